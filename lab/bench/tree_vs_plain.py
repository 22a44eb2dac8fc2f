"""`python -m lab round` without a mode: the time of a round compared with a plain token, and the accept length.

Plain decoding, the tree and, with --compare, transformers take turns in one run.
"""

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
from rich.text import Text

from espalier.bench.drive import (
    DriveResult,
    ModelEngines,
    drive,
    empty_prefix_cache,
    full_step_times,
    heldout_prompts,
    require_positions,
)
from espalier.engine.engine import Engine
from espalier.layout import TreeShape
from espalier.llm import LLM
from espalier.request import SamplingParams
from espalier.terminal.console import DIM_STYLE, print_table, progress, stdout, write_json
from espalier.terminal.flags import with_minimum
from lab.bench.forward_timer import ForwardTimer, engine_with_timers
from lab.bench.plot import Bars, plot_bars


@dataclass(frozen=True)
class TreeVsPlain:
    """One batch size and context.

    tree: the tree of most rounds.  By default the engine chooses the tree of each round.
    ratio: time of a round over time of a plain token; speedup: tokens/s of the tree over plain; outside_forwards: share
    of a round outside the models' forward passes, None on a GPU, where a round is one launch; identical: requests with
    the same tokens by the tree as plain.
    """

    batch: int
    context: int
    tree: TreeShape
    round_ms: float
    plain_token_ms: float
    ratio: float
    accept_length: float
    plain_tokens_per_second: float
    tree_tokens_per_second: float
    transformers_tokens_per_second: float | None
    speedup: float
    outside_forwards: float | None
    identical: int


class RoundBench:
    """The engine with the tree and the engine of plain decoding, loaded once for all cells."""

    def __init__(self, settings: dict[str, Any], compare: bool):
        self.tree = LLM(**settings)
        self.plain = LLM(**{**settings, "speculation": None})
        self.tree_engine: Engine = self.tree.engine
        self.timers: list[ForwardTimer] = []
        if self.tree.config.device == "cpu":
            self.tree_engine, self.timers = engine_with_timers(self.tree_engine)
        self.transformers = _transformers_timer(self.tree) if compare else None

    def measure(self, batch: int, context: int, num_tokens: int, repeats: int) -> TreeVsPlain:
        """Medians over repeats, after one warm-up of each.  Plain decoding, the tree and transformers take turns."""
        prompts = heldout_prompts(self.tree, batch, context)
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens)
        plain: list[DriveResult] = []
        tree: list[DriveResult] = []
        others: list[float] = []
        rounds_before = self.tree_engine.scheduler.round_trees.num_rounds.copy()
        for _ in range(repeats + 1):
            plain.append(self._run(self.plain.engine, prompts, params, []))
            tree.append(self._run(self.tree_engine, prompts, params, self.timers))
            if self.transformers is not None:
                others.append(self.transformers(prompts, num_tokens))
        [(shape, _)] = (self.tree_engine.scheduler.round_trees.num_rounds - rounds_before).most_common(1)
        return _compare_runs(batch, context, shape, plain[1:], tree[1:], others[1:], batch * num_tokens)

    @staticmethod
    def _run(
        engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams, timers: Sequence[ForwardTimer]
    ) -> DriveResult:
        """Run the prompts with an empty prefix cache."""
        empty_prefix_cache(engine)
        return drive(engine, prompts, params, timers)

    def close(self) -> None:
        self.tree_engine.close()
        self.tree.close()
        self.plain.close()


def _compare_runs(
    batch: int,
    context: int,
    tree_shape: TreeShape,
    plain: list[DriveResult],
    tree: list[DriveResult],
    transformers_seconds: list[float],
    num_tokens: int,
) -> TreeVsPlain:
    round_ms, token_ms = (1000 * median(full_step_times(runs)) for runs in (tree, plain))
    plain_speed, tree_speed = (median(run.num_tokens / run.seconds for run in runs) for runs in (plain, tree))
    forwards = sum(run.forward_seconds for run in tree) / sum(sum(run.full_step_times) for run in tree)
    is_timed = any(run.forward_seconds for run in tree)
    same = sum(a == b for a, b in zip(plain[0].tokens, tree[0].tokens, strict=True))
    return TreeVsPlain(
        batch=batch,
        context=context,
        tree=tree_shape,
        round_ms=round_ms,
        plain_token_ms=token_ms,
        ratio=round_ms / token_ms,
        accept_length=tree[0].stats.accept_length,
        plain_tokens_per_second=plain_speed,
        tree_tokens_per_second=tree_speed,
        transformers_tokens_per_second=num_tokens / median(transformers_seconds) if transformers_seconds else None,
        speedup=tree_speed / plain_speed,
        outside_forwards=1 - forwards if is_timed else None,
        identical=same,
    )


def _transformers_timer(llm: LLM) -> Callable[[Sequence[Sequence[int]], int], float]:
    """A function that returns the seconds transformers.generate takes for a batch of prompts of one length."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        llm.config.model, dtype=getattr(torch, llm.config.dtype), trust_remote_code=False, local_files_only=True
    )
    model = model.to(llm.config.device).eval()
    model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def generate(prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
        tokens = torch.tensor(prompts, device=llm.config.device)
        begun = perf_counter()
        out = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        assert out.shape[1] == tokens.shape[1] + num_tokens
        return perf_counter() - begun

    return generate


def run(args: Namespace, settings: dict[str, Any]) -> None:
    """Measure every batch and context, print and plot.  Raises EspalierError."""
    # Two engines share one device, so each takes pages only for what is measured.
    most, longest = max(args.batch), max(args.context) + args.tokens
    settings = with_minimum(
        settings, {"max_batch": most, "max_context": longest + 1}, max_batch=most, max_context=longest
    )
    require_positions(
        ModelEngines(settings).max_positions, longest, f"--context {max(args.context)}", f"--tokens {args.tokens}"
    )
    cells: list[TreeVsPlain] = []
    bench = RoundBench(settings, args.compare is not None)
    config = bench.tree.config
    tree = f"{config.layout.tree}, {config.dtype}"
    stdout().print(Text(f"{config.algorithm} tree, {tree}; {args.tokens} tokens a prompt", DIM_STYLE))
    with progress("measuring", len(args.batch) * len(args.context)) as advance:
        for batch in args.batch:
            for context in args.context:
                cells.append(bench.measure(batch, context, args.tokens, args.repeats))
                advance()
    bench.close()
    write_json(args.json, {"config": config.as_dict(), "cells": [asdict(cell) for cell in cells]})
    plot_bars([_bars_of_cell(cell) for cell in cells], tree, args.plot)
    print_table(_table(cells))


def _bars_of_cell(cell: TreeVsPlain) -> Bars:
    rates = cell.tree_tokens_per_second, cell.plain_tokens_per_second
    return Bars(f"{cell.batch}x{cell.context}", cell.round_ms, None, *rates)


def _table(cells: Sequence[TreeVsPlain]) -> list[list[str]]:
    """One row for each figure, one column for each cell."""
    rows = [
        ["batch", *(str(cell.batch) for cell in cells)],
        ["context", *(str(cell.context) for cell in cells)],
        ["steps, topk, nodes", *(", ".join(map(str, cell.tree.sizes.values())) for cell in cells)],
        ["round, ms", *(f"{cell.round_ms:.2f}" for cell in cells)],
        ["plain token, ms", *(f"{cell.plain_token_ms:.2f}" for cell in cells)],
        ["a round in plain tokens", *(f"{cell.ratio:.2f}" for cell in cells)],
        ["accept length", *(f"{cell.accept_length:.2f}" for cell in cells)],
        ["plain, tokens/s", *(f"{cell.plain_tokens_per_second:.1f}" for cell in cells)],
        ["tree, tokens/s", *(f"{cell.tree_tokens_per_second:.1f}" for cell in cells)],
        ["tree over plain", *(f"{cell.speedup:.2f}" for cell in cells)],
        ["same tokens as plain", *(f"{cell.identical}/{cell.batch}" for cell in cells)],
    ]
    if all(cell.outside_forwards is not None for cell in cells):
        rows.append(["a round outside model forwards", *(f"{cell.outside_forwards:.0%}" for cell in cells)])
    if all(cell.transformers_tokens_per_second is not None for cell in cells):
        rows.append(["transformers.generate, tokens/s", *(f"{c.transformers_tokens_per_second:.1f}" for c in cells)])
    return rows
