"""A load served offline: requests that arrive at once, at a rate or as others finish; when each token came."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter, sleep
from typing import Any

import torch

from espalier.engine.engine import Engine
from espalier.request import Request, SamplingParams

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Load:
    """Tokens of each prompt and of each output, in order of arrival."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def longest(self) -> int:
        return max(a + b for a, b in zip(self.inputs, self.outputs, strict=True))


def mixed(count: int, inputs: tuple[int, int], outputs: tuple[int, int], seed: int = 0) -> Load:
    """Lengths drawn evenly between the bounds, both included."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(low: int, high: int) -> tuple[int, ...]:
        return tuple(torch.randint(low, high + 1, (count,), generator=generator).tolist())

    return Load(drawn(*inputs), drawn(*outputs))


@dataclass(frozen=True)
class Arrivals:
    """concurrency: requests at once, the next entering as one finishes; rate: requests a second, whose distances are
    exponential; neither: all at once."""

    concurrency: int | None = None
    rate: float | None = None

    def due(self, count: int) -> list[float]:
        """Seconds from the start at which each arrives."""
        if self.rate is None:
            return [0.0] * count
        generator = torch.Generator().manual_seed(0)
        uniform = torch.rand(count, generator=generator, dtype=torch.float64)
        return (-torch.log1p(-uniform) / self.rate).cumsum(0).tolist()


@dataclass
class Timeline:
    """One request.  due: when it arrived; pieces: (when, tokens) as they came."""

    due: float
    pieces: list[tuple[float, int]] = field(default_factory=list)

    @property
    def first(self) -> float:
        return self.pieces[0][0] - self.due

    @property
    def gaps(self) -> list[float]:
        """Between one piece and the next: what a reader waits for."""
        return [after[0] - before[0] for before, after in pairwise(self.pieces)]

    @property
    def per_token(self) -> float | None:
        """Seconds a token after the first piece; None where there is no more."""
        later = sum(count for _, count in self.pieces[1:])
        return (self.pieces[-1][0] - self.pieces[0][0]) / later if later else None


@dataclass(frozen=True)
class Served:
    """seconds: from the first arrival to the last token."""

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
        """ms, by percentile: to the first token; between pieces of one request; a token of one request."""
        per_token = [each.per_token for each in self.timelines]
        return {
            "requests": len(self.requests),
            "seconds": self.seconds,
            "ttft_ms": percentiles([each.first for each in self.timelines]),
            "between_pieces_ms": percentiles([gap for each in self.timelines for gap in each.gaps]),
            "per_token_ms": percentiles([each for each in per_token if each is not None]),
            "accept_length": self.accept_length,
        }


def percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """ms, the nearest that occurred; None of nothing."""
    if not seconds:
        return None
    order = sorted(seconds)
    return {f"p{p}": 1e3 * order[round((len(order) - 1) * p / 100)] for p in PERCENTILES}


def serve(engine: Engine, prompts: Sequence[Sequence[int]], load: Load, arrivals: Arrivals) -> Served:
    """Greedy, each request to its length."""
    begun = perf_counter()
    due = [begun + at for at in arrivals.due(len(prompts))]
    timelines = [Timeline(at) for at in due]
    requests = [_request(i, prompt, count) for i, (prompt, count) in enumerate(zip(prompts, load.outputs, strict=True))]
    waiting = deque(requests)
    running = 0
    most = arrivals.concurrency or len(requests)
    while waiting or engine.has_work:
        while waiting and running < most and perf_counter() >= due[waiting[0].arrival]:
            request = waiting.popleft()
            if arrivals.rate is None:
                timelines[request.arrival].due = perf_counter()
            engine.add(request)
            running += 1
        if not engine.has_work:
            sleep(max(0.0, due[waiting[0].arrival] - perf_counter()))
            continue
        for piece in engine.step():
            if piece.token_ids:
                timelines[int(piece.request_id)].pieces.append((perf_counter(), len(piece.token_ids)))
            running -= piece.finish_reason is not None
    return Served(load, perf_counter() - begun, requests, timelines)


def _request(index: int, prompt: Sequence[int], num_tokens: int) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True).resolve({}, ())
    return Request(str(index), list(prompt), params, seed=index, arrival=index)
