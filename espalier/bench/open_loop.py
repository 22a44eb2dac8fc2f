"""`espalier bench load --url`: a load on running servers with OpenAI's API, whatever engine they run.

With --rate, each conversation starts at its planned time, however slow the answers are.  Each request has its own
connection, and its latencies count from its planned time.  The servers are measured one after another, with the same
requests.  Each pair of a rate and a temperature gets its own random prompts.
"""

import asyncio
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from operator import le
from time import perf_counter
from types import MappingProxyType
from typing import Any

from espalier.bench.clients import LoadTarget, SentRequest, fetch_model, fetch_rounds, parse_address, require_reachable
from espalier.bench.datasets import dataset_from_flags
from espalier.bench.flags import BURSTS, CHAT, COMPLETIONS, DATASET_FLAGS, FIXED, POISSON
from espalier.bench.load import LATENCY_TIMES, AnsweredRequest, Arrivals, Timeline, figures_by_category, latency_figures
from espalier.bench.report import (
    LoadPoint,
    category_table,
    check_plot_path,
    command_line,
    json_value,
    latency_rows,
    plot_load,
    write_markdown,
)
from espalier.bench.traffic import REASONING_SWITCHES, Conversation, Traffic
from espalier.errors import EspalierError, require_number
from espalier.terminal.console import print_header, print_table, progress, require_writable, write_json
from espalier.terminal.flags import api_key, engine_settings, flag_of, require_at_least_one

DEFAULT_FLAGS: Mapping[str, Any] = MappingProxyType(
    {
        "rate": [2.0],
        "arrivals": POISSON,
        "burst": 8,
        "requests": 64,
        "endpoint": CHAT,
        "input": (16, 64),
        "output": (16, 64),
        "prefixes": 0,
        "prefix_length": 64,
        "turns": 1,
        "think": 1.0,
        "timeout": 600.0,
    }
)


@dataclass(frozen=True)
class LatencyLimits:
    """Limits in ms; None for no limit.  ttft: for the time to the first token.  itl: for the mean time between two
    tokens of a request."""

    ttft: float | None
    itl: float | None

    def are_met_by(self, timeline: Timeline) -> bool:
        is_late = self.ttft is not None and 1e3 * timeline.ttft_s > self.ttft
        return not is_late and (self.itl is None or 1e3 * (timeline.tpot_s or 0.0) <= self.itl)


@dataclass(frozen=True)
class OpenLoopResult:
    """The results of one server at one rate.  rate: None if a fixed number of conversations was in progress.

    seconds: from the first arrival to the last answer.  rounds_by_length: {accept length: number of rounds in this
    time}; None if the server does not report rounds.  limits: a request within these limits counts for the goodput."""

    server: str
    rate: float | None
    temperature: float
    seconds: float
    requests: list[SentRequest] = field(repr=False)
    limits: LatencyLimits
    rounds_by_length: Counter[int] | None

    @property
    def answered_requests(self) -> list[SentRequest]:
        return [request for request in self.requests if not request.error]

    @property
    def accept_length(self) -> float | None:
        """The server's mean accept length; None if it is not reported, or if no round ran."""
        rounds = self.rounds_by_length
        return sum(rounds.elements()) / rounds.total() if rounds else None

    def figures(self) -> dict[str, Any]:
        length = self.accept_length
        # A server reports one accept length for all requests.  With several categories, none has a known length.
        mean = length if len({request.category for request in self.requests}) == 1 else None
        answers = [
            AnsweredRequest(r.category, r.timeline, r.num_output_tokens, mean and r.num_later_tokens / mean)
            for r in self.answered_requests
        ]
        num_good = sum(self.limits.are_met_by(request.timeline) for request in self.answered_requests)
        tokens = sum(request.num_output_tokens for request in self.answered_requests)
        return {
            "server": self.server,
            "rate": self.rate,
            "temperature": self.temperature,
            "requests": len(self.requests),
            "answered": len(self.answered_requests),
            "errors": dict(Counter(each.error for each in self.requests if each.error)),
            "seconds": self.seconds,
            "tokens_in": sum(each.num_prompt_tokens for each in self.answered_requests),
            "tokens_out": tokens,
            "requests_per_second": len(self.answered_requests) / self.seconds,
            "tokens_out_per_second": tokens / self.seconds,
            "goodput_per_second": num_good / self.seconds,
            "good_share": num_good / len(self.requests),
            "accept_length": length,
            **latency_figures([each.timeline for each in self.answered_requests]),
            "categories": figures_by_category(answers),
        }


def run(args: Namespace) -> int:
    """Run `espalier bench load --url`.  Raises EspalierError if a server does not answer the first request."""
    dataset = dataset_from_flags(args)
    _fill_and_check_flags(args)
    traffic = Traffic(args.input, args.output, args.turns, args.prefixes, args.prefix_length, args.token_ids)
    limits = LatencyLimits(args.ttft_limit, args.itl_limit)
    results, models = [], {}
    cells = [(temperature, rate) for temperature in args.temperature for rate in args.rate]
    # Each cell (temperature, rate) has other prompts, because the server's prefix cache has those of earlier cells.
    conversations_of_cells = [dataset or traffic.conversations(args.requests, seed) for seed in range(len(cells))]
    with progress("measuring", len(args.url) * sum(map(len, conversations_of_cells))) as advance:
        for url in args.url:
            target = asyncio.run(_reachable_server(args, url))
            models[str(target.address)] = target.shared_fields["model"]
            for (temperature, rate), conversations in zip(cells, conversations_of_cells, strict=True):
                cell = replace(target, shared_fields={"temperature": temperature, **target.shared_fields})
                before = asyncio.run(fetch_rounds(cell.address, cell.headers))
                seconds, requests = asyncio.run(_measure_server(cell, conversations, arrivals_of(args, rate), advance))
                after = asyncio.run(fetch_rounds(cell.address, cell.headers))
                rounds = None if before is None or after is None else after - before
                results.append(OpenLoopResult(str(cell.address), rate, temperature, seconds, requests, limits, rounds))
    figures = [result.figures() for result in results]
    load_flags = (*DEFAULT_FLAGS, "concurrency", "token_ids", "extra_body", "dataset", *DATASET_FLAGS)
    load_settings = {name: json_value(getattr(args, name)) for name in load_flags} | asdict(limits)
    write_json(args.json, {"command": command_line(), "models": models, "load": load_settings, "cells": figures})
    tables = [_table_rows(figures, limits)]
    if dataset is not None:
        tables += [
            category_table(
                f"{each['server']}{_rate_text(each['rate'])}, temperature {each['temperature']:g}", each["categories"]
            )
            for each in figures
        ]
    write_markdown(args.markdown, tables)
    print_header()
    for table in tables:
        print_table(table)
    for each in figures:
        for error, count in each["errors"].items():
            print(f"  {each['server']}{_rate_text(each['rate'])}: {count} requests without an answer: {error}")
    points = [_load_point(each) for each in figures if each["rate"] is not None]
    plot_load(points, {"ttft_ms": limits.ttft, "per_token_ms": limits.itl}, args.plot)
    return 0


def _fill_and_check_flags(args: Namespace) -> None:
    """Set the defaults of flags that were not given, and check the flags.  Raises EspalierError."""
    if args.concurrency is not None:
        args.rate = [None]
    if args.token_ids is not None:
        _check_token_ids(args)
    for name, value in DEFAULT_FLAGS.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    require_at_least_one(args, "burst", "requests", "turns", "prefix_length")
    for rate in args.rate:
        require_number("--rate", rate, lambda rate: rate > 0, "more than 0", optional=True)
    for name, low in (("prefixes", 0), ("think", 0), ("timeout", 1e-3), ("ttft_limit", 0), ("itl_limit", 0)):
        require_number(flag_of(name), getattr(args, name), partial(le, low), f"{low:g} or more", optional=True)
    require_writable("--json", args.json)
    require_writable("--markdown", args.markdown)
    if args.thinking is not None and args.endpoint != CHAT:
        raise EspalierError("--thinking is a switch of the chat template, for --endpoint chat; leave one out")
    if args.plot is not None and args.concurrency is not None:
        raise EspalierError("--plot draws figures by --rate, and --concurrency is set; leave one out")
    check_plot_path(args.plot)


def _check_token_ids(args: Namespace) -> None:
    """Raises EspalierError if flags for text prompts are given together with --token-ids."""
    require_at_least_one(args, "token_ids")
    if args.endpoint == CHAT or (args.turns or 1) > 1:
        flag = "--endpoint chat" if args.endpoint == CHAT else "--turns"
        raise EspalierError(f"{flag} needs a text, and --token-ids sends none; leave one out")
    args.endpoint = COMPLETIONS


def arrivals_of(args: Namespace, rate: float | None) -> Arrivals:
    """Returns the arrivals at one rate.  rate: None for --concurrency conversations at once, or all at once."""
    if rate is None:
        return Arrivals(args.concurrency)
    burst = {POISSON: None, FIXED: 1, BURSTS: args.burst or DEFAULT_FLAGS["burst"]}[args.arrivals or POISSON]
    return Arrivals(rate=rate, burst=burst)


async def _reachable_server(args: Namespace, url: str) -> LoadTarget:
    """Returns the server at a URL.  Raises EspalierError unless the server answers a first request."""
    key = api_key(args)
    address = parse_address(url)
    headers = {"host": address.host} | ({"authorization": f"Bearer {key}"} if key else {})
    await require_reachable(address)
    model = engine_settings(args).get("model") or await fetch_model(address, headers)
    switch = {} if args.thinking is None else {"chat_template_kwargs": {REASONING_SWITCHES[0]: args.thinking}}
    shared_fields = {"model": model, **switch, **(args.extra_body or {})}
    target = LoadTarget(address, headers, shared_fields, args.endpoint, args.timeout, args.think)
    [first] = Traffic((2, 2), (4, 4), vocab_size=args.token_ids).conversations(1, seed=-1)
    [sent] = await target.run_conversation(first, perf_counter())
    if sent.error:
        raise EspalierError(f"--url {url} does not answer a first request: {sent.error}")
    return target


async def _measure_server(
    target: LoadTarget, conversations: Sequence[Conversation], arrivals: Arrivals, advance: Any
) -> tuple[float, list[SentRequest]]:
    """Runs all conversations.  Returns (seconds, requests).  Without a rate, a fixed number of conversations run at
    once: when one ends, the next starts.  advance: called after each conversation."""
    started_at, arrival_times = perf_counter(), arrivals.arrival_times(len(conversations))
    free_places = asyncio.Semaphore(arrivals.concurrency or len(conversations))

    async def run_one(conversation: Conversation) -> list[SentRequest]:
        async with free_places:
            start = started_at + arrival_times[conversation.index] if arrivals.rate else perf_counter()
            requests = await target.run_conversation(conversation, start)
        advance()
        return requests

    results = await asyncio.gather(*(run_one(talk) for talk in conversations))
    return perf_counter() - started_at - arrival_times[0], [requests for each in results for requests in each]


def _table_rows(figures: Sequence[Mapping[str, Any]], limits: LatencyLimits) -> list[list[str]]:
    """Returns the rows of the printed table.  figures: those of each measurement, one column each."""
    limits_ms = (("ttft", limits.ttft), ("per token", limits.itl))
    limit_texts = [f"{name} {ms:g} ms" for name, ms in limits_ms if ms is not None]
    rows = [
        ["", *(each["server"] for each in figures)],
        ["arrivals a second", *("-" if each["rate"] is None else f"{each['rate']:g}" for each in figures)],
        ["temperature", *(f"{each['temperature']:g}" for each in figures)],
        ["answered, of all requests", *(f"{each['answered']} of {each['requests']}" for each in figures)],
        ["requests/s", *(f"{each['requests_per_second']:.2f}" for each in figures)],
        ["tokens in, out", *(f"{each['tokens_in']}, {each['tokens_out']}" for each in figures)],
        ["output tokens/s", *(f"{each['tokens_out_per_second']:.0f}" for each in figures)],
        ["accept length", *("-" if (x := each["accept_length"]) is None else f"{x:.2f}" for each in figures)],
    ]
    rows += latency_rows(figures)
    limits_text = f"within {' and '.join(limit_texts)}" if limit_texts else "(no limit is set)"
    goodputs = (f"{each['goodput_per_second']:.2f} ({each['good_share']:.0%})" for each in figures)
    rows.append([f"goodput, requests/s {limits_text}", *goodputs])
    return rows


def _rate_text(rate: float | None) -> str:
    """Returns the words for a rate of arrivals in a heading."""
    return "" if rate is None else f" at {rate:g}/s"


def _load_point(figures: Mapping[str, Any]) -> LoadPoint:
    times = {name: figures[name] for name in LATENCY_TIMES}
    per_second = figures["goodput_per_second"], figures["requests_per_second"]
    return LoadPoint(figures["server"], figures["rate"], times, *per_second)
