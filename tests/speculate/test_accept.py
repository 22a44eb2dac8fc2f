"""accept against walking down the tree from the root."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from espalier.kernels.attention.ancestor_bits import ancestor_mask, pack_bits
from espalier.kernels.ops.tree import accept
from espalier.sampling.pick import SampledTokens
from espalier.speculate.tree import VOID, RootTrees, Tree

STEPS = 4
TOKENS = 3


@st.composite
def trees(draw, nodes: int):
    """(tokens, parents, depths) of a tree at most STEPS deep, siblings distinct, with void nodes anywhere."""
    tokens, parents, depths = [draw(st.integers(0, TOKENS - 1))], [0], [0]
    for _ in range(1, nodes):
        free = [
            (parent, token)
            for parent in range(len(tokens))
            if tokens[parent] != VOID and depths[parent] < STEPS
            for token in range(TOKENS)
            if (parent, token) not in set(zip(parents[1:], tokens[1:], strict=True))
        ]
        parent, token = draw(st.sampled_from(free)) if free and draw(st.integers(0, 4)) else (0, VOID)
        tokens.append(token)
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return tokens, parents, depths


def tree_of(rows) -> Tree:
    tokens, parents, depths = (torch.tensor(list(part)) for part in zip(*rows, strict=True))
    ancestor_bits = pack_bits(ancestor_mask(parents, tokens == VOID, STEPS))
    return Tree(tokens, parents, depths, torch.zeros(tokens.shape), ancestor_bits)


def num_finite(picks, finite=None) -> SampledTokens:
    """Picks that are finite, but for those that are said not to be."""
    picks = torch.as_tensor(picks)
    return SampledTokens(picks, torch.ones_like(picks, dtype=torch.bool) if finite is None else torch.tensor(finite))


def walk(tokens, parents, depths, picks, limit):
    """(nodes on the path, tokens emitted), one child at a time."""
    path = [0]
    while depths[path[-1]] < limit:
        wanted = picks[path[-1]]
        child = [i for i in range(1, len(tokens)) if parents[i] == path[-1] and tokens[i] == wanted]
        if not child:
            break
        path += child
    return path, [tokens[i] for i in path[1:]] + [picks[path[-1]]]


@given(st.data(), st.sampled_from([1, 2, 7, 20]), st.integers(1, 3))
def test_the_kept_path_is_what_walking_finds(data, nodes, batch):
    rows = [data.draw(trees(nodes)) for _ in range(batch)]
    picks = [data.draw(st.lists(st.integers(0, TOKENS - 1), min_size=nodes, max_size=nodes)) for _ in rows]
    limits = data.draw(st.lists(st.integers(0, STEPS), min_size=batch, max_size=batch))
    real = data.draw(st.lists(st.booleans(), min_size=batch, max_size=batch))
    finite = [data.draw(st.lists(st.booleans(), min_size=nodes, max_size=nodes)) for _ in rows]
    path = accept(tree_of(rows), *num_finite(picks, finite), torch.tensor(limits), torch.tensor(real), STEPS)
    for b, (row, picked, limit) in enumerate(zip(rows, picks, limits, strict=True)):
        nodes_kept, emitted = walk(*row, picked, limit)
        assert int(path.length[b]) == (len(emitted) if real[b] else 0)
        good = [finite[b][node] for node in nodes_kept] + [False]
        assert int(path.num_finite[b]) == (good.index(False) if real[b] else 0)
        assert path.rows[b].tolist() == nodes_kept + [0] * (STEPS + 1 - len(nodes_kept))
        assert path.tokens[b].tolist() == emitted + [0] * (STEPS + 1 - len(emitted))


def chain(nodes: int) -> Tree:
    line = torch.arange(nodes)[None]
    parents = (line - 1).clamp(min=0)
    return Tree(
        line % TOKENS, parents, line, torch.zeros(1, nodes), pack_bits(torch.ones(1, nodes, nodes).tril().bool())
    )


@pytest.mark.parametrize("depth", [0, 62, 63, 64, 65, 128])
def test_paths_go_on_beyond_a_word_of_ancestors(depth):
    picks = (torch.arange(129)[None] + 1) % TOKENS
    picks[0, depth:] = 9
    everything = torch.tensor([128])
    path = accept(chain(129), *num_finite(picks), everything, torch.tensor([True]), steps=128)
    assert path.length.tolist() == [depth + 1] and path.rows[0, : depth + 1].tolist() == list(range(depth + 1))
    assert path.tokens[0, depth].item() == 9


def test_plain_decoding_emits_the_pick_of_the_root():
    root = RootTrees(2, torch.device("cpu"))(torch.tensor([5, 6]))
    path = accept(root, *num_finite([[1], [2]]), torch.tensor([0, 0]), torch.tensor([True, False]), steps=0)
    assert path.tokens.tolist() == [[1], [2]] and path.length.tolist() == [1, 0] and path.rows.tolist() == [[0], [0]]


def test_no_requests_have_no_paths():
    path = accept(tree_of([([0], [0], [0])]), *num_finite([[0]]), torch.ones(1), torch.tensor([True]), STEPS)
    assert path.rows.shape == (1, STEPS + 1)
    empty = RootTrees(2, torch.device("cpu"))(torch.zeros(0, dtype=torch.int64))
    path = accept(empty, *num_finite(empty.tokens), empty.tokens[:, 0], empty.tokens[:, 0] > 0, STEPS)
    assert path.rows.shape == (0, STEPS + 1) and path.length.shape == (0,)
