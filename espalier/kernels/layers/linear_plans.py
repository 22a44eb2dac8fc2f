"""Plans (launch parameters) of linear layers: the tables of measured plans in files, and the plans of dense layers
(linear.py), measured or by a rule.

`espalier doctor --tune` measures and writes tables.  Our own measurements ship beside this file.  A user's table is
read from the path in the environment variable ESPALIER_CHOICES or, if it is not set, from the user's configuration
folder.  The entries of a user's table override the shipped entries.  A table applies to chips with the same compute
capability, number of SMs and shared memory, and to the same activation dtype and weight format.  Nothing is measured at
startup.

If the chip has a table, a dense shape without an entry uses the rule for up to 64 rows, and F.linear for more rows.
Without a table all dense shapes use F.linear, and the log says so.  A quantised shape without an entry takes the
rule of quantised_plans.py.  A format is "dense", or a name of quantised_plans.py:tuning_format_name.
"""

import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.runtime.launch import Chip, chip, next_power_of_2

# The environment variable with the path of the user's table.
TUNING_FILE_VARIABLE = "ESPALIER_CHOICES"
SHIPPED_TUNING_FILE = Path(__file__).with_name("linear_tuning.json")
# The weight format of unquantised weights.
DENSE = "dense"
# Every file has this key.  It holds the tables of dense and quantised linear layers.
REQUIRED_JSON_KEY = "tables"

# [out, in] of a linear layer, or (hidden, inner) of one expert.
MatrixSize = tuple[int, int]
TuningKey = tuple[Chip, str, str]
P = TypeVar("P")
DTYPES = (torch.bfloat16, torch.float16)
# The most rows that the Triton kernel of dense layers multiplies (linear.py).
MAX_ROWS = 256
# The fewest rows of a tile for tensor cores.  1 to 16 rows are padded to 16, so for all these numbers a row gets the
# same bits.
MIN_BLOCK_ROWS = 16
# (most rows, the tiles (block_out, block_in, warps) to measure up to that number of rows).  A search of more tiles on
# an H200 found these within 2.5% of the best (docs/log.md).  One more tile is for small GPUs.
CANDIDATE_TILES = (
    (32, ((32, 256, 4), (64, 64, 4), (64, 128, 4), (64, 256, 4), (128, 64, 4), (128, 128, 4))),
    (64, ((64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 128, 4))),
    (128, ((64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 64, 8))),
    (256, ((64, 64, 4), (128, 64, 8))),
)
CANDIDATE_STAGES = (2, 3, 4, 6, 8)
CANDIDATE_SPLITS = (1, 2, 3, 4, 6, 8)
# The fewest rows for which plans of PyTorch's library are measured.  For fewer rows, its tiles are worse than those of
# the Triton kernel.
LIBRARY_MIN_ROWS = 65
LIBRARY_PIECES = (2, 3, 4)
LIBRARY_SPLITS = (2, 4)
# An edge of the library's tiles.  Sizes of pieces and splits are multiples of this number, so that no tile is partly
# empty.
LIBRARY_TILE = 128
# The most rows for which `plan_by_rule` has a plan.
MAX_RULE_ROWS = 64
# (most rows, block_in) of the rule's plans with one program per multiprocessor.  From 17 rows on, such plans are faster
# (H100).
ONE_PER_SM_BLOCK_IN = ((32, 128), (64, 64))
# The rule's tile (block_out, block_in), warps, most splits, and stages if 1, 2 or 3 programs share a multiprocessor.
# These values were the fastest for most shapes with up to 16 rows on an H200.
RULE_TILE, RULE_WARPS, RULE_SPLITS, RULE_STAGES = (64, 128), 4, 4, (6, 4, 3)
# Bytes of shared memory that a program uses besides its tiles.
RESERVED_SHARED_MEMORY = 1024


@dataclass(frozen=True)
class TuningTable(Generic[P]):
    """The plans measured on one kind of chip, for one activation dtype and one weight format.

    plans: for each matrix size, one plan per bucket (a range of numbers of rows or pairs).  measurement: the GPU's name
    and library versions, for people to read."""

    chip: Chip
    dtype: str
    plans: Mapping[MatrixSize, tuple[P, ...]]
    measurement: Mapping[str, str] = field(default_factory=dict)
    format: str = DENSE

    @property
    def key(self) -> TuningKey:
        return self.chip, self.dtype, self.format


@dataclass(frozen=True, eq=False)
class TuningSchema(Generic[P]):
    """A kind of layer with tuning tables, and how a file stores its tables.

    layer_kind: the kind's name in errors.  tables_key: the JSON key of the list of tables.  plans_key: the JSON key of
    the plans in a table.  count_unit: the word for what a bucket counts, "rows" or "pairs".  bucket_bounds: the upper
    bounds of the buckets.  encode_plan: converts a plan to JSON.  decode_plan: converts JSON to a plan; raises
    ValueError for a plan that cannot be used.  log_plans: called as log_plans(key, plans by size, files) when plans are
    first read.
    """

    layer_kind: str
    tables_key: str
    plans_key: str
    count_unit: str
    bucket_bounds: tuple[float, ...]
    encode_plan: Callable[[P], Any]
    decode_plan: Callable[[Any, MatrixSize], P]
    log_plans: Callable[[TuningKey, Mapping[MatrixSize, tuple[P, ...]], Sequence[str]], None]

    def plan_for_count(self, plans: Sequence[P], rows_or_pairs: float) -> P | None:
        """Returns the plan for the bucket of `rows_or_pairs`; None if this number is above the largest bucket."""
        for bound, plan in zip(self.bucket_bounds, plans, strict=True):
            if rows_or_pairs <= bound:
                return plan
        return None

    def read_tables(self, path: Path) -> list[TuningTable[P]]:
        """Returns the tables in a file.  Raises EspalierError if the file does not have the format of write_table."""
        try:
            return [self._table_from_json(entry) for entry in _read_json(path).get(self.tables_key, [])]
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise EspalierError(
                f"{path} is no table of {self.layer_kind} ({error!r}): remove it, or write it again with espalier "
                "doctor --tune"
            ) from None

    def write_table(self, path: Path, table: TuningTable[P]) -> None:
        """Merge a table into a file.  Other tables of the file stay, and so do the sizes of the same table that are not
        in `table`.  Raises EspalierError if the file cannot be read or written."""
        tables = self.read_tables(path) if path.exists() else []
        old_plans = {size: plan for old in tables if old.key == table.key for size, plan in old.plans.items()}
        merged = [*(old for old in tables if old.key != table.key), replace(table, plans=old_plans | dict(table.plans))]
        content = _read_json(path) if path.exists() else {REQUIRED_JSON_KEY: []}
        content[self.tables_key] = [self._table_to_json(entry) for entry in merged]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_dump_json(content), encoding="utf-8")
        except OSError as error:
            raise EspalierError(f"{path} cannot be written ({error.strerror}): choose another path") from None

    def measured_plans(self, gpu: Chip, dtype: torch.dtype, format: str = DENSE) -> Mapping[MatrixSize, tuple[P, ...]]:
        """Returns the plans by size that were measured on this chip.  The user's plans override shipped ones per size.

        dtype: the activations' dtype.  The first call for a chip, dtype and format reads the files and logs the plans.
        """
        return merged_plans(self, (gpu, str(dtype).removeprefix("torch."), format), user_tuning_file())

    def _table_from_json(self, table_json: dict[str, Any]) -> TuningTable[P]:
        gpu = Chip(**table_json["chip"] | {"capability": tuple(table_json["chip"]["capability"])})
        plans = {
            _parse_size(name): self._plans_from_json(size_plans, _parse_size(name))
            for name, size_plans in table_json[self.plans_key].items()
        }
        # Entries without a format were measured with dense weights.
        return TuningTable(gpu, table_json["dtype"], plans, table_json["measured"], table_json.get("format", DENSE))

    def _plans_from_json(self, plan_by_bucket: dict[str, Any], size: MatrixSize) -> tuple[P, ...]:
        if list(plan_by_bucket) != [str(bound) for bound in self.bucket_bounds]:
            raise ValueError(f"the buckets of {self.count_unit} must be {', '.join(map(str, self.bucket_bounds))}")
        return tuple(self.decode_plan(plan, size) for plan in plan_by_bucket.values())

    def _table_to_json(self, table: TuningTable[P]) -> dict[str, Any]:
        bounds = list(map(str, self.bucket_bounds))
        plans = {
            f"{first}x{second}": dict(zip(bounds, map(self.encode_plan, size_plans), strict=True))
            for (first, second), size_plans in sorted(table.plans.items())
        }
        key = {"chip": asdict(table.chip), "dtype": table.dtype, "format": table.format}
        return key | {"measured": dict(table.measurement), self.plans_key: plans}


@cache
def merged_plans(schema: TuningSchema[P], key: TuningKey, user_path: Path) -> Mapping[MatrixSize, tuple[P, ...]]:
    """Returns the shipped plans and the user's plans, by matrix size.  The result is cached for these arguments.  The
    user's file need not exist."""
    plans: dict[MatrixSize, tuple[P, ...]] = {}
    sources = []
    # pathlib's is_file would raise if the user may not read the folder.
    for path in (path for path in (SHIPPED_TUNING_FILE, user_path) if os.path.isfile(path)):
        for table in schema.read_tables(path):
            if table.key == key:
                plans |= table.plans
                sources.append(f"{path} ({len(table.plans)} shapes)")
    schema.log_plans(key, plans, sources)
    return plans


def user_tuning_file() -> Path:
    """Returns the path of the user's table; the file need not exist."""
    # expanduser does not raise if the user has no home; pathlib's version would.
    config = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(os.environ.get(TUNING_FILE_VARIABLE) or f"{config}/espalier/choices.json")


def _read_json(path: Path) -> dict[str, Any]:
    """Read a file of tables.  The content has a list of tables for each kind of layer."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or REQUIRED_JSON_KEY not in content:
        raise ValueError(f"no JSON object with {REQUIRED_JSON_KEY!r}")
    return content


def _parse_size(size_name: str) -> MatrixSize:
    """Reads a size such as "4096x1024"."""
    first, second = size_name.split("x")
    return int(first), int(second)


def _dump_json(content: dict[str, Any]) -> str:
    """Write JSON with one line per plan, so that the diff of a changed table is readable."""
    text = json.dumps(content, indent=1)
    return re.sub(r"\{[^{}]*\}", lambda innermost: " ".join(innermost.group().split()), text) + "\n"


@dataclass(frozen=True)
class TritonPlan:
    """Launch parameters of the Triton kernel of a linear layer.

    block_out × block_in: a tile of the weight.  splits: the parts into which the columns are split (split-K).  warps:
    warps per program.  stages: pipeline stages.  A stage holds one tile of the weight and one tile of x in shared
    memory.
    """

    block_out: int
    block_in: int
    splits: int
    warps: int
    stages: int

    def shared_memory(self, num_rows: int) -> int:
        """Returns the bytes of shared memory that a program uses for `num_rows` rows."""
        return self.stages * (self.block_out + block_rows(num_rows)) * self.block_in * 2 + RESERVED_SHARED_MEMORY


@dataclass(frozen=True)
class LibraryPlan:
    """Divides a product into several smaller products of PyTorch's library.  `pieces` or `splits` is 1.

    pieces: groups of weight rows, with one call for each.  splits: parts of the columns (split-K), all in one batched
    call."""

    pieces: int
    splits: int


LinearPlan = TritonPlan | LibraryPlan | None


def block_rows(num_rows: int) -> int:
    """Returns the tile size along rows: num_rows, padded to a power of two, at least MIN_BLOCK_ROWS."""
    return max(next_power_of_2(num_rows), MIN_BLOCK_ROWS)


def candidate_plans(num_rows: int, num_out: int, num_in: int, gpu: Chip) -> list[TritonPlan | LibraryPlan]:
    """Returns the plans worth measuring against F.linear."""
    library = _library_plans(num_out, num_in) if num_rows >= LIBRARY_MIN_ROWS else []
    return [*_triton_plans(num_rows, num_out, num_in, gpu), *library]


def plan_by_rule(num_rows: int, num_out: int, num_in: int, gpu: Chip) -> LinearPlan:
    """Returns the plan of a shape that was not measured, for at most `num_rows` rows; None above MAX_RULE_ROWS.

    The rule chooses the most splits with which all programs run at once and each program fills its pipeline."""
    if num_rows > MAX_RULE_ROWS:
        return None
    if num_rows > MIN_BLOCK_ROWS and -(-num_out // RULE_TILE[0]) <= gpu.processors:
        return _plan_one_program_per_sm(num_rows, num_out, num_in, gpu)
    (block_out, block_in), base = RULE_TILE, TritonPlan(*RULE_TILE, 1, RULE_WARPS, min(RULE_STAGES))
    fitting = max(min(gpu.shared_memory // base.shared_memory(num_rows), len(RULE_STAGES)), 1)
    blocks, steps = -(-num_out // block_out), -(-num_in // block_in)
    splits = max(min(RULE_SPLITS, fitting * gpu.processors // blocks, steps // base.stages), 1)
    programs_per_sm = min(-(-blocks * splits // gpu.processors), fitting)
    plan = replace(base, splits=splits, stages=RULE_STAGES[programs_per_sm - 1])
    return plan if programs_per_sm * plan.shared_memory(num_rows) <= gpu.shared_memory else replace(base, splits=splits)


def _plan_one_program_per_sm(num_rows: int, num_out: int, num_in: int, gpu: Chip) -> TritonPlan:
    """Returns the rule's plan with at most one program per multiprocessor, and as many stages as fit."""
    block_out, block_in = RULE_TILE[0], next(block_in for rows, block_in in ONE_PER_SM_BLOCK_IN if num_rows <= rows)
    blocks, steps = -(-num_out // block_out), -(-num_in // block_in)
    splits = max(min(RULE_SPLITS, gpu.processors // blocks, steps // max(RULE_STAGES[1:])), 1)
    plans = [TritonPlan(block_out, block_in, splits, RULE_WARPS, stages) for stages in reversed(CANDIDATE_STAGES)]
    return next(plan for plan in plans if plan.shared_memory(num_rows) <= gpu.shared_memory)


def _library_plans(num_out: int, num_in: int) -> list[LibraryPlan]:
    """Returns the plans of PyTorch's product to measure for a weight [num_out, num_in]."""
    pieces = [LibraryPlan(pieces, 1) for pieces in LIBRARY_PIECES if num_out % (pieces * LIBRARY_TILE) == 0]
    return pieces + [LibraryPlan(1, splits) for splits in LIBRARY_SPLITS if num_in % (splits * LIBRARY_TILE) == 0]


def _triton_plans(num_rows: int, num_out: int, num_in: int, gpu: Chip) -> list[TritonPlan]:
    """Returns the plans of the Triton kernel to measure for x [num_rows, num_in] and a weight [num_out, num_in]."""
    tiles = next(tiles for max_rows, tiles in CANDIDATE_TILES if num_rows <= max_rows)
    plans = (
        TritonPlan(block_out, block_in, splits, warps, stages)
        for block_out, block_in, warps in tiles
        for stages in CANDIDATE_STAGES
        for splits in CANDIDATE_SPLITS
    )
    return [plan for plan in plans if _is_worth_measuring(plan, num_rows, num_out, num_in, gpu)]


def _is_worth_measuring(plan: TritonPlan, num_rows: int, num_out: int, num_in: int, gpu: Chip) -> bool:
    """Returns whether a plan is worth measuring.

    With split-K there must be at least 0.45 programs per multiprocessor, and all programs must run at once.  A weight
    whose rows are too short to fill the pipeline gets the fewest stages and no split-K."""
    programs_per_sm = gpu.shared_memory // plan.shared_memory(num_rows)
    # Stages must fill at least a third of the shared memory, so that enough loads run at once to hide their latency.
    if programs_per_sm == 0 or plan.shared_memory(num_rows) * min(programs_per_sm, 8) < gpu.shared_memory // 3:
        return False
    if -(-num_in // plan.block_in) < plan.stages * plan.splits:
        return plan.splits == 1 and plan.stages == CANDIDATE_STAGES[0]
    programs = -(-num_out // plan.block_out) * plan.splits
    return plan.splits == 1 or 0.45 * gpu.processors <= programs <= gpu.processors * programs_per_sm


# Upper bounds of the buckets of numbers of rows.  A bucket has one plan.  Above the largest bound, F.linear runs.  In a
# bucket, a TritonPlan gives a row the same bits for any number of rows.
ROWS_BUCKETS = (16, 32, 64, 128, 256)

# The fewest columns of a weight tile.  Kernels prefetch whole L2 lines, which hold 64 two-byte numbers.
MIN_BLOCK_IN = 64

log = logging.getLogger(__name__)


# The plans of one weight shape, in the order of ROWS_BUCKETS.  None: F.linear for a dense weight, the rule for a
# quantised weight.
LinearPlans = tuple[LinearPlan, ...]
NO_PLANS: LinearPlans = (None,) * len(ROWS_BUCKETS)


def plans_for_dense_weight(weight: Tensor) -> LinearPlans | None:
    """Returns the plans for a dense weight [out, in] and activations of the weight's dtype.

    None on a CPU, for dtypes other than bfloat16 and float16, and on a chip without a table."""
    if not weight.is_cuda or weight.dtype not in DTYPES:
        return None
    shape = weight.shape[0], weight.shape[1]
    return plans_for_shape(chip(weight), shape, LINEAR_TUNING.measured_plans(chip(weight), weight.dtype))


def plans_for_shape(
    gpu: Chip, shape: MatrixSize, measured_plans: Mapping[MatrixSize, LinearPlans]
) -> LinearPlans | None:
    """Returns the plans of a weight shape: the measured plans, or plans by rule.  None if measured_plans is empty."""
    if shape in measured_plans or not measured_plans:
        return measured_plans.get(shape)
    _log_plan_by_rule(shape)
    return tuple(plan_by_rule(rows, *shape, gpu) for rows in ROWS_BUCKETS)


def _log_plans(key: TuningKey, plans: Mapping[MatrixSize, LinearPlans], sources: Sequence[str]) -> None:
    """Log which measured plans there are.  key: (chip, dtype, format).  sources: the files that have them."""
    gpu, dtype, format = key
    major, minor = gpu.capability
    where = f"capability {major}.{minor}, {gpu.processors} SMs, {gpu.shared_memory} bytes of shared memory"
    untuned = "F.linear" if format == DENSE else "plans by rule"
    source = (
        f"plans from {', '.join(sources)}" if sources else f"{untuned}; espalier doctor --tune measures faster ones"
    )
    log.info("linear layers, %s weights, %s, %s: %s", format, dtype, where, source)


@cache
def _log_plan_by_rule(shape: MatrixSize) -> None:
    log.info(
        "linear layers: no plan measured for [%d, %d]: a plan by rule up to %d rows, F.linear above; espalier doctor "
        "--tune measures faster plans",
        *shape,
        MAX_RULE_ROWS,
    )


def _plan_from_json(plan_json: dict[str, Any] | None, shape: MatrixSize) -> LinearPlan:
    if plan_json is None:
        return None
    return _library_plan_from_json(plan_json, shape) if "pieces" in plan_json else _triton_plan_from_json(plan_json)


def _library_plan_from_json(plan_json: dict[str, Any], shape: MatrixSize) -> LibraryPlan:
    plan = LibraryPlan(**plan_json)
    if min(plan.pieces, plan.splits) != 1 or max(plan.pieces, plan.splits) < 2:
        raise ValueError(f"{plan} must have one of pieces and splits at 1 and the other above 1")
    if shape[1] % plan.splits:
        raise ValueError(f"the splits of {plan} do not divide the {shape[1]} columns of the weight")
    return plan


def _triton_plan_from_json(plan_json: dict[str, Any]) -> TritonPlan:
    """Returns the plan.  Raises ValueError for a plan that cannot be launched."""
    plan = TritonPlan(**plan_json)
    powers_of_two = plan.block_out, plan.block_in, plan.warps
    if min(*powers_of_two, plan.splits, plan.stages) < 1 or any(size & (size - 1) for size in powers_of_two):
        raise ValueError(f"{plan} must be positive, and its blocks and warps powers of two")
    if plan.block_in < MIN_BLOCK_IN:
        raise ValueError(f"{plan} must have a block_in of at least {MIN_BLOCK_IN}")
    return plan


def _plan_to_json(plan: LinearPlan) -> dict[str, Any] | None:
    """Returns the plan as a tuning file stores it."""
    return None if plan is None else asdict(plan)


LINEAR_TUNING = TuningSchema(
    "linear layers", "tables", "shapes", "rows", ROWS_BUCKETS, _plan_to_json, _plan_from_json, _log_plans
)
