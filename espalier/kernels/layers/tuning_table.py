"""Tuning tables in a file: the plans that were measured for the sizes of a kind of layer, on one kind of chip.

`espalier doctor --tune` measures and writes tables.  Our own measurements ship beside this file.  A user's table is
read from the path in CHOICES_FILE or, if that is not set, from the user's configuration folder; its entries override
the shipped ones.  A table applies to chips with the same compute capability, number of SMs and shared memory, and to
the same activation dtype and weight format.  The GPU's name does not matter.  Nothing is measured at start.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from espalier.errors import EspalierError
from espalier.kernels.runtime.launch import Chip

# Environment variable: the path of the user's table.
CHOICES_FILE = "ESPALIER_CHOICES"
SHIPPED = Path(__file__).with_name("linear_tuning.json")
# Weight format: one tensor in the dtype of the activations.
DENSE = "dense"
# The list of tables that every file has.
ALWAYS = "tables"

# [out, in] of a linear layer, or (hidden, inner) of an expert.
Size = tuple[int, int]
Key = tuple[Chip, str, str]
P = TypeVar("P")


@dataclass(frozen=True)
class TuningTable(Generic[P]):
    """The plans measured on one kind of chip, for one activation dtype and one weight format.

    plans: by size, one for each bucket.  measured: GPU name and versions of the measurement, for humans only.
    """

    chip: Chip
    dtype: str
    plans: Mapping[Size, tuple[P, ...]]
    measured: Mapping[str, str] = field(default_factory=dict)
    format: str = DENSE

    @property
    def key(self) -> Key:
        return self.chip, self.dtype, self.format


@dataclass(frozen=True, eq=False)
class TunedKind(Generic[P]):
    """A kind of layer: how a file keeps its tables.

    words: for errors.  entries, plans: the keys of the list of tables in the file, and of the plans in a table.
    buckets: the upper bounds of `of`, such as rows; a size has a plan for each.
    encode, decode: a plan as JSON, and back; decode raises ValueError for a plan that cannot be used.
    log: (key, plans by size, files they are from, each with its number of sizes), when they are first used.
    """

    words: str
    entries: str
    plans: str
    of: str
    buckets: tuple[float, ...]
    encode: Callable[[P], Any]
    decode: Callable[[Any, Size], P]
    log: Callable[[Key, Mapping[Size, tuple[P, ...]], Sequence[str]], None]

    def at(self, plans: Sequence[P], count: float) -> P | None:
        """The plan of a size for the bucket of `count`; None above the largest."""
        for bound, plan in zip(self.buckets, plans, strict=True):
            if count <= bound:
                return plan
        return None

    def read(self, path: Path) -> list[TuningTable[P]]:
        """The tables in a file.  Raises EspalierError, naming the file, if it does not have the format of `write`."""
        try:
            return [self._table(entry) for entry in _content(path).get(self.entries, [])]
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise EspalierError(
                f"{path} is no table of {self.words} ({error!r}): remove it, or write it again with espalier doctor "
                "--tune"
            ) from None

    def write(self, path: Path, table: TuningTable[P]) -> None:
        """Merge a table into a file.  The file keeps other tables, and sizes of the same table that are not in `table`.

        Raises EspalierError.
        """
        tables = self.read(path) if path.exists() else []
        known = {size: plan for old in tables if old.key == table.key for size, plan in old.plans.items()}
        merged = [*(old for old in tables if old.key != table.key), replace(table, plans=known | dict(table.plans))]
        content = _content(path) if path.exists() else {ALWAYS: []}
        content[self.entries] = [self._entry(each) for each in merged]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_json(content), encoding="utf-8")
        except OSError as error:
            raise EspalierError(f"{path} cannot be written ({error.strerror}): choose another path") from None

    def measured(self, gpu: Chip, dtype: torch.dtype, format: str = DENSE) -> Mapping[Size, tuple[P, ...]]:
        """The plans by size that were measured on this chip: the shipped ones, overridden size by size by the user's.

        dtype: of the activations.  The files are read, and what they hold is logged, once per process.
        """
        return active_plans(self, (gpu, str(dtype).removeprefix("torch."), format), own_file())

    def _table(self, entry: dict[str, Any]) -> TuningTable[P]:
        gpu = Chip(**entry["chip"] | {"capability": tuple(entry["chip"]["capability"])})
        plans = {_size(name): self._decoded(of_size, _size(name)) for name, of_size in entry[self.plans].items()}
        # Some entries have no format; they were measured with dense weights.
        return TuningTable(gpu, entry["dtype"], plans, entry["measured"], entry.get("format", DENSE))

    def _decoded(self, of_size: dict[str, Any], size: Size) -> tuple[P, ...]:
        if list(of_size) != [str(bound) for bound in self.buckets]:
            raise ValueError(f"the buckets of {self.of} must be {', '.join(map(str, self.buckets))}")
        return tuple(self.decode(plan, size) for plan in of_size.values())

    def _entry(self, table: TuningTable[P]) -> dict[str, Any]:
        bounds = list(map(str, self.buckets))
        plans = {
            f"{first}x{second}": dict(zip(bounds, map(self.encode, of_size), strict=True))
            for (first, second), of_size in sorted(table.plans.items())
        }
        key = {"chip": asdict(table.chip), "dtype": table.dtype, "format": table.format}
        return key | {"measured": dict(table.measured), self.plans: plans}


@cache
def active_plans(kind: TunedKind[P], key: Key, user_path: Path) -> Mapping[Size, tuple[P, ...]]:
    """See TunedKind.measured.  The user's file need not exist."""
    plans: dict[Size, tuple[P, ...]] = {}
    sources = []
    # pathlib's is_file raises if the user may not read the folder.
    for path in (path for path in (SHIPPED, user_path) if os.path.isfile(path)):
        for table in kind.read(path):
            if table.key == key:
                plans |= table.plans
                sources.append(f"{path} ({len(table.plans)} shapes)")
    kind.log(key, plans, sources)
    return plans


def own_file() -> Path:
    """The path of the user's table; the file need not exist."""
    # expanduser does not raise if the user has no home; pathlib's version does.
    config = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(os.environ.get(CHOICES_FILE) or f"{config}/espalier/choices.json")


def _content(path: Path) -> dict[str, Any]:
    """The file as JSON: lists of tables by the kind of layer."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or ALWAYS not in content:
        raise ValueError(f"no JSON object with {ALWAYS!r}")
    return content


def _size(name: str) -> Size:
    first, second = name.split("x")
    return int(first), int(second)


def _json(content: dict[str, Any]) -> str:
    """JSON with one line per plan, so that the diff of a changed table is readable."""
    text = json.dumps(content, indent=1)
    return re.sub(r"\{[^{}]*\}", lambda innermost: " ".join(innermost.group().split()), text) + "\n"
