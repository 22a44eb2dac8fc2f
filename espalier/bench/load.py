"""Serves a load offline and records when each token came.

Requests arrive all at once, at a rate, or each as another finishes.  `bench throughput` and `bench latency` report it.
"""

from argparse import Namespace
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter, sleep
from typing import Any

import torch

from espalier.bench.drive import empty_prefix_cache, greedy_request
from espalier.bench.engines import BenchEngines, compared_ways, load_sizes, require_positions
from espalier.bench.flags import INPUTS, OUTPUTS, REQUESTS
from espalier.config import ResolvedConfig
from espalier.engine.engine import Engine
from espalier.request import Request
from espalier.terminal.flags import require_at_least_one

PERCENTILES = (50, 90, 99)
# What latency_of has percentiles of.
TIMES = ("ttft_ms", "between_pieces_ms", "per_token_ms", "end_to_end_ms")


@dataclass(frozen=True)
class Load:
    """Number of tokens of each prompt and of each output, in order of arrival."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def longest(self) -> int:
        return max(a + b for a, b in zip(self.inputs, self.outputs, strict=True))


def mixed(count: int, inputs: tuple[int, int], outputs: tuple[int, int], seed: int = 0) -> Load:
    """A load of `count` requests with lengths drawn uniformly between the bounds, both included."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(low: int, high: int) -> tuple[int, ...]:
        return tuple(torch.randint(low, high + 1, (count,), generator=generator).tolist())

    return Load(drawn(*inputs), drawn(*outputs))


@dataclass(frozen=True)
class Arrivals:
    """When requests arrive.

    concurrency: requests at once; the next arrives when one finishes.  rate: requests a second, as a Poisson process;
    with `burst`, so many at once, and the bursts evenly spaced.  Neither: all at once.
    """

    concurrency: int | None = None
    rate: float | None = None
    burst: int | None = None

    def due(self, count: int) -> list[float]:
        """The time at which each request arrives, in seconds from the start."""
        if self.rate is None:
            return [0.0] * count
        if self.burst is not None:
            return [i // self.burst * self.burst / self.rate for i in range(count)]
        generator = torch.Generator().manual_seed(0)
        uniform = torch.rand(count, generator=generator, dtype=torch.float64)
        return (-torch.log1p(-uniform) / self.rate).cumsum(0).tolist()


@dataclass
class Timeline:
    """One request.  due: when it arrived; chunks: (time, number of tokens) of each output chunk."""

    due: float
    chunks: list[tuple[float, int]] = field(default_factory=list)

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.chunks[0][0] - self.due

    @property
    def gaps(self) -> list[float]:
        """Seconds between one chunk and the next, as a reader sees them."""
        return [after[0] - before[0] for before, after in pairwise(self.chunks)]

    @property
    def per_token(self) -> float | None:
        """Mean seconds a token after the first chunk; None if there is only one chunk."""
        later = sum(count for _, count in self.chunks[1:])
        return (self.chunks[-1][0] - self.chunks[0][0]) / later if later else None

    @property
    def whole(self) -> float:
        """Seconds to the last token."""
        return self.chunks[-1][0] - self.due


@dataclass(frozen=True)
class Served:
    """A load after it ran.  seconds: from the first arrival to the last token."""

    load: Load
    seconds: float
    requests: list[Request]
    timelines: list[Timeline]

    @property
    def accept_length(self) -> float:
        rounds = sum(request.stats.rounds for request in self.requests)
        return sum(request.stats.emitted for request in self.requests) / rounds if rounds else 0.0

    def throughput(self) -> dict[str, Any]:
        tokens_in, tokens_out = sum(self.load.inputs), sum(len(request.output) for request in self.requests)
        return {
            "requests": len(self.requests),
            "seconds": self.seconds,
            "tokens_in": tokens_in,
            "tokens_out": tokens_out,
            "tokens_in_per_second": tokens_in / self.seconds,
            "tokens_out_per_second": tokens_out / self.seconds,
            "accept_length": self.accept_length,
        }

    def latency(self) -> dict[str, Any]:
        """See latency_of."""
        about = {"requests": len(self.requests), "seconds": self.seconds, "accept_length": self.accept_length}
        return about | latency_of(self.timelines)


def latency_of(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """Percentiles in ms of TIMES: to the first token, between chunks, a token of a request, to the last token."""
    per_token = [each.per_token for each in timelines if each.per_token is not None]
    gaps = [gap for each in timelines for gap in each.gaps]
    values = [each.first for each in timelines], gaps, per_token, [each.whole for each in timelines]
    return {name: percentiles(each) for name, each in zip(TIMES, values, strict=True)}


def title_of(times: str) -> str:
    """The name of one of TIMES in a table."""
    return times.removesuffix("_ms").replace("_", " ")


def percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """Nearest-rank percentiles in ms; None if there are no values."""
    if not seconds:
        return None
    order = sorted(seconds)
    return {f"p{p}": 1e3 * order[-(-len(order) * p // 100) - 1] for p in PERCENTILES}


def serve(engine: Engine, prompts: Sequence[Sequence[int]], load: Load, arrivals: Arrivals) -> Served:
    """Run the load: greedy, each request to its full output length."""
    begun = perf_counter()
    due = [begun + at for at in arrivals.due(len(prompts))]
    timelines = [Timeline(at) for at in due]
    numbered = enumerate(zip(prompts, load.outputs, strict=True))
    requests = [greedy_request(str(i), i, prompt, count) for i, (prompt, count) in numbered]
    waiting = deque(requests)
    running = 0
    max_running = arrivals.concurrency or len(requests)
    while waiting or engine.has_work:
        while waiting and running < max_running and perf_counter() >= due[waiting[0].arrival]:
            request = waiting.popleft()
            if arrivals.rate is None:
                timelines[request.arrival].due = perf_counter()
            engine.add(request)
            running += 1
        if not engine.has_work:
            sleep(max(0.0, due[waiting[0].arrival] - perf_counter()))
            continue
        for chunk in engine.step():
            if chunk.token_ids:
                timelines[int(chunk.request_id)].chunks.append((perf_counter(), len(chunk.token_ids)))
            running -= chunk.finish_reason is not None
    return Served(load, perf_counter() - timelines[0].due, requests, timelines)


def tree_and_plain(
    args: Namespace, arrivals: Arrivals, engines_of: Callable[..., BenchEngines]
) -> tuple[dict[str, Served], ResolvedConfig]:
    """The load of the flags, served in each of compared_ways, after a warm-up.  The config is that of the first way.

    engines_of: as espalier/bench/engines.py:engines_of.
    """
    require_at_least_one(args, "requests")
    inputs, outputs = args.input or INPUTS, args.output or OUTPUTS
    load = mixed(args.requests or REQUESTS, inputs, outputs)
    batch = min(len(load.inputs), arrivals.concurrency or 64)
    made = engines_of(args, load_sizes(batch, load.longest + 2), max_context=load.longest)
    asked = ("--input {},{}".format(*inputs), "--output {},{}".format(*outputs))
    require_positions(made.positions, load.longest, *asked)
    served, configs = {}, []
    for name, way in compared_ways(made).items():
        with made.open(way) as bench:
            prompts = bench.prompts(load.inputs)
            warm_up = Load(load.inputs[:batch], (8,) * batch)
            serve(bench.engine, prompts[:batch], warm_up, Arrivals())
            empty_prefix_cache(bench.engine)
            served[name] = serve(bench.engine, prompts, load, arrivals)
            configs.append(bench.config)
    return served, configs[0]
