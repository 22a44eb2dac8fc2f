"""Warp-specialized tree attention for Hopper: some warps load rows, the others attend.

It has the same work items, splits, blocks and order of sums as kernels/attention/tree_attention.py, and gives the same
bits.  It runs for two-byte types and head sizes 64 and 128, if the packed queries of a KV head fill more than a fourth
of a 64-row tensor core tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from espalier.kernels.attention.hopper_attend import attend_work_items
from espalier.kernels.attention.hopper_convert import convert_work_items
from espalier.kernels.attention.hopper_load import load_work_items
from espalier.kernels.attention.hopper_work import Constants, Rows, make_stages
from espalier.kernels.attention.work_items import ALL, COUNTED, NONE, Plan, wait_and_count_splits
from espalier.kernels.runtime.launch import Chip, gluon_kernel, unspecialised
from espalier.kernels.runtime.tma import tma_descriptor

if TYPE_CHECKING:
    from triton.experimental.gluon import language as gl

CAPABILITY = (9, 0)
DTYPES = (torch.bfloat16, torch.float16)
HEAD_SIZES = (64, 128)
# Packed queries of one attending warpgroup (four warps).
WARPGROUP_QUERIES = 64
BLOCK_N = 64
# An attending warpgroup holds one stage and waits for the next two.
MIN_STAGES = 3
MAX_STAGES = 6
# Of FP8 rows: converted ones, which hide the time of a conversion, and those as stored, which hide that of memory.
FP8_STAGES, FP8_RAW_STAGES = 4, 4
# Shared memory, in bytes, for barriers and for the arguments that Triton passes to the warps.
RESERVED = 1024
# Registers of a multiprocessor.
REGISTERS = 2**16
# Limit per thread.
MAX_REGISTERS = 240


@dataclass(frozen=True)
class HopperConfig:
    """Launch configuration.

    warpgroups: attending warpgroups, each with 64 packed queries; stages: blocks of K and V in shared memory;
    programs_per_processor: programs of the persistent grid per multiprocessor; raw_stages: blocks of FP8 rows in shared
    memory, 0 for two-byte rows.
    """

    warpgroups: int
    stages: int
    programs_per_processor: int
    raw_stages: int = 0

    def shared_bytes(self, size: int) -> int:
        """Shared memory of a program, in bytes, for heads of `size`."""
        two_byte_rows = self.block_m + 2 * self.stages * BLOCK_N
        return size * (2 * two_byte_rows + 2 * self.raw_stages * BLOCK_N) + RESERVED

    @property
    def block_m(self) -> int:
        """Packed queries of a tile."""
        return self.warpgroups * WARPGROUP_QUERIES

    @property
    def load_warps(self) -> tuple[int, int]:
        """(number of loading warps, registers per thread of theirs)."""
        if self.raw_stages:
            return 4, 56
        return (8, 40) if self.programs_per_processor == 1 else (4, 72)

    @property
    def convert_warps(self) -> tuple[int, int]:
        """(number of warps that convert FP8 rows, registers per thread of theirs)."""
        if not self.raw_stages:
            return 0, 0
        return (8, 64) if self.warpgroups == 1 else (4, 80)

    @property
    def registers(self) -> tuple[int, int]:
        """Registers per thread: (at launch, in attending warps after the other warps have released theirs).

        Launched programs use all registers of the multiprocessor, up to the limit per thread.
        """
        attend_warps, others = 4 * self.warpgroups, (self.load_warps, self.convert_warps)
        warps = attend_warps + sum(count for count, _ in others)
        of_others = sum(count * registers for count, registers in others)
        launch_limit = (attend_warps * MAX_REGISTERS + of_others) // warps
        at_launch = min(REGISTERS // (32 * warps * self.programs_per_processor), launch_limit) // 8 * 8
        return at_launch, (at_launch * warps - of_others) // attend_warps // 8 * 8


def choose_hopper_config(
    on: Chip, packed_queries: int, num_work_items: int, size: int, page_size: int, fp8: bool = False
) -> HopperConfig | None:
    """The launch configuration, or None if this chip cannot run the kernel or gains nothing.

    packed_queries: queries times heads of one KV head; num_work_items: with tiles of 128 packed queries; fp8: whether
    rows are FP8.
    Two warpgroups share each loaded block.  If two would leave multiprocessors idle, a program gets one warpgroup.  If
    there are enough such programs, each multiprocessor runs two, and one works while the other finishes.
    With few queries and small pages the Triton kernel is faster: all of its warps gather rows (docs/log.md).
    """
    if on.capability != CAPABILITY or size not in HEAD_SIZES or packed_queries <= WARPGROUP_QUERIES // 4:
        return None
    if packed_queries <= WARPGROUP_QUERIES // 2 and page_size < BLOCK_N:
        return None
    warpgroups = 2 if packed_queries > WARPGROUP_QUERIES and 4 * num_work_items >= 3 * on.processors else 1
    if fp8:
        # The stages of both dtypes fill a multiprocessor's shared memory.
        config = HopperConfig(warpgroups, FP8_STAGES, 1, FP8_RAW_STAGES)
        return config if config.shared_bytes(size) <= on.shared_memory else None
    num_programs = num_work_items * (1 if packed_queries <= WARPGROUP_QUERIES else 2)
    programs_per_processor = 2 if warpgroups == 1 and num_programs > on.processors else 1
    for stages in range(MAX_STAGES, MIN_STAGES - 1, -1):
        config = HopperConfig(warpgroups, stages, programs_per_processor)
        if config.shared_bytes(size) * programs_per_processor <= on.shared_memory:
            return config
    return None


# Arguments are grouped by meaning; one argument per line would hide the groups.
# fmt: off
@unspecialised("batch")
@gluon_kernel
def _hopper_attention_kernel(
    q_ptr, k_ptr, v_ptr, staged_k_ptr, staged_v_ptr,
    table_ptr, split_ptr, start_ptr, position_ptr, row_position_ptr, bits_ptr,
    out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, sink_ptr, k_scale_ptr, v_scale_ptr,
    scale, batch, queries, rows, first,
    q_b, q_q, q_h, k_row, k_h, v_row, v_h, staged_k_b, staged_k_r, staged_k_h, staged_v_b, staged_v_r, staged_v_h,
    table_b, position_b, position_q, row_position_b, row_position_r, bits_b, bits_q,
    k_descriptor, v_descriptor, contiguous_ptr,
    KV_HEADS: gl.constexpr, GROUP_SIZE: gl.constexpr, SIZE: gl.constexpr,
    PAGE_SIZE: gl.constexpr, WINDOW: gl.constexpr, STAGED: gl.constexpr, SINK: gl.constexpr,
    LONGEST_FIRST: gl.constexpr, SAME_STRIDES: gl.constexpr, CONTIGUOUS: gl.constexpr,
    WARPGROUPS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, RAW_STAGES: gl.constexpr,
    ATTEND_REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr, LOAD_WARPS: gl.constexpr,
    CONVERT_REGISTERS: gl.constexpr, CONVERT_WARPS: gl.constexpr, DEPENDENT: gl.constexpr,
):
    """RAW_STAGES: stages of FP8 rows, which more warps convert to those that are attended; 0 for other rows."""
    FP8: gl.constexpr = RAW_STAGES > 0
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    # As kernels/attention/tree_attention.py:_queries.
    attended: gl.constexpr = gl.float16 if FP8 else dtype
    CONSTANTS: gl.constexpr = Constants(
        KV_HEADS, GROUP_SIZE, PAGE_SIZE, WINDOW, STAGED, LONGEST_FIRST, SAME_STRIDES, CONTIGUOUS,
        WIDTHS=(SIZE, SIZE), COLUMNS=(0, 0), ROW_SIZE=2 * SIZE, OUT_SIZE=SIZE, BLOCK_M=64 * WARPGROUPS, BLOCK_N=BLOCK_N,
        RAW_STAGES=RAW_STAGES, LOAD_WARPS=LOAD_WARPS, CONVERT_WARPS=CONVERT_WARPS, DEPENDENT=DEPENDENT,
    )
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, SIZE], dtype)
    q_shared = gl.allocate_shared_memory(dtype, [WARPGROUPS, 64, SIZE], q_layout)
    stages = make_stages(attended, STAGES, 1 if FP8 else 32 * LOAD_WARPS, WARPGROUPS, CONSTANTS)
    # FP8 rows are loaded into stages of their own.
    loaded = stages
    num_splits = wait_and_count_splits(start_ptr, batch, queries, DEPENDENT)
    if FP8:
        loaded = make_stages(k_ptr.dtype.element_ty, RAW_STAGES, 32 * LOAD_WARPS, 1, CONSTANTS)
    num_tiles = (queries * GROUP_SIZE + CONSTANTS.BLOCK_M - 1) // CONSTANTS.BLOCK_M
    plan = Plan(split_ptr, start_ptr, num_splits, num_tiles, queries, rows, first)
    q_rows = Rows(q_ptr, q_b, q_q, q_h)
    committed = (Rows(k_ptr, 0, k_row, k_h), Rows(v_ptr, 0, v_row, v_h))
    staged = (
        Rows(staged_k_ptr, staged_k_b, staged_k_r, staged_k_h), Rows(staged_v_ptr, staged_v_b, staged_v_r, staged_v_h)
    )
    positions = Rows(position_ptr, position_b, position_q, 0)
    row_positions = Rows(row_position_ptr, row_position_b, row_position_r, 0)
    ancestor_bits = Rows(bits_ptr, bits_b, bits_q, 0)
    results = (out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, sink_ptr)
    scales = (k_scale_ptr, v_scale_ptr)
    # One warpgroup starts without the first of these functions, two-byte rows start without the last.
    gl.warp_specialize(
        [
            (attend_work_items, (
                0, q_shared, stages, plan, q_rows, positions, row_positions, ancestor_bits, results, scale, scales,
                SINK, CONSTANTS,
            )),
            (attend_work_items, (
                WARPGROUPS - 1, q_shared, stages, plan, q_rows, positions, row_positions, ancestor_bits, results, scale,
                scales, SINK, CONSTANTS,
            )),
            (load_work_items, (
                loaded, plan, committed, staged, table_ptr, table_b, positions, (k_descriptor, v_descriptor),
                contiguous_ptr, CONSTANTS,
            )),
            (convert_work_items, (loaded, stages, plan, positions, CONSTANTS)),
        ][2 - WARPGROUPS:4 if FP8 else 3],
        [4, LOAD_WARPS, CONVERT_WARPS][2 - WARPGROUPS:3 if FP8 else 2],
        [ATTEND_REGISTERS, LOAD_REGISTERS, CONVERT_REGISTERS][2 - WARPGROUPS:3 if FP8 else 2],
    )
# fmt: on


def needs_counting(page_size: int, window: int) -> bool:
    """Whether contiguous blocks must be counted (kernels/attention/contiguous_blocks.py).

    They need not if a page holds whole blocks (all are contiguous), and cannot be used with a window.
    """
    return not window and page_size % BLOCK_N > 0


def copies_by_tma(config: HopperConfig) -> bool:
    """Whether this launch copies contiguous blocks by TMA.

    Two attending warpgroups keep the multiprocessor busy, so copies by threads would slow them down.  One warpgroup
    waits for memory, and TMA does not make memory faster (docs/log.md).
    """
    return config.warpgroups == 2


def tma_arguments(
    config: HopperConfig, k: torch.Tensor, v: torch.Tensor, page_size: int, window: int, contiguous: torch.Tensor | None
) -> dict[str, Any]:
    """Launch arguments that say which blocks are copied by TMA.  k, v: [R, heads, size]."""
    kind = NONE
    # A row of the heads' values is one row of the descriptor, so the heads must be contiguous.
    if copies_by_tma(config) and not window and all(rows.stride(1) == rows.shape[2] for rows in (k, v)):
        kind = ALL if not needs_counting(page_size, window) else NONE if contiguous is None else COUNTED
    size = k.shape[2]
    descriptors = [None if kind == NONE else tma_descriptor(rows.flatten(1), BLOCK_N, size) for rows in (k, v)]
    return {
        "k_descriptor": descriptors[0],
        "v_descriptor": descriptors[1],
        "contiguous_ptr": None if kind == NONE else contiguous,
        "CONTIGUOUS": kind,
    }


def hopper_constants(config: HopperConfig, size: int, same_strides: bool) -> dict[str, Any]:
    """Constants and options of a launch.  same_strides: rows of K and of V have the same stride."""
    at_launch, attend_registers = config.registers
    load_warps, load_registers = config.load_warps
    convert_warps, convert_registers = config.convert_warps
    return {
        "SIZE": size,
        "SAME_STRIDES": same_strides,
        "WARPGROUPS": config.warpgroups,
        "BLOCK_N": BLOCK_N,
        "STAGES": config.stages,
        "ATTEND_REGISTERS": attend_registers,
        "LOAD_REGISTERS": load_registers,
        "LOAD_WARPS": load_warps,
        "RAW_STAGES": config.raw_stages,
        "CONVERT_REGISTERS": convert_registers,
        "CONVERT_WARPS": convert_warps,
        "num_warps": 4,
        "maxnreg": at_launch,
    }
