"""`espalier bench choose`: measures the fastest tree at each batch size, and writes a table for --by-batch.

The engine runs every candidate tree at every batch bucket (a batch size to which rounds are padded).  A round is one
step of draft, verify and accept.  The same runs give the accept lengths.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

from rich.text import Text

from espalier.bench.drive import (
    BenchEngine,
    BenchEngines,
    ModelEngines,
    drive,
    full_step_times,
    require_one_rank,
    require_positions,
)
from espalier.config import SpeculationConfig
from espalier.engine.engine import Engine
from espalier.errors import EspalierError
from espalier.layout import PLAIN_TREE, TARGET_ONLY, TreeShape
from espalier.prompt_files import prompt_token_ids, read_records
from espalier.request import SamplingParams
from espalier.startup import tree_policy
from espalier.startup.build import make_engine
from espalier.startup.tree_cost import fits_in
from espalier.stats import SpeculationStats
from espalier.terminal.console import (
    DIM_STYLE,
    print_header,
    print_table,
    progress,
    require_writable,
    stdout,
    write_json,
)
from espalier.terminal.flags import engine_settings, flag_of, flag_text, require_at_least_one, with_minimum

CANDIDATE_TREES = (TreeShape(5, 8, 64), TreeShape(5, 4, 16), TreeShape(3, 2, 8))
# The numbers of nodes of a block draft's candidate trees.  All these trees have the full depth, because a block draft
# proposes all depths in one pass.
BLOCK_NODE_COUNTS = (64, 32, 16, 8)
DEFAULT_FLAGS = MappingProxyType({"context": 128, "tokens": 96, "repeats": 5})

# (the configured tree, candidate trees, whether the draft is a block draft) -> the accept length of each tree
PredictAcceptLengths = Callable[[TreeShape, Sequence[TreeShape], bool], Mapping[TreeShape, float]]


@dataclass(frozen=True)
class TreeTime:
    """The time of a round with one tree at one batch size.  accept_length: mean tokens that a round gives a request."""

    batch_size: int
    tree: TreeShape
    round_ms: float
    accept_length: float

    @property
    def tokens_per_second(self) -> float:
        return 1000 * self.batch_size * self.accept_length / self.round_ms

    def as_dict(self) -> dict[str, Any]:
        figures = {"round_ms": self.round_ms, "accept_length": self.accept_length}
        return {"batch": self.batch_size, **self.tree.sizes, **figures, "tokens_per_second": self.tokens_per_second}


def run(args: Namespace) -> int:
    """Run the command `espalier bench choose`."""
    fill_and_check_flags(args)
    print_header()
    choose(args, engine_settings(args), ModelEngines)
    return 0


def fill_and_check_flags(args: Namespace) -> None:
    """Sets flags that were not given to their defaults, and checks all flags.  Raises EspalierError."""
    for name, value in DEFAULT_FLAGS.items():
        setattr(args, name, value if getattr(args, name) is None else getattr(args, name))
    require_at_least_one(args, "batch", *DEFAULT_FLAGS)
    if args.tokens < 2:
        raise EspalierError(f"--tokens={args.tokens} is not supported: the first comes of no round; use 2 or more")
    for name in ("json", "out"):
        require_writable(flag_of(name), getattr(args, name))


def choose(
    args: Namespace,
    settings: dict[str, Any],
    open_engines: Callable[[Mapping[str, Any]], BenchEngines],
    predict_accept_lengths: PredictAcceptLengths | None = None,
) -> None:
    """Measures the trees, prints the times, and writes the table.  Raises EspalierError.

    settings: the keywords of LLM.  open_engines: returns the BenchEngines of given settings.  predict_accept_lengths:
    None to measure the accept lengths."""
    _refuse_unused_settings(settings)
    context, longest = args.context, args.context + args.tokens
    largest_batch = {"max_batch": max(args.batch)} if args.batch else {}
    settings = without_by_batch(
        with_minimum(settings, {"max_context": longest + 1, **largest_batch}, max_context=longest, **largest_batch)
    )
    engines = open_engines(settings)
    require_positions(engines.max_positions, longest, f"--context {context}", f"--tokens {args.tokens}")
    with engines.open() as bench:
        config, layout = bench.config, bench.engine.layout
        configured_tree = layout.tree
        if not configured_tree.steps:
            raise EspalierError(
                "bench choose measures trees up to the configured one, which is plain decoding; set a tree"
            )
        is_block = layout.block_rows > 0
        shapes = trees_to_measure(configured_tree, args.candidates, is_block)
        if not args.candidates:
            # Plain decoding without the draft is for comparison only.
            shapes = list(dict.fromkeys((*shapes, layout.tree_without_draft)))
        lengths = None if predict_accept_lengths is None else predict_accept_lengths(configured_tree, shapes, is_block)
        source = "measured" if lengths is None else f"predicted from {lengths[configured_tree]:g} of {configured_tree}"
        stdout().print(
            Text(f"{config.algorithm}, {config.dtype}, context {context}; accept lengths {source}", DIM_STYLE)
        )
        prompts = None if getattr(args, "dataset", None) is None else _read_prompts(args.dataset, bench, context)
        timed_batches = TimedBatches.for_batches(bench, args.batch or (), context, args.tokens, args.repeats, prompts)
        with progress("measuring", len(shapes) * len(timed_batches.prompts_by_batch)) as advance:
            tree_times = measure_trees(bench.engine, config.graph_batch, timed_batches, shapes, lengths, advance)
    by_batch = by_batch_table(tree_times)
    # Write the files before printing, because printing fails if stdout is closed.
    if args.out is not None:
        tree_policy.write_trees(args.out, by_batch)
    figures = {"config": config.as_dict(), "cells": [tree_time.as_dict() for tree_time in tree_times]}
    write_json(args.json, figures | {"by_batch": {least: shape.sizes for least, shape in by_batch.items()}})
    print_table(_table_rows(tree_times))
    if args.out is not None:
        stdout().print(Text(f"written: {args.out}; use it by --by-batch {args.out}", DIM_STYLE))


def _refuse_unused_settings(settings: Mapping[str, Any]) -> None:
    """Raises EspalierError for engine settings without effect in this command, and for several ranks."""
    require_one_rank(settings, "bench choose")
    tree = settings.get("speculation")
    if tree is not None and tree.by_batch not in ("auto", {}):
        raise EspalierError("--by-batch is not for bench choose, which measures such a table; leave one out")
    if "prefix_cache" in settings:
        raise EspalierError(
            "--prefix-cache is not for bench choose, which needs it to enter its prompts; leave one out"
        )


def without_by_batch(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `settings` without the table by_batch, so that every batch size gets the configured tree."""
    speculation = settings.get("speculation")
    speculation = speculation if isinstance(speculation, SpeculationConfig) else SpeculationConfig()
    return {**settings, "speculation": replace(speculation, by_batch={})}


def trees_to_measure(
    configured: TreeShape, given_trees: Sequence[TreeShape], is_block: bool = False
) -> list[TreeShape]:
    """Returns the trees to measure, without duplicates.

    If no tree is given: the configured tree, the smaller CANDIDATE_TREES, and plain decoding.  For a block draft, the
    configured tree with fewer nodes (BLOCK_NODE_COUNTS) replaces CANDIDATE_TREES.  is_block: whether the draft is a
    block draft.  Raises EspalierError for a tree that is larger than the configured tree."""
    for shape in given_trees:
        configured.require_fits(shape)
    if is_block:
        sizes = [nodes for nodes in BLOCK_NODE_COUNTS if nodes < configured.num_draft_tokens]
        smaller_trees = [replace(configured, num_draft_tokens=nodes) for nodes in sizes]
    else:
        smaller_trees = [shape for shape in CANDIDATE_TREES if fits_in(configured, shape)]
    return list(dict.fromkeys(given_trees or (configured, *smaller_trees, PLAIN_TREE)))


def _read_prompts(path: Path, bench: BenchEngine, context: int) -> list[list[int]]:
    """Returns a file's prompts of at most `context` tokens, as token ids.  Raises EspalierError if none fits."""
    inputs = bench.llm.inputs
    prompts = [
        prompt_token_ids(location, record, inputs.model_info.vocab_size, lambda: inputs)
        for location, record in read_records("--dataset", path)
    ]
    fitting = [tokens for tokens in prompts if 0 < len(tokens) <= context]
    if not fitting:
        raise EspalierError(f"--dataset {path} has no prompt of up to {context} tokens; raise --context")
    if len(fitting) < len(prompts):
        stdout().print(f"{len(prompts) - len(fitting)} of {len(prompts)} prompts are left out: above {context} tokens")
    return fitting


@dataclass(frozen=True)
class TimedBatches:
    """The runs at each batch size: one warm-up run, then `repeats` timed runs.  A run generates num_tokens greedy
    tokens after each prompt of a batch.  prompts_by_batch: {batch size: prompts as token ids}.  Each run takes the next
    prompts, and begins again after the last one."""

    prompts_by_batch: Mapping[int, Sequence[Sequence[int]]]
    num_tokens: int
    repeats: int

    @classmethod
    def for_batches(
        cls,
        bench: BenchEngine,
        batch_sizes: Sequence[int],
        context: int,
        num_tokens: int,
        repeats: int,
        given_prompts: Sequence[Sequence[int]] | None = None,
    ) -> "TimedBatches":
        """Returns the runs for these batch sizes.  Raises EspalierError for a size that is not a bucket.

        batch_sizes: if empty, all buckets up to graph_batch (without CUDA graphs, up to max_batch).  given_prompts:
        token ids; if None, `bench` makes prompts of `context` tokens."""
        buckets = bench.engine.layout.batch_buckets(bench.config.graph_batch or bench.config.layout.max_batch)
        if unmeasured := [batch for batch in batch_sizes if batch not in buckets]:
            raise EspalierError(
                f"--batch={unmeasured[0]} is not measured, as rounds are padded; use some of {flag_text(buckets)}"
            )
        batches = sorted(set(batch_sizes)) or buckets
        prompts = {batch: given_prompts or bench.make_prompts([context] * batch) for batch in batches}
        return cls(prompts, num_tokens, repeats)

    def prompt_batches(self, batch_size: int) -> Iterator[list[Sequence[int]]]:
        """Yields the prompts of each run with this batch size, first those of the warm-up run."""
        prompts = cycle(self.prompts_by_batch[batch_size])
        return (list(islice(prompts, batch_size)) for _ in range(self.repeats + 1))


def measure_trees(
    engine: Engine,
    graph_batch: int,
    timed_batches: TimedBatches,
    trees: Sequence[TreeShape],
    accept_lengths: Mapping[TreeShape, float] | None,
    advance: Callable[[], None],
) -> list[TreeTime]:
    """Measures the round time of every tree at every batch size.  Raises EspalierError if no round runs all requests.

    Closes `engine`, and makes a new engine for each tree on the same models and buffers.  The new engine's prefix cache
    keeps the prompts of earlier runs, so that a run with the same prompts starts them all in one step.
    graph_batch: EngineConfig.graph_batch of these engines.  accept_lengths: the accept length of each tree; None to
    measure it over the runs of all batch sizes.  advance: called after each tree at each batch size."""
    runner, overlap = engine.executor.runner, engine.in_flight.overlap
    engine.close()
    tree_times = []
    for shape in trees:
        runner_of_shape = replace(runner, layout=replace(runner.layout, trees=((1, shape),)))
        engine_of_shape = make_engine(runner_of_shape, overlap, prefix_cache=True, graph_batch=graph_batch)
        stats, batch_times = SpeculationStats(), []
        for batch in timed_batches.prompts_by_batch:
            round_ms = _round_ms(engine_of_shape, batch, timed_batches, stats)
            batch_times.append((batch, round_ms))
            advance()
        engine_of_shape.close()
        accept_length = stats.accept_length if accept_lengths is None else accept_lengths[shape]
        tree_times += [TreeTime(batch, shape, ms, accept_length) for batch, ms in batch_times]
    return tree_times


def _round_ms(engine: Engine, batch_size: int, timed_batches: TimedBatches, stats: SpeculationStats) -> float:
    """Returns the median ms of the rounds with all `batch_size` requests.  Adds the runs' statistics to `stats`."""
    params = SamplingParams(temperature=0.0, max_tokens=timed_batches.num_tokens)
    runs = [drive(engine, prompts, params) for prompts in timed_batches.prompt_batches(batch_size)][1:]
    for run in runs:
        stats.merge(run.stats)
    return 1000 * median(full_step_times(runs))


def fastest_trees(tree_times: Sequence[TreeTime]) -> dict[int, TreeTime]:
    """Returns the fastest tree at each batch size; of equally fast trees the first one.

    TARGET_ONLY (plain decoding that does not run the draft) is left out, because the draft must read all tokens.  Only
    then can it propose again when the batch gets smaller and the table names another tree."""
    fastest: dict[int, TreeTime] = {}
    for timed in (timed for timed in tree_times if timed.tree != TARGET_ONLY):
        if timed.batch_size not in fastest or timed.tokens_per_second > fastest[timed.batch_size].tokens_per_second:
            fastest[timed.batch_size] = timed
    return dict(sorted(fastest.items()))


def by_batch_table(tree_times: Sequence[TreeTime]) -> dict[int, TreeShape]:
    """Returns a table for SpeculationConfig.by_batch: {batch size from which on a tree is the fastest: the tree}."""
    trees: dict[int, TreeShape] = {}
    for batch, fastest in fastest_trees(tree_times).items():
        if not trees or next(reversed(trees.values())) != fastest.tree:
            trees[batch] = fastest.tree
    return trees


def _table_rows(tree_times: Sequence[TreeTime]) -> list[list[str]]:
    """Returns the rows of the printed table: a row for each batch size, a column for each tree, * for the fastest."""
    shapes = list(dict.fromkeys(timed.tree for timed in tree_times))
    fastest, by_cell = fastest_trees(tree_times), {(timed.batch_size, timed.tree): timed for timed in tree_times}
    rows = [["batch", *(str(shape) for shape in shapes)]]
    rows.append(["accept length", *(f"{by_cell[next(iter(fastest)), shape].accept_length:.2f}" for shape in shapes)])
    for batch, winner in fastest.items():
        cells = [by_cell[batch, shape] for shape in shapes]
        rows.append([str(batch), *(f"{_table_cell(timed)} {'*' if timed == winner else ' '}" for timed in cells)])
    return rows


def _table_cell(tree_time: TreeTime) -> str:
    return f"{tree_time.round_ms:.2f} ms, {tree_time.tokens_per_second:.0f} tokens/s"
