"""Chooses the tree for each batch size: from the user's table, from a file, or by prediction.

A table maps a minimum number of requests to a tree.  `espalier bench choose` measures such a table.
Without a table, tree_cost.py predicts the trees from the measured speed of the GPU.  While the engine runs,
engine/tree_choice.py then chooses among the trees of `tree_sets`.

This module also limits how long a prefill pass pauses running streams: it computes the number of rows of a pass from
the predicted time.
"""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from espalier.config import EngineConfig, RoundCosts, SpeculationConfig, is_unresolved
from espalier.engine.acceptance import FIRST_CHILD_RATES, MEASURED_DRAFT, gains, scaled_first_child_rates
from espalier.engine.round_times import CpuCosts
from espalier.errors import EspalierError, require_int, whole_number, without_duplicate_keys
from espalier.layout import MIN_CHUNK_WIDTH, PLAIN_TREE, TREE_FIELDS, TreeShape, next_bucket
from espalier.startup.tree_cost import ASSUMED_CONTEXT, ChipFigures, PassWeights, smaller_trees, trees_by_cost

# TreeShape.shared_rows of trees whose rows are shared by the requests of a batch.  With 8 rows per request, sharing
# gains at most 2%; with 16, nothing (docs/log.md).
SHARED_ROWS = 4
# The depth of a tree on a CPU in a round without a draft pass, where all tokens are looked up in texts.  Repeated text
# is often long, and the engine verifies only rows that are worth their time.
MAX_LOOKUP_STEPS = 12
# How good an unknown draft may be: the possible probabilities that the first child at depth 1 is accepted.
POSSIBLE_RATES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
# The predicted speed of a single tree may be too low by this factor.
RATE_UNCERTAINTY = 1.1
# The engine keeps at least MIN_TREES trees beside plain decoding.  It keeps more trees until, for each of
# POSSIBLE_RATES, the best kept tree is at least MIN_SET_RATE times as fast as the best of all trees.
MIN_TREES, MIN_SET_RATE = 3, 0.97

ChoicesByBatch = tuple[tuple[int, tuple[TreeShape, ...]], ...]


@dataclass(frozen=True)
class PredictedCosts:
    """The times of rounds on a GPU, predicted from the models' sizes (weights) and the GPU's speed (chip)."""

    weights: PassWeights
    chip: ChipFigures
    uses_clock: bool = True

    def seconds(self, tree: TreeShape, batch: int, context: float) -> float:
        """Returns the time of a round of `batch` requests.  context: the mean number of tokens of a request."""
        return self.weights.round_seconds(tree, batch, self.chip, context)

    def seconds_for_rows(self, tree: TreeShape, batch: int, rows: int) -> float:
        """Must not be called: on a GPU, a clock measures the times of rounds."""
        raise NotImplementedError


def tree_sets(
    configured_tree: TreeShape, costs: PredictedCosts, max_batch: int, has_sources: bool = False
) -> ChoicesByBatch:
    """Returns the value of RoundLayout.choices: (minimum batch of a bucket, trees of the bucket in order of predicted
    speed).

    has_sources: whether other sources propose tokens in addition to a draft."""
    trees = [configured_tree, *smaller_trees(configured_tree, costs.weights)]
    halved = configured_tree
    trees_by_bucket: dict[int, tuple[TreeShape, ...]] = {}
    least = 1
    for bucket in sorted({next_bucket(batch) for batch in range(1, max_batch + 1)}):
        while halved.num_draft_tokens > 1 and halved.num_draft_tokens * min(bucket, max_batch) > MAX_VERIFY_ROWS:
            halved = replace(halved, num_draft_tokens=halved.num_draft_tokens // 2)
        fitting = [tree for tree in dict.fromkeys((halved, *trees)) if tree.num_draft_tokens <= halved.num_draft_tokens]
        shapes = best_trees([tree for tree in fitting if tree != PLAIN_TREE], costs, bucket)
        if has_sources:
            shapes += (replace(halved, drafts=False),)
        if shapes != next(reversed(trees_by_bucket.values()), None):
            trees_by_bucket[least] = shapes
        least = bucket + 1
    return tuple(trees_by_bucket.items())


def best_trees(trees: Sequence[TreeShape], costs: PredictedCosts, batch: int) -> tuple[TreeShape, ...]:
    """Returns plain decoding and the smallest set of trees that is good enough (MIN_TREES, MIN_SET_RATE), in order of
    predicted speed.  batch: the number of requests."""
    all_trees = (*trees, PLAIN_TREE)
    measured, *assumed = (
        _token_rates(all_trees, costs, batch, rate) for rate in (FIRST_CHILD_RATES[0], *POSSIBLE_RATES)
    )
    assumed += [{**rates, tree: rates[tree] * RATE_UNCERTAINTY} for rates in assumed for tree in trees]

    def worst_relative_speed(kept: Sequence[TreeShape]) -> float:
        """Returns the speed of the best tree in `kept`, relative to the best of all trees, where it is lowest."""
        return min(max(rates[tree] for tree in (*kept, PLAIN_TREE)) / max(rates.values()) for rates in assumed)

    counts = range(min(MIN_TREES, len(trees)), len(trees) + 1)
    sets = (max(combinations(trees, count), key=worst_relative_speed) for count in counts)
    kept = next(kept for kept in sets if worst_relative_speed(kept) >= MIN_SET_RATE)
    return tuple(sorted((*kept, PLAIN_TREE), key=lambda tree: -measured[tree]))


def _token_rates(
    trees: Sequence[TreeShape], costs: PredictedCosts, batch: int, first_child_rate: float
) -> dict[TreeShape, float]:
    """Returns the tokens per second of a request with each tree.  first_child_rate: the acceptance at depth 1."""
    first_child = scaled_first_child_rates(first_child_rate, max(tree.steps for tree in trees))
    return {tree: (1 + gains(tree, first_child)[-1]) / costs.seconds(tree, batch, ASSUMED_CONTEXT) for tree in trees}


# The maximum number of rows of a verify pass with default trees.  Staging buffers and logits grow with the rows.  For
# 4096 rows of llama-3.1-8b, K and V take 0.54 GB, and logits in bfloat16 take 1.05 GB.
MAX_VERIFY_ROWS = 4096
EXAMPLE_TABLE = '{"8": {"steps": 3, "topk": 2, "num_draft_tokens": 8}, "64": {"steps": 0}}'
log = logging.getLogger("espalier")

TreesByBatch = dict[int, TreeShape]


def choose_trees(
    requested: Any,
    configured_tree: TreeShape,
    costs: PredictedCosts | None,
    user_set_tree: bool = False,
    max_batch: int = 1,
) -> TreesByBatch:
    """Returns the trees that differ from the configured tree, as {minimum number of requests: tree}.
    requested: a table, the path of a table, or "auto".  costs: None if there is no prediction, as on a CPU.
    user_set_tree: whether the user set a field of the configured tree, such as steps.
    Logs one line with the trees and the reason; the line is a warning if "auto" may replace the user's tree.
    Raises EspalierError for an invalid table.  RoundLayout checks that trees fit the configured tree."""
    if isinstance(requested, Mapping):
        trees, reason = parse_trees(requested, "by_batch"), "set by by_batch"
    elif requested != "auto":
        trees, reason = read_trees(Path(requested)), f"read from {requested}"
    elif configured_tree == PLAIN_TREE:
        return {}
    elif costs is None:
        trees, reason = {}, "trees of smaller batches are not predicted for this device"
    else:
        trees, reason = _predicted_trees(configured_tree, costs, max_batch)
    if requested == "auto":
        trees = _limit_trees(trees, configured_tree, max_batch)
    text = "; ".join(f"from {min_requests} requests on {shape}" for min_requests, shape in trees.items())
    replaces_users_tree = requested == "auto" and user_set_tree and costs is not None
    level = logging.WARNING if replaces_users_tree else logging.INFO
    log.log(level, "trees by batch: %s%s (%s)", configured_tree, f"; {text}" if trees else " at every batch", reason)
    return trees


def has_tree_settings(speculation: SpeculationConfig) -> bool:
    """Whether the user set any size of the tree."""
    return any(not is_unresolved(getattr(speculation, name)) for name in TREE_FIELDS)


def adaptive_tree_choices(
    speculation: SpeculationConfig,
    configured_tree: TreeShape,
    costs: PredictedCosts | None,
    max_batch: int,
    algorithm: str,
    can_share_rows: bool,
    sources: Sequence[str],
    weights: PassWeights,
    max_steps: int | None = None,
) -> tuple[RoundCosts | None, ChoicesByBatch]:
    """Returns the values of ResolvedConfig.round_costs and RoundLayout.choices.

    Returns None and () if the engine does not choose trees while it runs.
    speculation: the user's settings.  On a CPU, a tree that the user sets runs in every round.  Rounds without a draft
    pass are chosen only if `sources` has one that finds its tokens in texts.
    can_share_rows: whether requests may share rows; used only on a CPU.  sources: names of what proposes tokens beside
    the drafter.  weights: the sizes of target and draft.  max_steps: the drafter's maximum depth; None for no limit."""
    if speculation.by_batch != "auto" or configured_tree == PLAIN_TREE:
        return None, ()
    looks_up = algorithm != "ngram" and bool(sources)
    if costs is not None:
        return costs, tree_sets(configured_tree, costs, max_batch, looks_up)
    if algorithm == "ngram" and speculation == SpeculationConfig():
        return CpuCosts(), ((1, (configured_tree, PLAIN_TREE)),)
    if looks_up and {*sources} != {"prediction"} and not has_tree_settings(speculation):
        deepest = max(configured_tree.steps, min(MAX_LOOKUP_STEPS, max_steps or MAX_LOOKUP_STEPS))
        unshared = (configured_tree, replace(configured_tree, steps=deepest, drafts=False), PLAIN_TREE)
        has_shared = can_share_rows and configured_tree.num_draft_tokens >= 2 * SHARED_ROWS
        shared = (replace(configured_tree, shared_rows=SHARED_ROWS),) if has_shared else ()
        return CpuCosts(draft_cost=weights.draft / weights.dense), ((1, unshared), (2, (*unshared, *shared)))
    return None, ()


def with_depth_of(tree: TreeShape, choices: ChoicesByBatch) -> TreeShape:
    """Returns the tree with the steps of the deepest choice, so that buffers of its size fit every choice."""
    return replace(tree, steps=max([tree.steps, *(shape.steps for _, shapes in choices for shape in shapes)]))


def _predicted_trees(configured_tree: TreeShape, costs: PredictedCosts, max_batch: int) -> tuple[TreesByBatch, str]:
    """Returns the trees that tree_cost.py predicts, and a text that explains the prediction."""
    chip, routing = costs.chip, "for uniform routing " if costs.weights.expert else ""
    reason = (
        f"predicted {routing}from {chip.bandwidth / 1e12:.1f} TB/s and {chip.peak_flops / 1e12:.0f} TFLOP/s, as "
        f"measured on {chip.gpu}, and from the accept lengths of {MEASURED_DRAFT}, to begin with; others "
        "follow while the engine runs; by_batch={} keeps the tree"
    )
    return trees_by_cost(configured_tree, costs.weights, max_batch, chip), reason


def _limit_trees(trees: TreesByBatch, configured_tree: TreeShape, max_batch: int) -> TreesByBatch:
    """Halves a tree's number of nodes from the batch size on at which its rows would exceed MAX_VERIFY_ROWS."""
    limited_trees: TreesByBatch = {}
    all_trees = {1: configured_tree} | trees
    ends = [*(min_requests - 1 for min_requests in [*all_trees][1:]), max_batch]
    for end, (min_requests, shape) in zip(ends, all_trees.items(), strict=True):
        while shape.num_draft_tokens > 1 and (too_large_from := MAX_VERIFY_ROWS // shape.num_draft_tokens + 1) <= end:
            if too_large_from > min_requests:
                limited_trees[min_requests], min_requests = shape, too_large_from
            shape = replace(shape, num_draft_tokens=shape.num_draft_tokens // 2)
        limited_trees[min_requests] = shape
    return {batch: shape for batch, shape in limited_trees.items() if (batch, shape) != (1, configured_tree)}


def parse_trees(table: Mapping[Any, Any], source: str) -> TreesByBatch:
    """Returns the trees of a table {minimum number of requests: TreeShape, or a mapping of its fields}.  With steps 0,
    the other fields may be missing.  source: where the table comes from, for errors.

    Raises EspalierError for an invalid entry.
    """
    trees: TreesByBatch = {}
    for key, value in table.items():
        min_requests = _read_num_requests(key, source)
        if trees and min_requests <= max(trees):
            raise EspalierError(
                f"{source}: {min_requests} comes after {max(trees)}; list numbers of requests in ascending order"
            )
        trees[min_requests] = (
            value if isinstance(value, TreeShape) else _read_tree(value, f"{source}, from {min_requests} requests on")
        )
    return trees


def _read_num_requests(key: Any, source: str) -> int:
    """key: a key of the table of trees.  source: the file or setting that has the table, for the error text."""
    try:
        require_int("", count := whole_number(str(key)), 1)
    except ValueError:
        why = f"{source}: {key!r} is not a number of requests; use 1 or more, as in {EXAMPLE_TABLE}"
        raise EspalierError(why) from None
    return count


def _read_tree(value: Any, source: str) -> TreeShape:
    """value: a tree as JSON has it.  source: the file or setting that has the table, for the error text."""
    if not isinstance(value, Mapping):
        raise EspalierError(f"{source}: {value!r} is not a tree; use an object, as in {EXAMPLE_TABLE}")
    for name in value:
        if name not in TREE_FIELDS:
            raise EspalierError(f"{source}: unknown {name!r}; a tree has {', '.join(TREE_FIELDS)}")
    sizes = PLAIN_TREE.sizes | dict(value) if value.get("steps") == 0 else dict(value)
    for name in TREE_FIELDS:
        if name not in sizes:
            raise EspalierError(f"{source}: {name} is missing; a tree has {', '.join(TREE_FIELDS)}")
        if type(sizes[name]) is not int:
            raise EspalierError(f"{source}: {name}={sizes[name]!r} is not supported; use a whole number")
    try:
        return TreeShape(**sizes)
    except EspalierError as error:
        raise EspalierError(f"{source}: {error}") from None


def read_trees(path: Path) -> TreesByBatch:
    """Reads a table that `write_trees` wrote.  Raises EspalierError for an invalid file."""
    return parse_trees(_read_object(path, "table of trees; `espalier bench choose` writes one"), str(path))


def write_trees(path: Path, trees: Mapping[int, TreeShape]) -> None:
    """Writes a table as JSON.  Raises EspalierError if the file cannot be written."""
    lines = [f"  {json.dumps(str(min_requests))}: {json.dumps(shape.sizes)}" for min_requests, shape in trees.items()]
    try:
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    except OSError as error:
        raise EspalierError(f"{path} cannot be written ({error.strerror}); name another file") from None


def _read_object(path: Path, expected: str) -> dict[str, Any]:
    """Returns the JSON object of a file.  expected: says in errors which file to name."""
    if not os.path.isfile(path):
        raise EspalierError(f"{path} is not a file; name a {expected}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=without_duplicate_keys)
    except (OSError, ValueError) as error:
        raise EspalierError(f"{path} cannot be read ({error}); name a {expected}") from None
    if not isinstance(content, dict):
        raise EspalierError(f"{path} holds no JSON object; name a {expected}")
    return content


# The default of max_pause_ms.  An 8B model on an H100 computes about 640 rows in this time.
DEFAULT_PAUSE_MS = 20.0
# Even the smallest pass may take longer than DEFAULT_PAUSE_MS / MIN_PASS_FACTOR, because it reads all weights.  Then a
# pass may take MIN_PASS_FACTOR times as long as the smallest.  With fewer rows in a pass, prefill would be less than
# half as fast.
MIN_PASS_FACTOR = 2.0


def busy_chunk_size(config: EngineConfig, chunk_size: int, default: int, costs: PredictedCosts | None) -> int:
    """Returns the maximum number of rows of a prefill pass while streaming requests wait for it.
    chunk_size: the maximum number of rows of any pass.  default: the value for a machine whose passes are not
    predicted.
    Raises EspalierError if rows and pause are both set, if the smallest pass takes longer than the pause, and if a
    pause is set for a machine whose passes are not predicted."""
    if not is_unresolved(config.busy_chunk_size):
        if not is_unresolved(config.max_pause_ms):
            raise EspalierError(
                f"max_pause_ms={config.max_pause_ms} and busy_chunk_size={config.busy_chunk_size} both bound the "
                "passes that streams wait for; remove one of them"
            )
        return int(config.busy_chunk_size)
    if costs is None:
        if not is_unresolved(config.max_pause_ms):
            raise EspalierError(
                f"max_pause_ms={config.max_pause_ms} needs the predicted time of a pass, and a CPU has none; set "
                "busy_chunk_size, the rows of a pass, instead"
            )
        return min(default, chunk_size)
    smallest_ms = _pass_ms(costs, MIN_CHUNK_WIDTH)
    bound_ms = (
        max(DEFAULT_PAUSE_MS, MIN_PASS_FACTOR * smallest_ms)
        if is_unresolved(config.max_pause_ms)
        else float(config.max_pause_ms)
    )
    if bound_ms < smallest_ms:
        raise EspalierError(
            f"max_pause_ms={config.max_pause_ms} is below the {smallest_ms:.1f} ms that the smallest prefill pass, of "
            f"{MIN_CHUNK_WIDTH} rows, is predicted to take on {costs.chip.gpu}; raise it"
        )
    # The widths of passes are multiples of MIN_CHUNK_WIDTH.
    steps_down = range(chunk_size // MIN_CHUNK_WIDTH, 0, -1)
    rows = next(step * MIN_CHUNK_WIDTH for step in steps_down if _pass_ms(costs, step * MIN_CHUNK_WIDTH) <= bound_ms)
    log.info(
        "streams wait for prefill passes of at most %d rows, predicted to take %.1f ms (max_pause_ms=%.4g%s)",
        rows,
        _pass_ms(costs, rows),
        bound_ms,
        "" if not is_unresolved(config.max_pause_ms) else ", by default",
    )
    return rows


def _pass_ms(costs: PredictedCosts, rows: int) -> float:
    """Returns the predicted time of a prefill pass in ms, including the draft's pass over the same rows."""
    weights, chip = costs.weights, costs.chip
    return 1000 * (weights.target_seconds(rows, chip) + (weights.draft_seconds(rows, chip) if weights.draft else 0))
