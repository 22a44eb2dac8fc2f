"""Warp-specialized attention over latent rows of 512 + 64 values, for Hopper.

Work items, splits and masks are those of kernels/attention/latent_attention.py.  The loading warps copy each block of
rows into shared memory once, for K and V.  Two warpgroups attend to them (kernels/attention/hopper_latent_attend.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from espalier.kernels.attention.hopper import CAPABILITY, DTYPES, RESERVED
from espalier.kernels.attention.hopper_convert import convert_latent_work_items
from espalier.kernels.attention.hopper_latent_attend import score_work_items, value_work_items
from espalier.kernels.attention.hopper_load import _copy, _element_offset, _pages, _row_of, extent_of
from espalier.kernels.attention.work_items import (
    ALL,
    NONE,
    block_index,
    load_work_item,
    wait_and_count_splits,
    work_item_of,
)
from espalier.kernels.layers.quantised import FP8
from espalier.kernels.runtime.launch import Chip, gluon_kernel

if TYPE_CHECKING:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper

V_SIZE, ROPE_SIZE = 512, 64
# Packed queries of a tile.
BLOCK_M = 64
# Rows of a block.  Blocks of 64 rows would leave room for only two stages, and are slower (docs/log.md).
BLOCK_N = 32
STAGES = 4
# Buffers in shared memory through which the first attending warpgroup sends blocks of weights to the second.
SLOTS = 2
# Warps that copy rows.
LOAD_WARPS = 4
# Registers per thread: at launch; of the second attending warpgroup; of the loading warps.  The first attending
# warpgroup gets the rest, 232.
REGISTERS_AT_LAUNCH, VALUE_REGISTERS, LOAD_REGISTERS = 168, 200, 72
# FP8 rows: blocks as they are attended and as they are stored; warps that load and that convert.  The products of a
# warpgroup need 158 registers at launch, so there are not more warps than for two-byte rows.
FP8_STAGES, FP8_RAW_STAGES = 2, 4
FP8_LOAD_WARPS, CONVERT_WARPS = 2, 2


@dataclass(frozen=True)
class HopperLatentConfig:
    """Launch configuration.  stages: blocks of rows that shared memory holds; raw_stages: blocks of FP8 rows, 0 for
    two-byte rows."""

    stages: int
    raw_stages: int = 0

    programs_per_processor: ClassVar[int] = 1
    block_m: ClassVar[int] = BLOCK_M

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a program, in bytes."""
        two_byte_rows, fp8_rows = BLOCK_M + self.stages * BLOCK_N, self.raw_stages * BLOCK_N
        rows = (2 * two_byte_rows + fp8_rows) * (V_SIZE + ROPE_SIZE)
        return rows + 2 * SLOTS * BLOCK_M * BLOCK_N + 4 * SLOTS * BLOCK_M + RESERVED


def choose_hopper_latent_config(on: Chip, fp8: bool = False) -> HopperLatentConfig | None:
    """The launch configuration, or None if this chip cannot run the kernel.  fp8: whether rows are FP8."""
    config = HopperLatentConfig(FP8_STAGES, FP8_RAW_STAGES) if fp8 else HopperLatentConfig(STAGES)
    return config if on.capability == CAPABILITY and config.shared_bytes <= on.shared_memory else None


def fits_hopper_latent(q: Tensor, rows: list[Tensor], v_size: int) -> bool:
    """Whether the kernel takes queries and rows [.., size]: their types, sizes, addresses and strides.

    Triton must see an address and strides divisible by 16, to copy 16 bytes at a time.
    """
    return v_size == V_SIZE and all(
        tensor.shape[-1] == V_SIZE + ROPE_SIZE
        and q.dtype in DTYPES
        and tensor.dtype in (q.dtype, FP8)
        and tensor.data_ptr() % 16 == 0
        and all(stride % 16 == 0 for stride in tensor.stride()[:-1])
        for tensor in (q, *rows)
    )


# Arguments are grouped by meaning; one argument per line would hide the groups.
# fmt: off
@gluon_kernel
def _copy_latent_rows(
    stages, stage, pointer, row, row_offset, row_stride, exists,
    MASKED: gl.constexpr, SMALL: gl.constexpr, HALF: gl.constexpr, ROPE: gl.constexpr, LOAD: gl.constexpr,
):
    """Start a copy of the rows row + row_offset into a stage.  SMALL: as in hopper_load.py:_element_offset."""
    left, right, rope, _full, _empty = stages
    offsets = _element_offset(row_offset, row_stride, SMALL)
    at = pointer + row * row_stride
    _copy(left.index(stage), at, offsets, exists, MASKED, HALF, LOAD)
    _copy(right.index(stage), at + HALF, offsets, exists, MASKED, HALF, LOAD)
    _copy(rope.index(stage), at + 2 * HALF, offsets, exists, MASKED, ROPE, LOAD)


@gluon_kernel
def _load_latent_block(
    stages, stage, t, at, page, row_ptr, row_stride, staged_ptr, staged_r, end, first, num_committed, low, high,
    PAGE_SIZE: gl.constexpr, HALF: gl.constexpr, ROPE: gl.constexpr, BLOCK_N: gl.constexpr, LOAD: gl.constexpr,
):
    """As kernels/attention/hopper_load.py:_load_block."""
    ROWS: gl.constexpr = gl.SliceLayout(1, LOAD)
    offset = gl.arange(0, BLOCK_N, layout=ROWS)
    if t < num_committed:
        row, row_offset = _row_of(page, at, PAGE_SIZE, BLOCK_N, ROWS)
        if (at >= first) & (at + BLOCK_N <= end):
            _copy_latent_rows(
                stages, stage, row_ptr, row, row_offset, row_stride, 0,
                False, PAGE_SIZE % BLOCK_N == 0, HALF, ROPE, LOAD,
            )
        else:
            exists = (at + offset >= first) & (at + offset < end)
            _copy_latent_rows(
                stages, stage, row_ptr, row, row_offset, row_stride, exists,
                True, PAGE_SIZE % BLOCK_N == 0, HALF, ROPE, LOAD,
            )
    else:
        node = low + (t - num_committed) * BLOCK_N
        _copy_latent_rows(
            stages, stage, staged_ptr, node.to(gl.int64), offset, staged_r, node + offset < high,
            True, True, HALF, ROPE, LOAD,
        )


@gluon_kernel
def _load_contiguous_latents(
    stages, num_done, count, at, end, half_descriptor, rope_descriptor, table,
    PAGE_SIZE: gl.constexpr, HALF: gl.constexpr, ROPE: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, LOAD_WARPS: gl.constexpr,
):
    """As kernels/attention/hopper_load.py:_load_contiguous."""
    left, right, rope, full, empty = stages
    BYTES: gl.constexpr = left.dtype.primitive_bitwidth // 8
    page = gl.load(table + at // PAGE_SIZE, mask=count > 0, other=0)
    for _ in range(count):
        row = page.to(gl.int32) * PAGE_SIZE + at % PAGE_SIZE
        at += BLOCK_N
        page = gl.load(table + gl.minimum(at, end - 1) // PAGE_SIZE)
        stage = num_done % STAGES
        hopper.mbarrier.wait(empty.index(stage), num_done // STAGES % 2 ^ 1)
        hopper.mbarrier.expect(full.index(stage), BLOCK_N * (2 * HALF + ROPE) * BYTES)
        hopper.mbarrier.arrive(full.index(stage), count=32 * LOAD_WARPS - 1)
        hopper.tma.async_copy_global_to_shared(half_descriptor, [row, 0], full.index(stage), left.index(stage))
        hopper.tma.async_copy_global_to_shared(half_descriptor, [row, HALF], full.index(stage), right.index(stage))
        hopper.tma.async_copy_global_to_shared(rope_descriptor, [row, 2 * HALF], full.index(stage), rope.index(stage))
        num_done += 1
    return num_done


@gluon_kernel
def _load_latent_work_items(
    stages, plan, row_ptr, row_stride, staged, table_ptr, table_b, half_descriptor, rope_descriptor,
    HEADS: gl.constexpr, HALF: gl.constexpr, ROPE: gl.constexpr, PAGE_SIZE: gl.constexpr, STAGED: gl.constexpr,
    LONGEST_FIRST: gl.constexpr, CONTIGUOUS: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, LOAD_WARPS: gl.constexpr,
):
    """As kernels/attention/hopper_load.py:load_work_items, with one row for K and V."""
    left, _right, _rope, full, empty = stages
    # A thread copies 16 bytes; a warp copies 64 values of a row, as many as the RoPE part has.
    VALUES: gl.constexpr = 128 // left.dtype.primitive_bitwidth
    LOAD: gl.constexpr = gl.BlockedLayout([1, VALUES], [VALUES // 2, 64 // VALUES], [LOAD_WARPS, 1], [1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(1, LOAD)
    split_ptr, start_ptr, num_splits, num_tiles, _queries, rows, first = plan
    staged_ptr, staged_b, staged_r = staged
    num_work_items = num_splits * num_tiles
    backwards = 0
    num_done = 0
    for base in range(0, num_work_items, gl.num_programs(0)):
        work_item = work_item_of(base, backwards)
        backwards = 1 - backwards
        if work_item < num_work_items:
            _split, request, begin, end, _request_splits, is_last, tile, _head = load_work_item(
                work_item, split_ptr, start_ptr, num_splits, num_tiles, 1, LONGEST_FIRST
            )
            begin, num_committed, num_lower, num_unmasked, low, high, num_blocks = extent_of(
                begin, end, first, is_last, tile, rows, 0, HEADS, STAGED, 0, 64, BLOCK_N
            )
            table = table_ptr + request * table_b
            num_contiguous = 0
            if CONTIGUOUS != 0:
                num_contiguous = num_unmasked
                num_done = _load_contiguous_latents(
                    stages, num_done, num_contiguous, begin + num_lower * BLOCK_N, end,
                    half_descriptor, rope_descriptor, table, PAGE_SIZE, HALF, ROPE, BLOCK_N, STAGES, LOAD_WARPS,
                )
            # Pages are loaded two blocks ahead, so that no copy waits for its page.
            at = begin + block_index(num_contiguous, num_lower, num_unmasked) * BLOCK_N
            next_at = begin + block_index(num_contiguous + 1, num_lower, num_unmasked) * BLOCK_N
            page = _pages(table, at, end, PAGE_SIZE, BLOCK_N, ROWS)
            next_page = _pages(table, next_at, end, PAGE_SIZE, BLOCK_N, ROWS)
            for t in range(num_contiguous, num_blocks):
                stage = num_done % STAGES
                hopper.mbarrier.wait(empty.index(stage), num_done // STAGES % 2 ^ 1)
                _load_latent_block(
                    stages, stage, t, at, page, row_ptr, row_stride, staged_ptr + request * staged_b, staged_r,
                    end, first, num_committed, low, high, PAGE_SIZE, HALF, ROPE, BLOCK_N, LOAD,
                )
                hopper.async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
                page, at = next_page, next_at
                next_at = begin + block_index(t + 2, num_lower, num_unmasked) * BLOCK_N
                next_page = _pages(table, next_at, end, PAGE_SIZE, BLOCK_N, ROWS)
                num_done += 1


@gluon_kernel
def _start_warps_for_fp8(
    q_shared, stages, exchange, plan, query_args, ancestor_bits, results, scale,
    row_ptr, row_stride, staged, table_ptr, table_b, half_descriptor, rope_descriptor,
    HEADS: gl.constexpr, HALF: gl.constexpr, ROPE: gl.constexpr, PAGE_SIZE: gl.constexpr, STAGED: gl.constexpr,
    LONGEST_FIRST: gl.constexpr, CONTIGUOUS: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, RAW_STAGES: gl.constexpr, SLOTS: gl.constexpr,
    VALUE_REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr, LOAD_WARPS: gl.constexpr, CONVERT_WARPS: gl.constexpr,
):
    """FP8 rows are loaded into stages of their own, which more warps convert."""
    dtype: gl.constexpr = row_ptr.dtype.element_ty
    half_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, HALF], dtype)
    rope_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, ROPE], dtype)
    full = gl.allocate_shared_memory(gl.int64, [RAW_STAGES, 1], hopper.mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [RAW_STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for stage in gl.static_range(RAW_STAGES):
        hopper.mbarrier.init(full.index(stage), count=32 * LOAD_WARPS)
        hopper.mbarrier.init(empty.index(stage), count=1)
    raw = (
        gl.allocate_shared_memory(dtype, [RAW_STAGES, BLOCK_N, HALF], half_layout),
        gl.allocate_shared_memory(dtype, [RAW_STAGES, BLOCK_N, HALF], half_layout),
        gl.allocate_shared_memory(dtype, [RAW_STAGES, BLOCK_N, ROPE], rope_layout),
        full,
        empty,
    )
    gl.warp_specialize([
        (score_work_items, (
            q_shared, stages, exchange, plan, query_args, ancestor_bits, results, scale,
            HEADS, HALF, ROPE, STAGED, LONGEST_FIRST, BLOCK_N, STAGES, SLOTS,
        )),
        (value_work_items, (
            stages, exchange, plan, results, HEADS, HALF, STAGED, LONGEST_FIRST, BLOCK_N, STAGES, SLOTS,
        )),
        (_load_latent_work_items, (
            raw, plan, row_ptr, row_stride, staged, table_ptr, table_b, half_descriptor, rope_descriptor,
            HEADS, HALF, ROPE, PAGE_SIZE, STAGED, LONGEST_FIRST, CONTIGUOUS, BLOCK_N, RAW_STAGES, LOAD_WARPS,
        )),
        (convert_latent_work_items, (
            raw, stages, plan, HEADS, STAGED, LONGEST_FIRST, BLOCK_N, RAW_STAGES, STAGES, CONVERT_WARPS,
        )),
    ], [4, LOAD_WARPS, CONVERT_WARPS], [VALUE_REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS])


@gluon_kernel
def _hopper_latent_kernel(
    q_ptr, row_ptr, staged_ptr, table_ptr, split_ptr, start_ptr, bits_ptr,
    out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, row_scale_ptr,
    scale, batch, queries, rows, first,
    q_b, q_q, q_h, row_stride, staged_b, staged_r, table_b, bits_b, bits_q, half_descriptor, rope_descriptor,
    HEADS: gl.constexpr, HALF: gl.constexpr, ROPE: gl.constexpr, PAGE_SIZE: gl.constexpr, STAGED: gl.constexpr,
    LONGEST_FIRST: gl.constexpr, CONTIGUOUS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    RAW_STAGES: gl.constexpr, SLOTS: gl.constexpr, DEPENDENT: gl.constexpr,
    VALUE_REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr, LOAD_WARPS: gl.constexpr, CONVERT_WARPS: gl.constexpr,
):
    """RAW_STAGES: stages of FP8 rows, which more warps convert to those that are attended; 0 for other rows."""
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    half_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, HALF], dtype)
    rope_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, ROPE], dtype)
    weight_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BLOCK_N], dtype)
    q_shared = (
        gl.allocate_shared_memory(dtype, [64, HALF], half_layout),
        gl.allocate_shared_memory(dtype, [64, HALF], half_layout),
        gl.allocate_shared_memory(dtype, [64, ROPE], rope_layout),
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    sent = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], hopper.mbarrier.MBarrierLayout())
    received = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], hopper.mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        hopper.mbarrier.init(full.index(stage), count=1 if RAW_STAGES > 0 else 32 * LOAD_WARPS)
        hopper.mbarrier.init(empty.index(stage), count=2)
    for slot in gl.static_range(SLOTS):
        hopper.mbarrier.init(sent.index(slot), count=1)
        hopper.mbarrier.init(received.index(slot), count=1)
    stages = (
        gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HALF], half_layout),
        gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HALF], half_layout),
        gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, ROPE], rope_layout),
        full,
        empty,
    )
    exchange = (
        gl.allocate_shared_memory(dtype, [SLOTS, 64, BLOCK_N], weight_layout),
        gl.allocate_shared_memory(gl.float32, [SLOTS, 64], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        sent,
        received,
    )
    num_splits = wait_and_count_splits(start_ptr, batch, DEPENDENT)
    plan = (split_ptr, start_ptr, num_splits, (queries * HEADS + 63) // 64, queries, rows, first)
    if RAW_STAGES > 0:
        _start_warps_for_fp8(
            q_shared, stages, exchange, plan, (q_ptr, q_b, q_q, q_h), (bits_ptr, bits_b, bits_q),
            (out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, gl.load(row_scale_ptr)), scale * gl.load(row_scale_ptr),
            row_ptr, row_stride, (staged_ptr, staged_b, staged_r), table_ptr, table_b, half_descriptor, rope_descriptor,
            HEADS, HALF, ROPE, PAGE_SIZE, STAGED, LONGEST_FIRST, CONTIGUOUS, BLOCK_N, STAGES, RAW_STAGES, SLOTS,
            VALUE_REGISTERS, LOAD_REGISTERS, LOAD_WARPS, CONVERT_WARPS,
        )
    else:
        results = (out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, gl.to_tensor(1.0))
        gl.warp_specialize([
            (score_work_items, (
                q_shared, stages, exchange, plan, (q_ptr, q_b, q_q, q_h), (bits_ptr, bits_b, bits_q), results, scale,
                HEADS, HALF, ROPE, STAGED, LONGEST_FIRST, BLOCK_N, STAGES, SLOTS,
            )),
            (value_work_items, (
                stages, exchange, plan, results, HEADS, HALF, STAGED, LONGEST_FIRST, BLOCK_N, STAGES, SLOTS,
            )),
            (_load_latent_work_items, (
                stages, plan, row_ptr, row_stride, (staged_ptr, staged_b, staged_r), table_ptr, table_b,
                half_descriptor, rope_descriptor, HEADS, HALF, ROPE, PAGE_SIZE, STAGED, LONGEST_FIRST, CONTIGUOUS,
                BLOCK_N, STAGES, LOAD_WARPS,
            )),
        ], [4, LOAD_WARPS], [VALUE_REGISTERS, LOAD_REGISTERS])
# fmt: on


def hopper_latent_arguments(config: HopperLatentConfig, pages: Tensor, page_size: int) -> dict[str, Any]:
    """Constants, options and TMA descriptors of a launch.  pages: [R, 1, 576].

    TMA copies the blocks if a page holds whole blocks.
    """
    contiguous = ALL if page_size % BLOCK_N == 0 else NONE
    half, rope = _descriptors(pages[:, 0]) if contiguous == ALL else (None, None)
    return {
        "half_descriptor": half,
        "rope_descriptor": rope,
        "CONTIGUOUS": contiguous,
        "HALF": V_SIZE // 2,
        "ROPE": ROPE_SIZE,
        "BLOCK_N": BLOCK_N,
        "STAGES": config.stages,
        "RAW_STAGES": config.raw_stages,
        "SLOTS": SLOTS,
        "VALUE_REGISTERS": VALUE_REGISTERS,
        "LOAD_REGISTERS": LOAD_REGISTERS,
        "LOAD_WARPS": FP8_LOAD_WARPS if config.raw_stages else LOAD_WARPS,
        "CONVERT_WARPS": CONVERT_WARPS,
        "num_warps": 4,
        "maxnreg": REGISTERS_AT_LAUNCH,
    }


def _descriptors(rows: Tensor) -> tuple[Any, Any]:
    """TMA descriptors of two blocks: of half a latent, and of the RoPE part.  rows: [R, 576]."""
    descriptor_class, half, rope = _layouts(rows.dtype)
    return (
        descriptor_class.from_tensor(rows, [BLOCK_N, V_SIZE // 2], half),
        descriptor_class.from_tensor(rows, [BLOCK_N, ROPE_SIZE], rope),
    )


@cache
def _layouts(dtype: torch.dtype) -> tuple[Any, Any, Any]:
    """Triton's descriptor class, and the shared-memory layouts of the two blocks."""
    from triton.experimental.gluon import language
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    element = {torch.bfloat16: language.bfloat16, torch.float16: language.float16, FP8: language.float8e4nv}[dtype]
    half, rope = (
        language.NVMMASharedLayout.get_default_for([BLOCK_N, size], element) for size in (V_SIZE // 2, ROPE_SIZE)
    )
    return TensorDescriptor, half, rope
