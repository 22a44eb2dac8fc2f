"""Plans (launch parameters) of quantised linear layers (linear_quantised.py), and the check that a kernel supports a
weight.

A plan is measured (linear_plans.py), or a rule gives it.  `candidate_plans` returns the plans worth measuring.  Up to
MEMORY_BOUND_ROWS rows, memory bandwidth limits the time.  Then candidate_plans orders plans by an estimate of their
time.  The estimate counts how many programs run at once, how many bytes they have in flight, and how full the last wave
is.
"""

from dataclasses import replace
from functools import cache
from itertools import zip_longest

import torch

from espalier.errors import EspalierError
from espalier.kernels.hopper.plans import num_splits_for, supports_format
from espalier.kernels.layers.linear_plans import (
    DTYPES,
    LINEAR_TUNING,
    MIN_BLOCK_IN,
    MIN_BLOCK_ROWS,
    RESERVED_SHARED_MEMORY,
    TritonPlan,
    block_rows,
)
from espalier.kernels.layers.quantised import E2M1_CODES, E8M0_BIAS, INTERLEAVED_COLUMNS, InputRows, QuantisedMatrix
from espalier.kernels.runtime.launch import Chip, chip

# The most columns that FP8 units add up before the sum is added in float32 (quantised_tile.py).  Kernels cannot
# read this constant, so _fp8_dot repeats the number.
MAX_FP8_SUM_COLUMNS = 128
# The most rows of one tile; more rows are divided among several tiles.
MAX_BLOCK_ROWS = 128
# The largest stored exponent of MXFP4 with which the factors of the kernels do not overflow: a scale of 2^65.
MAX_EXPONENT = E8M0_BIAS + 65
# The lowest compute capability for which the compiler supports FP8 (E4M3).
FP8_CAPABILITY = (8, 9)
# The most rows for which memory limits the time, and the most rows for which columns are split.  More rows fill the
# chip without splits.
MEMORY_BOUND_ROWS, SPLIT_ROWS = 64, 256
# The rule splits columns until this many programs share a multiprocessor, if memory limits the time; if multiplications
# limit the time, until this many warps share it.
PROGRAMS_PER_PROCESSOR, WARPS_PER_PROCESSOR = 2, 8
MAX_SPLITS = 8
# The fewest loop steps in a split of FP8 weights.  With fewer steps the pipeline would never be full.
MIN_STEPS_PER_SPLIT = 4
# Tiles of 4-bit weights: (most rows of a tile, (block_out, most block_in, warps), the most programs whose registers fit
# a multiprocessor).  Up to 16 rows a step reads 128 bytes of each weight row.  With more rows, inputs take more bytes
# than the weight, and blocks of 128 weight rows read half as many bytes of inputs.  For MXFP4 such blocks are slower up
# to 32 rows (docs/log.md).  The compiler loads MXFP4 exponents ahead only if a thread has at least four per step.
E2M1_TILES = ((16, (64, 256, 4), 4), (32, (64, 256, 4), 3), (64, (128, 128, 4), 2), (MAX_BLOCK_ROWS, (128, 128, 8), 1))
NIBBLE_TILES = {
    "int4": ((16, (64, 256, 4), 4), (64, (128, 128, 8), 2), (MAX_BLOCK_ROWS, (128, 128, 8), 1)),
    # NVFP4 has the tiles of MXFP4, because only MXFP4 was measured.
    **dict.fromkeys(E2M1_CODES, E2M1_TILES),
}
MAX_STAGES = 6
# If a matrix has at least this many columns, the last step may be partly empty.
MIN_RAGGED_COLUMNS = 1024


def quantised_plan_for(weight: QuantisedMatrix, x: InputRows) -> TritonPlan:
    """Returns the plan measured for the weight's shape and format and the rows of x, else the plan of the rule."""
    plans = LINEAR_TUNING.measured_plans(chip(weight.codes), x.dtype, tuning_format_name(weight))
    shape = weight.shape[0], weight.shape[1]
    plan = LINEAR_TUNING.plan_for_count(plans[shape], len(x)) if shape in plans else None
    return plan if isinstance(plan, TritonPlan) else plan_by_rule_for(weight, x)


def plan_by_rule_for(weight: QuantisedMatrix, x: InputRows) -> TritonPlan:
    """Returns the plan of `plan_by_rule`.  If a Hopper kernel multiplies, the plan has the splits of that kernel."""
    (num_out, num_in), grouped = weight.shape, weight.group_size < weight.shape[-1]
    input_bytes, gpu = 1 if weight.input_scales is not None else x.dtype.itemsize, chip(weight.codes)
    plan = plan_by_rule(len(x), num_out, num_in, weight.code, max_block_in(weight), grouped, gpu, input_bytes)
    if plan.splits > 1 and supports_format(weight, x.dtype, len(x), gpu):
        return replace(plan, splits=num_splits_for(num_out, num_in, gpu))
    return plan


def tuning_format_name(weight: QuantisedMatrix) -> str:
    """Returns the name of the weight's format in tuning tables.  The name has every property that changes a kernel's
    time."""
    group = "" if weight.group_size >= weight.shape[-1] else f"-{weight.rows_per_scale}x{weight.group_size}"
    inputs = "" if weight.input_scales is None else f"-inputs{weight.input_scales.group_size or ''}"
    return f"{weight.code}{group}{inputs}"


def max_block_in(weight: QuantisedMatrix) -> int:
    """Returns the most columns of a weight tile.

    For FP8, this is the number of columns that share a scale; if MAX_FP8_SUM_COLUMNS divides that number, it is 2 ·
    MAX_FP8_SUM_COLUMNS."""
    if weight.code != "fp8":
        return 256
    groups = [weight.group_size]
    if weight.input_scales is not None and weight.input_scales.group_size is not None:
        groups.append(weight.input_scales.group_size)
    smallest = min([group for group in groups if group < weight.shape[-1]], default=MAX_FP8_SUM_COLUMNS)
    return 2 * MAX_FP8_SUM_COLUMNS if smallest % MAX_FP8_SUM_COLUMNS == 0 else smallest


@cache
def plan_by_rule(
    num_rows: int,
    num_out: int,
    num_in: int,
    code: str,
    max_block_in: int,
    is_grouped: bool,
    gpu: Chip,
    input_bytes: int = 2,
) -> TritonPlan:
    """Returns the plan of a shape that was not measured.  code: see QuantisedMatrix.

    is_grouped: whether each group of columns has its own scale.  input_bytes: the bytes of one input value, for FP8
    weights."""
    tile = min(block_rows(num_rows), MAX_BLOCK_ROWS)
    num_tiles = -(-num_rows // tile)
    max_splits = MAX_SPLITS if num_rows <= SPLIT_ROWS else 1
    if code != "fp8":
        return nibble_plan_by_rule(tile, num_tiles, num_out, num_in, code, max_splits, gpu)
    return fp8_plan_by_rule(tile, num_tiles, num_out, num_in, max_block_in, is_grouped, max_splits, gpu, input_bytes)


@cache
def fp8_plan_by_rule(
    tile_rows: int,
    num_tiles: int,
    num_out: int,
    num_in: int,
    max_block_in: int,
    is_grouped: bool,
    max_splits: int,
    gpu: Chip,
    input_bytes: int,
) -> TritonPlan:
    """Returns the plan of FP8 weights where nothing is measured, for `num_tiles` tiles of `tile_rows` rows."""
    memory_bound = tile_rows <= MEMORY_BOUND_ROWS
    # For few rounded rows without group scales, steps of 256 columns are 3 to 5% faster than 128 (docs/log.md).
    is_few = memory_bound and tile_rows == MIN_BLOCK_ROWS and input_bytes == 1 and not is_grouped
    block_in = min(max_block_in, 256 if is_few and (num_in % 256 == 0 or num_in >= MIN_RAGGED_COLUMNS) else 128)
    # With group scales, every step multiplies a tile's sums by scales.  A small tile keeps both in registers.
    block_out, warps = (64, 4) if memory_bound or is_grouped else (128, 8)
    programs, programs_per_sm, max_stages = num_tiles * -(-num_out // block_out), 1, 4
    # For few rows, two or three programs share a multiprocessor: the number that fills the last wave better.
    targets = [PROGRAMS_PER_PROCESSOR if memory_bound else WARPS_PER_PROCESSOR // warps]
    if is_few:
        targets.append(PROGRAMS_PER_PROCESSOR + 1)
    most_splits = min(max_splits, num_in // block_in // MIN_STEPS_PER_SPLIT)
    split_counts = [max(min(count * gpu.processors // programs, most_splits), 1) for count in targets]
    splits = max(split_counts, key=lambda splits: _wave_fill(programs * splits, gpu))
    if memory_bound:
        # All programs run at once if registers allow, because a second wave would be mostly empty.
        programs_per_sm = min(
            -(-programs * splits // gpu.processors), 3 if is_grouped and tile_rows > MIN_BLOCK_ROWS else 4
        )
        max_stages = MAX_STAGES
    plan = TritonPlan(block_out, block_in, splits, warps, 1)
    shared = gpu.shared_memory_per_program(programs_per_sm)
    # If the tensor cores limit the time, one program with many stages is faster than two per multiprocessor.
    return replace(plan, stages=max(min(shared // (block_in * (block_out + tile_rows * input_bytes)), max_stages), 1))


def _wave_fill(num_programs: int, gpu: Chip) -> float:
    """Returns the share (0 to 1) of the multiprocessors that is busy, on average over the waves of `num_programs`
    programs."""
    return num_programs / (-(-num_programs // gpu.processors) * gpu.processors)


@cache
def nibble_plan_by_rule(
    tile_rows: int, num_tiles: int, num_out: int, num_in: int, code: str, max_splits: int, gpu: Chip
) -> TritonPlan:
    """Returns the plan of 4-bit weights that are not measured, for `num_tiles` tiles.  code: see QuantisedMatrix."""
    tiles = NIBBLE_TILES[code]
    (block_out, max_in, warps), max_programs = next((shape, count) for rows, shape, count in tiles if tile_rows <= rows)
    fitting_sizes = (size for size in (256, 128, 64, 32) if num_in >= MIN_RAGGED_COLUMNS or num_in % size == 0)
    block_in = min(next(fitting_sizes, 32), max_in)
    programs = num_tiles * -(-num_out // block_out)
    num_wanted = min(PROGRAMS_PER_PROCESSOR, max_programs) * gpu.processors
    splits = max(min(num_wanted // programs, max_splits, num_in // block_in // 4), 1)
    # All programs run at once if registers allow, because a second wave would be mostly empty.
    programs_per_sm = min(-(-programs * splits // gpu.processors), max_programs)
    shared = gpu.shared_memory_per_program(programs_per_sm)
    plan = TritonPlan(block_out, block_in, splits, warps, 1)
    # Codes need one stage less than inputs, because the running step has its codes in registers.
    codes, inputs = code_bytes_per_step(plan, code), tile_rows * plan.block_in * 2
    return replace(plan, stages=max(min((shared + codes) // (codes + inputs), MAX_STAGES), 2))


def stage_bytes(plan: TritonPlan, tile_rows: int, weight: QuantisedMatrix) -> int:
    """Returns the bytes of shared memory per pipeline stage, with `tile_rows` rows of inputs."""
    input_bytes = 2 if weight.input_scales is None else 1
    return code_bytes_per_step(plan, weight.code) + tile_rows * plan.block_in * input_bytes


def code_bytes_per_step(plan: TritonPlan, code: str) -> int:
    """Returns the bytes of one step's codes, including the E2M1 scales that are loaded with the codes."""
    values = plan.block_out * plan.block_in
    return values if code == "fp8" else values // 2 + values // {"int4": values, "mxfp4": 32, "nvfp4": 16}[code]


def require_supported_weight(weight: QuantisedMatrix, dtype: torch.dtype) -> None:
    """Check that a kernel supports the weight, if the weight is on a GPU.  Raises EspalierError."""
    if not weight.codes.is_cuda:
        return
    if weight.code != "fp8" and has_words_of_two_groups(weight):
        raise EspalierError(
            f"on a GPU, 4-bit weights need columns, and columns of a group, in multiples of {INTERLEAVED_COLUMNS}, but "
            f"this matrix has {weight.shape[-1]} in groups of {weight.group_size}; use another copy of the model"
        )
    if weight.code == "mxfp4" and weight.scales.numel() and (largest := int(weight.scales.max())) > MAX_EXPONENT:
        raise EspalierError(
            f"a scale is 2^{largest - E8M0_BIAS}, but on a GPU those of MXFP4 may be at most 2^"
            f"{MAX_EXPONENT - E8M0_BIAS}; if no value is so large, the file is corrupt: download it again"
        )
    if weight.code == "fp8" and chip(weight.codes).capability < FP8_CAPABILITY:
        raise EspalierError(
            "FP8 weights need a GPU of compute capability 8.9 or newer (Ada, Hopper); use a 4-bit or bfloat16 copy of "
            "the model"
        )
    if dtype not in (DTYPES if weight.code not in E2M1_CODES else (torch.bfloat16,)):
        raise EspalierError(f"{weight.code} weights need dtype=bfloat16 on a GPU, not {dtype}; pass dtype=bfloat16")


def has_words_of_two_groups(weight: QuantisedMatrix) -> bool:
    """Returns whether 32 interleaved columns span several groups, or the last columns are not interleaved.

    Kernels cannot multiply such a matrix.  NVFP4 may have two groups in 32 columns: kernels read two scales."""
    columns = 2 * weight.group_size if weight.code == "nvfp4" else min(weight.group_size, weight.shape[-1])
    return columns % INTERLEAVED_COLUMNS != 0 or weight.shape[-1] % INTERLEAVED_COLUMNS != 0


# Candidates if memory limits the time, and if multiplications limit it: (block_out, warps), stages, splits (split-K).
MEMORY_BOUND_CANDIDATES = (((64, 4), (128, 4), (128, 8), (32, 4), (256, 8)), (4, 5, 6, 3, 8, 2), (1, 2, 3, 4, 6, 8))
COMPUTE_BOUND_CANDIDATES = (((64, 4), (128, 4), (128, 8)), (2, 3, 4), (1, 2, 4, 3))
# The most weights of a step, and the most sums, that a thread holds in registers.
NIBBLES_PER_THREAD, SUMS_PER_THREAD, WARP_THREADS = 128, 128, 32
# The fewest and the most programs per multiprocessor with split-K.
MIN_PROGRAMS_PER_PROCESSOR, MAX_PROGRAMS_PER_PROCESSOR = 0.5, 4
# The assumptions of `_streaming_us` about a multiprocessor: the warps that its registers allow, the bytes that it reads
# per microsecond, and the microseconds from a load to its data.
MAX_WARPS, BYTES_PER_US, LATENCY_US = 16, 33_000, 1.0
# Microseconds to add the partial sums of split-K.
SUM_SPLITS_US = 1.0


def candidate_plans(num_rows: int, weight: QuantisedMatrix, gpu: Chip) -> list[TritonPlan]:
    """Returns the plans to compare with the rule's plan by measurement; none for FP8 groups of less than MIN_BLOCK_IN
    columns.

    The plans of different tiles alternate, so that the first few plans include the best plan of each tile."""
    num_in, max_columns, is_fp8 = weight.shape[-1], max_block_in(weight), weight.code == "fp8"
    tile = min(block_rows(num_rows), MAX_BLOCK_ROWS)
    candidates = MEMORY_BOUND_CANDIDATES if num_rows <= MEMORY_BOUND_ROWS else COMPUTE_BOUND_CANDIDATES
    tiles, all_stages, all_splits = candidates
    by_tile = [
        [
            TritonPlan(block_out, block_in, splits, warps, stages)
            for splits in all_splits
            for stages in all_stages
            if num_in // block_in >= stages * splits
        ]
        for block_in in (256, 128, 64)
        if max_columns % block_in == 0 and block_in >= MIN_BLOCK_IN
        for block_out, warps in tiles
        if block_out * tile <= SUMS_PER_THREAD * WARP_THREADS * warps
        if is_fp8 or (block_out >= 64 and block_out * block_in <= NIBBLES_PER_THREAD * WARP_THREADS * warps)
    ]
    for plans in by_tile:
        plans[:] = [plan for plan in plans if _fits_chip(plan, tile, weight, gpu)]
        if num_rows <= MEMORY_BOUND_ROWS:
            plans.sort(key=lambda plan: _streaming_us(plan, tile, weight, gpu))
    return [plan for next_of_each_tile in zip_longest(*by_tile) for plan in next_of_each_tile if plan is not None]


def _fits_chip(plan: TritonPlan, tile_rows: int, weight: QuantisedMatrix, gpu: Chip) -> bool:
    """Returns whether the stages fit in shared memory and the splits give neither too few nor too many programs."""
    programs = -(-weight.shape[0] // plan.block_out) * plan.splits
    return stage_bytes(plan, tile_rows, weight) * plan.stages + RESERVED_SHARED_MEMORY <= gpu.shared_memory and (
        plan.splits == 1
        or MIN_PROGRAMS_PER_PROCESSOR * gpu.processors <= programs <= MAX_PROGRAMS_PER_PROCESSOR * gpu.processors
    )


def _streaming_us(plan: TritonPlan, tile_rows: int, weight: QuantisedMatrix, gpu: Chip) -> float:
    """Estimates a plan's microseconds by a model that counts only memory.  Only the order of estimates is used."""
    num_out, num_in = weight.shape
    programs = -(-num_out // plan.block_out) * plan.splits
    shared_memory = stage_bytes(plan, tile_rows, weight) * plan.stages
    programs_per_sm = min(gpu.programs_fitting_per_processor(shared_memory), MAX_WARPS // plan.warps)
    step_bytes = code_bytes_per_step(plan, weight.code)
    program_bytes = step_bytes * num_in / plan.block_in / plan.splits
    waves, last_programs = divmod(programs, programs_per_sm * gpu.processors)

    def wave_us(num_programs: int) -> float:
        """Returns the microseconds of `num_programs` programs that run at the same time."""
        rate = min(gpu.processors * BYTES_PER_US, num_programs * step_bytes * (plan.stages - 1) / LATENCY_US)
        return LATENCY_US + num_programs * program_bytes / max(rate, 1)

    last_us = wave_us(last_programs) if last_programs else 0.0
    return waves * wave_us(programs_per_sm * gpu.processors) + last_us + (SUM_SPLITS_US if plan.splits > 1 else 0.0)
