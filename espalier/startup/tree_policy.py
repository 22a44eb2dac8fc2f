"""Chooses the tree for each batch size: the user's table, a table in a file, or the trees that are predicted.

A table says "from n requests on, use this tree".  `espalier bench choose` measures and writes one.  Without a
table, the trees are predicted (tree_cost.py) from what the GPU was measured to do at the start (measure_chip.py), and
chosen anew while the engine runs (engine/tree_choice.py), among those of tree_sets.py.
"""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from espalier.config import SpeculationConfig, is_open
from espalier.engine.acceptance import ACCEPTED_BY
from espalier.engine.round_times import CpuCosts
from espalier.errors import EspalierError, once_each
from espalier.layout import PLAIN, TREE_FIELDS, RoundCosts, TreeShape
from espalier.startup.tree_cost import ChipFigures, PassWeights, trees_by_cost
from espalier.startup.tree_sets import Choices, PredictedCosts, sharing, tree_sets

# Rows of a verify pass that trees by default do not exceed.  Staging and logits grow with them: 4096 rows of
# llama-3.1-8b are 0.54 GB of K and V, and 1.05 GB of logits in bfloat16.
MAX_VERIFY_ROWS = 4096
EXAMPLE = '{"8": {"steps": 3, "topk": 2, "num_draft_tokens": 8}, "64": {"steps": 0}}'
log = logging.getLogger("espalier")

Trees = dict[int, TreeShape]


@dataclass(frozen=True)
class Machine:
    """The facts that trees are predicted from.  weights: of target and draft."""

    chip: ChipFigures
    weights: PassWeights


def choose_trees(
    requested: Any, configured: TreeShape, machine: Machine | None, is_named: bool = False, max_batch: int = 1
) -> Trees:
    """The trees that differ from the configured one: least number of requests -> tree.

    requested: a table, the path of one, or "auto"; machine: None where nothing is predicted, as on a CPU.
    is_named: whether the user set the configured tree; max_batch: the largest batch.
    Logs one line with the trees and the reason; a warning if "auto" may replace the user's tree.
    Raises EspalierError naming what is wrong with a table.  RoundLayout checks that trees fit the configured one.
    """
    if isinstance(requested, Mapping):
        chosen, why = parse(requested, "by_batch"), "set by by_batch"
    elif requested != "auto":
        chosen, why = read(Path(requested)), f"read from {requested}"
    elif configured == PLAIN:
        return {}
    elif machine is None:
        chosen, why = {}, "trees of smaller batches are not predicted for this device"
    else:
        chosen, why = _predicted_trees(configured, machine, max_batch)
    if requested == "auto":
        chosen, why = _bounded(chosen, configured, max_batch), why
    listed = "; ".join(f"from {least} requests on {shape}" for least, shape in chosen.items())
    replaces_named = requested == "auto" and is_named and machine is not None
    level = logging.WARNING if replaces_named else logging.INFO
    log.log(level, "trees by batch: %s%s (%s)", configured, f"; {listed}" if chosen else " at every batch", why)
    return chosen


def names_tree(speculation: SpeculationConfig) -> bool:
    """Whether the user set a size of the tree."""
    return any(not is_open(getattr(speculation, name)) for name in TREE_FIELDS)


def choose_while_running(
    speculation: SpeculationConfig,
    configured: TreeShape,
    machine: Machine | None,
    max_batch: int,
    algorithm: str,
    shares: bool,
    sources: Sequence[str],
    weights: PassWeights,
) -> tuple[RoundCosts | None, Choices]:
    """The values of ResolvedConfig.round_costs and RoundLayout.choices.  None and () if the engine does not choose
    trees while it runs.

    speculation: as the user gave it.  On a CPU, a tree that the user names runs in every round, and a draft model
    pauses only where other sources search texts.  shares: as in tree_sets; sources: beside the drafter; weights: of
    target and draft.
    """
    if speculation.by_batch != "auto" or configured == PLAIN:
        return None, ()
    looks_up = algorithm != "ngram" and bool(sources)
    if machine is not None:
        costs = PredictedCosts(machine.weights, machine.chip)
        return costs, tree_sets(configured, costs, max_batch, MAX_VERIFY_ROWS, shares, looks_up)
    if algorithm == "ngram" and speculation == SpeculationConfig():
        return CpuCosts(), ((1, (configured, PLAIN)),)
    if looks_up and {*sources} != {"prediction"} and not names_tree(speculation):
        lone = (configured, replace(configured, drafts=False), PLAIN)
        shared = tuple(sharing(configured)) if shares else ()
        return CpuCosts(draft=weights.draft / weights.dense), ((1, lone), (2, (*lone, *shared)))
    return None, ()


def _predicted_trees(configured: TreeShape, machine: Machine, max_batch: int) -> tuple[Trees, str]:
    """The trees that tree_cost.py predicts, and the figures behind the prediction in words."""
    chip, routing = machine.chip, "for uniform routing " if machine.weights.expert else ""
    why = (
        f"predicted {routing}from {chip.bandwidth / 1e12:.1f} TB/s and {chip.peak / 1e12:.0f} TFLOP/s, as measured on "
        f"{chip.gpu}, and from the accept lengths of {ACCEPTED_BY}, to begin with; others "
        "follow while the engine runs; by_batch={} keeps the tree"
    )
    return trees_by_cost(configured, machine.weights, max_batch, chip), why


def _bounded(trees: Trees, configured: TreeShape, max_batch: int) -> Trees:
    """These trees.  Smaller batches than theirs get trees of half the nodes, as often as they would exceed
    MAX_VERIFY_ROWS."""
    halves: Trees = {}
    shape, end = configured, min([*trees, max_batch + 1])
    while shape.num_draft_tokens > 1 and (least := MAX_VERIFY_ROWS // shape.num_draft_tokens + 1) < end:
        shape = replace(shape, num_draft_tokens=shape.num_draft_tokens // 2)
        halves[least] = shape
    return halves | trees


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
    sizes = PLAIN.sizes | dict(value) if value.get("steps") == 0 else dict(value)
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
    return parse(_read_object(path, "table of trees; `espalier bench choose` writes one"), str(path))


def write(path: Path, trees: Mapping[int, TreeShape]) -> None:
    """Write a table as JSON.  Raises EspalierError if the file cannot be written."""
    lines = [f"  {json.dumps(str(least))}: {json.dumps(shape.sizes)}" for least, shape in trees.items()]
    try:
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    except OSError as error:
        raise EspalierError(f"{path} cannot be written ({error.strerror}); name another file") from None


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
