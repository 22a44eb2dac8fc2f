"""The tree of a block draft: the reference equals a sorted list of all paths, and the kernel equals the reference."""

import math
from itertools import pairwise

import pytest
import torch

from espalier.errors import EspalierError
from espalier.kernels.attention.ancestor_bits import unpack_bits
from espalier.kernels.ops.drafts import Candidates, select_paths
from espalier.kernels.ops.tree import VOID
from tests.kernels.treeing import poisoned, random, same
from tests.pairwise import fewer

GAPS = torch.tensor([0.0, -0.0, -0.25, -0.5, -1.0, -7.0])


def random_candidates(batch, steps, rows, topk, seed):
    """Rows in descending order, with many ties; some candidates do not exist, and some that exist have no row."""
    generator = random(seed)
    shape = (batch, steps, rows, topk)
    scores = GAPS[torch.randint(0, len(GAPS), shape, generator=generator)].cumsum(-1)
    if seed % 3 == 0:
        scores = scores - torch.rand(shape, generator=generator).cumsum(-1)
    if seed % 3 == 1:
        missing = torch.randint(1, topk + 2, shape[:3], generator=generator)
        scores = scores.masked_fill(torch.arange(topk) >= missing[..., None], -torch.inf)
    tokens = torch.rand((*shape[:3], topk + 20), generator=generator).argsort(-1)[..., :topk]
    below = torch.randint(-1 if seed % 2 else 0, rows, shape, generator=generator, dtype=torch.int32)
    return torch.arange(batch) + 70, Candidates(tokens, scores, below)


def by_sorting(root, tokens, scores, below, nodes):
    """[(token, parent's node, depth, score, ancestors)] of one request: all paths, sorted."""
    steps, _, topk = tokens.shape
    levels, before = [], [((), 0, 0.0)]
    for depth in range(1, steps + 1):
        # (places so far, row, score), in the order of the paths that they continue, then of their places.
        found = []
        for path, row, above in before:
            for place in range(topk):
                score = (torch.tensor(above) + scores[depth - 1, row, place]).item()
                if score > -math.inf:
                    found.append(((*path, place), row, score + 0.0))
        found.sort(key=lambda entry: -entry[2])
        levels.append(found)
        before = [
            (path, int(below[depth - 1, row, path[-1]]), score)
            for path, row, score in found
            if below[depth - 1, row, path[-1]] >= 0
        ]
    pool = [(score, depth, path, row) for depth, found in enumerate(levels, 1) for path, row, score in found]
    best = sorted(pool, key=lambda entry: -entry[0])[: nodes - 1]
    node_of, tree = {(): 0}, [(root, 0, 0, 0.0, {0})]
    for node, (score, depth, path, row) in enumerate(best, 1):
        parent = node_of[path[:-1]]
        node_of[path] = node
        token = int(tokens[depth - 1, row, path[-1]])
        tree.append((token, parent, depth, score, tree[parent][4] | {node}))
    return tree + [(VOID, 0, 1, -math.inf, {node}) for node in range(len(tree), nodes)]


@pytest.mark.parametrize(
    "steps,rows,topk,nodes",
    [
        (1, 1, 1, 1),
        (1, 1, 4, 4),
        (3, 1, 1, 4),
        (4, 1, 3, 30),
        (2, 1, 8, 80),
        (5, 3, 3, 64),
        (3, 4, 4, 90),
        (8, 2, 2, 200),
    ],
)
def test_reference_is_all_paths_sorted(steps, rows, topk, nodes):
    for seed in range(6):
        root, candidates = random_candidates(2, steps, rows, topk, seed)
        tree = select_paths.reference(root, candidates, nodes)
        masks = unpack_bits(tree.ancestors, nodes)
        for b in range(2):
            expected = by_sorting(int(root[b]), *(value[b] for value in candidates), nodes)
            ancestors = [set(row.nonzero().flatten().tolist()) for row in masks[b]]
            fields = (value[b].tolist() for value in tree[:4])
            assert list(zip(*fields, ancestors, strict=True)) == expected


def test_more_nodes_of_a_depth_than_topk_may_have_children():
    root, candidates = random_candidates(1, 3, 1, 4, 0)
    candidates = candidates._replace(scores=torch.full_like(candidates.scores, -0.5))
    tree = select_paths(root, candidates, 80)
    parents_at_two = {int(p) for p, d in zip(tree.parents[0], tree.depths[0], strict=True) if d == 3}
    assert len(parents_at_two) > 4


SMALL = [(0, 2, 1, 2, 4), (1, 1, 1, 1, 1), (2, 1, 1, 4, 5), (2, 3, 1, 3, 30), (1, 15, 1, 2, 65), (2, 4, 3, 3, 40)]
# More candidates than are read at once.
SMALL += [(2, 9, 16, 16, 24)]
LARGE = [
    (2, 60, 16, 16, 256),
    (64, 7, 1, 8, 64),
    (64, 15, 1, 16, 256),
    (8, 15, 8, 8, 256),
    (3, 8, 1, 32, 512),
    (2, 5, 4, 4, 1024),
]


def check(device, batch, steps, rows, topk, nodes):
    for seed in range(3):
        root, candidates = random_candidates(batch, steps, rows, topk, seed)
        with poisoned():
            moved = Candidates(*(value.to(device) for value in candidates))
            tree = select_paths.triton(root.to(device), moved, nodes)
        same(tree, select_paths.reference(root, candidates, nodes))


@pytest.mark.parametrize("batch,steps,rows,topk,nodes", fewer(SMALL, lambda *size: size != (2, 3, 1, 3, 30)))
def test_kernel_is_the_reference(kernel_device, batch, steps, rows, topk, nodes):
    check(kernel_device, batch, steps, rows, topk, nodes)


@pytest.mark.gpu
@pytest.mark.parametrize("batch,steps,rows,topk,nodes", LARGE)
def test_kernel_is_the_reference_at_size(kernel_device, batch, steps, rows, topk, nodes):
    check(kernel_device, batch, steps, rows, topk, nodes)


def test_without_candidates_only_the_root_is_left(kernel_device):
    root, candidates = random_candidates(2, 2, 1, 2, 0)
    for nothing in (-torch.inf, torch.nan):
        void = Candidates(*(value.to(kernel_device) for value in candidates))
        void.scores.fill_(nothing)
        tree = select_paths.triton(root.to(kernel_device), void, 4)
        assert tree.tokens.tolist() == [[70, -1, -1, -1], [71, -1, -1, -1]]
        assert tree.ancestors.flatten(1).tolist() == [[1, 2, 4, 8]] * 2


def test_without_next_rows_the_tree_is_one_deep(kernel_device):
    root, candidates = random_candidates(2, 3, 1, 4, 0)
    candidates.next_rows.fill_(-1)
    moved = Candidates(*(value.to(kernel_device) for value in candidates))
    tree = select_paths.triton(root.to(kernel_device), moved, 8)
    assert tree.depths.tolist() == [[0, 1, 1, 1, 1, 1, 1, 1]] * 2
    same(tree, select_paths.reference(root, candidates, 8))


def test_sizes_beyond_a_key_are_refused():
    root, candidates = random_candidates(1, 2, 1, 2, 0)
    with pytest.raises(EspalierError, match="at most 1024 nodes, 63 steps and topk 256"):
        select_paths(root, candidates, 1025)
    with pytest.raises(EspalierError, match="select_paths: scores"):
        select_paths(root, candidates._replace(scores=candidates.scores[..., :1]), 3)


def test_cpu_tensors_use_the_reference():
    root, candidates = random_candidates(2, 3, 2, 3, 1)
    same(select_paths(root, candidates, 9), select_paths.reference(root, candidates, 9))
    order = select_paths(root, candidates, 9).scores[0].tolist()
    assert all(after <= before for before, after in pairwise(order))
