"""Plans (launch parameters) of the expert product (experts.py): the plans to measure, a rule for unmeasured sizes.

A plan depends on the mean number of pairs (row, choice) per expert.  With few pairs, each program streams weights, and
enough programs must run to keep the memory busy.  With many pairs, tensor cores are the limit.

Quantised experts share the inner loop of quantised linear layers.  No plans are measured for quantised experts.  They
take plans by the rule of these layers, with at least one tile for each expert that has rows.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from espalier.kernels.hopper.plans import FEW_ROWS, TILE_SHAPE, supports_format
from espalier.kernels.layers.linear_plans import (
    DTYPES,
    MIN_BLOCK_ROWS,
    RESERVED_SHARED_MEMORY,
    MatrixSize,
    TritonPlan,
    TuningKey,
    TuningSchema,
    block_rows,
)
from espalier.kernels.layers.quantised import QuantisedMatrix
from espalier.kernels.layers.quantised_plans import (
    MAX_FP8_SUM_COLUMNS,
    MEMORY_BOUND_ROWS,
    fp8_plan_by_rule,
    max_block_in,
    nibble_plan_by_rule,
    stage_bytes,
)
from espalier.kernels.runtime.launch import Chip, next_power_of_2

MAX_TILE_ROWS = 128
# (upper bound of the mean pairs per expert, numbers of tile rows to measure).  With 1 tile row, each pair is a tile.
TILE_ROWS_BY_PAIRS: tuple[tuple[float, tuple[int, ...]], ...] = (
    (1 / 8, (1,)),
    (1, (1, 16)),
    (4, (16,)),
    (16, (16, 32)),
    (64, (32, 64, 128)),
    (float("inf"), (64, 128)),
)
# The upper bounds of the buckets: numbers of pairs per expert that have the same plan.
PAIRS_BUCKETS = tuple(bound for bound, _ in TILE_ROWS_BY_PAIRS)
# (most rows of a tile, the tiles (block_out, block_in, warps) and the numbers of stages that are worth measuring).
CANDIDATE_TILES = (
    (
        16,
        (
            (16, 256, 2),
            (32, 128, 4),
            (32, 256, 4),
            (64, 64, 4),
            (64, 128, 4),
            (64, 256, 4),
            (128, 64, 4),
            (128, 128, 4),
        ),
        (3, 4, 6),
    ),
    (32, ((32, 256, 4), (64, 64, 4), (64, 128, 4), (128, 64, 4)), (3, 4)),
    (64, ((64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 64, 8)), (3, 4)),
    (128, ((64, 64, 4), (64, 64, 8), (128, 64, 4), (128, 64, 8), (128, 128, 8)), (2, 3, 4)),
)
# The fewest stages that keep the memory busy.
MIN_STAGES = 3
# Programs per multiprocessor that keep the memory busy.  The rule makes tiles smaller until the grid has this many.
MIN_PROGRAMS_PER_PROCESSOR = 2
# The most rows of a tile with 4-bit weights.  Larger tiles are 6 to 25% slower, because more of an
# expert's last tile is empty (docs/log.md).
MAX_NIBBLE_TILE_ROWS = 64
# Up to this mean number of pairs per expert, tiles have FEW_ROWS rows, if a kernel supports such tiles.
MAX_PAIRS_OF_SMALL_TILES = 4

log = logging.getLogger(__name__)


def expected_active_experts(num_experts: int, top_k: int, num_rows: int) -> float:
    """Returns the expected number of experts that get rows, for uniform routing and independent rows."""
    return float(num_experts * (1 - (1 - top_k / num_experts) ** num_rows))


@dataclass(frozen=True)
class ExpertsShape:
    """The sizes of one layer's experts.

    num_matrices: 2 for gate and up, 1 without a gate.
    The matrices are gate_up [num_experts, num_matrices · inner_size, hidden_size] and down [num_experts, hidden_size,
    inner_size].
    """

    num_experts: int
    top_k: int
    hidden_size: int
    inner_size: int
    num_matrices: int = 2

    @property
    def matrix_size(self) -> tuple[int, int]:
        """The key (hidden_size, inner_size) of tuning tables."""
        return self.hidden_size, self.inner_size

    @property
    def expert_bytes(self) -> int:
        """The bytes of one expert's weights, with two bytes per weight."""
        return 2 * (self.num_matrices + 1) * self.hidden_size * self.inner_size

    def flops(self, num_rows: int) -> int:
        """FLOPs of the products of all rows with their experts."""
        return self.expert_bytes * self.top_k * num_rows

    def active_experts(self, num_rows: int) -> float:
        """Returns the expected number of experts with rows, see expected_active_experts."""
        return expected_active_experts(self.num_experts, self.top_k, num_rows)

    def pairs_bucket(self, num_rows: int) -> int:
        """Returns the index of the bucket in PAIRS_BUCKETS.

        num_rows is rounded up to a power of two, so that a batch has the same plan with and without padding."""
        pairs = next_power_of_2(num_rows) * self.top_k / self.num_experts
        return next(index for index, bound in enumerate(PAIRS_BUCKETS) if pairs <= bound)


@dataclass(frozen=True)
class ProductPlan:
    """Launch parameters of one of an expert's two products: with gate and up, or with down.

    block_out × block_in: a program's tile of gate, up or down.  stages: the most pipeline stages.  A stage holds one
    tile of each matrix and one of x."""

    block_out: int
    block_in: int
    warps: int
    stages: int

    def tile_shape(self, num_matrices: int) -> tuple[int, int, int]:
        """Returns (block_out, block_in, warps) of the product with gate and up (num_matrices 2), or with down (1)."""
        return num_matrices * self.block_out, self.block_in, self.warps

    def stage_bytes(self, num_matrices: int, tile_rows: int, itemsize: int) -> int:
        """Returns the bytes of a stage.  num_matrices: 2 for gate and up, 1 for down.  itemsize: bytes of a value."""
        return (num_matrices * self.block_out + block_rows(tile_rows)) * self.block_in * itemsize

    def fitting_stages(self, gpu: Chip, num_matrices: int, tile_rows: int, itemsize: int) -> int:
        """Returns how many of the plan's stages fit in shared memory.  The number of stages changes no result."""
        fitting = (gpu.shared_memory - RESERVED_SHARED_MEMORY) // self.stage_bytes(num_matrices, tile_rows, itemsize)
        return max(min(self.stages, fitting), 1)

    def one_wave_stages(
        self, gpu: Chip, max_stages: int, num_matrices: int, tile_rows: int, itemsize: int, num_programs: int
    ) -> int:
        """Returns the most stages, up to `max_stages`, with which all programs run at the same time.  If that is fewer
        than MIN_STAGES, returns `max_stages`."""
        shared_memory = gpu.shared_memory // -(-num_programs // gpu.processors) - RESERVED_SHARED_MEMORY
        fitting = shared_memory // self.stage_bytes(num_matrices, tile_rows, itemsize)
        return max_stages if fitting < MIN_STAGES else min(max_stages, fitting)


@dataclass(frozen=True)
class ExpertsPlan:
    """The plan of one layer's experts.  gated, down: the plans of the two products.  tile_rows: the most pairs of a
    tile; 1: each pair is a tile."""

    tile_rows: int
    gated: ProductPlan
    down: ProductPlan


# The plans of one matrix size, one plan per bucket, in the order of PAIRS_BUCKETS.
ExpertsPlans = tuple[ExpertsPlan, ...]


def candidate_plans(tile_rows: int, num_matrices: int, gpu: Chip) -> list[ProductPlan]:
    """Returns the plans of one product that are worth measuring for tiles of `tile_rows` pairs, in 16-bit dtypes.

    num_matrices: matrices that a program reads, 2 for gate and up, 1 for down."""
    tiles, stages = next((tiles, stages) for max_rows, tiles, stages in CANDIDATE_TILES if tile_rows <= max_rows)
    plans = [ProductPlan(*tile, count) for tile in tiles for count in stages]
    return [plan for plan in plans if plan.fitting_stages(gpu, num_matrices, tile_rows, 2) == plan.stages]


def experts_plan_by_rule(shape: ExpertsShape, num_rows: int, dtype: torch.dtype, gpu: Chip) -> ExpertsPlan:
    """Returns the plan of a size that was not measured.  A tile has room for the mean number of pairs per expert."""
    pairs = next_power_of_2(num_rows) * shape.top_k
    tile_rows = min(max(next_power_of_2(-(-pairs // shape.num_experts)), MIN_BLOCK_ROWS), MAX_TILE_ROWS)
    if dtype.itemsize > 2:
        # float32 products are IEEE and do not use tensor cores.  Their tiles must fit in registers.
        product = ProductPlan(32, 32, 4, 3)
        return ExpertsPlan(min(tile_rows, 32), product, product)
    num_tiles = min(pairs, shape.num_experts)
    return ExpertsPlan(
        tile_rows,
        _product_plan_by_rule(tile_rows, num_tiles, shape.inner_size, gpu),
        _product_plan_by_rule(tile_rows, num_tiles, shape.hidden_size, gpu),
    )


def _product_plan_by_rule(tile_rows: int, num_tiles: int, num_out: int, gpu: Chip) -> ProductPlan:
    """tile_rows: the rows of a tile of x.  num_tiles: the tiles of all experts.  num_out: the rows of the matrix."""
    block_out = 64
    while block_out > 16 and num_tiles * -(-num_out // block_out) < MIN_PROGRAMS_PER_PROCESSOR * gpu.processors:
        block_out //= 2
    warps = 8 if tile_rows > 64 else 4 if block_out > 16 else 2
    return ProductPlan(block_out, 128 if tile_rows <= 32 else 64, warps, 3)


# Registers per multiprocessor, and the most and the fewest per thread.  With fewer than MIN_REGISTERS, values would
# spill to memory.  A thread's registers are a multiple of REGISTER_UNIT.
REGISTERS, MAX_REGISTERS, MIN_REGISTERS, REGISTER_UNIT = 65536, 255, 128, 8
# Registers that a thread needs besides those for the sums of an FP8 tile.
NON_SUM_REGISTERS = 96
WARP_THREADS = 32
# The rule gives a loop at most (number of its steps - this number) pipeline stages, but at least MIN_STAGES.
STEPS_OUTSIDE_PIPELINE = 2


def quantised_plan_by_rule(
    shape: ExpertsShape,
    num_rows: int,
    plan: ExpertsPlan,
    gate_up: Tensor | QuantisedMatrix,
    down: Tensor | QuantisedMatrix,
    gpu: Chip,
) -> ExpertsPlan:
    """Returns the plan of quantised experts.

    plan: the plan of dense experts.  If one of the two matrices is dense, its part of this plan stays.  With 4-bit
    weights, a tile gets at most MAX_NIBBLE_TILE_ROWS rows."""
    if any(isinstance(matrix, QuantisedMatrix) and matrix.code != "fp8" for matrix in (gate_up, down)):
        plan = replace(plan, tile_rows=min(plan.tile_rows, MAX_NIBBLE_TILE_ROWS))
    # Rows are rounded up, so that a batch has the same plan with and without padding.
    num_rows = next_power_of_2(num_rows)
    pairs = num_rows * shape.top_k
    matrices = gate_up.shape[1] // down.shape[2]
    active_experts = round(shape.active_experts(num_rows))
    num_tiles = pairs if plan.tile_rows == 1 else max(active_experts, -(-pairs // plan.tile_rows))
    tile = block_rows(plan.tile_rows)
    return ExpertsPlan(
        plan.tile_rows,
        plan.gated if isinstance(gate_up, Tensor) else _quantised_product_plan(gate_up, tile, num_tiles, matrices, gpu),
        plan.down if isinstance(down, Tensor) else _quantised_product_plan(down, tile, num_tiles, 1, gpu),
    )


def _quantised_product_plan(
    weight: QuantisedMatrix, tile_rows: int, num_tiles: int, num_matrices: int, gpu: Chip
) -> ProductPlan:
    """num_tiles: the tiles of x of all experts.  num_matrices: 2 with gate and up, 1 with down."""
    _, num_out, num_in = weight.shape
    if weight.code == "fp8":
        input_bytes = 2 if weight.input_scales is None else 1
        # For many pairs, the rule's tile for grouped scales is faster than its larger tile (docs/log.md).
        grouped = weight.group_size < num_in or tile_rows > MEMORY_BOUND_ROWS
        # Steps of more columns gain nothing, because the matrix rows of experts are short (docs/log.md).
        sizes = num_out, num_in, min(max_block_in(weight), MAX_FP8_SUM_COLUMNS)
        plan = fp8_plan_by_rule(tile_rows, num_tiles, *sizes, grouped, 1, gpu, input_bytes)
    else:
        plan = nibble_plan_by_rule(tile_rows, num_tiles, num_out, num_in, weight.code, 1, gpu)
    # More stages than the loop needs would take shared memory from other programs.
    stages = min(plan.stages, max(-(-num_in // plan.block_in) - STEPS_OUTSIDE_PIPELINE, MIN_STAGES))
    return ProductPlan(plan.block_out // num_matrices, plan.block_in, plan.warps, stages)


def quantised_launch_options(
    plan: ProductPlan, weight: QuantisedMatrix, num_matrices: int, tile_rows: int, gpu: Chip
) -> dict[str, Any]:
    """Returns BLOCK_IN, num_stages and maxnreg of a plan.  num_matrices: 2 for gate and up, 1 for down.

    BLOCK_IN is at most max_block_in(weight).  num_stages is at most what fits in shared memory.  maxnreg lets as many
    programs share a multiprocessor as its shared memory allows.  But with FP8, a thread needs registers for two sums of
    its part of a tile: the sum of the running step and the total.
    """
    block_in = min(plan.block_in, max_block_in(weight))
    one_stage = TritonPlan(num_matrices * plan.block_out, block_in, 1, plan.warps, 1)
    bytes_per_stage = stage_bytes(one_stage, block_rows(tile_rows), weight)
    stages = max(min(plan.stages, (gpu.shared_memory - RESERVED_SHARED_MEMORY) // bytes_per_stage), 1)
    programs_per_processor = max(gpu.programs_fitting_per_processor(stages * bytes_per_stage), 1)
    sums_per_thread = num_matrices * plan.block_out * block_rows(tile_rows) // (WARP_THREADS * plan.warps)
    min_registers = 2 * sums_per_thread + NON_SUM_REGISTERS if weight.code == "fp8" else 0
    fitting_units = REGISTERS // (WARP_THREADS * plan.warps * programs_per_processor) // REGISTER_UNIT
    registers = max(fitting_units * REGISTER_UNIT, min_registers, MIN_REGISTERS)
    maxnreg = registers if registers < MAX_REGISTERS else None
    return {"BLOCK_IN": block_in, "num_stages": stages, "maxnreg": maxnreg}


def choose_experts_plan(
    shape: ExpertsShape,
    num_rows: int,
    dtype: torch.dtype,
    gpu: Chip,
    matrices: tuple[Tensor | QuantisedMatrix, Tensor | QuantisedMatrix] | None = None,
) -> ExpertsPlan:
    """Returns the plan for a number of rows.  matrices: gate_up and down; None: both are dense."""
    plan = _dense_experts_plan(shape, num_rows, dtype, gpu)
    # The K experts of a single row differ, so its pairs need no sort.
    plan = replace(plan, tile_rows=1) if num_rows == 1 else plan
    if matrices is None:
        return plan
    max_few_pairs = MAX_PAIRS_OF_SMALL_TILES * shape.num_experts
    is_few = plan.tile_rows == MIN_BLOCK_ROWS and next_power_of_2(num_rows) * shape.top_k <= max_few_pairs
    if is_few and all(isinstance(m, QuantisedMatrix) and supports_format(m, dtype, FEW_ROWS, gpu) for m in matrices):
        small_tile_plan = quantised_plan_by_rule(shape, num_rows, replace(plan, tile_rows=FEW_ROWS), *matrices, gpu)
        # The Hopper kernels for these tiles need a gate.
        has_gate = matrices[0].shape[1] > matrices[1].shape[2]
        if has_gate and small_tile_plan.gated.tile_shape(2) == small_tile_plan.down.tile_shape(1) == TILE_SHAPE:
            # Tiles of FEW_ROWS rows halve the multiplications, and an expert seldom has more than FEW_ROWS pairs.
            return small_tile_plan
    return quantised_plan_by_rule(shape, num_rows, plan, *matrices, gpu)


def _dense_experts_plan(shape: ExpertsShape, num_rows: int, dtype: torch.dtype, gpu: Chip) -> ExpertsPlan:
    """Returns the plan of dense experts: the measured plan of the nearest size, or a plan by rule."""
    if dtype in DTYPES:
        plans = EXPERTS_TUNING.measured_plans(gpu, dtype)
        if plans:
            return _plans_of_nearest_size(plans, shape.matrix_size)[shape.pairs_bucket(num_rows)]
    return experts_plan_by_rule(shape, num_rows, dtype, gpu)


def _plans_of_nearest_size(plans: Mapping[MatrixSize, ExpertsPlans], size: MatrixSize) -> ExpertsPlans:
    """Returns the plans of this size, or of the size nearest in bytes; among equally near sizes, the first."""
    own = plans.get(size)
    if own is not None:
        return own
    return plans[min(plans, key=lambda other: abs(math.log(other[0] * other[1] / (size[0] * size[1]))))]


def _log_plans(key: TuningKey, plans: Mapping[MatrixSize, ExpertsPlans], sources: Sequence[str]) -> None:
    """Log which measured plans there are.  key: (chip, dtype, format).  sources: the files that have them."""
    sizes = ", ".join(f"{hidden}x{inner}" for hidden, inner in plans)
    log.info("experts, %s: %s", key[1], f"plans measured for {sizes}" if plans else "no plans measured on this chip")


def _plan_from_json(plan_json: dict[str, Any], size: MatrixSize) -> ExpertsPlan:
    """Returns the plan that a tuning file stores as `plan_json`.  size: not read."""
    return ExpertsPlan(plan_json["rows"], ProductPlan(*plan_json["gated"]), ProductPlan(*plan_json["down"]))


def _plan_to_json(plan: ExpertsPlan) -> dict[str, Any]:
    """Returns the fields of a plan in the file: block_out, block_in, warps and stages of each product."""
    return {"rows": plan.tile_rows, **{name: [*asdict(getattr(plan, name)).values()] for name in ("gated", "down")}}


EXPERTS_TUNING = TuningSchema(
    "experts", "experts", "sizes", "pairs an expert", PAIRS_BUCKETS, _plan_to_json, _plan_from_json, _log_plans
)
