"""`python -m lab prefill`: the time to prefill prompts, and how long running requests wait during a prefill."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

import torch
from rich.text import Text

from espalier.bench.drive import BenchEngine, empty_prefix_cache, greedy_request, require_positions
from espalier.bench.linears import ModelShape
from espalier.errors import EspalierError
from espalier.kernels.layers.linear_plans import DENSE
from espalier.request import Request
from espalier.speculate.drafters.registry import drafter_without_files
from espalier.terminal.console import print_table, stdout, write_json
from espalier.terminal.flags import require_at_least_one
from lab.bench.cases import time_cases
from lab.bench.ceilings import PeakMeter
from lab.bench.engines import engine_report, engines_of_flags, load_sizes, shape_of_flags
from lab.bench.experts import expert_case
from lab.bench.experts_touched import mixture_blocks
from lab.bench.floor import FloorMeter
from lab.bench.full_rounds import abort_requests, enter_requests
from lab.bench.instrument import record_launches
from lab.bench.passes import prefill_pass, prompt_attention_flops

TIMED_TURNS = 7
# Rounds of the running batch before the long prompt arrives, and after it has entered.
ROUNDS_BEFORE_PROMPT = 30
ROUNDS_AFTER_PROMPT = 3
# Default --prompts: {True: for a named shape on a GPU, False: for a model}.
DEFAULT_PROMPTS = {True: [(1, 8192), (32, 1024)], False: [(1, 256), (8, 64)]}
# FLOP/s of attention that the bound counts with: what our kernel reaches over a long prefix (docs/log.md, "The table").
ATTENTION_PEAK = 540e12
# Tokens of context beyond the longest prompt: running requests decode while it enters.
SPARE_CONTEXT = 512

# The times at which tokens came to each request, in seconds.
TokenTimes = Sequence[Sequence[float]]


@dataclass(frozen=True)
class PrefillFigures:
    """`batch` prompts of `length` tokens that arrive together; medians over turns.

    ms: from arrival until the last request has its first token.  passes: prefill passes.  rounds: rounds that ran
    between the passes, for requests that had entered already.  linear_ms, expert_ms: time of the linear layers
    alone, and of their products with experts alone; None if not measured, or without experts.
    bound_ms: see bound_ms()."""

    batch: int
    length: int
    ms: float
    tokens_per_second: float
    passes: int
    rounds: int
    linear_ms: float | None
    expert_ms: float | None
    bound_ms: float | None

    def share(self, part_ms: float | None) -> float | None:
        """Returns part_ms as a share of the whole time."""
        return None if part_ms is None else part_ms / self.ms

    def as_dict(self) -> dict[str, Any]:
        shares = {"linear_share": self.share(self.linear_ms), "expert_share": self.share(self.expert_ms)}
        return {**asdict(self), **shares, "of_bound": self.of_bound}

    @property
    def of_bound(self) -> float | None:
        return None if self.bound_ms is None else self.ms / self.bound_ms


@dataclass(frozen=True)
class DecodePause:
    """ms between tokens of running requests, before a prompt of `length` tokens arrives and during its prefill.

    running: the number of running requests, with prompts of `context` tokens."""

    running: int
    context: int
    length: int
    median_before_ms: float
    longest_before_ms: float
    longest_during_ms: float


def run(args: Namespace) -> int:
    groups = args.prompts or DEFAULT_PROMPTS[args.shape is not None]
    require_at_least_one(args, "running")
    count, longest = max(groups, key=lambda group: group[1])
    max_batch = max(args.running + 1, *(batch for batch, _ in groups))
    least = {"max_batch": args.running + 1, "max_context": longest + 1}
    made = engines_of_flags(args, load_sizes(max_batch, longest + SPARE_CONTEXT), **least)
    require_positions(made.max_positions, longest + 1, f"--prompts {count}x{longest} and the token after it")
    floors = FloorMeter(shape_of_flags(args)) if args.shape and torch.cuda.is_available() else None
    with made.open() as bench:
        # The pause comes first, because it may find that the engine is too small for it.
        paused = measure_pause(bench, args.running, max(1, groups[0][1] // 8), groups[0][1])
        prefills = [measure_prefill(bench, batch, length, floors) for batch, length in groups]
    figures = {"prefill": [each.as_dict() for each in prefills], "pause": asdict(paused)}
    write_json(args.json, {**engine_report(args, bench.config), **figures})
    _print_tables(prefills, paused)
    return 0


def _print_tables(prefills: Sequence[PrefillFigures], paused: DecodePause) -> None:
    parts = {"linear layers": [each.linear_ms for each in prefills], "experts": [each.expert_ms for each in prefills]}
    parts = {name: times for name, times in parts.items() if any(times)}
    heads = [head for name in parts for head in (f"{name}, ms", "their share")]
    has_bound = any(each.bound_ms is not None for each in prefills)
    rows = [["prompts", "ms", "tokens/s", "passes", *heads, *(["bound, ms", "of bound"] if has_bound else ())]]
    for i, each in enumerate(prefills):
        row = [f"{each.batch}x{each.length}", f"{each.ms:.1f}", f"{each.tokens_per_second:.0f}", f"{each.passes}"]
        for times in parts.values():
            share = each.share(times[i])
            row += ["", ""] if share is None else [f"{times[i]:.1f}", f"{share:.0%}"]
        if has_bound:
            row += ["", ""] if each.bound_ms is None else [f"{each.bound_ms:.1f}", f"{each.of_bound:.2f}"]
        rows.append(row)
    print_table(rows)
    who = f"{paused.running} running requests of {paused.context} tokens"
    before = f"{paused.median_before_ms:.1f} ms between tokens (at most {paused.longest_before_ms:.1f})"
    during = f"at most {paused.longest_during_ms:.1f} during the prefill of {paused.length} tokens"
    stdout().print(Text(f"{who} wait {before}, {during}"))


def measure_prefill(bench: BenchEngine, batch: int, length: int, floors: FloorMeter | None) -> PrefillFigures:
    """Measure `batch` prompts of `length` tokens, after one turn to warm up.  floors: a meter for the same shape."""
    prompts, launches = bench.make_prompts([length] * batch), record_launches(bench.engine)
    times, peaks = [], []
    drafts = drafter_without_files(bench.config.algorithm) is None
    # A measured peak takes a second.
    has_bound = floors is not None and bound_ms(floors.shape, batch, length, drafts, 1.0) is not None
    meter = PeakMeter(floors.timer, floors.device) if floors is not None and has_bound else None
    for _ in range(1 + TIMED_TURNS):
        empty_prefix_cache(bench.engine)
        launches.reset()
        times.append(_seconds_to_enter(bench, prompts))
        if meter is not None:
            # The peak is measured after each prefill, because a hot GPU has lower clocks than a cool GPU.
            peaks.append(meter.measure())
    seconds = median(times[1:])
    passes, num_rounds = launches.prefills, len(launches.rounds)
    linear_ms = None if floors is None else _linear_ms(bench, passes, floors)
    expert_ms = None if floors is None else _expert_ms(bench, passes, floors)
    bound = bound_ms(floors.shape, batch, length, drafts, median(peaks[1:])) if floors is not None and peaks else None
    rate = batch * length / seconds
    return PrefillFigures(batch, length, 1e3 * seconds, rate, len(passes), num_rounds, linear_ms, expert_ms, bound)


def bound_ms(shape: ModelShape, batch: int, length: int, has_draft: bool, peak_flops: float) -> float | None:
    """Returns FLOPs of linear layers / peak_flops (measured, bf16) + FLOPs of attention / ATTENTION_PEAK, in ms.

    This is no strict lower bound.  It counts every row of the prompts in every layer, but the engine leaves out rows of
    the last layer that are not read, and a kernel may be faster than ATTENTION_PEAK.  Padded rows do not count.  None
    with experts, quantised weights or MTP modules."""
    formats = {shape.weight_format, shape.draft_sizes.weight_format if has_draft else DENSE}
    if shape.experts is not None or shape.mtp is not None or formats != {DENSE}:
        return None
    draft = shape.extend_passes(batch * length) if has_draft else ()
    linear = sum(run.flops for run in (*shape.target_pass(batch * length, batch), *draft))
    # A block draft only projects a prompt's tokens to K and V.
    attending = (shape, shape.draft_sizes) if has_draft and shape.block is None else (shape,)
    attention = batch * sum(prompt_attention_flops(each, length) for each in attending)
    return 1e3 * (linear / peak_flops + attention / ATTENTION_PEAK)


def _seconds_to_enter(bench: BenchEngine, prompts: Sequence[Sequence[int]]) -> float:
    """Returns the seconds from the arrival of the prompts until the last request has its first token."""
    engine = bench.engine
    begun = perf_counter()
    enter_requests(engine, prompts, 1)
    seconds = perf_counter() - begun
    while engine.has_work:
        engine.step()
    return seconds


def _linear_ms(bench: BenchEngine, passes: Sequence[tuple[int, int]], floors: FloorMeter) -> float:
    """ms of the linear layers of all passes.  A pass runs batch x width rows."""
    drafts = drafter_without_files(bench.config.algorithm) is None
    ms_of_pass: dict[tuple[int, int], float] = {}
    for batch, width in set(passes):
        rows = batch * width
        runs = prefill_pass(floors.shape, rows, batch, drafts)
        ms_of_pass[batch, width] = floors.time_linears(runs, rows).fastest_ms
    return sum(ms_of_pass[each] for each in passes)


def _expert_ms(bench: BenchEngine, passes: Sequence[tuple[int, int]], floors: FloorMeter) -> float | None:
    """Returns the ms of the target's products with experts in all passes; None for a dense model.

    The last layer is left out if it computes only the rows that are read."""
    sizes, mixed = floors.shape.experts, mixture_blocks(bench.engine)
    if sizes is None:
        return None
    layer = mixed[0].gate_up, mixed[0].down, floors.weights.dtype
    all_rows = {batch * width for batch, width in passes}
    cases = {rows: expert_case((), sizes.shape, *layer, rows) for rows in all_rows}
    us_of_rows = {rows: one.us for rows, one in zip(cases, time_cases(cases.values(), floors.timer, 1.0), strict=True)}
    layers = len(mixed) - (bench.engine.executor.runner.drafter.spec.target_output != "hidden")
    return layers * sum(us_of_rows[batch * width] for batch, width in passes) / 1e3


def measure_pause(bench: BenchEngine, running: int, context: int, length: int) -> DecodePause:
    """Measure how long `running` requests wait while one prompt of `length` tokens enters."""
    _measure_pause_once(bench, running, context, length)  # compiles the kernels
    return _measure_pause_once(bench, running, context, length)


def _measure_pause_once(bench: BenchEngine, running: int, context: int, length: int) -> DecodePause:
    engine = bench.engine
    empty_prefix_cache(engine)
    *short, long = bench.make_prompts([context] * running + [length])
    num_tokens = engine.layout.max_context - context - 1
    requests = enter_requests(engine, short, num_tokens)
    before = _record_token_times(bench, requests, ROUNDS_BEFORE_PROMPT)
    entering = greedy_request("long", running, long, 1)
    engine.add(entering)
    during = _record_token_times(bench, requests, None, entering)
    after = _record_token_times(bench, requests, ROUNDS_AFTER_PROMPT)
    if any(request.is_done for request in requests):
        raise EspalierError(
            f"the running requests, of {num_tokens} tokens each, had ended before a prompt of {length} had entered; "
            "raise --max-context, or lower --steps"
        )
    abort_requests(engine, requests)
    gaps_before = [gap for times in before for gap in _gaps_between(times)]
    gaps_during = token_gaps(before, during, after)
    return DecodePause(
        running, context, length, 1e3 * median(gaps_before), 1e3 * max(gaps_before), 1e3 * max(gaps_during)
    )


def token_gaps(before: TokenTimes, during: TokenTimes, after: TokenTimes) -> list[float]:
    """Returns each request's gaps between tokens, from its last token before the prompt to its first after it."""
    by_request = zip(before, during, after, strict=True)
    return [gap for early, times, late in by_request for gap in _gaps_between([*early[-1:], *times, *late[:1]])]


def _record_token_times(
    bench: BenchEngine, requests: Sequence[Request], num_steps: int | None, until_first_token_of: Request | None = None
) -> list[list[float]]:
    """Step the engine, and return the times at which each request got tokens.

    It runs num_steps steps, or until `until_first_token_of` has its first token."""
    times: list[list[float]] = [[] for _ in requests]
    lengths = [len(request.output) for request in requests]
    steps_done = 0
    while steps_done != num_steps and not (until_first_token_of is not None and until_first_token_of.output):
        bench.engine.step()
        steps_done += 1
        now = perf_counter()
        for i, request in enumerate(requests):
            if len(request.output) > lengths[i]:
                times[i].append(now)
                lengths[i] = len(request.output)
    return times


def _gaps_between(times: Sequence[float]) -> list[float]:
    return [after - before for before, after in pairwise(times)]
