"""The plans of quantised linear layers that are worth measuring, the likely best first.

Up to STREAMED_ROWS rows a plan is judged by how it keeps memory busy: how many programs run at once, how many bytes
they have in flight, and how full the last wave is.  Above, products bind, and all plans count as equal.
"""

from itertools import zip_longest

from espalier.kernels.layers.linear_plans import RESERVED_SHARED_MEMORY, TritonPlan, block_rows
from espalier.kernels.layers.linear_tuning import MIN_BLOCK_IN
from espalier.kernels.layers.quantised import QuantisedMatrix
from espalier.kernels.layers.quantised_plans import (
    MAX_BLOCK_ROWS,
    STREAMED_ROWS,
    codes_bytes,
    max_block_in,
    stage_bytes,
)
from espalier.kernels.runtime.launch import Chip

# Where weights are streamed, and where rows are many: (block_out, warps), stages, split-K.
STREAMED = (((64, 4), (128, 4), (128, 8), (32, 4), (256, 8)), (4, 5, 6, 3, 8, 2), (1, 2, 3, 4, 6, 8))
MULTIPLIED = (((64, 4), (128, 4), (128, 8)), (2, 3, 4), (1, 2, 4, 3))
# The most weights of a step that a thread can have in registers, and the most sums.
NIBBLES_PER_THREAD, SUMS_PER_THREAD, WARP = 128, 128, 32
# Programs per multiprocessor with split-K.
FEWEST_PROGRAMS, MOST_PROGRAMS = 0.5, 4
# What `_streaming_us` assumes of a multiprocessor: warps for which it has registers; bytes that it reads in a
# microsecond; microseconds from a request to its bytes.
WARPS, BYTES_PER_US, LATENCY_US = 16, 33_000, 1.0
# Microseconds of adding up the parts of split-K.
PARTS_US = 1.0


def candidates(rows: int, weight: QuantisedMatrix, gpu: Chip) -> list[TritonPlan]:
    """The plans to measure against the rule's.  None for groups of less than MIN_BLOCK_IN columns.

    Tiles take turns, so that the first few plans have the best of each.
    """
    num_in, most, is_fp8 = weight.shape[-1], max_block_in(weight), weight.code == "fp8"
    tile = min(block_rows(rows), MAX_BLOCK_ROWS)
    tiles, all_stages, all_splits = STREAMED if rows <= STREAMED_ROWS else MULTIPLIED
    by_tile = [
        [
            TritonPlan(block_out, block_in, splits, warps, stages)
            for splits in all_splits
            for stages in all_stages
            if num_in // block_in >= stages * splits
        ]
        for block_in in (256, 128, 64)
        if most % block_in == 0 and block_in >= MIN_BLOCK_IN
        for block_out, warps in tiles
        if block_out * tile <= SUMS_PER_THREAD * WARP * warps
        if is_fp8 or (block_out >= 64 and block_out * block_in <= NIBBLES_PER_THREAD * WARP * warps)
    ]
    for plans in by_tile:
        plans[:] = [plan for plan in plans if _fits(plan, tile, weight, gpu)]
        if rows <= STREAMED_ROWS:
            plans.sort(key=lambda plan: _streaming_us(plan, tile, weight, gpu))
    return [plan for of_each in zip_longest(*by_tile) for plan in of_each if plan is not None]


def _fits(plan: TritonPlan, tile: int, weight: QuantisedMatrix, gpu: Chip) -> bool:
    programs = -(-weight.shape[0] // plan.block_out) * plan.splits
    return stage_bytes(plan, tile, weight) * plan.stages + RESERVED_SHARED_MEMORY <= gpu.shared_memory and (
        plan.splits == 1 or FEWEST_PROGRAMS * gpu.processors <= programs <= MOST_PROGRAMS * gpu.processors
    )


def _streaming_us(plan: TritonPlan, tile: int, weight: QuantisedMatrix, gpu: Chip) -> float:
    """Microseconds by a model of memory alone.  Wrong by far, but the best plans come first."""
    num_out, num_in = weight.shape
    programs = -(-num_out // plan.block_out) * plan.splits
    sharing = min(gpu.programs_with(stage_bytes(plan, tile, weight) * plan.stages), WARPS // plan.warps)
    step = codes_bytes(plan, weight.code)
    bytes_of_one = step * num_in / plan.block_in / plan.splits
    waves, rest = divmod(programs, sharing * gpu.processors)

    def us(together: int) -> float:
        rate = min(gpu.processors * BYTES_PER_US, together * step * (plan.stages - 1) / LATENCY_US)
        return LATENCY_US + together * bytes_of_one / max(rate, 1)

    last = us(rest) if rest else 0.0
    return waves * us(sharing * gpu.processors) + last + (PARTS_US if plan.splits > 1 else 0.0)
