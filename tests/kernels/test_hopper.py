"""The Hopper attention kernel: its launch configurations, and the same bits as the Triton kernel."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from espalier.errors import EspalierError
from espalier.kernels.attention.choose import choose_attention_config
from espalier.kernels.attention.triton_config import choose_triton_config
from espalier.kernels.attention.work_items import TMA_ALL, TMA_COUNTED, TMA_NONE
from espalier.kernels.hopper.attention import tma_arguments
from espalier.kernels.hopper.config import (
    HEAD_SIZES,
    MIN_STAGES,
    REGISTERS,
    HopperConfig,
    choose_hopper_config,
    kv_block_rows,
)
from espalier.kernels.runtime.launch import Chip, chip
from tests.kernels.attending import Case, difference, draw, poison_empty, run

HOPPER = Chip(227 * 1024, 132, (9, 0))


def test_choices_fit_the_chip():
    queries, work_items = (17, 32, 64, 65, 256, 8192), (1, 40, 70, 132, 5000)
    for packed_queries, num_work_items, size in product(queries, work_items, HEAD_SIZES):
        config = choose_hopper_config(HOPPER, packed_queries, num_work_items, size, 64)
        assert config is not None and config.num_stages >= MIN_STAGES
        assert config.shared_bytes(size) * config.programs_per_processor <= HOPPER.shared_memory
        start, attend_registers = config.registers(size)
        load_warps, load_registers = config.load_warps(size)
        warps = 4 * config.warpgroups + load_warps
        assert start * warps * 32 * config.programs_per_processor <= REGISTERS and attend_registers <= 240
        assert attend_registers * 4 * config.warpgroups + load_registers * load_warps <= start * warps


def test_choices_for_fp8_rows_fit_the_chip():
    for packed_queries, num_work_items, size in product((17, 64, 65, 8192), (1, 132, 5000), (64, 128)):
        config = choose_hopper_config(HOPPER, packed_queries, num_work_items, size, 64, is_fp8=True)
        assert config is not None and config.raw_stages and config.num_stages >= MIN_STAGES
        assert config.shared_bytes(size) <= HOPPER.shared_memory
        start, attend_registers = config.registers(size)
        others = (config.load_warps(size), config.convert_warps)
        warps = 4 * config.warpgroups + sum(count for count, _ in others)
        assert start * warps * 32 <= REGISTERS and 184 <= attend_registers <= 240
        of_others = sum(count * registers for count, registers in others)
        assert attend_registers * 4 * config.warpgroups + of_others <= start * warps
    assert choose_hopper_config(Chip(200 * 1024, 132, (9, 0)), 256, 5000, 128, 64, is_fp8=True) is None


def test_no_configuration_for_an_unsupported_chip_or_shape():
    assert choose_hopper_config(HOPPER, 16, 5000, 128, 64) is None
    assert choose_hopper_config(HOPPER, 32, 5000, 128, 16) is None
    assert choose_hopper_config(HOPPER, 32, 5000, 256, 16) is not None
    assert choose_hopper_config(HOPPER, 32, 5000, 256, 1) is None
    assert choose_hopper_config(HOPPER, 256, 5000, 80, 64) is None
    assert choose_hopper_config(Chip(99 * 1024, 132, (9, 0)), 256, 5000, 128, 64) is None
    assert choose_hopper_config(Chip(227 * 1024, 132, (10, 0)), 256, 5000, 128, 64) is None


def test_what_the_kernel_lacks_is_not_its(monkeypatch, kernel_device):
    """Soft-caps, heads of 512 values, and FP8 rows with heads of 256."""
    monkeypatch.setattr("espalier.kernels.attention.choose.chip", lambda tensor: HOPPER)
    plain = Case((300,), queries=64, page_size=64, k_size=128, v_size=128, dtype=torch.float16)
    for case, is_hopper in (
        (plain, True),
        (replace(plain, softcap=20.0), False),
        (replace(plain, k_size=256, v_size=256), True),
        (replace(plain, k_size=256, v_size=256, fp8=True), False),
        (replace(plain, k_size=512, v_size=512), False),
    ):
        inputs = draw(case, kernel_device)
        assert isinstance(choose_attention_config(inputs), HopperConfig) == is_hopper, case
    with pytest.raises(EspalierError, match="no soft-cap"):
        run(draw(replace(plain, softcap=20.0), kernel_device), 4, config=HopperConfig(1, 3, 1))


@pytest.mark.parametrize(
    ("warpgroups", "page_size", "window", "contiguous", "kind"),
    [
        (2, 64, 0, False, TMA_ALL),
        (2, 256, 0, False, TMA_ALL),
        (2, 16, 0, True, TMA_COUNTED),
        (2, 16, 0, False, TMA_NONE),
        (2, 96, 0, True, TMA_COUNTED),
        (2, 64, 100, False, TMA_NONE),
        (1, 64, 0, False, TMA_NONE),
        (1, 1, 0, True, TMA_NONE),
    ],
)
def test_contiguous_blocks_are_copied_by_tma(warpgroups, page_size, window, contiguous, kind):
    pytest.importorskip("triton", reason="needs Triton")
    config = HopperConfig(warpgroups, 5, 1)
    pool = torch.zeros(192, 4, 64, dtype=torch.bfloat16)
    counts = torch.zeros(3, dtype=torch.int32) if contiguous else None
    arguments = tma_arguments(config, pool, pool[:, :2], page_size, window, counts)
    assert arguments["TMA_BLOCKS"] == kind and (arguments["k_descriptor"] is None) == (kind == TMA_NONE)
    if kind != TMA_NONE:
        # A descriptor covers the rows of all heads; a block has one head.  V is here a view of two of four heads.
        k, v = arguments["k_descriptor"], arguments["v_descriptor"]
        assert (list(k.shape), k.block_shape) == ([192, 256], [64, 64])
        assert (list(v.shape), list(v.strides)) == ([192, 128], [256, 1])
        assert k.base.data_ptr() == pool.data_ptr(), "the descriptor must not be of a copy"
    every_other_head = pool[:, ::2]
    assert tma_arguments(config, pool, every_other_head, page_size, window, counts)["TMA_BLOCKS"] == TMA_NONE


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
# GPT-OSS: 64 heads over 8, with and without its window.
SHAPES += [
    Case((300, 0, 65, 2000), queries, rows, page_size, 64, 8, 64, 64, window, 0, torch.bfloat16, max_splits, sink=True)
    for queries, rows in [(5, None), (64, 64), (300, None)]
    for page_size, window, max_splits in [(16, None, 8), (16, 128, 8), (64, 128, 1), (64, None, 1)]
]
SHAPES += [
    Case((0, 1, 64, 130, 131, 900), queries, rows, 16, 32, 8, 128, 128, None, first, torch.float16, 8)
    for (queries, rows), first in product([(5, None), (64, 64), (300, None)], [1, 130])
]
# Contiguous blocks, all or only the first ones of a request, on pages of less than a block, of several blocks, and of
# one and a half blocks; both dtypes and head sizes.
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
SHAPES += [Case((700,), 1, None, 16, 71, 1, 64, 64, dtype=torch.bfloat16, max_splits=4)]
SHAPES += [replace(case, fp8=True) for case in SHAPES[::3]]
# Heads of 256 values, whose blocks have 32 rows.
SHAPES += [
    Case((0, 1, 64, 127, 1000, 4096), queries, rows, page_size, 24, 4, 256, 256, window, first, dtype, 8, in_order=n)
    for page_size, n in [(1, 700), (16, 0), (16, 5000), (48, 9), (64, 0)]
    for queries, rows in [(8, 40), (64, 64), (300, None)]
    for window, first, dtype in [(None, 0, torch.bfloat16), (100, 1, torch.float16)]
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_same_bits_as_the_triton_kernel(kernel_device, monkeypatch, case):
    """For any number of stages and warpgroups.  So the other tests of the Triton kernel also cover this kernel."""
    inputs = draw(case, kernel_device)
    poison_empty(monkeypatch)
    on = chip(inputs.q)
    if choose_hopper_config(on, 64, 1, case.k_size, 64) is None:
        pytest.skip("needs a Hopper GPU with enough shared memory")
    packed_queries = case.queries * case.heads // case.kv_heads
    plain = choose_triton_config(on, packed_queries, case.rows or case.queries, case.k_size, case.v_size, case.dtype)
    configs = HopperConfig(1, 3, 2), HopperConfig(1, 6, 1), HopperConfig(2, 5, 1)
    if case.k_size == 256:
        configs = HopperConfig(1, 3, 1), HopperConfig(1, 6, 1), HopperConfig(2, 3, 1), HopperConfig(2, 5, 1)
    if case.fp8:
        configs = HopperConfig(1, 3, 1, 6), HopperConfig(1, 3, 1, 2), HopperConfig(2, 3, 1, 6)
    for staged, config in product((True, False), configs):
        if case.k_size == 256:
            # A block that a query does not see changes its bits a little, so both kernels need the same tiles.
            plain = replace(plain, block_m=config.block_m, num_warps=4 * config.warpgroups)
        out, lse = run(inputs, case.max_splits, staged, config=plain)
        # Counts change only a launch with two warpgroups on pages that do not hold whole blocks.
        counted = config.warpgroups == 2 and case.page_size % kv_block_rows(case.k_size) > 0
        for contiguous in (False, True) if counted else (False,):
            hopper_out, hopper_lse = run(inputs, case.max_splits, staged, contiguous, config=config)
            same = torch.equal(hopper_out, out) and torch.equal(hopper_lse, lse)
            assert same, f"{config}, contiguous {contiguous}: {difference(hopper_out, out)}"
