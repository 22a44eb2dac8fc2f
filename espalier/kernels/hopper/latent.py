"""Warp-specialized attention over latent rows of 512 + 64 values, for Hopper.

Work items, splits and masks are those of kernels/attention/latent_attention.py.  The loading warps copy each block of
rows into shared memory once, for K and V.  Two warpgroups attend to them (kernels/hopper/latent_attend.py).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental.gluon import language as gl

from espalier.kernels.attention.work_items import ALL, NONE, Plan, wait_and_count_splits
from espalier.kernels.hopper.config import LATENT_BLOCK_N, ROPE_SIZE, SLOTS, V_SIZE, HopperLatentConfig
from espalier.kernels.hopper.convert import convert_work_items
from espalier.kernels.hopper.latent_attend import score_work_items, value_work_items
from espalier.kernels.hopper.load import load_work_items
from espalier.kernels.hopper.work import Constants, Rows, Stages, make_barriers, make_stages
from espalier.kernels.runtime.jit import gluon_kernel
from espalier.kernels.runtime.tma import tma_descriptor

# Warps that copy rows.
LOAD_WARPS = 4
# Registers per thread: at launch; of the second attending warpgroup; of the loading warps.  The first attending
# warpgroup gets the rest, 232.
REGISTERS_AT_LAUNCH, VALUE_REGISTERS, LOAD_REGISTERS = 168, 200, 72
# Of FP8 rows: warps that load and that convert.  The products of a warpgroup need 158 registers at launch, so there are
# not more warps than for two-byte rows.
FP8_LOAD_WARPS, CONVERT_WARPS = 2, 2


# Arguments are grouped by meaning; one argument per line would hide the groups.
# fmt: off
@gluon_kernel(do_not_specialize=["batch"])
def hopper_latent_kernel(
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
    FP8: gl.constexpr = RAW_STAGES > 0
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    # A tile's rows are columns of one row in memory, so all tiles have its stride.
    CONSTANTS: gl.constexpr = Constants(
        KV_HEADS=1, GROUP_SIZE=HEADS, PAGE_SIZE=PAGE_SIZE, WINDOW=0, STAGED=STAGED, LONGEST_FIRST=LONGEST_FIRST,
        SAME_STRIDES=True, CONTIGUOUS=CONTIGUOUS, WIDTHS=(HALF, HALF, ROPE), COLUMNS=(0, HALF, 2 * HALF),
        ROW_SIZE=2 * HALF + ROPE, OUT_SIZE=HALF, BLOCK_M=64, BLOCK_N=BLOCK_N,
        RAW_STAGES=RAW_STAGES, LOAD_WARPS=LOAD_WARPS, CONVERT_WARPS=CONVERT_WARPS, DEPENDENT=DEPENDENT,
    )
    half_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, HALF], dtype)
    rope_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, ROPE], dtype)
    weight_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BLOCK_N], dtype)
    q_shared = (
        gl.allocate_shared_memory(dtype, [64, HALF], half_layout),
        gl.allocate_shared_memory(dtype, [64, HALF], half_layout),
        gl.allocate_shared_memory(dtype, [64, ROPE], rope_layout),
    )
    stages = make_stages(dtype, STAGES, 1 if FP8 else 32 * LOAD_WARPS, 2, CONSTANTS)
    sent, received = make_barriers(SLOTS, 1, 1)
    weights = gl.allocate_shared_memory(dtype, [SLOTS, 64, BLOCK_N], weight_layout)
    decays = gl.allocate_shared_memory(gl.float32, [SLOTS, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    exchange = Stages((weights, decays), sent, received)
    num_splits = wait_and_count_splits(start_ptr, batch, queries, DEPENDENT)
    plan = Plan(split_ptr, start_ptr, num_splits, (queries * HEADS + 63) // 64, queries, rows, first)
    # FP8 rows are loaded into stages of their own.
    loaded = stages
    row_scale = gl.to_tensor(1.0)
    if FP8:
        loaded = make_stages(row_ptr.dtype.element_ty, RAW_STAGES, 32 * LOAD_WARPS, 1, CONSTANTS)
        row_scale = gl.load(row_scale_ptr)
        scale = scale * row_scale
    committed, staged = Rows(row_ptr, 0, row_stride, 0), Rows(staged_ptr, staged_b, staged_r, 0)
    # In the place of positions: there is no window.
    unused = Rows(bits_ptr, 0, 0, 0)
    results = (out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, row_scale)
    # Two-byte rows start without the last of these functions.
    gl.warp_specialize(
        [
            (score_work_items, (
                q_shared, stages, exchange, plan, Rows(q_ptr, q_b, q_q, q_h), unused, Rows(bits_ptr, bits_b, bits_q, 0),
                results, scale, CONSTANTS,
            )),
            (value_work_items, (stages, exchange, plan, unused, results, CONSTANTS)),
            (load_work_items, (
                loaded, plan, (committed, committed, committed), (staged, staged, staged), table_ptr, table_b, unused,
                (half_descriptor, half_descriptor, rope_descriptor), None, CONSTANTS,
            )),
            (convert_work_items, (loaded, stages, plan, unused, CONSTANTS)),
        ][:4 if FP8 else 3],
        [4, LOAD_WARPS, CONVERT_WARPS][:3 if FP8 else 2],
        [VALUE_REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS][:3 if FP8 else 2],
    )
# fmt: on


def block_arguments(pages: Tensor, page_size: int, block_n: int) -> dict[str, Any]:
    """Constants and TMA descriptors of blocks of `block_n` rows.  pages: [R, 1, 576].

    TMA copies the blocks if a page holds whole blocks.
    """
    whole = page_size % block_n == 0
    return {
        "half_descriptor": tma_descriptor(pages[:, 0], block_n, V_SIZE // 2) if whole else None,
        "rope_descriptor": tma_descriptor(pages[:, 0], block_n, ROPE_SIZE) if whole else None,
        "CONTIGUOUS": ALL if whole else NONE,
        "HALF": V_SIZE // 2,
        "ROPE": ROPE_SIZE,
        "BLOCK_N": block_n,
    }


def hopper_latent_arguments(config: HopperLatentConfig, pages: Tensor, page_size: int) -> dict[str, Any]:
    """Constants, options and TMA descriptors of a launch.  pages: [R, 1, 576]."""
    return block_arguments(pages, page_size, LATENT_BLOCK_N) | {
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
