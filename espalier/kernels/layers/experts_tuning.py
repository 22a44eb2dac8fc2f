"""The tuning table of the expert product: the plans for each size of expert.  Nothing is measured at start.

`espalier doctor --tune experts` measures and writes tables.  They are in the same file as the tables of linear layers
(linear_tuning.py), with the same rules for chips and for the user's own file.  Plans are listed by the size of an
expert (hidden, inner) and by the mean pairs (row, choice) per expert.  A size that was not measured takes the plans of
the size nearest in bytes.  A chip without a table takes the rule of experts_plan.py.
"""

import logging
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.hopper.plans import FEW_ROWS, TILE, takes_format
from espalier.kernels.layers.experts_plan import PAIRS_BUCKETS, ExpertsPlan, ExpertsShape, ProductPlan, rule
from espalier.kernels.layers.experts_quantised import quantised_rule
from espalier.kernels.layers.linear_plans import MIN_BLOCK_ROWS
from espalier.kernels.layers.linear_tuning import (
    DTYPES,
    SHIPPED,
    own_file,
    read_entries,
    write_entries,
)
from espalier.kernels.layers.quantised import QuantisedMatrix
from espalier.kernels.runtime.launch import Chip, power_of_two

# Key of the list of tables in the file.
ENTRIES = "experts"

# Mean pairs of an expert up to which tiles have FEW_ROWS where a kernel has such tiles.
FEW_PAIRS = 4

# (hidden, inner) of an expert, and its plans in the order of PAIRS_BUCKETS.
Size = tuple[int, int]
Plans = tuple[ExpertsPlan, ...]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExpertsTable:
    """The plans measured on one kind of chip, for one dtype.  measured: GPU name and versions, for readers only."""

    chip: Chip
    dtype: str
    sizes: Mapping[Size, Plans]
    measured: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> tuple[Chip, str]:
        return self.chip, self.dtype


def plan_for(
    shape: ExpertsShape,
    rows: int,
    dtype: torch.dtype,
    gpu: Chip,
    matrices: tuple[Tensor | QuantisedMatrix, Tensor | QuantisedMatrix] | None = None,
) -> ExpertsPlan:
    """The plan for a number of rows.  matrices: gate_up and down; None: both are dense."""
    plan = _measured_or_rule(shape, rows, dtype, gpu)
    # The experts of one row differ: there is nothing to sort.
    plan = replace(plan, rows=1) if rows == 1 else plan
    if matrices is None:
        return plan
    is_few = plan.rows == MIN_BLOCK_ROWS and power_of_two(rows) * shape.top_k <= FEW_PAIRS * shape.num_experts
    if is_few and all(isinstance(m, QuantisedMatrix) and takes_format(m, dtype, FEW_ROWS, gpu) for m in matrices):
        few = quantised_rule(shape, rows, replace(plan, rows=FEW_ROWS), *matrices, gpu)
        if few.gated.tile(2) == few.down.tile(1) == TILE:
            # Half of the products; an expert seldom has more pairs.
            return few
    return quantised_rule(shape, rows, plan, *matrices, gpu)


def _measured_or_rule(shape: ExpertsShape, rows: int, dtype: torch.dtype, gpu: Chip) -> ExpertsPlan:
    if dtype in DTYPES:
        plans = _active_plans((gpu, str(dtype).removeprefix("torch.")), own_file())
        if plans:
            return _nearest(plans, shape.size)[shape.bucket(rows)]
    return rule(shape, rows, dtype, gpu)


def _nearest(plans: Mapping[Size, Plans], size: Size) -> Plans:
    """The plans of this size, else of the size nearest in bytes; of equally near sizes, the first."""
    own = plans.get(size)
    if own is not None:
        return own
    return plans[min(plans, key=lambda known: abs(math.log(known[0] * known[1] / (size[0] * size[1]))))]


@cache
def _active_plans(key: tuple[Chip, str], user_path: Path) -> Mapping[Size, Plans]:
    """Shipped plans, overridden size by size by the user's.  Reads and logs once per process."""
    plans: dict[Size, Plans] = {}
    for path in (SHIPPED, user_path):
        for table in read(path) if os.path.isfile(path) else ():
            if table.key == key:
                plans |= table.sizes
    sizes = ", ".join(f"{hidden}x{inner}" for hidden, inner in plans)
    log.info("experts, %s: %s", key[1], f"plans measured for {sizes}" if plans else "no plans measured on this chip")
    return plans


def read(path: Path) -> list[ExpertsTable]:
    """The tables of experts in a file; none if it has only those of linear layers.  Raises EspalierError."""
    try:
        return [_table(entry) for entry in read_entries(path).get(ENTRIES, [])]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise EspalierError(
            f"{path} is no table of experts ({error!r}): remove it, or write it again with espalier doctor --tune"
        ) from None


def write(path: Path, table: ExpertsTable) -> None:
    """Merge a table into a file.  The file keeps other tables, and sizes of the same table that are not in `table`."""
    tables = read(path) if path.exists() else []
    old_sizes = {size: plans for old in tables if old.key == table.key for size, plans in old.sizes.items()}
    merged = replace(table, sizes=old_sizes | dict(table.sizes))
    write_entries(path, ENTRIES, [_entry(each) for each in (*(t for t in tables if t.key != table.key), merged)])


def _table(entry: dict[str, Any]) -> ExpertsTable:
    gpu = Chip(**entry["chip"] | {"capability": tuple(entry["chip"]["capability"])})
    sizes = {_size(name): _plans(buckets) for name, buckets in entry["sizes"].items()}
    return ExpertsTable(gpu, entry["dtype"], sizes, entry["measured"])


def _size(name: str) -> Size:
    hidden, inner = name.split("x")
    return int(hidden), int(inner)


def _plans(buckets: dict[str, Any]) -> Plans:
    if list(buckets) != [str(bound) for bound in PAIRS_BUCKETS]:
        raise ValueError(f"the buckets of pairs an expert must be {', '.join(map(str, PAIRS_BUCKETS))}")
    return tuple(
        ExpertsPlan(fields["rows"], ProductPlan(*fields["gated"]), ProductPlan(*fields["down"]))
        for fields in buckets.values()
    )


def _entry(table: ExpertsTable) -> dict[str, Any]:
    sizes = {
        f"{hidden}x{inner}": {
            str(bound): {"rows": plan.rows, "gated": _fields(plan.gated), "down": _fields(plan.down)}
            for bound, plan in zip(PAIRS_BUCKETS, plans, strict=True)
        }
        for (hidden, inner), plans in sorted(table.sizes.items())
    }
    return {"chip": asdict(table.chip), "dtype": table.dtype, "measured": dict(table.measured), "sizes": sizes}


def _fields(plan: ProductPlan) -> list[int]:
    """block_out, block_in, warps and stages."""
    return list(asdict(plan).values())
