"""`espalier bench choose`: measures the fastest tree at each batch size, and writes a table for --by-batch.

The engine's own launches run every bucket with every candidate tree.  Accept lengths are measured in the same runs.
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

from espalier.bench.drive import BenchEngine, BenchEngines, ModelEngines, drive, full_steps, require_positions
from espalier.config import SpeculationConfig
from espalier.engine.engine import Engine
from espalier.errors import EspalierError
from espalier.layout import PLAIN_TREE, TreeShape
from espalier.prompt_files import records, token_ids
from espalier.request import SamplingParams
from espalier.startup import tree_policy
from espalier.startup.build import make_engine
from espalier.startup.tree_cost import fits_in
from espalier.stats import SpeculationStats
from espalier.terminal.console import QUIET, print_header, print_table, progress, require_writable, stdout, write_json
from espalier.terminal.flags import engine_settings, flag_of, require_at_least_one, with_minimum, written

CANDIDATES = (TreeShape(5, 8, 64), TreeShape(5, 4, 16), TreeShape(3, 2, 8))
# Node counts of a block draft's candidates.  Its one pass costs the same at any depth, so they keep the depth.
BLOCK_NODES = (64, 32, 16, 8)
DEFAULTS = MappingProxyType({"context": 128, "tokens": 96, "repeats": 5})

# (the configured tree, candidates, whether the draft is a block draft) -> the accept length of each tree
Predict = Callable[[TreeShape, Sequence[TreeShape], bool], Mapping[TreeShape, float]]


@dataclass(frozen=True)
class TreeTime:
    """The round time of one candidate tree at one batch size."""

    batch: int
    shape: TreeShape
    round_ms: float
    accept_length: float

    @property
    def tokens_per_second(self) -> float:
        return 1000 * self.batch * self.accept_length / self.round_ms

    def as_dict(self) -> dict[str, Any]:
        measured = {"round_ms": self.round_ms, "accept_length": self.accept_length}
        return {"batch": self.batch, **self.shape.sizes, **measured, "tokens_per_second": self.tokens_per_second}


def run(args: Namespace) -> int:
    """Run `espalier bench choose`."""
    fill_in(args)
    print_header()
    choose(args, engine_settings(args), ModelEngines)
    return 0


def fill_in(args: Namespace) -> None:
    """Set the defaults of missing flags, and check all flags.  Raises EspalierError."""
    for name, value in DEFAULTS.items():
        setattr(args, name, value if getattr(args, name) is None else getattr(args, name))
    require_at_least_one(args, "batch", *DEFAULTS)
    if args.tokens < 2:
        raise EspalierError(f"--tokens={args.tokens} is not supported: the first comes of no round; use 2 or more")
    for name in ("json", "out"):
        require_writable(flag_of(name), getattr(args, name))


def choose(
    args: Namespace,
    settings: dict[str, Any],
    engines_with: Callable[[Mapping[str, Any]], BenchEngines],
    predict: Predict | None = None,
) -> None:
    """Measure, print and write the table.

    predict: gives accept lengths instead of measuring.  Raises EspalierError.
    """
    _refuse_unused(settings)
    context, longest = args.context, args.context + args.tokens
    largest = {"max_batch": max(args.batch)} if args.batch else {}
    settings = without_table(
        with_minimum(settings, {"max_context": longest + 1, **largest}, max_context=longest, **largest)
    )
    made = engines_with(settings)
    require_positions(made.positions, longest, f"--context {context}", f"--tokens {args.tokens}")
    with made.open() as bench:
        config, configured = bench.config, bench.engine.layout.tree
        if not configured.steps:
            raise EspalierError(
                "bench choose measures trees up to the configured one, which is plain decoding; set a tree"
            )
        is_block = bench.engine.layout.block_rows > 0
        shapes = candidates_of(configured, args.candidates, is_block)
        lengths = None if predict is None else predict(configured, shapes, is_block)
        source = "measured" if lengths is None else f"predicted from {lengths[configured]:g} of {configured}"
        stdout().print(Text(f"{config.algorithm}, {config.dtype}, context {context}; accept lengths {source}", QUIET))
        given = None if getattr(args, "dataset", None) is None else _prompts_of(args.dataset, bench, context)
        runs = TimedRuns.of(bench, args.batch or (), context, args.tokens, args.repeats, given)
        with progress("measuring", len(shapes) * len(runs.prompts)) as advance:
            timed = measure(bench.engine, config.graph_batch, runs, shapes, lengths, advance)
    by_batch = table(timed)
    # Write before printing: printing fails if the reader of stdout has closed it.
    if args.out is not None:
        tree_policy.write_trees(args.out, by_batch)
    figures = {"config": config.as_dict(), "cells": [one.as_dict() for one in timed]}
    write_json(args.json, figures | {"by_batch": {least: shape.sizes for least, shape in by_batch.items()}})
    print_table(_rows(timed))
    if args.out is not None:
        stdout().print(Text(f"written: {args.out}; use it by --by-batch {args.out}", QUIET))


def _refuse_unused(settings: Mapping[str, Any]) -> None:
    """Raises EspalierError for engine settings that would have no effect here."""
    tree = settings.get("speculation")
    if tree is not None and tree.by_batch not in ("auto", {}):
        raise EspalierError("--by-batch is not for bench choose, which measures such a table; leave one out")
    if "prefix_cache" in settings:
        raise EspalierError(
            "--prefix-cache is not for bench choose, which needs it to enter its prompts; leave one out"
        )


def without_table(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, but with the configured tree at every batch size."""
    speculation = settings.get("speculation")
    speculation = speculation if isinstance(speculation, SpeculationConfig) else SpeculationConfig()
    return {**settings, "speculation": replace(speculation, by_batch={})}


def candidates_of(configured: TreeShape, given: Sequence[TreeShape], is_block: bool = False) -> list[TreeShape]:
    """The trees to measure, each once.

    If no tree is given: the configured tree, the CANDIDATES that fit in it, and plain decoding.  A block draft has the
    configured tree with fewer nodes (BLOCK_NODES) instead of CANDIDATES.
    Raises EspalierError for a tree that is larger than the configured tree.
    """
    for shape in given:
        configured.require_fits(shape)
    if is_block:
        sizes = [nodes for nodes in BLOCK_NODES if nodes < configured.num_draft_tokens]
        fitting = [replace(configured, num_draft_tokens=nodes) for nodes in sizes]
    else:
        fitting = [shape for shape in CANDIDATES if fits_in(configured, shape)]
    return list(dict.fromkeys(given or (configured, *fitting, PLAIN_TREE)))


def _prompts_of(path: Path, bench: BenchEngine, context: int) -> list[list[int]]:
    """The prompts of a file, of at most `context` tokens each.  Raises EspalierError if there are none."""
    inputs = bench.llm.inputs
    found = [
        token_ids(place, record, inputs.facts.vocab_size, lambda: inputs)
        for place, record in records("--dataset", path)
    ]
    fitting = [tokens for tokens in found if 0 < len(tokens) <= context]
    if not fitting:
        raise EspalierError(f"--dataset {path} has no prompt of up to {context} tokens; raise --context")
    if len(fitting) < len(found):
        stdout().print(f"{len(found) - len(fitting)} of {len(found)} prompts are left out: above {context} tokens")
    return fitting


@dataclass(frozen=True)
class TimedRuns:
    """The prompts of each batch size, used in turn.

    A run continues a batch of prompts by num_tokens greedy tokens.  One run warms up, then `repeats` runs are timed.
    """

    prompts: Mapping[int, Sequence[Sequence[int]]]
    num_tokens: int
    repeats: int

    @classmethod
    def of(
        cls,
        bench: BenchEngine,
        batches: Sequence[int],
        context: int,
        num_tokens: int,
        repeats: int,
        given: Sequence[Sequence[int]] | None = None,
    ) -> "TimedRuns":
        """The runs for these batch sizes, or for every bucket if `batches` is empty.  Prompts are drawn with
        `context` tokens, unless they are given.  A CPU uses the buckets of a GPU.

        Raises EspalierError for a batch size that is no bucket.
        """
        buckets = bench.engine.layout.batch_buckets(bench.config.graph_batch or bench.config.layout.max_batch)
        if other := [batch for batch in batches if batch not in buckets]:
            raise EspalierError(
                f"--batch={other[0]} is not measured, as rounds are padded; use some of {written(buckets)}"
            )
        chosen = sorted(set(batches)) or buckets
        return cls({batch: given or bench.prompts([context] * batch) for batch in chosen}, num_tokens, repeats)

    def batches(self, batch: int) -> Iterator[list[Sequence[int]]]:
        """Yields the prompts of each run."""
        prompts = cycle(self.prompts[batch])
        return (list(islice(prompts, batch)) for _ in range(self.repeats + 1))


def measure(
    engine: Engine,
    graph_batch: int,
    runs: TimedRuns,
    shapes: Sequence[TreeShape],
    accept_lengths: Mapping[TreeShape, float] | None,
    advance: Callable[[], None],
) -> list[TreeTime]:
    """Time every batch size with every tree.

    Each tree has a new engine on the models and buffers of `engine`, which is closed.  In the new engine, the prefix
    cache lets prompts that ran once enter together, however long they are.

    graph_batch: of `engine`; accept_lengths: by tree; None: they are measured in these runs, over all batch sizes.
    Raises EspalierError if no round ever runs the whole batch.
    """
    runner, overlap = engine.executor.runner, engine.in_flight.overlap
    engine.close()
    timed = []
    for shape in shapes:
        runner_of_shape = replace(runner, layout=replace(runner.layout, trees=((1, shape),)))
        engine_of_shape = make_engine(runner_of_shape, overlap, prefix_cache=True, graph_batch=graph_batch)
        stats, cells = SpeculationStats(), []
        for batch in runs.prompts:
            round_ms = _round_ms(engine_of_shape, batch, runs, stats)
            cells.append((batch, round_ms))
            advance()
        engine_of_shape.close()
        length = stats.accept_length if accept_lengths is None else accept_lengths[shape]
        timed += [TreeTime(batch, shape, ms, length) for batch, ms in cells]
    return timed


def _round_ms(engine: Engine, batch: int, runs: TimedRuns, stats: SpeculationStats) -> float:
    """The median ms of the rounds that ran the whole batch.  The runs' statistics are added to `stats`."""
    params = SamplingParams(temperature=0.0, max_tokens=runs.num_tokens)
    driven = [drive(engine, prompts, params) for prompts in runs.batches(batch)][1:]
    for each in driven:
        stats.merge(each.stats)
    return 1000 * median(full_steps(driven))


def best(timed: Sequence[TreeTime]) -> dict[int, TreeTime]:
    """The fastest tree at each batch size; of equally fast trees, the first."""
    found: dict[int, TreeTime] = {}
    for one in timed:
        if one.batch not in found or one.tokens_per_second > found[one.batch].tokens_per_second:
            found[one.batch] = one
    return dict(sorted(found.items()))


def table(timed: Sequence[TreeTime]) -> dict[int, TreeShape]:
    """A table for SpeculationConfig.by_batch: the least batch size of each range -> the fastest tree in that range."""
    trees: dict[int, TreeShape] = {}
    for batch, fastest in best(timed).items():
        if not trees or next(reversed(trees.values())) != fastest.shape:
            trees[batch] = fastest.shape
    return trees


def _rows(timed: Sequence[TreeTime]) -> list[list[str]]:
    """The lines of the printed table, one for each batch size, with a column for each candidate.  A star marks the
    fastest tree of a line."""
    shapes = list(dict.fromkeys(one.shape for one in timed))
    fastest, by_cell = best(timed), {(one.batch, one.shape): one for one in timed}
    rows = [["batch", *(str(shape) for shape in shapes)]]
    rows.append(["accept length", *(f"{by_cell[next(iter(fastest)), shape].accept_length:.2f}" for shape in shapes)])
    for batch, winner in fastest.items():
        cells = [by_cell[batch, shape] for shape in shapes]
        rows.append([str(batch), *(f"{_cell(one)} {'*' if one == winner else ' '}" for one in cells)])
    return rows


def _cell(one: TreeTime) -> str:
    return f"{one.round_ms:.2f} ms, {one.tokens_per_second:.0f} tokens/s"
