"""Logits of very many nodes are computed slice by slice: with slices of a few rows every output is the same."""

from typing import Any

import pytest
import torch

from espalier.request import SamplingParams
from espalier.speculate import logit_slices
from espalier.speculate.logit_slices import MAX_NODE_LOGIT_BYTES, node_slices
from espalier.startup.tree_policy import MAX_VERIFY_ROWS
from tests.grammar.test_lossless import END, GRAMMARS, masker_of
from tests.harness import VOCAB, Ran, Setup, prompts, request, run
from tests.properties.block_setup import BlockSetup

TREE = {"steps": 3, "topk": 4, "num_draft_tokens": 20}
SETUPS = (Setup(**TREE), BlockSetup(form="dspark", **TREE, page_size=1), BlockSetup(form="jetspec", **TREE))
STYLES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 1.0, "presence_penalty": 2.0, "repetition_penalty": 2.0, "logprobs": 2},
    {"temperature": 2.0, "top_k": 9},
)


def ran(setup: Setup, with_grammar: bool) -> Ran:
    requests = []
    for i, (style, prompt) in enumerate(zip(STYLES, prompts(3, (5, 9, 30)), strict=True)):
        requests.append(request(i, prompt, SamplingParams(max_tokens=18, stop_token_ids=[END], **style)))
        if with_grammar and i:
            requests[-1].masker = masker_of(GRAMMARS[i])
    return run(setup.engine(), requests)


@pytest.mark.parametrize("with_grammar", [pytest.param(False, marks=pytest.mark.full), True], ids=["free", "grammar"])
@pytest.mark.parametrize(
    "setup", [*SETUPS[:2], pytest.param(SETUPS[2], marks=pytest.mark.full)], ids=["eagle3", "dspark", "jetspec"]
)
def test_slices_of_a_trees_logits_equal_the_whole(setup, with_grammar, monkeypatch):
    whole = ran(setup, with_grammar)
    rows: list[int] = []
    target = setup.models(setup.layout.position_rows)[0]
    logits = type(target).logits
    monkeypatch.setattr(type(target), "logits", lambda model, x: rows.append(x[..., 0].numel()) or logits(model, x))
    # Seven rows: two nodes of each of three requests, three of two, all seven of one.
    monkeypatch.setattr(logit_slices, "MAX_NODE_LOGIT_BYTES", 7 * 4 * VOCAB)
    sliced = ran(setup, with_grammar)
    # Besides slices, the rows of accepted paths; a whole tree has twenty.
    assert 7 in rows and max(rows) <= 3 * setup.layout.extend_width < 3 * setup.layout.num_draft_tokens
    assert sliced.tokens == whole.tokens and sliced.stats == whole.stats
    for apart, together in zip(sliced.requests, whole.requests, strict=True):
        for one, other in zip(apart.logprobs, together.logprobs, strict=True):
            assert (one.token_id, one.rank) == (other.token_id, other.rank)
            assert one.logprob == pytest.approx(other.logprob, abs=1e-12)
            assert [t for t, _ in one.top] == [t for t, _ in other.top]


def test_slices_hold_what_the_bytes_say_and_default_trees_need_one():
    for batch, nodes, vocab in ((64, 256, 128_256), (1, 256, 128_256), (3, 7, 16), (512, 9, 2**30), (0, 4, 16)):
        slices = node_slices(batch, nodes, vocab)
        assert torch.cat([torch.arange(nodes)[each] for each in slices]).tolist() == list(range(nodes))
        assert all(
            (each.stop - each.start) * batch * vocab * 4 <= MAX_NODE_LOGIT_BYTES or each.stop == each.start + 1
            for each in slices
        )
    assert len(node_slices(64, 256, 128_256)) > 1
    assert len(node_slices(MAX_VERIFY_ROWS // 64, 64, 128_256)) == 1
