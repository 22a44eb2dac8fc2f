"""`python -m lab serve`: a server compared with LLM.generate, on the same prompts and settings.

Both get all prompts at once, as token ids, without a prefix cache.  The server's time is from the first byte that a
client sends to the last byte that a client receives; the clients share a thread (bench/clients.py).  An untimed run of
the same kind precedes each timed run, because the first run after other kinds is slower.  The table also compares the
work: rounds and answers.
With --shape both run a copy of a synthetic model on the same GPU.  It has no tokenizer: prompts are token ids, and
answers have token ids (return_token_ids) instead of text.
--soak counts the requests that a server leaves unanswered.  --bad-host measures how long other requests wait while one
host sends large requests.
"""

import json
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from types import MappingProxyType
from typing import Any

from espalier.bench.clients import HttpResponse, post_request_bytes
from espalier.bench.drive import BenchEngine, require_positions
from espalier.errors import EspalierError
from espalier.request import SamplingParams
from espalier.terminal.console import print_header, print_table, progress, require_writable, write_json
from espalier.terminal.flags import engine_settings, flag_of, require_at_least_one
from lab.bench import bad_host, soak
from lab.bench.checks import positive_numbers, require_success
from lab.bench.engines import ShapeEngines, engine_report, engines_of_flags, load_sizes, requested_pages
from lab.bench.server import SERVED_NAME, Server, exchange_all, running_server
from lab.shape_flags import SHAPE_FLAGS

# Long enough for an engine step and a report.
REPORT_SECONDS = 0.05
# Defaults of the flags in the default mode.
FLAG_DEFAULTS = MappingProxyType({"concurrency": "1,16", "context": 128, "tokens": 96, "repeats": 5})


def run(args: Namespace) -> int:
    modes = {"--bad-host": args.bad_host or None, "--soak": args.soak}
    chosen = [flag for flag, value in modes.items() if value is not None]
    if len(chosen) > 1:
        raise EspalierError(f"{chosen[1]} is not for {chosen[0]}; leave one out")
    for name, value in FLAG_DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
        elif chosen:
            raise EspalierError(f"{flag_of(name)} is not for {chosen[0]}; leave one out")
    require_at_least_one(args, "soak", "context", "tokens", "repeats")
    if args.soak is None and not args.bad_host:
        return _compare_server(args)
    refuse_shape(args, "--bad-host" if args.bad_host else "--soak")
    require_writable("--json", args.json)
    print_header()
    settings = engine_settings(args)
    return bad_host.run(args, settings) if args.bad_host else soak.run(args, settings)


def refuse_shape(args: Namespace, mode: str) -> None:
    """Raises EspalierError for a flag of synthetic models."""
    for name in ("shape", *SHAPE_FLAGS):
        if getattr(args, name) is not None:
            raise EspalierError(f"{flag_of(name)} is not for {mode}; leave one out")


def _compare_server(args: Namespace) -> int:
    sizes = positive_numbers("--concurrency", args.concurrency, "1,16")
    # The same prompts come at every turn, so the prefix cache is off for LLM and server.
    longest = args.context + args.tokens
    made = engines_of_flags(args, load_sizes(max(sizes), longest + 1), max_context=longest)
    require_positions(made.max_positions, longest, f"--context {args.context}", f"--tokens {args.tokens}")
    flags: list[str] = []
    start: tuple[str, ...] = ("espalier", "serve")
    if isinstance(made, ShapeEngines):
        made, flags, start = with_full_batch_pages(made), _shape_flags(args), ("lab", "server")
    cells: list[ConcurrencyFigures] = []
    with running_server(made.settings, *flags, start=start) as server, made.open() as opened:
        bench = ServeBench(opened, server)
        with progress("measuring", len(sizes)) as advance:
            for size in sizes:
                cells.append(bench.measure(size, args.context, args.tokens, args.repeats))
                advance()
    write_json(args.json, {**engine_report(args, made.config()), "cells": [cell.as_dict() for cell in cells]})
    print_table(_table(cells))
    return 0


def with_full_batch_pages(made: ShapeEngines) -> ShapeEngines:
    """Limit the pages to those of a full batch, because the server and the LLM share the GPU's memory."""
    if requested_pages(made.settings) is not None:
        return made
    num_pages = made.config().layout.max_pages
    return ShapeEngines(made.recipe, {**made.settings, "num_pages": num_pages}, made.device, made.variants)


def _shape_flags(args: Namespace) -> list[str]:
    """Returns the command-line flags of the server's synthetic models."""
    given = [name for name in ("shape", *SHAPE_FLAGS) if getattr(args, name) is not None]
    return [part for name in given for part in (flag_of(name), str(getattr(args, name)))]


def _table(cells: Sequence["ConcurrencyFigures"]) -> list[list[str]]:
    return [
        ["requests at once", *(str(cell.concurrency) for cell in cells)],
        ["LLM.generate, tokens/s", *(f"{cell.offline:.0f}" for cell in cells)],
        ["server, streams, tokens/s", *(f"{cell.streamed:.0f}" for cell in cells)],
        ["server, whole answers, tokens/s", *(f"{cell.whole:.0f}" for cell in cells)],
        ["streams over LLM.generate", *(f"{cell.streamed / cell.offline:.2f}" for cell in cells)],
        ["whole answers over LLM.generate", *(f"{cell.whole / cell.offline:.2f}" for cell in cells)],
        ["rounds: LLM.generate, streams, whole", *(" ".join(f"{each:g}" for each in cell.rounds) for cell in cells)],
        ["streams' answers as LLM.generate's", *(f"{cell.num_equal} of {cell.concurrency}" for cell in cells)],
    ]


@dataclass(frozen=True)
class ConcurrencyFigures:
    """Median tokens/s at one concurrency: LLM.generate, and the server with streams and with whole responses.

    rounds: the median number of rounds, in the same order; num_equal: streams with the same answer as LLM.generate."""

    concurrency: int
    offline: float
    streamed: float
    whole: float
    rounds: tuple[float, ...]
    num_equal: int

    def as_dict(self) -> dict[str, float]:
        return asdict(self) | {"streamed_ratio": self.streamed / self.offline, "whole_ratio": self.whole / self.offline}


class ServeBench:
    """An LLM and a server of the same model, both loaded."""

    def __init__(self, opened: BenchEngine, server: Server):
        self.opened = opened
        self.llm = opened.llm
        self.server = server

    def measure(self, concurrency: int, context: int, num_tokens: int, repeats: int) -> ConcurrencyFigures:
        """Medians over repeats.  LLM.generate, streams and whole responses take turns."""
        prompts = self.opened.make_prompts([context] * concurrency)
        kinds = (self._run_offline, partial(self._run_served, stream=True), partial(self._run_served, stream=False))
        runs: list[tuple[TimedRun, ...]] = []
        for _ in range(repeats):
            pairs = [(kind(prompts, num_tokens), kind(prompts, num_tokens)) for kind in kinds]
            runs.append(tuple(timed for _, timed in pairs))
        columns = list(zip(*runs, strict=True))
        offline, streamed, whole = (concurrency * num_tokens / median(run.seconds for run in each) for each in columns)
        rounds = tuple(median(run.rounds for run in each) for each in columns)
        answers = zip(runs[-1][0].answers, runs[-1][1].answers, strict=True)
        return ConcurrencyFigures(
            concurrency, offline, streamed, whole, rounds, sum(one == other for one, other in answers)
        )

    def _run_offline(self, prompts: Sequence[list[int]], num_tokens: int) -> "TimedRun":
        launched = self.llm.engine.scheduler.num_rounds
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        # The server's engine is idle for the same time before a run.
        time.sleep(REPORT_SECONDS)
        before, began = launched.total(), time.perf_counter()
        outputs = self.llm.generate(prompts, params)
        seconds = time.perf_counter() - began
        require_success(outputs)
        has_text = self.llm.tokenizer is not None
        return TimedRun(
            seconds, launched.total() - before, [each.text if has_text else each.token_ids for each in outputs]
        )

    def _run_served(self, prompts: Sequence[list[int]], num_tokens: int, stream: bool) -> "TimedRun":
        """Send all prompts at once, and time from the first byte sent to the last byte received."""
        same = {"model": SERVED_NAME, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": stream}
        # Without text, a stream's events would be empty.
        same["return_token_ids"] = self.llm.tokenizer is None
        requests = [post_request_bytes("/v1/completions", {**same, "prompt": prompt}) for prompt in prompts]
        before = self._rounds_of_server()
        exchanges = exchange_all(self.server.port, requests)
        for exchange in exchanges:
            if exchange.status != 200 or b'"error"' in exchange.received:
                raise EspalierError(
                    f"the server answered {exchange.status}: {bytes(exchange.received[-300:]).decode()}"
                )
        seconds = max(exchange.ended_at for exchange in exchanges) - exchanges[0].sent_at
        answers = [streamed_answer(each) for each in exchanges] if stream else []
        return TimedRun(seconds, self._rounds_of_server() - before, answers)

    def _rounds_of_server(self) -> float:
        # The engine reports the last round one step after the last token.
        time.sleep(REPORT_SECONDS)
        metrics = self.server.metrics()
        return sum(value for name, value in metrics.items() if name.startswith("espalier_rounds_total"))


@dataclass(frozen=True)
class TimedRun:
    """One timed run.

    rounds: launched by the engine; answers: texts, or token ids without a tokenizer; empty for whole responses.
    """

    seconds: float
    rounds: float
    answers: list[Any]


def streamed_answer(exchange: HttpResponse) -> Any:
    """The text of a stream, or its token ids if its events have them."""
    chunks = [json.loads(data)["choices"][0] for _, data in exchange.events() if data != b"[DONE]"]
    if chunks and "token_ids" in chunks[0]:
        return [token for chunk in chunks for token in chunk["token_ids"]]
    return "".join(chunk["text"] for chunk in chunks)
