"""The tuning tables of linear layers: which plan computes which weight shape.  Nothing is measured at start.

`espalier doctor --tune` measures and writes tables.  Our own measurements ship beside this file.  A user's table is
read from the path in CHOICES_FILE or, if that is not set, from the user's configuration folder; its entries override
the shipped ones.  A table applies to chips with the same compute capability, number of SMs and shared memory, and to
the same activation dtype and weight format.  The GPU's name does not matter.  On a chip with a table, a shape without
an entry takes the rule of linear.py up to 64 rows and F.linear above.  On a chip without a table every shape takes
F.linear.  The log says so.

A format is "dense", or a name of linear_quantised.py:tuning_name.  A quantised shape without an entry takes the rule of
linear_quantised.py.
"""

import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.layers.linear_plans import DTYPES, RULE_ROWS, LibraryPlan, LinearPlan, TritonPlan, rule
from espalier.kernels.runtime.launch import Chip, chip

# Environment variable: the path of the user's table.
CHOICES_FILE = "ESPALIER_CHOICES"
SHIPPED = Path(__file__).with_name("linear_tuning.json")
# Row-count buckets, by their upper bounds: one plan per bucket, F.linear above the largest.  Within a bucket a
# TritonPlan gives a row the same bits whatever the number of rows.  Up to 16 rows are padded to 16: one bucket.
ROWS_BUCKETS = (16, 32, 64, 128, 256)

# The kernel prefetches whole lines of 128 bytes: 64 numbers.
MIN_BLOCK_IN = 64

# Key of the list of tables in a file.  espalier/kernels/layers/experts_tuning.py has another.
ENTRIES = "tables"
# Weight format: one tensor in the dtype of the activations.
DENSE = "dense"

Shape = tuple[int, int]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LinearPlans:
    """The plans of one weight shape, in the order of ROWS_BUCKETS.  None: F.linear; of quantised weights, the rule."""

    by_bucket: tuple[LinearPlan, ...] = (None,) * len(ROWS_BUCKETS)

    def at(self, rows: int) -> LinearPlan:
        """The plan for a number of rows."""
        for max_rows, plan in zip(ROWS_BUCKETS, self.by_bucket, strict=True):
            if rows <= max_rows:
                return plan
        return None


@dataclass(frozen=True)
class Table:
    """The plans measured on one kind of chip, for one activation dtype and one weight format.

    shapes: plans by weight shape [out, in].  measured: GPU name and versions of the measurement, for humans only.
    """

    chip: Chip
    dtype: str
    shapes: Mapping[Shape, LinearPlans]
    measured: Mapping[str, str] = field(default_factory=dict)
    format: str = DENSE

    @property
    def key(self) -> tuple[Chip, str, str]:
        return self.chip, self.dtype, self.format


def plans_for(shape: Shape, format: str, dtype: torch.dtype, stored: Tensor) -> LinearPlans | None:
    """The plans for a dense weight's shape [out, in]; None: nothing was measured on this chip.

    dtype: of the activations; stored: any tensor of the weight, to tell the chip.
    """
    if not stored.is_cuda or dtype not in DTYPES:
        return None
    return plans_on(chip(stored), shape, measured_plans(chip(stored), format, dtype))


def measured_plans(gpu: Chip, format: str, dtype: torch.dtype) -> Mapping[Shape, LinearPlans]:
    """The plans by weight shape that were measured on this chip for a weight format."""
    return _active_plans((gpu, str(dtype).removeprefix("torch."), format), own_file())


def plans_on(gpu: Chip, shape: Shape, measured: Mapping[Shape, LinearPlans]) -> LinearPlans | None:
    """The plans for a weight shape, given those measured on this chip; None if there are none."""
    if shape in measured or not measured:
        return measured.get(shape)
    _log_rule(shape)
    return LinearPlans(tuple(rule(rows, *shape, gpu) for rows in ROWS_BUCKETS))


def own_file() -> Path:
    """The path of the user's table; the file need not exist."""
    # expanduser and isfile do not raise if the user has no home or may not read the folder; pathlib's versions do.
    config = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(os.environ.get(CHOICES_FILE) or f"{config}/espalier/choices.json")


@cache
def _active_plans(key: tuple[Chip, str, str], user_path: Path) -> Mapping[Shape, LinearPlans]:
    """Shipped plans, overridden shape by shape by the user's.  Reads and logs once per process."""
    plans: dict[Shape, LinearPlans] = {}
    sources = []
    for path in (SHIPPED, user_path):
        for table in read(path) if os.path.isfile(path) else ():
            if table.key == key:
                plans |= table.shapes
                sources.append(f"{path} ({len(table.shapes)} shapes)")
    gpu, dtype, format = key
    major, minor = gpu.capability
    where = f"capability {major}.{minor}, {gpu.processors} SMs, {gpu.shared_memory} bytes of shared memory"
    untuned = "F.linear" if format == DENSE else "plans by rule"
    source = (
        f"plans from {', '.join(sources)}" if sources else f"{untuned}; espalier doctor --tune measures faster ones"
    )
    log.info("linear layers, %s weights, %s, %s: %s", format, dtype, where, source)
    return plans


@cache
def _log_rule(shape: Shape) -> None:
    log.info(
        "linear layers: no plan measured for [%d, %d]: a plan by rule up to %d rows, F.linear above; espalier doctor "
        "--tune measures faster plans",
        *shape,
        RULE_ROWS,
    )


def read(path: Path) -> list[Table]:
    """The tables in a file.  Raises EspalierError, naming the file, if it does not have the format of `write`."""
    try:
        return [_table(entry) for entry in read_entries(path)[ENTRIES]]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise EspalierError(
            f"{path} is no table of linear layers ({error!r}): remove it, or write it again with espalier doctor --tune"
        ) from None


def write(path: Path, table: Table) -> None:
    """Merge a table into a file.  The file keeps other tables, and shapes of the same table that are not in `table`."""
    tables = read(path) if path.exists() else []
    same_key = [old for old in tables if old.key == table.key]
    old_shapes = {shape: plans for old in same_key for shape, plans in old.shapes.items()}
    merged = replace(table, shapes=old_shapes | dict(table.shapes))
    write_entries(path, ENTRIES, [_entry(old) for old in tables if old not in same_key] + [_entry(merged)])


def read_entries(path: Path) -> dict[str, Any]:
    """The file as JSON: lists of tables by the kind of layer."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError("no JSON object")
    return content


def write_entries(path: Path, kind: str, entries: list[dict[str, Any]]) -> None:
    """Replace the tables of one kind of layer in a file; it keeps the others.  Raises EspalierError."""
    content = {ENTRIES: [], **(read_entries(path) if path.exists() else {}), kind: entries}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_json(content), encoding="utf-8")
    except OSError as error:
        raise EspalierError(f"{path} cannot be written ({error.strerror}): choose another path") from None


def _table(entry: dict[str, Any]) -> Table:
    gpu = Chip(**entry["chip"] | {"capability": tuple(entry["chip"]["capability"])})
    shapes = {_shape(name): _plans(buckets, _shape(name)) for name, buckets in entry["shapes"].items()}
    # Older files have no format; they were measured with dense weights.
    return Table(gpu, entry["dtype"], shapes, entry["measured"], entry.get("format", DENSE))


def _shape(name: str) -> Shape:
    num_out, num_in = name.split("x")
    return int(num_out), int(num_in)


def _plans(buckets: dict[str, Any], shape: Shape) -> LinearPlans:
    if list(buckets) != [str(max_rows) for max_rows in ROWS_BUCKETS]:
        raise ValueError(f"the row-count buckets must be {', '.join(map(str, ROWS_BUCKETS))}")
    return LinearPlans(tuple(None if fields is None else _plan(fields, shape) for fields in buckets.values()))


def _plan(fields: dict[str, Any], shape: Shape) -> LibraryPlan | TritonPlan:
    return _library_plan(fields, shape) if "pieces" in fields else _triton_plan(fields)


def _library_plan(fields: dict[str, Any], shape: Shape) -> LibraryPlan:
    plan = LibraryPlan(**fields)
    if min(plan.pieces, plan.splits) != 1 or max(plan.pieces, plan.splits) < 2:
        raise ValueError(f"{plan} must have one of pieces and splits at 1 and the other above 1")
    if shape[1] % plan.splits:
        raise ValueError(f"the splits of {plan} do not divide the {shape[1]} columns of the weight")
    return plan


def _triton_plan(fields: dict[str, Any]) -> TritonPlan:
    """Refuses, when the table is read, a plan that could not be launched."""
    plan = TritonPlan(**fields)
    powers_of_two = plan.block_out, plan.block_in, plan.warps
    if min(*powers_of_two, plan.splits, plan.stages) < 1 or any(size & (size - 1) for size in powers_of_two):
        raise ValueError(f"{plan} must be positive, and its blocks and warps powers of two")
    if plan.block_in < MIN_BLOCK_IN:
        raise ValueError(f"{plan} must have a block_in of at least {MIN_BLOCK_IN}")
    return plan


def _entry(table: Table) -> dict[str, Any]:
    shapes = {
        f"{num_out}x{num_in}": {
            str(max_rows): plan and asdict(plan) for max_rows, plan in zip(ROWS_BUCKETS, plans.by_bucket, strict=True)
        }
        for (num_out, num_in), plans in sorted(table.shapes.items())
    }
    key = {"chip": asdict(table.chip), "dtype": table.dtype, "format": table.format}
    return key | {"measured": dict(table.measured), "shapes": shapes}


def _json(content: dict[str, Any]) -> str:
    """JSON with one line per plan, so that the diff of a changed table is readable."""
    text = json.dumps(content, indent=1)
    return re.sub(r"\{[^{}]*\}", lambda innermost: " ".join(innermost.group().split()), text) + "\n"
