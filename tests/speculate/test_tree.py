"""ordered_topk and Pool.select against sorting lists, ties above all."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from espalier.errors import EspalierError
from espalier.kernels.attention.ancestor_bits import true_for_all_ancestors
from espalier.kernels.ops import tree as tree_ops
from espalier.speculate.tree import VOID, CandidatePool, RootTrees, ordered_topk

# Few values, so that most are tied.
SCORES = st.sampled_from([0.0, -0.0, -0.25, -1.0, -1.5, -7.0, -math.inf, math.nan])


def usable(score: float) -> float:
    return -math.inf if math.isnan(score) else score


@pytest.fixture(params=["sorted", "keys"])
def order(request, monkeypatch):
    """Few scores are sorted, many are ordered by keys: here both, of few."""
    if request.param == "keys":
        monkeypatch.setattr(tree_ops, "MAX_SORTED", 0)


@pytest.mark.usefixtures("order")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(SCORES, min_size=7, max_size=7), min_size=1, max_size=3), st.integers(1, 10))
def test_topk_is_in_order_and_ties_go_to_the_lower_index(rows, k):
    scores = torch.tensor(rows)
    before = scores.clone()
    values, indices = ordered_topk(scores, k)
    assert torch.equal(scores.view(torch.int32), before.view(torch.int32)), "the argument stays as it is"
    assert not values.signbit()[values == 0].any(), "-0.0 is 0.0"
    for row, got_values, got_indices in zip(rows, values.tolist(), indices.tolist(), strict=True):
        order = sorted(range(7), key=lambda i: (-usable(row[i]), i))[:k]
        missing = max(k - 7, 0)
        assert got_indices == order + [0] * missing
        assert got_values == [usable(row[i]) for i in order] + [-math.inf] * missing


@pytest.mark.usefixtures("order")
def test_topk_keeps_leading_dimensions_and_takes_an_empty_batch():
    scores = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    values, indices = ordered_topk(scores, 2)
    assert torch.equal(values, scores.topk(2).values) and torch.equal(indices, scores.topk(2).indices)
    assert ordered_topk(scores[:0], 4)[0].shape == (0, 3, 4)


@pytest.mark.usefixtures("order")
def test_infinite_and_extreme_scores_are_in_order():
    scores = torch.tensor([[-3.4e38, 3.4e38, math.inf, -1e-45, 0.0, 1e-45, -math.inf]])
    assert ordered_topk(scores, 7)[1].tolist() == [[2, 1, 5, 4, 3, 0, 6]]


@st.composite
def pools(draw):
    """Levels of candidates as a draft makes them: (token, score, parent's pool index or -1); children never beat
    parents.  The first topk of a level's order are the beams of the next."""
    topk, steps = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    levels = [[(token, min(usable(draw(SCORES)), 0.0), -1) for token in range(topk)]]
    first = 0
    for _ in range(1, steps):
        above = levels[-1]
        children = [
            (token, above[beam][1] + min(usable(draw(SCORES)), 0.0), first + beam)
            for beam in best_of(above, topk)
            for token in range(topk)
        ]
        first += len(above)
        levels.append(children)
    size = sum(map(len, levels))
    return levels, topk, draw(st.integers(1, size + 1))


def best_of(level, topk):
    return sorted(range(len(level)), key=lambda i: (-level[i][1], i))[:topk]


def pool_of(levels, topk) -> CandidatePool:
    pool = CandidatePool(topk)
    for number, candidates in enumerate(levels):
        if number:
            pool.set_beams(torch.tensor([best_of(levels[number - 1], topk)]))
        tokens, scores, _ = zip(*candidates, strict=True)
        pool.add_level(torch.tensor(tokens).view(1, -1, topk), torch.tensor(scores).view(1, -1, topk))
    return pool


def selected(levels, nodes):
    """The best nodes - 1 candidates as (token, parent's node, depth, score), void ones as (-1, 0, 1, -inf)."""
    flat = [(level, *candidate) for level, candidates in enumerate(levels, 1) for candidate in candidates]
    best = sorted(sorted(range(len(flat)), key=lambda i: (-flat[i][2], flat[i][0], i))[: nodes - 1])
    node_of = {index: node for node, index in enumerate(best, 1)}
    tree = []
    for index in best:
        level, token, score, parent = flat[index]
        void = score == -math.inf
        tree.append((VOID, 0, 1, score) if void else (token, 0 if parent < 0 else node_of[parent], level, score))
    return tree


@given(pools())
def test_selection_is_what_sorting_finds(drawn):
    levels, topk, nodes = drawn
    tree = pool_of(levels, topk).select(torch.tensor([9]), nodes)
    got = list(
        zip(
            tree.tokens[0].tolist(),
            tree.parents[0].tolist(),
            tree.depths[0].tolist(),
            tree.scores[0].tolist(),
            strict=True,
        )
    )
    assert got == [(9, 0, 0, 0.0), *selected(levels, nodes)]
    check_invariants(tree)


def check_invariants(tree):
    """A parent comes before its node and is one of its ancestors; siblings differ; a void node is related to nobody."""
    mask = tree.ancestor_mask()
    for b in range(tree.tokens.shape[0]):
        children = set()
        for node in range(1, tree.tokens.shape[1]):
            parent, token = int(tree.parents[b, node]), int(tree.tokens[b, node])
            if token == VOID:
                assert mask[b, node].nonzero().tolist() == [[node]] and mask[b, :, node].nonzero().tolist() == [[node]]
                continue
            assert parent < node and int(tree.depths[b, node]) == int(tree.depths[b, parent]) + 1
            assert torch.equal(mask[b, node], mask[b, parent] | (torch.arange(mask.shape[1]) == node))
            assert (parent, token) not in children
            children.add((parent, token))


def test_a_sure_child_comes_after_its_parent():
    pool = CandidatePool(topk=2)
    pool.add_level(torch.tensor([[[3, 4]]]), torch.tensor([[[-0.5, -0.5]]]))
    pool.set_beams(torch.tensor([[0, 1]]))
    pool.add_level(torch.tensor([[[5, 6], [7, 8]]]), torch.tensor([[[-0.5, -9.0], [-0.5, -9.0]]]))
    assert pool.select(torch.tensor([1]), 3).tokens.tolist() == [[1, 3, 4]]
    assert pool.select(torch.tensor([1]), 4).tokens.tolist() == [[1, 3, 4, 5]]


@pytest.mark.parametrize("nodes", [64, 65, 129])
def test_a_chain_beyond_a_word_has_every_ancestor(nodes):
    pool = CandidatePool(topk=1)
    for level in range(nodes - 1):
        if level:
            pool.set_beams(torch.tensor([[0]]))
        pool.add_level(torch.tensor([[[level % 7]]]), torch.tensor([[[-float(level)]]]))
    tree = pool.select(torch.tensor([0]), nodes)
    assert torch.equal(tree.ancestor_mask()[0], torch.ones(nodes, nodes).tril().bool())
    for broken in (0, 63, nodes - 1):
        holds = torch.ones(1, nodes, dtype=torch.bool)
        holds[0, broken] = False
        assert true_for_all_ancestors(tree.ancestors, holds)[0].tolist() == [node < broken for node in range(nodes)]


def test_an_empty_batch_has_a_tree():
    pool = CandidatePool(topk=2)
    none = torch.zeros(0, 1, 2, dtype=torch.int64)
    pool.add_level(none, none.float())
    assert pool.select(none[:, 0, 0], 3).ancestors.shape == (0, 3, 1)
    assert RootTrees(2, torch.device("cpu"))(none[:, 0, 0]).tokens.shape == (0, 1)


def test_a_pool_smaller_than_the_tree_is_refused():
    pool = CandidatePool(topk=2)
    pool.add_level(torch.tensor([[[3, 4]]]), torch.tensor([[[-0.5, -0.5]]]))
    with pytest.raises(EspalierError, match="too few for 4 nodes"):
        pool.select(torch.tensor([1]), 4)
