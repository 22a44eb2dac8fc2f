"""Plans of dense linear layers (linear.py): the plans worth measuring, and a rule for shapes that nobody measured.

linear_tuning.py reads what was measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from espalier.kernels.runtime.launch import Chip, power_of_two

DTYPES = (torch.bfloat16, torch.float16)
MAX_ROWS = 256
# Smallest tile of rows that tensor cores take.  1 to 16 rows are padded to it, so they are the same computation.
MIN_BLOCK_ROWS = 16
# (max rows, the (block_out, block_in, warps) to measure up to that number): those within 2.5% of the best in a wider
# search on an H200 (docs/log.md), and one that fits small GPUs.
TILES = (
    (32, ((32, 256, 4), (64, 64, 4), (64, 128, 4), (64, 256, 4), (128, 64, 4), (128, 128, 4))),
    (64, ((64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 128, 4))),
    (128, ((64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 64, 8))),
    (256, ((64, 64, 4), (128, 64, 8))),
)
STAGES = (2, 3, 4, 6, 8)
SPLITS = (1, 2, 3, 4, 6, 8)
# The library's plans are measured from this number of rows on; below it, its tiles are worse than ours.
LIBRARY_MIN_ROWS = 65
LIBRARY_PIECES = (2, 3, 4)
LIBRARY_SPLITS = (2, 4)
# Largest edge of the library's tiles.  A piece or split must be a multiple of it, so that no tile is partly empty.
LIBRARY_TILE = 128
# The most rows of `rule`.
RULE_ROWS = 64
# (most rows, block_in) where a program has a multiprocessor alone: faster from 17 rows on, on an H100.
RULE_ALONE = ((32, 128), (64, 64))
# The rule's tile, warps, most splits, and stages by the number of programs that share a multiprocessor: what most
# shapes were measured to be fastest with, up to 16 rows on an H200.
RULE_TILE, RULE_WARPS, RULE_SPLITS, RULE_STAGES = (64, 128), 4, 4, (6, 4, 3)
# Bytes of shared memory that a program uses besides its tiles.
RESERVED_SHARED_MEMORY = 1024


@dataclass(frozen=True)
class TritonPlan:
    """Launch parameters of the Triton kernel.

    block_out × block_in: a tile of the weight; splits: of `in` (split-K); warps: per program; stages: pipeline stages,
    each holds one tile of the weight and one of x in shared memory.
    """

    block_out: int
    block_in: int
    splits: int
    warps: int
    stages: int

    def shared_memory(self, rows: int) -> int:
        """Bytes of shared memory that a program uses for `rows` rows."""
        return self.stages * (self.block_out + block_rows(rows)) * self.block_in * 2 + RESERVED_SHARED_MEMORY


@dataclass(frozen=True)
class LibraryPlan:
    """Several smaller products by PyTorch's library.  One of the two fields is 1.

    pieces: groups of weight rows, one call for each.  splits: of `in` (split-K), all in one batched call, which returns
    float32 partial sums.
    """

    pieces: int
    splits: int


LinearPlan = TritonPlan | LibraryPlan | None


def block_rows(rows: int) -> int:
    """The tile size along rows: rows padded to a power of two, at least MIN_BLOCK_ROWS."""
    return max(power_of_two(rows), MIN_BLOCK_ROWS)


def candidates(rows: int, num_out: int, num_in: int, gpu: Chip) -> list[TritonPlan | LibraryPlan]:
    """The plans worth measuring against F.linear."""
    library = _library_plans(num_out, num_in) if rows >= LIBRARY_MIN_ROWS else []
    return [*_triton_plans(rows, num_out, num_in, gpu), *library]


def rule(rows: int, num_out: int, num_in: int, gpu: Chip) -> LinearPlan:
    """The plan of a shape that was not measured, for a bucket of up to `rows` rows; None above RULE_ROWS.

    It splits `in` as long as all programs run at once and each fills its pipeline.
    """
    if rows > RULE_ROWS:
        return None
    if rows > MIN_BLOCK_ROWS and num_blocks(num_out, RULE_TILE[0]) <= gpu.processors:
        return _alone(rows, num_out, num_in, gpu)
    (block_out, block_in), least = RULE_TILE, TritonPlan(*RULE_TILE, 1, RULE_WARPS, min(RULE_STAGES))
    together = max(min(gpu.shared_memory // least.shared_memory(rows), len(RULE_STAGES)), 1)
    blocks, steps = num_blocks(num_out, block_out), num_blocks(num_in, block_in)
    splits = max(min(RULE_SPLITS, together * gpu.processors // blocks, steps // least.stages), 1)
    sharing = min(num_blocks(blocks * splits, gpu.processors), together)
    plan = replace(least, splits=splits, stages=RULE_STAGES[sharing - 1])
    return plan if sharing * plan.shared_memory(rows) <= gpu.shared_memory else replace(least, splits=splits)


def _alone(rows: int, num_out: int, num_in: int, gpu: Chip) -> TritonPlan:
    """The rule's plan with at most one program on a multiprocessor, and as many stages as fit into it."""
    block_out, block_in = RULE_TILE[0], next(block_in for most, block_in in RULE_ALONE if rows <= most)
    blocks, steps = num_blocks(num_out, block_out), num_blocks(num_in, block_in)
    splits = max(min(RULE_SPLITS, gpu.processors // blocks, steps // max(RULE_STAGES[1:])), 1)
    plans = [TritonPlan(block_out, block_in, splits, RULE_WARPS, stages) for stages in reversed(STAGES)]
    return next(plan for plan in plans if plan.shared_memory(rows) <= gpu.shared_memory)


def _library_plans(num_out: int, num_in: int) -> list[LibraryPlan]:
    pieces = [LibraryPlan(pieces, 1) for pieces in LIBRARY_PIECES if num_out % (pieces * LIBRARY_TILE) == 0]
    return pieces + [LibraryPlan(1, splits) for splits in LIBRARY_SPLITS if num_in % (splits * LIBRARY_TILE) == 0]


def _triton_plans(rows: int, num_out: int, num_in: int, gpu: Chip) -> list[TritonPlan]:
    tiles = next(tiles for max_rows, tiles in TILES if rows <= max_rows)
    plans = (
        TritonPlan(block_out, block_in, splits, warps, stages)
        for block_out, block_in, warps in tiles
        for stages in STAGES
        for splits in SPLITS
    )
    return [plan for plan in plans if _worth_measuring(plan, rows, num_out, num_in, gpu)]


def _worth_measuring(plan: TritonPlan, rows: int, num_out: int, num_in: int, gpu: Chip) -> bool:
    """With split-K the grid must be 0.45 to 1 wave; without, any number of waves.  A weight whose rows are too short to
    fill the pipeline gets the fewest stages and no split-K."""
    programs_per_sm = gpu.shared_memory // plan.shared_memory(rows)
    # Loads in flight must fill at least a third of the shared memory to hide the memory latency.
    if programs_per_sm == 0 or plan.shared_memory(rows) * min(programs_per_sm, 8) < gpu.shared_memory // 3:
        return False
    if num_blocks(num_in, plan.block_in) < plan.stages * plan.splits:
        return plan.splits == 1 and plan.stages == STAGES[0]
    programs = num_blocks(num_out, plan.block_out) * plan.splits
    return plan.splits == 1 or 0.45 * gpu.processors <= programs <= gpu.processors * programs_per_sm


def num_blocks(count: int, block: int) -> int:
    return -(-count // block)
