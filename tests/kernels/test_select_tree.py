"""Tree selection: the reference equals sorted lists and parent walks, and the kernel equals the reference, exactly."""

import math

import pytest
import torch

from espalier.errors import EspalierError
from espalier.kernels.attention.ancestor_bits import unpack_bits
from espalier.kernels.ops.tree import VOID, select_tree
from tests.kernels.treeing import poisoned, random_pool, same
from tests.pairwise import fewer


def selected_by_lists(root, tokens, scores, beams, topk, nodes):
    """[(token, parent's node, depth, score, set of ancestors)] of one request."""
    scores = [-math.inf if math.isnan(score) else score for score in scores]
    best = sorted(sorted(range(len(tokens)), key=lambda i: (-scores[i], i))[: nodes - 1])
    node_of = {candidate: node for node, candidate in enumerate(best, 1)}
    beam_in_pool = [place + (size_of(topk, i // topk) if i >= topk else 0) for i, place in enumerate(beams)]
    tree = [(root, 0, 0, 0.0, {0})]
    for node, i in enumerate(best, 1):
        if scores[i] == -math.inf:
            tree.append((VOID, 0, 1, -math.inf, {node}))
            continue
        level = 1 if i < topk else 2 + (i - topk) // topk**2
        parent = 0 if i < topk else node_of[beam_in_pool[(i - topk) // topk]]
        tree.append((tokens[i], parent, level, scores[i], tree[parent][4] | {node}))
    return tree


def random_inputs(batch, topk, steps, seed):
    """root, tokens, scores, beams"""
    return torch.arange(batch) + 70, *random_pool(batch, topk, steps, seed)


def whole(inputs, device="cpu"):
    root, *pool = (value.to(device) for value in inputs)
    return root, *([values] for values in pool)


def in_levels(inputs, topk, device="cpu"):
    root, tokens, scores, beams = (value.to(device) for value in inputs)
    sizes = [topk, *[topk**2] * (beams.shape[1] // topk)]
    return root, tokens.split(sizes, 1), scores.split(sizes, 1), beams.split(topk, 1) if beams.shape[1] else ()


def size_of(topk, steps):
    """The number of candidates in a pool."""
    return topk + (steps - 1) * topk**2


@pytest.mark.parametrize("topk,steps", [(1, 1), (1, 5), (2, 1), (2, 4), (3, 3), (8, 3)])
def test_reference_equals_sorting_and_walking(topk, steps):
    size = size_of(topk, steps)
    for seed, nodes in enumerate((1, 2, size // 2 + 1, size, size + 1)):
        inputs = random_inputs(2, topk, steps, seed)
        tree = select_tree.reference(*whole(inputs), topk, nodes)
        masks = unpack_bits(tree.ancestors, nodes)
        for b in range(2):
            expected = selected_by_lists(*(value[b].tolist() for value in inputs), topk, nodes)
            ancestors = [set(row.nonzero().flatten().tolist()) for row in masks[b]]
            fields = (value[b].tolist() for value in tree[:4])
            assert list(zip(*fields, ancestors, strict=True)) == expected


SMALL = [
    (0, 2, 2, 4),
    (1, 1, 1, 1),
    (2, 1, 4, 5),
    (2, 2, 3, 7),
    (2, 3, 3, 22),
    (1, 8, 2, 65),
    (1, 12, 2, 129),
    (2, 2, 17, 5),
]
LARGE = [
    (64, 8, 5, 64),
    (64, 10, 8, 64),
    (64, 10, 8, 129),
    (3, 16, 8, 512),
    (2, 1, 511, 512),
    (64, 8, 8, 1),
    (5, 45, 1, 46),
    # topk that are not powers of two, in pools with several candidates per thread: for the kernel's divisions.
    *((8, topk, 8, 64) for topk in (3, 5, 6, 7, 9, 11, 12)),
]


def check(device, batch, topk, steps, nodes):
    for seed in range(3):
        inputs = random_inputs(batch, topk, steps, seed)
        with poisoned():
            tree = select_tree.triton(*whole(inputs, device), topk, nodes)
            of_levels = select_tree.triton(*in_levels(inputs, topk, device), topk, nodes)
        same(tree, select_tree.reference(*whole(inputs), topk, nodes))
        same(of_levels, select_tree.reference(*in_levels(inputs, topk), topk, nodes))
        same(of_levels, tree._make(value.cpu() for value in tree))


@pytest.mark.parametrize(
    "batch,topk,steps,nodes", fewer(SMALL, lambda *size: size not in ((2, 2, 3, 7), (1, 8, 2, 65)))
)
def test_kernel_is_the_reference(kernel_device, batch, topk, steps, nodes):
    check(kernel_device, batch, topk, steps, nodes)


@pytest.mark.gpu
@pytest.mark.parametrize("batch,topk,steps,nodes", LARGE)
def test_kernel_is_the_reference_at_size(kernel_device, batch, topk, steps, nodes):
    check(kernel_device, batch, topk, steps, nodes)


def test_without_candidates_only_the_root_is_left(kernel_device):
    inputs = random_inputs(2, 2, 2, 0)
    inputs[2].fill_(-torch.inf)
    tree = select_tree.triton(*whole(inputs, kernel_device), 2, 4)
    assert tree.tokens.tolist() == [[70, -1, -1, -1], [71, -1, -1, -1]]
    assert tree.ancestors.flatten(1).tolist() == [[1, 2, 4, 8]] * 2
    same(tree, select_tree.reference(*whole(inputs), 2, 4))


def test_wrong_sizes_are_refused(kernel_device):
    root, tokens, scores, beams = (value.to(kernel_device) for value in random_inputs(2, 3, 2, 0))
    with pytest.raises(EspalierError, match="whole levels"):
        select_tree.triton(root, [tokens[:, :11]], [scores[:, :11]], [beams[:, :2]], 3, 4)
    with pytest.raises(EspalierError, match="too few for 14 nodes"):
        select_tree.triton(root, [tokens], [scores], [beams], 3, 14)
    with pytest.raises(EspalierError, match="select_tree: beams"):
        select_tree.triton(root, [tokens], [scores], [beams[:, 1:]], 3, 4)
    with pytest.raises(EspalierError, match="select_tree: tokens"):
        select_tree.triton(root, tokens.split(6, 1), scores.split(6, 1), [beams], 3, 4)


def test_cpu_tensors_use_the_reference():
    inputs = whole(random_inputs(2, 3, 2, 1))
    same(select_tree(*inputs, 3, 9), select_tree.reference(*inputs, 3, 9))
