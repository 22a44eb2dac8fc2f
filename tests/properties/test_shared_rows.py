"""Rows that are shared out over a batch: tokens are those of plain decoding, however they are shared out."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from espalier.kernels.ops.tree import VOID, Tree, select_tree
from espalier.request import Request, SamplingParams
from espalier.speculate import round as of_round
from tests.harness import Setup, prompts, request, run
from tests.kernels.treeing import random_pool
from tests.properties.layouts import reference_of
from tests.properties.test_tokens import STYLES
from tests.properties.watch import CONSERVED, TOKENS, Watch, run_watched

SHARED = Setup(steps=4, topk=2, num_draft_tokens=12, page_size=3, max_context=64, max_batch=4, shared_rows=3)


def traffic(styles: list[dict]) -> list[Request]:
    made = prompts(5, [2 + 7 * i % 13 for i in range(len(styles))])
    params = [SamplingParams(**{"max_tokens": 3 + 5 * i % 17, **style}) for i, style in enumerate(styles)]
    return [request(i, *each) for i, each in enumerate(zip(made, params, strict=True))]


def mixed(*temperatures: float) -> list[dict]:
    return [{"temperature": each} for each in temperatures]


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 12), st.data())
def test_the_best_nodes_of_the_batch_with_all_their_ancestors(batch, topk, steps, nodes, data):
    seed = data.draw(st.integers(0, 10_000))
    tokens, scores, beams = random_pool(batch, topk, steps, seed)
    nodes = min(nodes, tokens.shape[1] + 1)
    tree = select_tree(torch.arange(batch), [tokens], [scores], [beams], topk, nodes)
    rows = data.draw(st.integers(batch, batch * nodes))
    places = tree.best_nodes(rows).tolist()
    flat = tree.scores.flatten().tolist()
    roots = [row * nodes for row in range(batch)]
    others = sorted((place for place in range(batch * nodes) if place not in roots), key=lambda at: (-flat[at], at))
    assert places == sorted(roots + others[: rows - batch])
    only = tree.keep_nodes(torch.tensor(places))
    for place in range(batch * nodes):
        row, node = divmod(place, nodes)
        if place not in places:
            assert int(only.tokens[row, node]) == VOID and float(only.scores[row, node]) == -torch.inf
            assert only.ancestor_mask()[row, node].nonzero().flatten().tolist() == [node]
            assert only.ancestor_mask()[row, :, node].nonzero().flatten().tolist() == [node], "nobody's ancestor"
        else:
            above = tree.ancestor_mask()[row, node]
            assert all(row * nodes + int(at) in places for at in above.nonzero().flatten())
            assert torch.equal(only.ancestor_mask()[row, node], above)


def at_random(tree: Tree, rows: int) -> torch.Tensor:
    """Any nodes, their ancestors among them: as if scores said something else each round."""
    generator = torch.Generator().manual_seed(int(tree.tokens.sum()))
    drawn = torch.rand(tree.scores.shape, generator=generator)
    lineage = tree.ancestor_mask()
    # The least of what was drawn along the path, a little less for each step down.
    least = torch.where(lineage, drawn[:, None], torch.inf).amin(-1) - tree.depths * 1e-3
    return BEST(tree._replace(scores=torch.where(tree.tokens == VOID, -torch.inf, least.float())), rows)


BEST = Tree.best_nodes


FULL = pytest.mark.full
FEW = [*mixed(0.0, 1.0, 0.0, 1.0), STYLES["opted_out"], STYLES["shallow"]]
RUNS = [
    ("eagle3", "at random", True, 2, FEW),
    ("eagle3", "by score", False, 3, FEW),
    ("ngram", "at random", False, 3, FEW[:4]),
    ("ngram", "by score", True, 2, FEW[:4]),
    *(
        pytest.param(algorithm, sharing, overlap, rows, [*FEW[:4], *STYLES.values()], marks=FULL)
        for algorithm in ("eagle3", "ngram")
        for sharing in ("by score", "at random")
        for overlap, rows in ((True, 2), (False, 3))
    ),
]


@pytest.mark.parametrize(("algorithm", "sharing", "overlap", "rows", "styles"), RUNS)
def test_tokens_are_plain_decodings_as_many_as_the_chosen_nodes_say(
    algorithm, sharing, overlap, rows, styles, monkeypatch
):
    if sharing == "at random":
        monkeypatch.setattr(Tree, "best_nodes", at_random)
    setup = replace(SHARED, algorithm=algorithm, overlap=overlap, shared_rows=rows, num_text_paths=rows % 2)
    watch = Watch(setup.engine(), algorithm, reference_of(setup), (TOKENS, CONSERVED))
    run_watched(watch, traffic(styles))
    assert watch.coverage.mean_accept_length > 1, "guesses are accepted"


def test_no_row_is_given_to_a_node_that_cannot_be_accepted(monkeypatch):
    verify, trees = of_round.verify, []
    monkeypatch.setattr(of_round, "verify", lambda proposed: trees.append(proposed) or verify(proposed))
    run(replace(SHARED, shared_rows=2).engine(), traffic(FEW))
    for tree, slots in ((proposed.tree, proposed.slots) for proposed in trees):
        assert not ((tree.tokens != VOID) & (tree.depths > slots.max_accept_depth.clamp(min=0)[:, None])).any()
    assert any((proposed.tree.tokens[:, 1:] != VOID).any() for proposed in trees)


def test_with_a_row_each_the_roots_run_alone():
    engine, requests = replace(SHARED, shared_rows=1).engine(), traffic(mixed(0.0, 1.0))
    ran = run(engine, requests)
    assert ran.tokens == run(SHARED.plain().engine(), traffic(mixed(0.0, 1.0))).tokens
    assert ran.stats.accept_length == 1


# Layers with experts and latent rows; with a window and sinks.
FAMILIES = ["deepseek_v3", "gpt_oss", *(pytest.param(name, marks=FULL) for name in ("gemma2", "qwen3_moe", "granite"))]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_of_layer_runs_chosen_rows(family):
    styles = mixed(0.0, 1.0, 0.0, 1.0)
    setup = replace(SHARED, family=family)
    assert run(setup.engine(), traffic(styles)).tokens == run(setup.plain().engine(), traffic(styles)).tokens
