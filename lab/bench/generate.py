"""`python -m lab generate`: the time of a round and the time to the first token of LLM.generate, as a user calls it.

The time of a round is the mean over the rounds that run every request.  Rounds after the first request has finished do
not count: they are smaller.
"""

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from statistics import median
from time import perf_counter
from typing import Any

import torch
from rich.text import Text

from espalier.bench.drive import BenchEngines, EngineVariant, empty_prefix_cache, require_positions, variants_to_compare
from espalier.config import ResolvedConfig
from espalier.engine.executor import LaunchHandle
from espalier.engine.launch_input import LaunchInput
from espalier.errors import EspalierError
from espalier.layout import PLAIN_TREE, TreeShape
from espalier.llm import LLM
from espalier.request import Output, SamplingParams
from espalier.speculate.drafters.registry import drafter_without_files
from espalier.terminal.console import DIM_STYLE, print_table, progress, stdout, write_json
from espalier.terminal.flags import require_at_least_one
from lab.bench.checks import refuse_tree_flags, require_pages, require_success
from lab.bench.engines import engine_report, engines_of_flags, shape_of_flags, variant_with_tree
from lab.bench.floor import FloorMeter, RoundSize, kv_value_bytes

# Default --prompts: for a named shape, and for a model.
SHAPE_PROMPTS = [(1, 1024), (8, 1024)]
MODEL_PROMPTS = [(1, 128), (8, 128)]
# The first rounds of the full batch do not count, because the host runs ahead.
WARM_UP_ROUNDS = 3
# The fewest rounds that a mean is taken over.
MIN_ROUNDS = 8


@dataclass(frozen=True)
class RoundFigures:
    """The rounds of one call.  seconds: the mean time of a round that runs every request.

    accept_length: the mean over all requests and rounds."""

    seconds: float
    accept_length: float


class RoundClock:
    """A LaunchObserver that notes when each launch starts.

    launches: (time, number of requests) of each; the number is 0 for a prefill pass.
    """

    def __init__(self) -> None:
        self.launches: list[tuple[float, int]] = []

    def on_launch(self, launch_input: LaunchInput) -> None:
        self.launches.append((perf_counter(), 0 if launch_input.is_prefill else len(launch_input.slots)))

    def before_result(self, handle: LaunchHandle) -> None:
        pass

    def seconds(self, batch: int) -> float:
        """Mean time of a round, over the first rounds of `batch` requests without another launch between them.

        Raises EspalierError if there are too few such rounds."""
        sizes = [size for _, size in self.launches]
        first = sizes.index(batch) if batch in sizes else len(sizes)
        times = [time for time, _ in takewhile(lambda launch: launch[1] == batch, self.launches[first:])]
        times = times[WARM_UP_ROUNDS:]
        if len(times) <= MIN_ROUNDS:
            raise EspalierError(
                f"too few rounds ran the whole batch of {batch}: {len(times)} after the first {WARM_UP_ROUNDS}, and "
                f"{MIN_ROUNDS + 1} are needed; raise --tokens"
            )
        return (times[-1] - times[0]) / (len(times) - 1)


@dataclass(frozen=True)
class PromptFigures:
    """A batch of prompts of `context` tokens.

    tree: of a round of this batch; by default an engine changes it by batch.
    first_token_ms: from the call until every request has its first token.  round_ms: of rounds that run every request,
    without prefill.  accept_length: the mean over all requests and rounds.  tokens_per_second: of a round of round_ms
    in which each request accepts that many tokens.  floor_ms: the least time of such a round, weight_bytes_ms: of its
    weights' bytes (floor.py); None without a named shape or a GPU.
    """

    batch: int
    context: int
    first_token_ms: float
    round_ms: float
    accept_length: float
    tokens_per_second: float
    tree: TreeShape
    floor_ms: float | None = None
    weight_bytes_ms: float | None = None


def run(args: Namespace) -> int:
    args.prompts = args.prompts or (MODEL_PROMPTS if args.shape is None else SHAPE_PROMPTS)
    require_at_least_one(args, "tokens", "repeats")
    if args.tree is None:
        engines = engines_of_flags(args, {})
        variants = list(variants_to_compare(engines).values())
    else:
        refuse_tree_flags(args, "--tree")
        variants = _variants_with_trees(args.tree)
        engines = engines_of_flags(args, {}, variants)
    for variant in variants:
        _require_sizes(engines.config(variant), engines.max_positions, args)
    measured: list[list[PromptFigures]] = []
    configs: list[ResolvedConfig] = []
    with progress("measuring", len(variants) * len(args.prompts)) as advance:
        for variant in variants:
            figures, config = _measure_variant(engines, variant, args, advance)
            measured.append(figures)
            configs.append(config)
    if args.shape is not None and torch.cuda.is_available():
        _add_floors(measured, configs, args)
    config = configs[0]
    # The config is that of the first tree; each cell says its tree.
    write_json(args.json, {**engine_report(args, config), "tokens": args.tokens, "cells": _json_cells(measured)})
    layout = config.layout
    sizes = f"max_batch {layout.max_batch}, max_context {layout.max_context}, page_size {layout.page_size}"
    stdout().print(Text(f"{config.algorithm}; {sizes}; {config.dtype}", DIM_STYLE))
    print_table(_table(measured))
    return 0


def _variants_with_trees(trees: Sequence[TreeShape]) -> list[EngineVariant]:
    """Returns variants for each tree, then plain decoding.  Raises EspalierError if one would be measured twice."""
    named = trees if trees == [PLAIN_TREE] else [*trees, PLAIN_TREE]
    twice = [tree for place, tree in enumerate(named) if tree in named[:place]]
    if twice:
        beside = "plain decoding is measured beside every tree"
        raise EspalierError(f"--tree names {twice[0]} twice ({beside}); leave one out")
    return [variant_with_tree(tree) for tree in named]


def _require_sizes(config: ResolvedConfig, positions: int, args: Namespace) -> None:
    """Check, before anything is loaded, that all prompts fit into the engine.  Raises EspalierError if not."""
    batch, length = (max(sizes) for sizes in zip(*args.prompts, strict=True))
    context = length + args.tokens
    longest = next(f"{count}x{each}" for count, each in args.prompts if each == length)
    require_positions(positions, context, f"--prompts {longest}", f"--tokens {args.tokens}")
    layout = config.layout
    if batch > layout.max_batch:
        raise EspalierError(f"{batch} prompts at once are above max_batch={layout.max_batch}; give --max-batch {batch}")
    if context > layout.max_context:
        raise EspalierError(
            f"prompts of {length} tokens and {args.tokens} new ones are above "
            f"max_context={layout.max_context}; give --max-context {context}, or lower --prompts or --tokens"
        )


def _measure_variant(
    engines: BenchEngines, variant: EngineVariant, args: Namespace, advance: Callable[[], None]
) -> tuple[list[PromptFigures], ResolvedConfig]:
    """Measure every group of prompts.  The engine's memory is freed when this function returns."""
    measured = []
    with engines.open(variant) as bench:
        for batch, context in args.prompts:
            prompts = bench.make_prompts([context] * batch)
            measured.append(measure_prompts(bench.llm, prompts, args.tokens, args.repeats))
            advance()
        return measured, bench.config


def _add_floors(by_variant: list[list[PromptFigures]], configs: list[ResolvedConfig], args: Namespace) -> None:
    """Set floor_ms and weight_bytes_ms of all figures.  The context is the prompt and half of the new tokens."""
    value_bytes = kv_value_bytes(configs[0].kv_dtype, configs[0].draft_kv_dtype)
    floors = FloorMeter(shape_of_flags(args), value_bytes=value_bytes)
    ceilings = floors.ceilings()
    for figures, config in zip(by_variant, configs, strict=True):
        has_draft = drafter_without_files(config.algorithm) is None
        for i, one in enumerate(figures):
            size = RoundSize(one.batch, one.tree, one.context + args.tokens / 2, has_draft)
            floor = floors.round(size, ceilings)
            figures[i] = replace(one, floor_ms=floor.ms, weight_bytes_ms=floor.weight_bytes_ms)


def measure_prompts(llm: LLM, prompts: Sequence[Sequence[int]], num_tokens: int, repeats: int) -> PromptFigures:
    """Medians over repeats, after a warm-up.

    prompts: of one length; num_tokens: of each request, in the calls whose rounds are timed.
    Raises EspalierError if the pages do not hold the batch, or if there are too few tokens to time a round.
    """
    batch, context = len(prompts), len(prompts[0])
    require_pages(llm.engine, f"{batch}x{context} with {num_tokens} new tokens", batch, context + num_tokens)
    first_seconds, rounds = [], []
    for _ in range(1 + repeats):
        empty_prefix_cache(llm.engine)
        first_seconds.append(_seconds_to_first_token(llm, prompts))
        # The prompts are cached now, so all requests enter at once.
        rounds.append(_time_rounds(llm, prompts, num_tokens))
    seconds, accept_length = median(each.seconds for each in rounds[1:]), rounds[-1].accept_length
    return PromptFigures(
        batch=batch,
        context=context,
        first_token_ms=1e3 * median(first_seconds[1:]),
        round_ms=1e3 * seconds,
        accept_length=accept_length,
        tokens_per_second=batch * accept_length / seconds,
        tree=llm.engine.layout.for_batch(batch).tree,
    )


def _seconds_to_first_token(llm: LLM, prompts: Sequence[Sequence[int]]) -> float:
    begun = perf_counter()
    _generate_greedy(llm, prompts, 1)
    return perf_counter() - begun


def _time_rounds(llm: LLM, prompts: Sequence[Sequence[int]], num_tokens: int) -> RoundFigures:
    llm.engine.observer = clock = RoundClock()
    try:
        outputs = _generate_greedy(llm, prompts, num_tokens)
    finally:
        llm.engine.observer = None
    seconds = clock.seconds(len(prompts))  # raises if there were too few rounds
    # The first token of a request comes from its prefill.
    decoded = sum(len(output.token_ids) - 1 for output in outputs)
    accept_length = decoded / sum(output.speculation.rounds for output in outputs)
    return RoundFigures(seconds, accept_length)


def _generate_greedy(llm: LLM, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[Output]:
    """Generate num_tokens greedy tokens for each prompt.  Raises EspalierError if a request fails."""
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True))
    require_success(outputs)
    return outputs


def _json_cells(by_variant: Sequence[Sequence[PromptFigures]]) -> list[dict[str, Any]]:
    """For --json: for each group of prompts and each tree, its figures, those of plain decoding, and the speedup.

    by_variant: the figures of each engine variant, plain decoding last."""
    cells: list[dict[str, Any]] = []
    for *trees, plain in zip(*by_variant, strict=True):
        prompts: dict[str, Any] = {"batch": plain.batch, "context": plain.context}
        beside = {"plain": asdict(plain)}
        cells += [
            {**prompts, "tree": asdict(tree), **beside, "tree_over_plain": _speedup(tree, plain)} for tree in trees
        ]
        if not trees:
            cells.append(prompts | beside)
    return cells


def _speedup(tree: PromptFigures, plain: PromptFigures) -> float:
    return tree.tokens_per_second / plain.tokens_per_second


def _table(by_variant: Sequence[Sequence[PromptFigures]]) -> list[list[str]]:
    """One row for each group of prompts and each engine variant.  by_variant: as in `_json_cells`."""
    rows = [[
        "batch x context", "steps, topk, nodes", "first token ms", "round ms", "of floor", "bytes ms", "accept",
        "tokens/s", "over plain",
    ]]  # fmt: skip
    for *trees, plain in zip(*by_variant, strict=True):
        rows += [_table_row("tree", tree, f"{_speedup(tree, plain):.2f}") for tree in trees]
        rows.append(_table_row("plain", plain, ""))
    return rows


def _table_row(name: str, figures: PromptFigures, over_plain: str) -> list[str]:
    return [
        f"{figures.batch}x{figures.context} {name}",
        ", ".join(map(str, figures.tree.sizes.values())),
        f"{figures.first_token_ms:.1f}",
        f"{figures.round_ms:.2f}",
        f"{figures.round_ms / figures.floor_ms:.2f}" if figures.floor_ms else "",
        f"{figures.weight_bytes_ms:.2f}" if figures.weight_bytes_ms else "",
        f"{figures.accept_length:.2f}",
        f"{figures.tokens_per_second:.1f}",
        over_plain,
    ]
