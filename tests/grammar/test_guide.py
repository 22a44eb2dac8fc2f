"""What the draft is told of a grammar: forced tokens, and masks at every level."""

import numpy as np
import pytest
import torch

from espalier.grammar.token_masker import ForcedTokens
from espalier.request import SamplingParams
from tests.harness import VOCAB, Setup, prompts, request
from tests.masks import pack_mask

ALLOWED = [3, 5, 9]


class Chain:
    """After the prompt: `forced`, then only ALLOWED, for ever."""

    is_stuck = False

    def __init__(self, forced: list[int]) -> None:
        self.forced, self.pushed = forced, 0

    def push(self, token_id: int) -> None:
        self.pushed += 1

    def at(self, depth: int) -> np.ndarray:
        place = self.pushed + depth
        tokens = ALLOWED if place >= len(self.forced) else [self.forced[place]]
        return pack_mask(torch.isin(torch.arange(VOCAB), torch.tensor(tokens))).numpy()

    def root_mask(self) -> np.ndarray:
        return self.at(0)

    def mask_after(self, path) -> np.ndarray:
        return self.at(len(path))

    def forced_tokens(self, most: int) -> ForcedTokens:
        left = self.forced[self.pushed :][:most]
        return ForcedTokens(left, self.at(len(left)))

    def node_masks(self, tokens, parents, out) -> None:
        depths = [0]
        for parent in parents[1:]:
            depths.append(depths[parent] + 1)
        for node, depth in enumerate(depths):
            out[node] = self.at(depth)


def traces_of(setup: Setup, forced: list[int]):
    engine = setup.engine()
    traces = []
    engine.scheduler.on_round = traces.append
    asked = request(0, prompts(4, (12,))[0], SamplingParams(max_tokens=16, temperature=0.0))
    asked.masker = Chain(forced)
    engine.add(asked)
    while engine.has_work:
        engine.step()
    engine.close()
    return asked, traces


@pytest.mark.parametrize("draft_vocab", [None, 5])
@pytest.mark.parametrize("topk", [1, 3])
@pytest.mark.parametrize("algorithm", ["eagle3", "ngram"])
def test_forced_tokens_are_a_chain_that_needs_no_draft(algorithm, topk, draft_vocab):
    """Also tokens that are not in the draft's vocabulary."""
    if algorithm == "ngram" and draft_vocab:
        pytest.skip("n-gram has no vocabulary")
    setup = Setup(algorithm=algorithm, steps=3, topk=topk, num_draft_tokens=3 * topk, draft_vocab=draft_vocab)
    forced = [7, 2, 11, 4, 6, 1, 8, 13]
    asked, traces = traces_of(setup, forced)
    assert asked.output[: len(forced)] == forced
    # The first token comes from the prompt's pass; of the others each round takes the tree's depth and one more.
    num_rounds = -(-(len(forced) - 1) // 4) if topk > 1 else -(-(len(forced) - 1) // 3)
    assert [len(trace.emitted) for trace in traces[: num_rounds - 1]] == [4 if topk > 1 else 3] * (num_rounds - 1)
    drafted = [token for token in traces[0].tree.tokens[1:] if token >= 0]
    assert drafted[: 3 if topk > 1 else 2] == forced[1 : 4 if topk > 1 else 3]


@pytest.mark.parametrize("algorithm", ["eagle3", "ngram"])
def test_the_draft_proposes_only_what_the_masks_allow(algorithm):
    """n-gram knows the mask of the first token that is not forced; a draft model asks at every level."""
    setup = Setup(algorithm=algorithm, steps=3, topk=3, num_draft_tokens=9)
    asked, traces = traces_of(setup, [7, 2])
    assert set(asked.output[2:]) <= set(ALLOWED)
    for trace in traces[1:]:
        depths, tokens = trace.tree.depths, trace.tree.tokens
        checked = [token for depth, token in zip(depths, tokens, strict=True) if depth == 1 or algorithm == "eagle3"]
        assert set(checked[1:]) <= {*ALLOWED, -1, tokens[0]}


def test_behind_forced_tokens_ngram_goes_on_as_after_them():
    """Looked up with the forced tokens as part of the text."""
    setup = Setup(algorithm="ngram", steps=3, topk=1, num_draft_tokens=4)
    engine = setup.engine()
    traces = []
    engine.scheduler.on_round = traces.append
    # 7 2 was followed by 3 before.
    asked = request(0, [7, 2, 3, 5, 1, 4], SamplingParams(max_tokens=8, temperature=0.0))
    asked.masker = Chain([1, 7, 2])
    engine.add(asked)
    while engine.has_work:
        engine.step()
    engine.close()
    assert traces[0].tree.tokens == [1, 7, 2, 3]
