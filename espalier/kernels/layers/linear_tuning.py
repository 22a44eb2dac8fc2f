"""Which way each linear layer is computed: a measured table, read from files, never timed at start.

`espalier doctor --tune` measures and writes it.  What was measured by us is shipped beside this file; a user's own
stands in CHOICES_FILE or, without it, in the user's configuration folder, and is asked first.  A table is in force
where everything holds that it depends on: capability, number of processors and shared memory of the chip, the dtype of
what is multiplied, and the format of the weight; a device's name decides nothing.  Dense layers without an entry go to
PyTorch's F.linear, and the log says so.
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
from espalier.kernels.layers.linear import DTYPES, LibraryPlan, LinearPlan, TritonPlan
from espalier.kernels.runtime.launch import Chip, chip

# Names a user's own file.
CHOICES_FILE = "ESPALIER_CHOICES"
SHIPPED = Path(__file__).with_name("linear_tuning.json")
# Up to each of these, rows are launched alike, and above the last by F.linear; by a TritonPlan, a row's bits do not
# depend on their number either. Fewer than 16 are padded to 16, so they have no bucket of their own.
ROWS_BUCKETS = (16, 32, 64, 128, 256)

# What a line of 128 bytes holds: the kernel asks for whole ones.
LEAST_BLOCK_IN = 64

# The format of a weight that is one tensor in the dtype of what it is multiplied with.
DENSE = "dense"

Shape = tuple[int, int]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LinearPlans:
    """Of one weight's shape: for each bucket of rows the way to compute it, None for F.linear."""

    by_bucket: tuple[LinearPlan, ...] = (None,) * len(ROWS_BUCKETS)

    def at(self, rows: int) -> LinearPlan:
        for bound, way in zip(ROWS_BUCKETS, self.by_bucket, strict=True):
            if rows <= bound:
                return way
        return None


@dataclass(frozen=True)
class Table:
    """What was measured on one kind of chip, in one dtype, for weights of one format.  shapes: by the weight's [out,
    in].  measured: on what, for the reader."""

    chip: Chip
    dtype: str
    shapes: Mapping[Shape, LinearPlans]
    measured: Mapping[str, str] = field(default_factory=dict)
    format: str = DENSE

    @property
    def key(self) -> tuple[Chip, str, str]:
        return self.chip, self.dtype, self.format


def plans_for(shape: Shape, format: str, dtype: torch.dtype, stored: Tensor) -> LinearPlans | None:
    """What is in force for a weight [out, in]; None: nothing was measured.

    dtype: of the rows that it multiplies; stored: any tensor of the weight, which tells the chip.
    """
    if not stored.is_cuda or dtype not in DTYPES:
        return None
    name = str(dtype).removeprefix("torch.")
    return _in_force((chip(stored), name, format), own_file()).get(shape) or _missing(shape, name, format)


def own_file() -> Path:
    """Where a user's own table stands."""
    # expanduser and isfile, unlike pathlib's, raise neither for a user without a home nor for one that may not look.
    config = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(os.environ.get(CHOICES_FILE) or f"{config}/espalier/choices.json")


@cache
def _in_force(key: tuple[Chip, str, str], own: Path) -> Mapping[Shape, LinearPlans]:
    """Read once a process, and logged then.  A user's entry stands before the shipped one of its shape."""
    found: dict[Shape, LinearPlans] = {}
    sources = []
    for path in (SHIPPED, own):
        for table in read(path) if os.path.isfile(path) else ():
            if table.key == key:
                found |= table.shapes
                sources.append(f"{path} ({len(table.shapes)} shapes)")
    on, dtype, format = key
    where = f"capability {on.capability[0]}.{on.capability[1]}, {on.processors} processors, {on.shared_memory} bytes"
    force = f"as measured in {', '.join(sources)}" if sources else "F.linear; `espalier doctor --tune` measures others"
    log.info("linear layers, %s weights, %s, %s: %s", format, dtype, where, force)
    return found


@cache
def _missing(shape: Shape, dtype: str, format: str) -> None:
    log.info("linear layers: none measured for [%d, %d], %s, in %s; F.linear", *shape, format, dtype)


def read(path: Path) -> list[Table]:
    """Raises EspalierError naming a file that is not what `write` makes."""
    try:
        return [_table(entry) for entry in json.loads(path.read_text(encoding="utf-8"))["tables"]]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise EspalierError(
            f"{path} is no table of linear layers ({error!r}); remove it, or write it anew: espalier doctor --tune"
        ) from None


def write(path: Path, table: Table) -> None:
    """Put a table into a file.  What stands there for the same chip, dtype and format keeps the shapes that are not
    new."""
    tables = read(path) if path.exists() else []
    same = [old for old in tables if old.key == table.key]
    kept = {shape: choices for old in same for shape, choices in old.shapes.items()}
    merged = replace(table, shapes=kept | dict(table.shapes))
    entries = [_entry(old) for old in tables if old not in same] + [_entry(merged)]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_json(entries), encoding="utf-8")
    except OSError as error:
        raise EspalierError(f"{path} cannot be written ({error.strerror}); name another file") from None


def _table(entry: dict[str, Any]) -> Table:
    on = Chip(**entry["chip"] | {"capability": tuple(entry["chip"]["capability"])})
    shapes = {_shape(name): _choices(buckets, _shape(name)) for name, buckets in entry["shapes"].items()}
    # A file from before there were formats was measured with dense weights.
    return Table(on, entry["dtype"], shapes, entry["measured"], entry.get("format", DENSE))


def _shape(name: str) -> Shape:
    num_out, num_in = name.split("x")
    return int(num_out), int(num_in)


def _choices(buckets: dict[str, Any], shape: Shape) -> LinearPlans:
    if list(buckets) != [str(bound) for bound in ROWS_BUCKETS]:
        raise ValueError(f"buckets of rows are {', '.join(map(str, ROWS_BUCKETS))}")
    return LinearPlans(
        tuple(
            None if way is None else _library(way, shape) if "pieces" in way else _checked(TritonPlan(**way), bound)
            for way, bound in zip(buckets.values(), ROWS_BUCKETS, strict=True)
        )
    )


def _library(way: dict[str, Any], shape: Shape) -> LibraryPlan:
    found = LibraryPlan(**way)
    if min(found.pieces, found.splits) != 1 or max(found.pieces, found.splits) < 2:
        raise ValueError(f"{found} is not in pieces or in parts")
    if shape[1] % found.splits:
        raise ValueError(f"{found} does not divide the {shape[1]} numbers of a row")
    return found


def _checked(choice: TritonPlan, rows: int) -> TritonPlan:
    """Refuse, when a table is read, what would fail when it is launched."""
    blocks = choice.block_out, choice.block_in, choice.warps
    if min(*blocks, choice.splits, choice.stages) < 1 or any(size & (size - 1) for size in blocks):
        raise ValueError(f"{choice} has blocks or warps that are no powers of two, or none")
    if choice.block_in < LEAST_BLOCK_IN:
        raise ValueError(f"{choice} for {rows} rows reads fewer than {LEAST_BLOCK_IN} columns at once")
    return choice


def _entry(table: Table) -> dict[str, Any]:
    shapes = {
        f"{num_out}x{num_in}": {
            str(bound): way and asdict(way) for bound, way in zip(ROWS_BUCKETS, choices.by_bucket, strict=True)
        }
        for (num_out, num_in), choices in sorted(table.shapes.items())
    }
    about = {"chip": asdict(table.chip), "dtype": table.dtype, "format": table.format}
    return about | {"measured": dict(table.measured), "shapes": shapes}


def _json(entries: list[dict[str, Any]]) -> str:
    """A line for each launch, so that a changed table reads well."""
    text = json.dumps({"tables": entries}, indent=1)
    return re.sub(r"\{[^{}]*\}", lambda innermost: " ".join(innermost.group().split()), text) + "\n"
