"""Which tree a batch has: what the user says, a table in a file, or the crossing that was measured on this chip.

A table says "from this many requests on, this tree".  `espalier bench round --choose` measures and writes one.  Without
one, plain decoding takes over where it was measured to be as fast: crossovers that were measured by us are shipped
beside this file, and the nearest one decides.
"""

import json
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from espalier.errors import EspalierError
from espalier.kernels.runtime.launch import Chip
from espalier.layout import PLAIN, TREE_FIELDS, TreeShape

SHIPPED = Path(__file__).with_name("crossovers.json")
# Where launches bind and not weights, plain decoding is as fast at other batches: a crossing says nothing of targets
# that have so many times more or fewer weights.
UNLIKE = 4.0
EXAMPLE = '{"8": {"steps": 3, "topk": 2, "num_draft_tokens": 8}, "64": {"steps": 0}}'
log = logging.getLogger("espalier")

Trees = dict[int, TreeShape]


@dataclass(frozen=True)
class Machine:
    """What a crossing depends on: the chip, the dtype, and the target's width and depth."""

    chip: Chip
    dtype: str
    hidden_size: int
    num_layers: int


@dataclass(frozen=True)
class Crossover:
    """Of a tree on a machine: plain decoding was as fast from plain_from requests on.  measured: how, for the
    reader."""

    machine: Machine
    tree: TreeShape
    plain_from: int
    measured: Mapping[str, Any] = field(default_factory=dict)


def choose_trees(
    asked: Any, configured: TreeShape, machine: Machine | None, is_named: bool = False, max_batch: int = 1
) -> Trees:
    """Trees by the least number of requests that has them; machine: None where nothing is measured, as on a CPU.

    asked: a table, the path of one, or "auto".  is_named: whether the user asked for the configured tree; max_batch:
    the largest batch.  Raises EspalierError naming what is wrong with a table; whether trees fit the configured one is
    the layout's to say.  One line in the log says what was decided, and why: a warning where "auto" takes a named tree
    away from batches that there are.
    """
    if isinstance(asked, Mapping):
        chosen, why = parse(asked, "by_batch"), "as set"
    elif asked != "auto":
        chosen, why = read(Path(asked)), f"as {asked} says"
    elif configured == PLAIN:
        return {}
    else:
        chosen, why = _crossed(configured, machine)
    spelled = "; ".join(f"from {least} requests on {shape}" for least, shape in chosen.items())
    takes_away = asked == "auto" and is_named and min(chosen, default=max_batch + 1) <= max_batch
    level = logging.WARNING if takes_away else logging.INFO
    log.log(level, "trees by batch: %s%s (%s)", configured, f"; {spelled}" if chosen else " at every batch", why)
    return chosen


def _crossed(configured: TreeShape, machine: Machine | None) -> tuple[Trees, str]:
    """What the nearest crossing says, and in words where it comes from."""
    near = None if machine is None else nearest(crossovers(), machine, configured)
    if near is None:
        return {}, "no crossing is measured for such a target here; `espalier bench round --choose` measures one"
    on = f"hidden size {near.machine.hidden_size}, {near.machine.num_layers} layers, {near.tree}"
    return {near.plain_from: PLAIN}, f"plain was as fast there with {on}; by_batch={{}} keeps the tree"


def nearest(known: list[Crossover], machine: Machine, tree: TreeShape) -> Crossover | None:
    """The crossing of this chip and dtype whose target is nearest in weights, and whose tree then is; None where every
    target is too far."""

    def apart(one: Crossover) -> tuple[float, float, int, int]:
        return (
            abs(math.log(_weights(one.machine) / _weights(machine))),
            abs(math.log(one.tree.num_draft_tokens / tree.num_draft_tokens)),
            abs(one.tree.steps - tree.steps),
            abs(one.tree.topk - tree.topk),
        )

    here = [one for one in known if (one.machine.chip, one.machine.dtype) == (machine.chip, machine.dtype)]
    return min((one for one in here if apart(one)[0] < math.log(UNLIKE)), key=apart, default=None)


def _weights(machine: Machine) -> int:
    """In proportion to those of a target's layers."""
    return machine.hidden_size**2 * machine.num_layers


def parse(table: Mapping[Any, Any], where: str) -> Trees:
    """Trees of a table, {requests: TreeShape or its fields}; at steps 0 the others may be left out.

    Raises EspalierError naming the entry.
    """
    trees: Trees = {}
    for key, value in table.items():
        least = _requests(key, where)
        if trees and least <= max(trees):
            raise EspalierError(f"{where}: {least} stands after {max(trees)}; name numbers of requests in order")
        trees[least] = value if isinstance(value, TreeShape) else _shape(value, f"{where}, from {least} requests on")
    return trees


def _requests(key: Any, where: str) -> int:
    as_text = str(key)
    if isinstance(key, bool) or not (as_text.isascii() and as_text.isdigit() and int(as_text) > 0):
        raise EspalierError(f"{where}: {key!r} is no number of requests; use 1 or more, as in {EXAMPLE}")
    return int(as_text)


def _shape(value: Any, where: str) -> TreeShape:
    if not isinstance(value, Mapping):
        raise EspalierError(f"{where}: {value!r} is no tree; use an object such as those of {EXAMPLE}")
    for name in value:
        if name not in TREE_FIELDS:
            raise EspalierError(f"{where}: unknown {name!r}; a tree has {', '.join(TREE_FIELDS)}")
    sizes = asdict(PLAIN) | dict(value) if value.get("steps") == 0 else dict(value)
    for name in TREE_FIELDS:
        if name not in sizes:
            raise EspalierError(f"{where}: {name} is missing; a tree has {', '.join(TREE_FIELDS)}")
        if type(sizes[name]) is not int:
            raise EspalierError(f"{where}: {name}={sizes[name]!r} is not supported; use a whole number")
    try:
        return TreeShape(**sizes)
    except EspalierError as error:
        raise EspalierError(f"{where}: {error}") from None


def read(path: Path) -> Trees:
    """A table as `write` makes it.  Raises EspalierError naming the file."""
    return parse(_read_object(path, "table of trees; `espalier bench round --choose` writes one"), str(path))


def write(path: Path, trees: Mapping[int, TreeShape]) -> None:
    """Raises EspalierError where the file cannot be written."""
    lines = [f"  {json.dumps(str(least))}: {json.dumps(asdict(shape))}" for least, shape in trees.items()]
    try:
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    except OSError as error:
        raise EspalierError(f"{path} cannot be written ({error.strerror}); name another file") from None


def crossovers(path: Path = SHIPPED) -> list[Crossover]:
    """What was measured.  Raises EspalierError naming a file that holds something else."""
    found = _read_object(path, "list of crossovers; install espalier again")
    try:
        return [_crossing(entry) for entry in found["crossovers"]]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise EspalierError(f"{path} is no list of crossovers ({error!r}); install espalier again") from None


def _crossing(entry: dict[str, Any]) -> Crossover:
    chip = Chip(**entry["chip"] | {"capability": tuple(entry["chip"]["capability"])})
    machine = Machine(chip, entry["dtype"], int(entry["hidden_size"]), int(entry["num_layers"]))
    return Crossover(
        machine, _shape(entry["tree"], "tree"), _requests(entry["plain_from"], "plain_from"), entry["measured"]
    )


def _read_object(path: Path, what: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a name stands in it twice")
        return dict(pairs)

    if not os.path.isfile(path):
        raise EspalierError(f"{path} is not a file; name a {what}")
    try:
        found = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique)
    except (OSError, ValueError) as error:
        raise EspalierError(f"{path} cannot be read ({error}); name a {what}") from None
    if not isinstance(found, dict):
        raise EspalierError(f"{path} holds no JSON object; name a {what}")
    return found
