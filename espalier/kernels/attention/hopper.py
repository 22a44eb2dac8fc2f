"""Tree attention with Hopper's own instructions: warps that load and warps that attend, each at its own pace.

The same units, splits, blocks of rows and order of sums as kernels/attention/tree_attention.py, whose results it gives
to the bit.  For two-byte types and head sizes of whole tiles, where the queries that share a KV head fill more than a
fourth of the tensor cores' 64 rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from espalier.kernels.attention.hopper_attend import attend_units
from espalier.kernels.attention.hopper_load import load_units
from espalier.kernels.attention.work_items import ALL, COUNTED, NONE, items_of
from espalier.kernels.runtime.launch import Chip, gluon_kernel

if TYPE_CHECKING:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper

CAPABILITY = (9, 0)
DTYPES = (torch.bfloat16, torch.float16)
SIZES = (64, 128)
# A group of four warps attends with 64 queries.
GROUP = 64
BLOCK_N = 64
# A stage is freed while the next two are waited for.
FEWEST_STAGES = 3
MOST_STAGES = 6
# Barriers, and arguments on their way to the warps.
RESERVED = 1024
REGISTERS = 2**16
# The most that a thread can use.
MOST_REGISTERS = 240


@dataclass(frozen=True)
class HopperBlocks:
    """Launch choices.  groups: of four warps that attend, 64 packed queries each; per_processor: blocks that the
    persistent grid puts on one multiprocessor."""

    groups: int
    stages: int
    per_processor: int

    def held(self, size: int) -> int:
        """Shared memory of a block, for values of two bytes."""
        return 2 * size * (self.m + 2 * self.stages * BLOCK_N) + RESERVED

    @property
    def m(self) -> int:
        """Packed queries of a tile."""
        return self.groups * GROUP

    @property
    def loaders(self) -> tuple[int, int]:
        """Warps that load, and registers of a thread of theirs."""
        return (8, 40) if self.per_processor == 1 else (4, 72)

    @property
    def registers(self) -> tuple[int, int]:
        """A thread's at the start, as many as fill the multiprocessor, and an attending one's when those that load have
        handed theirs over."""
        loaders, loading = self.loaders
        attending = 4 * self.groups
        most = (attending * MOST_REGISTERS + loaders * loading) // (attending + loaders)
        start = min(REGISTERS // (32 * (attending + loaders) * self.per_processor), most) // 8 * 8
        return start, (start * (attending + loaders) - loaders * loading) // attending // 8 * 8


def choose_hopper(on: Chip, packed: int, units: int, size: int, page_size: int) -> HopperBlocks | None:
    """packed: queries that share a KV head; units: of 128 of them, in all.  None: this chip cannot, or gains nothing.

    Two groups read a block of rows together; where there is not work for every multiprocessor in blocks of two, one is
    better, and two blocks of one a multiprocessor, if there are as many, hide each other's ends.  Few queries that wait
    for rows gathered from small pages are better served by all warps of the plain kernel (docs/log.md).
    """
    if on.capability != CAPABILITY or size not in SIZES or packed <= GROUP // 4:
        return None
    if packed <= GROUP // 2 and page_size < BLOCK_N:
        return None
    groups = 2 if packed > GROUP and 4 * units >= 3 * on.processors else 1
    halves = units * (1 if packed <= GROUP else 2)
    per_processor = 2 if groups == 1 and halves > on.processors else 1
    for stages in range(MOST_STAGES, FEWEST_STAGES - 1, -1):
        blocks = HopperBlocks(groups, stages, per_processor)
        if blocks.held(size) * per_processor <= on.shared_memory:
            return blocks
    return None


# Arguments of kernels stand in groups, which a line each would hide.
# fmt: off
@gluon_kernel
def _hopper_attention_kernel(
    q_ptr, k_ptr, v_ptr, new_k_ptr, new_v_ptr,
    table_ptr, item_ptr, start_ptr, position_ptr, row_position_ptr, word_ptr,
    out_ptr, lse_ptr, part_ptr, part_lse_ptr,
    scale, batch, queries, rows, first,
    q_b, q_q, q_h, k_row, k_h, v_row, v_h, new_k_b, new_k_r, new_k_h, new_v_b, new_v_r, new_v_h,
    table_b, position_b, position_q, row_position_b, row_position_r, word_b, word_q, k_rows, v_rows, straight_ptr,
    KV_HEADS: gl.constexpr, GROUPS: gl.constexpr, SIZE: gl.constexpr,
    PAGE_SIZE: gl.constexpr, WINDOW: gl.constexpr, NODES: gl.constexpr, DIRECT: gl.constexpr, WIDE: gl.constexpr,
    SAME: gl.constexpr, STRAIGHT: gl.constexpr, QUERY_GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    ATTENDING: gl.constexpr, LOADING: gl.constexpr, LOADERS: gl.constexpr, DEPENDENT: gl.constexpr,
):
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    BLOCK_M: gl.constexpr = 64 * QUERY_GROUPS
    rows_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, SIZE], dtype)
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, SIZE], dtype)
    q_shared = gl.allocate_shared_memory(dtype, [QUERY_GROUPS, 64, SIZE], q_layout)
    k_stages = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, SIZE], rows_layout)
    v_stages = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, SIZE], rows_layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        hopper.mbarrier.init(full.index(stage), count=32 * LOADERS)
        hopper.mbarrier.init(empty.index(stage), count=QUERY_GROUPS)
    items = items_of(start_ptr, batch, DEPENDENT)
    tiles = (queries * GROUPS + BLOCK_M - 1) // BLOCK_M
    stages = (k_stages, v_stages, full, empty)
    plan = (item_ptr, start_ptr, items, tiles, queries, rows, first)
    asks = (q_ptr, q_b, q_q, q_h)
    keys, values = (k_ptr, k_row, k_h), (v_ptr, v_row, v_h)
    new_keys, new_values = (new_k_ptr, new_k_b, new_k_r, new_k_h), (new_v_ptr, new_v_b, new_v_r, new_v_h)
    positions = (position_ptr, position_b, position_q)
    row_positions, ancestor_bits = (row_position_ptr, row_position_b, row_position_r), (word_ptr, word_b, word_q)
    results = (out_ptr, lse_ptr, part_ptr, part_lse_ptr)
    # A tuple that stands in a variable would lose its constants, so the calls are written out.
    if QUERY_GROUPS == 1:
        gl.warp_specialize([
            (attend_units, (
                q_shared.index(0), stages, plan, asks, positions, row_positions, ancestor_bits, results,
                scale, 0, KV_HEADS, GROUPS, SIZE, WINDOW, NODES, DIRECT, WIDE, BLOCK_M, BLOCK_N, STAGES,
            )),
            (load_units, (
                stages, plan, keys, values, new_keys, new_values, table_ptr, table_b, positions,
                k_rows, v_rows, straight_ptr, KV_HEADS, GROUPS, SIZE, PAGE_SIZE, WINDOW, NODES, WIDE, SAME, STRAIGHT,
                BLOCK_M, BLOCK_N, STAGES, LOADERS,
            )),
        ], [LOADERS], [LOADING])
    else:
        gl.warp_specialize([
            (attend_units, (
                q_shared.index(0), stages, plan, asks, positions, row_positions, ancestor_bits, results,
                scale, 0, KV_HEADS, GROUPS, SIZE, WINDOW, NODES, DIRECT, WIDE, BLOCK_M, BLOCK_N, STAGES,
            )),
            (attend_units, (
                q_shared.index(1), stages, plan, asks, positions, row_positions, ancestor_bits, results,
                scale, 1, KV_HEADS, GROUPS, SIZE, WINDOW, NODES, DIRECT, WIDE, BLOCK_M, BLOCK_N, STAGES,
            )),
            (load_units, (
                stages, plan, keys, values, new_keys, new_values, table_ptr, table_b, positions,
                k_rows, v_rows, straight_ptr, KV_HEADS, GROUPS, SIZE, PAGE_SIZE, WINDOW, NODES, WIDE, SAME, STRAIGHT,
                BLOCK_M, BLOCK_N, STAGES, LOADERS,
            )),
        ], [4, LOADERS], [ATTENDING, LOADING])
# fmt: on


def in_whole_copies(tensor: torch.Tensor) -> bool:
    """Whether rows of sixteen bytes, which a copy takes at once, stand so that Triton sees it: at multiples of 16."""
    return tensor.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in tensor.stride()[:-1])


def row_blocks(rows: torch.Tensor) -> Any:
    """What the copying engine reads BLOCK_N rows of one head by: rows [R, heads, size], heads side by side.  None: they
    are not."""
    size = rows.shape[2]
    if rows.stride(1) != size:
        return None
    descriptor, layout = _of_blocks(rows.dtype, size)
    return descriptor.from_tensor(rows.view(len(rows), -1), [BLOCK_N, size], layout)


@cache
def _of_blocks(dtype: torch.dtype, size: int) -> tuple[Any, Any]:
    """Triton's class of descriptors, and how a block stands in shared memory."""
    from triton.experimental.gluon import language
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    number = {torch.bfloat16: language.bfloat16, torch.float16: language.float16}[dtype]
    return TensorDescriptor, language.NVMMASharedLayout.get_default_for([BLOCK_N, size], number)


def must_count(page_size: int, window: int) -> bool:
    """Whether pages do not say that rows of a block stand side by side, and counting could
    (kernels/attention/contiguous_blocks.py)."""
    return not window and page_size % BLOCK_N > 0


def copies_straight(blocks: HopperBlocks) -> bool:
    """Whether a launch gains by copies in one go.

    Two groups of attending warps keep a multiprocessor busy, and copies by threads take turns with them; one group
    waits for memory, which answers the engine no sooner (docs/log.md).
    """
    return blocks.groups == 2


def straight_rows(
    blocks: HopperBlocks, k: torch.Tensor, v: torch.Tensor, page_size: int, window: int, straight: torch.Tensor | None
) -> dict[str, Any]:
    """Arguments of a launch that say which blocks of rows are copied in one go.  k, v: [R, heads, size]."""
    known = NONE
    if copies_straight(blocks) and not window:
        known = ALL if not must_count(page_size, window) else NONE if straight is None else COUNTED
    of_k, of_v = (row_blocks(rows) if known != NONE else None for rows in (k, v))
    if of_k is None or of_v is None:
        return {"k_rows": None, "v_rows": None, "straight_ptr": None, "STRAIGHT": NONE}
    return {"k_rows": of_k, "v_rows": of_v, "straight_ptr": straight, "STRAIGHT": known}


def hopper_constants(blocks: HopperBlocks, size: int, same: bool) -> dict[str, Any]:
    """Constants and options of a launch that follow from the choice; same: keys and values stand equally far apart."""
    start, attending = blocks.registers
    loaders, loading = blocks.loaders
    return {
        "SIZE": size,
        "SAME": same,
        "QUERY_GROUPS": blocks.groups,
        "BLOCK_N": BLOCK_N,
        "STAGES": blocks.stages,
        "ATTENDING": attending,
        "LOADING": loading,
        "LOADERS": loaders,
        "num_warps": 4,
        "maxnreg": start,
    }
