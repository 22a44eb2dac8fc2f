"""Beam selection: the reference equals sorted lists and sets of rows, and the kernel equals the reference, exactly."""

import math

import pytest
import torch

from espalier.errors import EspalierError
from espalier.kernels.attention.ancestor_bits import unpack_bits
from espalier.kernels.ops.tree import select_beams
from tests.kernels.treeing import drawn_scores, poisoned, random, same


def random_inputs(batch, rows, topk, num_ancestor_words, seed, level_one=False):
    generator = random(seed)
    tokens = torch.randint(0, 2**40, (batch, rows, topk), generator=generator)
    scores = drawn_scores((batch, rows, topk), generator)
    ancestor_bits = torch.randint(-(2**63), 2**63 - 1, (batch, rows, num_ancestor_words), generator=generator)
    return tokens, scores, None if level_one else ancestor_bits


BLANK = -7


def blank_path(batch, rows, device="cpu"):
    """A path in which every token is BLANK, as a slice of a wider tensor."""
    return torch.full((batch, rows + 2), BLANK, device=device)[:, :rows]


def to(values, device):
    return [value if value is None else value.to(device) for value in values]


def beams_by_lists(tokens, scores, ancestor_bits, first, num_ancestor_words):
    rows, topk = tokens.shape
    flat = [-math.inf if math.isnan(score) else score for score in scores.flatten().tolist()]
    order = sorted(range(rows * topk), key=lambda i: (-flat[i], i))[:topk]
    ancestors = [
        set() if ancestor_bits is None else set(unpack_bits(row, num_ancestor_words * 64).nonzero().flatten().tolist())
        for row in (range(rows) if ancestor_bits is None else ancestor_bits)
    ]
    return [
        (int(tokens.flatten()[i]), flat[i], i, i // topk, ancestors[i // topk] | {first + beam})
        for beam, i in enumerate(order)
    ]


@pytest.mark.parametrize(
    "rows,topk,first,num_ancestor_words", [(1, 1, 0, 1), (1, 3, 0, 2), (3, 3, 62, 2), (4, 4, 64, 3)]
)
def test_reference_equals_sorting(rows, topk, first, num_ancestor_words):
    for seed in range(5):
        inputs = random_inputs(2, rows, topk, num_ancestor_words, seed, level_one=rows == 1)
        path = blank_path(2, first + topk)
        beams = select_beams.reference(*inputs, path, first, num_ancestor_words)
        assert (path[:, :first] == BLANK).all()
        for b in range(2):
            request = [None if value is None else value[b] for value in inputs]
            expected = beams_by_lists(*request, first, num_ancestor_words)
            mask = unpack_bits(beams.ancestor_bits[b], num_ancestor_words * 64)
            got = [
                (
                    path[b, first + k].item(),
                    *(value[b, k].item() for value in beams[:3]),
                    set(mask[k].nonzero().flatten().tolist()),
                )
                for k in range(topk)
            ]
            assert got == expected


SMALL = [(0, 2, 2, 2, 1), (1, 1, 1, 0, 1), (3, 1, 3, 0, 2), (2, 3, 3, 62, 2), (2, 4, 4, 64, 3), (1, 8, 8, 40, 1)]
LARGE = [(64, 8, 8, 32, 1), (64, 10, 10, 60, 2), (3, 32, 32, 224, 4), (2, 45, 45, 90, 3), (64, 1, 10, 0, 2)]
LARGE += [(8, topk, topk, topk, 1) for topk in (3, 5, 6, 7, 9, 11, 12, 17, 23)]


def check(device, batch, rows, topk, first, num_ancestor_words):
    for seed in range(3):
        inputs = random_inputs(batch, rows, topk, num_ancestor_words, seed, level_one=rows == 1 and batch != 1)
        path, expected = blank_path(batch, first + topk + 1, device), blank_path(batch, first + topk + 1)
        with poisoned():
            beams = select_beams.triton(*to(inputs, device), path, first, num_ancestor_words)
        same(beams, select_beams.reference(*inputs, expected, first, num_ancestor_words))
        assert torch.equal(path.cpu(), expected)


@pytest.mark.parametrize("batch,rows,topk,first,num_ancestor_words", SMALL)
def test_kernel_is_the_reference(kernel_device, batch, rows, topk, first, num_ancestor_words):
    check(kernel_device, batch, rows, topk, first, num_ancestor_words)


@pytest.mark.gpu
@pytest.mark.parametrize("batch,rows,topk,first,num_ancestor_words", LARGE)
def test_kernel_is_the_reference_at_size(kernel_device, batch, rows, topk, first, num_ancestor_words):
    check(kernel_device, batch, rows, topk, first, num_ancestor_words)


def test_extreme_scores_are_in_order(kernel_device):
    scores = torch.tensor([[[-3.4e38, -math.inf, 3.4e38, -1e-45, 0.0, 1e-45, math.nan, math.inf, -0.0]]])
    tokens = torch.arange(9)[None, None]
    beams = select_beams.triton(
        tokens.to(kernel_device), scores.to(kernel_device), None, blank_path(1, 9, kernel_device), 0, 1
    )
    assert beams.candidate_indices.tolist() == [[7, 2, 5, 4, 8, 3, 0, 1, 6]]
    same(beams, select_beams.reference(tokens, scores, None, blank_path(1, 9), 0, 1))


def test_wrong_sizes_are_refused(kernel_device):
    tokens, scores, ancestor_bits = to(random_inputs(2, 3, 3, 1, 0), kernel_device)
    path = blank_path(2, 65, kernel_device)
    with pytest.raises(EspalierError, match=r"row 64 does not fit into .* 1 words"):
        select_beams.triton(tokens, scores, ancestor_bits, path, 62, 1)
    with pytest.raises(EspalierError, match="row 65 does not fit into a contiguous path"):
        select_beams.triton(tokens, scores, ancestor_bits.repeat(1, 1, 2), path, 63, 2)
    with pytest.raises(EspalierError, match="select_beams: ancestor_bits"):
        select_beams.triton(tokens, scores, ancestor_bits, path, 0, 2)
    with pytest.raises(EspalierError, match="select_beams: scores"):
        select_beams.triton(tokens, scores.double(), ancestor_bits, path, 0, 1)


def test_cpu_tensors_use_the_reference():
    inputs = random_inputs(2, 3, 3, 1, 0)
    same(select_beams(*inputs, blank_path(2, 6), 3, 1), select_beams.reference(*inputs, blank_path(2, 6), 3, 1))
