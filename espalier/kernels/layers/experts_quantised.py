"""Plans of the expert product with quantised experts (experts.py) where nothing is measured.

They are those of quantised linear layers, whose inner loop the experts share: each expert with rows is a tile or more.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from espalier.kernels.layers.experts_plan import MIN_STAGES, ExpertsPlan, ExpertsShape, ProductPlan
from espalier.kernels.layers.linear_plans import RESERVED_SHARED_MEMORY, TritonPlan, block_rows
from espalier.kernels.layers.quantised import QuantisedMatrix
from espalier.kernels.layers.quantised_plans import (
    STREAMED_ROWS,
    SUM_COLUMNS,
    fp8_rule,
    max_block_in,
    nibble_rule,
    stage_bytes,
)
from espalier.kernels.runtime.launch import Chip, power_of_two

# Registers of a multiprocessor; the most and the fewest of a thread.  With fewer, values would spill to memory.
# A thread has a multiple of UNIT.
REGISTERS, MAX_REGISTERS, MIN_REGISTERS, UNIT = 65536, 255, 128, 8
WARP = 32
# Steps of a loop that its pipeline does not hold from the start.
STEPS_BEHIND_THE_PIPELINE = 2


def quantised_rule(
    shape: ExpertsShape,
    rows: int,
    plan: ExpertsPlan,
    gate_up: Tensor | QuantisedMatrix,
    down: Tensor | QuantisedMatrix,
    gpu: Chip,
) -> ExpertsPlan:
    """plan: of dense experts, whose tiles have as many rows; it stays for a matrix that is dense."""
    # As many rows as a padded batch has, so that both take one plan.
    rows = power_of_two(rows)
    pairs = rows * shape.top_k
    num_tiles = pairs if plan.rows == 1 else max(round(shape.touched(rows)), -(-pairs // plan.rows))
    tile = block_rows(plan.rows)
    return ExpertsPlan(
        plan.rows,
        plan.gated if isinstance(gate_up, Tensor) else _product(gate_up, tile, num_tiles, 2, gpu),
        plan.down if isinstance(down, Tensor) else _product(down, tile, num_tiles, 1, gpu),
    )


def _product(weight: QuantisedMatrix, tile: int, num_tiles: int, matrices: int, gpu: Chip) -> ProductPlan:
    _, num_out, num_in = weight.shape
    if weight.code == "fp8":
        grouped, input_bytes = weight.group < num_in, 2 if weight.inputs is None else 1
        # Longer steps gain nothing: rows of experts are short (docs/log.md).
        sizes = num_out, num_in, min(max_block_in(weight), SUM_COLUMNS)
        plan = fp8_rule(tile, num_tiles, tile <= STREAMED_ROWS, *sizes, grouped, 1, gpu, input_bytes)
    else:
        plan = nibble_rule(tile, num_tiles, num_out, num_in, weight.code, 1, gpu)
    # A pipeline as deep as the loop is long would hold shared memory that further programs can use.
    stages = min(plan.stages, max(-(-num_in // plan.block_in) - STEPS_BEHIND_THE_PIPELINE, MIN_STAGES))
    return ProductPlan(plan.block_out // matrices, plan.block_in, plan.warps, stages)


def launch_options(plan: ProductPlan, weight: QuantisedMatrix, matrices: int, rows: int, gpu: Chip) -> dict[str, Any]:
    """BLOCK_IN, num_stages and maxnreg of a plan.  matrices: 2 for gate and up, 1 for down; rows: of a tile.

    A tile does not span two groups of columns.  Stages are no more than fit.  Registers are so few that as many
    programs share a multiprocessor as its shared memory lets.
    """
    block_in = min(plan.block_in, max_block_in(weight))
    of_stage = stage_bytes(TritonPlan(matrices * plan.block_out, block_in, 1, plan.warps, 1), block_rows(rows), weight)
    stages = max(min(plan.stages, (gpu.shared_memory - RESERVED_SHARED_MEMORY) // of_stage), 1)
    sharing = max(gpu.programs_with(stages * of_stage), 1)
    registers = max(REGISTERS // (WARP * plan.warps * sharing) // UNIT * UNIT, MIN_REGISTERS)
    return {
        "BLOCK_IN": block_in,
        "num_stages": stages,
        "maxnreg": registers if registers < MAX_REGISTERS else None,
    }
