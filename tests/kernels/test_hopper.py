"""Attention with Hopper's instructions: the choices, and the same bits as the plain kernel's."""

from itertools import product

import pytest
import torch

from espalier.kernels.attention.hopper import FEWEST_STAGES, REGISTERS, HopperBlocks, choose_hopper, straight_rows
from espalier.kernels.attention.tree_attention import choose
from espalier.kernels.attention.work_items import ALL, COUNTED, NONE
from espalier.kernels.runtime.launch import Chip, chip
from tests.kernels.attending import Case, difference, draw, poisoned, run

HOPPER = Chip(227 * 1024, 132, (9, 0))


def test_choices_fit_the_chip():
    for packed, units, size in product((17, 32, 64, 65, 256, 8192), (1, 40, 70, 132, 5000), (64, 128)):
        b = choose_hopper(HOPPER, packed, units, size, 64)
        assert b is not None and b.stages >= FEWEST_STAGES
        assert b.held(size) * b.per_processor <= HOPPER.shared_memory
        start, attending = b.registers
        loaders, loading = b.loaders
        warps = 4 * b.groups + loaders
        assert start * warps * 32 * b.per_processor <= REGISTERS and attending <= 240
        assert attending * 4 * b.groups + loading * loaders <= start * warps


def test_nothing_is_chosen_that_the_chip_or_the_shape_cannot():
    assert choose_hopper(HOPPER, 16, 5000, 128, 64) is None
    assert choose_hopper(HOPPER, 32, 5000, 128, 16) is None
    assert choose_hopper(HOPPER, 256, 5000, 80, 64) is None
    assert choose_hopper(Chip(99 * 1024, 132, (9, 0)), 256, 5000, 128, 64) is None
    assert choose_hopper(Chip(227 * 1024, 132, (10, 0)), 256, 5000, 128, 64) is None


@pytest.mark.parametrize(
    ("groups", "page_size", "window", "counted", "known"),
    [
        (2, 64, 0, False, ALL),
        (2, 256, 0, False, ALL),
        (2, 16, 0, True, COUNTED),
        (2, 16, 0, False, NONE),
        (2, 96, 0, True, COUNTED),
        (2, 64, 100, False, NONE),
        (1, 64, 0, False, NONE),
        (1, 1, 0, True, NONE),
    ],
)
def test_what_is_known_of_blocks_that_stand_side_by_side(groups, page_size, window, counted, known):
    pytest.importorskip("triton", reason="needs Triton")
    blocks = HopperBlocks(groups, 5, 1)
    pool = torch.zeros(192, 4, 64, dtype=torch.bfloat16)
    counts = torch.zeros(3, dtype=torch.int32) if counted else None
    made = straight_rows(blocks, pool, pool[:, :2], page_size, window, counts)
    assert made["STRAIGHT"] == known and (made["k_rows"] is None) == (known == NONE)
    if known != NONE:
        # Rows of all heads that there are, a block of them of one head; the second pool's are every other two.
        assert (list(made["k_rows"].shape), made["k_rows"].block_shape) == ([192, 256], [64, 64])
        assert (list(made["v_rows"].shape), list(made["v_rows"].strides)) == ([192, 128], [256, 1])
        assert made["k_rows"].base.data_ptr() == pool.data_ptr(), "a copy would be of yesterday"
    apart = pool[:, ::2]
    assert straight_rows(blocks, pool, apart, page_size, window, counts)["STRAIGHT"] == NONE


SHAPES = [
    Case(lengths, queries, rows, page_size, 32, 8, 128, 128, window, first, dtype, 8)
    for lengths, page_size, (queries, rows), (window, first, dtype) in product(
        [(0, 1, 64, 127, 1000, 4096)],
        [1, 16, 48, 64],
        [(5, None), (8, 8), (8, 40), (64, 64), (129, 129), (300, None)],
        [(None, 0, torch.bfloat16), (100, 1, torch.float16)],
    )
]
SHAPES += [
    Case((300, 0, 65), queries, queries, 16, heads, kv_heads, 64, 64, None, 0, torch.bfloat16, 2, sink)
    for queries, (heads, kv_heads), sink in product([3, 40], [(71, 1), (14, 2), (20, 20)], [False, True])
    if queries * heads // kv_heads > 16
]
SHAPES += [
    Case((0, 1, 64, 130, 131, 900), queries, rows, 16, 32, 8, 128, 128, None, first, torch.float16, 8)
    for (queries, rows), first in product([(5, None), (64, 64), (300, None)], [1, 130])
]
# Blocks that stand side by side, all of a request's or its first: on pages that hold less than a block, of several, of
# one and a half; of either type and size.
SHAPES += [
    Case(
        (0, 1, 64, 130, 1000, 4096),
        queries,
        rows,
        page_size,
        32,
        8,
        128,
        128,
        None,
        first,
        torch.bfloat16,
        8,
        in_order=n,
    )
    for page_size, n in [(1, 5000), (1, 700), (16, 5000), (16, 40), (48, 5000), (48, 9), (96, 30), (192, 0), (256, 0)]
    for (queries, rows), first in [((8, 40), 0), ((64, 64), 1), ((300, None), 130)]
]
SHAPES += [
    Case((0, 65, 700), 40, 40, page_size, heads, kv_heads, size, size, None, 0, dtype, 3, in_order=in_order)
    for page_size, in_order in [(64, 0), (1, 500)]
    for heads, kv_heads, size, dtype in [
        (14, 2, 64, torch.bfloat16),
        (71, 1, 64, torch.bfloat16),
        (16, 4, 128, torch.float16),
        (8, 2, 64, torch.float16),
    ]
]
SHAPES += [Case((700,), 1, None, 16, 71, 1, 64, 64, dtype=torch.bfloat16, most=4)]


@pytest.mark.gpu
@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_the_plain_kernel_s_bits(kernel_device, monkeypatch, case):
    """Any number of stages and groups; so the tests of graphs, batches and references count for both kernels."""
    inputs = draw(case, kernel_device)
    poisoned(monkeypatch)
    on = chip(inputs.q)
    if choose_hopper(on, 64, 1, case.k_size, 64) is None:
        pytest.skip("not the instructions of this chip, or too little shared memory")
    packed = case.queries * case.heads // case.kv_heads
    plain = choose(on, packed, case.rows or case.queries, case.k_size, case.v_size, case.dtype)
    for staged in (True, False):
        out, lse = run(inputs, case.most, staged, how=plain)
        for how in (HopperBlocks(1, 3, 2), HopperBlocks(1, 6, 1), HopperBlocks(2, 5, 1)):
            # What is counted changes a launch of two groups alone, on pages that do not say.
            for counted in (False, True) if how.groups == 2 and case.page_size % 64 else (False,):
                again, again_lse = run(inputs, case.most, staged, counted, how=how)
                same = torch.equal(again, out) and torch.equal(again_lse, lse)
                assert same, f"{how}, counted {counted}: {difference(again, out)}"
