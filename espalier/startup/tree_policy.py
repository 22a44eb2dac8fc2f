"""Chooses the tree for each batch size: the user's table, a table in a file, or a measured crossover.

A table says "from n requests on, use this tree".  `espalier bench round --choose` measures and writes one.  Without a
table, plain decoding is used from the crossover on: the batch size at which it was measured to be as fast as the tree.
crossovers.json has our measurements, of dense targets; the one whose target is most similar is used.  For a mixture of
experts the trees are predicted (tree_cost.py).
"""

import json
import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from espalier.errors import EspalierError, once_each
from espalier.kernels.runtime.launch import Chip
from espalier.layout import PLAIN, TREE_FIELDS, TreeShape
from espalier.startup.tree_cost import ACCEPTED_BY, ChipFigures, MixtureWeights, trees_by_cost

SHIPPED = Path(__file__).with_name("crossovers.json")
# A crossover is used only for targets with less than this many times more or fewer weights.  Small models are bound by
# launches and not by reading weights, so their crossover is elsewhere.
MAX_WEIGHT_RATIO = 4.0
# Rows of a verify pass that trees by default do not exceed.  Staging and logits grow with them: 4096 rows of
# llama-3.1-8b are 0.54 GB of K and V, and 1.05 GB of logits in bfloat16.
MAX_VERIFY_ROWS = 4096
EXAMPLE = '{"8": {"steps": 3, "topk": 2, "num_draft_tokens": 8}, "64": {"steps": 0}}'
log = logging.getLogger("espalier")

Trees = dict[int, TreeShape]
Parsed = TypeVar("Parsed")


@dataclass(frozen=True)
class Machine:
    """The facts that trees are chosen by: the chip, the dtype, and the target's width and depth.

    mixture: the weights of a mixture of experts; None for a dense target.
    """

    chip: Chip
    dtype: str
    hidden_size: int
    num_layers: int
    mixture: MixtureWeights | None = None


@dataclass(frozen=True)
class Crossover:
    """A measurement: from `plain_from` requests on, plain decoding was as fast as this tree on this machine.

    measured: how it was measured; for readers of the file only.
    """

    machine: Machine
    tree: TreeShape
    plain_from: int
    measured: Mapping[str, Any] = field(default_factory=dict)


def choose_trees(
    requested: Any, configured: TreeShape, machine: Machine | None, is_named: bool = False, max_batch: int = 1
) -> Trees:
    """The trees that differ from the configured one, by the least number of requests that uses them.

    requested: a table, the path of one, or "auto"; machine: None where no crossovers are measured, as on a CPU.
    is_named: whether the user set the configured tree; max_batch: the largest batch.
    Logs one line with the trees and the reason; a warning if "auto" replaces the user's tree at a batch that can occur.
    Raises EspalierError naming what is wrong with a table.  RoundLayout checks that trees fit the configured one.
    """
    if isinstance(requested, Mapping):
        chosen, why = parse(requested, "by_batch"), "set by by_batch"
    elif requested != "auto":
        chosen, why = read(Path(requested)), f"read from {requested}"
    elif configured == PLAIN:
        return {}
    elif machine is not None and machine.mixture is not None:
        chosen, why = _predicted(configured, machine, machine.mixture, max_batch)
    else:
        chosen, why = _from_crossover(configured, machine)
    if requested == "auto":
        chosen, why = _bounded(chosen, configured, max_batch), why
    listed = "; ".join(f"from {least} requests on {shape}" for least, shape in chosen.items())
    replaces_named = requested == "auto" and is_named and min(chosen, default=max_batch + 1) <= max_batch
    level = logging.WARNING if replaces_named else logging.INFO
    log.log(level, "trees by batch: %s%s (%s)", configured, f"; {listed}" if chosen else " at every batch", why)
    return chosen


def _predicted(configured: TreeShape, machine: Machine, mixture: MixtureWeights, max_batch: int) -> tuple[Trees, str]:
    """The trees by tree_cost.py, and in words what they were predicted from."""
    known = chip_figures()
    figures = known.get(machine.chip, next(iter(known.values())))
    of_chip = "" if machine.chip in known else ", as this chip was not measured (`espalier bench floor` does)"
    why = (
        f"predicted for uniform routing from the bandwidth and peak of {figures.gpu}{of_chip}, and from the accept "
        f"lengths of {ACCEPTED_BY}; `espalier bench round --choose` measures; by_batch={{}} keeps the tree"
    )
    return trees_by_cost(configured, mixture, max_batch, figures), why


def _from_crossover(configured: TreeShape, machine: Machine | None) -> tuple[Trees, str]:
    """The trees by the nearest crossover, and the reason in words."""
    near = None if machine is None else nearest(crossovers(), machine, configured)
    if near is None:
        return {}, "no crossover is measured for a similar target here; `espalier bench round --choose` measures one"
    on = f"hidden size {near.machine.hidden_size}, {near.machine.num_layers} layers, {near.tree}"
    return {near.plain_from: PLAIN}, f"as fast in a measurement with {on}; by_batch={{}} keeps the tree"


def _bounded(trees: Trees, configured: TreeShape, max_batch: int) -> Trees:
    """These trees and, up to the first of them, half the nodes wherever a batch would exceed MAX_VERIFY_ROWS."""
    halves: Trees = {}
    shape, end = configured, min([*trees, max_batch + 1])
    while shape.num_draft_tokens > 1 and (least := MAX_VERIFY_ROWS // shape.num_draft_tokens + 1) < end:
        shape = replace(shape, num_draft_tokens=shape.num_draft_tokens // 2)
        halves[least] = shape
    return halves | trees


def nearest(known: list[Crossover], machine: Machine, tree: TreeShape) -> Crossover | None:
    """The crossover of this chip and dtype with the most similar number of weights, then the most similar tree.

    None if the weights of every target differ by MAX_WEIGHT_RATIO or more.
    """

    def distance(one: Crossover) -> tuple[float, float, int, int]:
        return (
            abs(math.log(_relative_weights(one.machine) / _relative_weights(machine))),
            abs(math.log(one.tree.num_draft_tokens / tree.num_draft_tokens)),
            abs(one.tree.steps - tree.steps),
            abs(one.tree.topk - tree.topk),
        )

    same_chip = [one for one in known if (one.machine.chip, one.machine.dtype) == (machine.chip, machine.dtype)]
    near = (one for one in same_chip if distance(one)[0] < math.log(MAX_WEIGHT_RATIO))
    return min(near, key=distance, default=None)


def _relative_weights(machine: Machine) -> int:
    """A number proportional to the weights of the target's layers."""
    return machine.hidden_size**2 * machine.num_layers


def parse(table: Mapping[Any, Any], where: str) -> Trees:
    """The trees of a table {requests: TreeShape or its fields}.  With steps 0 the other fields may be missing.

    Raises EspalierError naming the bad entry.
    """
    trees: Trees = {}
    for key, value in table.items():
        least = _requests(key, where)
        if trees and least <= max(trees):
            raise EspalierError(
                f"{where}: {least} comes after {max(trees)}; list numbers of requests in ascending order"
            )
        trees[least] = value if isinstance(value, TreeShape) else _shape(value, f"{where}, from {least} requests on")
    return trees


def _requests(key: Any, where: str) -> int:
    as_text = str(key)
    if isinstance(key, bool) or not (as_text.isascii() and as_text.isdigit() and int(as_text) > 0):
        raise EspalierError(f"{where}: {key!r} is not a number of requests; use 1 or more, as in {EXAMPLE}")
    return int(as_text)


def _shape(value: Any, where: str) -> TreeShape:
    if not isinstance(value, Mapping):
        raise EspalierError(f"{where}: {value!r} is not a tree; use an object, as in {EXAMPLE}")
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
    """Read a table that `write` wrote.  Raises EspalierError naming the file."""
    return parse(_read_object(path, "table of trees; `espalier bench round --choose` writes one"), str(path))


def write(path: Path, trees: Mapping[int, TreeShape]) -> None:
    """Write a table as JSON.  Raises EspalierError if the file cannot be written."""
    lines = [f"  {json.dumps(str(least))}: {json.dumps(asdict(shape))}" for least, shape in trees.items()]
    try:
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    except OSError as error:
        raise EspalierError(f"{path} cannot be written ({error.strerror}); name another file") from None


def crossovers(path: Path = SHIPPED) -> list[Crossover]:
    """The measured crossovers of a file.  Raises EspalierError naming a file of another form."""
    return _parse_all(path, "crossovers", _parse_crossover)


def chip_figures() -> dict[Chip, ChipFigures]:
    """What chips were measured to do."""
    return dict(_parse_all(SHIPPED, "chips", _parse_chip))


def _parse_all(path: Path, name: str, parse_entry: Callable[[dict[str, Any]], Parsed]) -> list[Parsed]:
    content = _read_object(path, f"list of {name}; install espalier again")
    try:
        return [parse_entry(entry) for entry in content[name]]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise EspalierError(f"{path} is not a list of {name} ({error!r}); install espalier again") from None


def _parse_chip(entry: dict[str, Any]) -> tuple[Chip, ChipFigures]:
    return _chip_of(entry), ChipFigures(entry["gpu"], float(entry["bandwidth"]), float(entry["peak"]))


def _chip_of(entry: dict[str, Any]) -> Chip:
    return Chip(**entry["chip"] | {"capability": tuple(entry["chip"]["capability"])})


def _parse_crossover(entry: dict[str, Any]) -> Crossover:
    chip = _chip_of(entry)
    machine = Machine(chip, entry["dtype"], int(entry["hidden_size"]), int(entry["num_layers"]))
    return Crossover(
        machine, _shape(entry["tree"], "tree"), _requests(entry["plain_from"], "plain_from"), entry["measured"]
    )


def _read_object(path: Path, what: str) -> dict[str, Any]:
    if not os.path.isfile(path):
        raise EspalierError(f"{path} is not a file; name a {what}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=once_each)
    except (OSError, ValueError) as error:
        raise EspalierError(f"{path} cannot be read ({error}); name a {what}") from None
    if not isinstance(content, dict):
        raise EspalierError(f"{path} holds no JSON object; name a {what}")
    return content
