"""Serves a load by an engine and records when each token came, and what the time was spent on.

Requests arrive all at once, at a rate, or each as another finishes.  `espalier bench load` reports it (load_report.py).
"""

import hashlib
import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter, sleep
from typing import Any

import torch

from espalier.bench.drive import greedy_request
from espalier.engine.engine import Engine
from espalier.engine.executor import Handle, LaunchObserver
from espalier.engine.launch_input import LaunchInput
from espalier.request import Request

PERCENTILES = (50, 90, 99)
# What latency_of has percentiles of.
TIMES = ("ttft_ms", "between_pieces_ms", "per_token_ms", "end_to_end_ms")


@dataclass(frozen=True)
class Load:
    """Conversations of `turns` requests each, in order of arrival.

    inputs, outputs: tokens that each request adds to what was said before it, and tokens of its output, conversation
    after conversation.  prefixes: number of different beginnings of prefix_tokens tokens, which conversations share in
    turn; 0 for none.  think: seconds from an answer to the next turn.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    turns: int = 1
    prefixes: int = 0
    prefix_tokens: int = 0
    think: float = 0.0

    @property
    def count(self) -> int:
        """Conversations."""
        return len(self.inputs) // self.turns

    @property
    def longest(self) -> int:
        """Tokens of the longest conversation at its end."""
        return self.beginning + max(sum(each.inputs + each.outputs) for each in map(self.of, range(self.count)))

    @property
    def beginning(self) -> int:
        """Tokens of a shared beginning."""
        return self.prefix_tokens if self.prefixes else 0

    def of(self, conversation: int) -> "Load":
        """The requests of one conversation."""
        places = slice(conversation * self.turns, (conversation + 1) * self.turns)
        return Load(self.inputs[places], self.outputs[places], self.turns)

    def texts(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """What the users of each conversation say, beginnings included: its share of a prompt of `lengths` tokens."""
        beginnings = [list(prompt[: self.prefix_tokens]) for prompt in prompts[: self.prefixes]]
        rest = prompts[self.prefixes :]
        return [[*beginnings[i % self.prefixes], *text] if beginnings else list(text) for i, text in enumerate(rest)]

    @property
    def lengths(self) -> list[int]:
        """The lengths in tokens of the prompts that `texts` takes."""
        return [self.prefix_tokens] * self.prefixes + [sum(self.of(i).inputs) for i in range(self.count)]


def mixed(count: int, inputs: tuple[int, int], outputs: tuple[int, int], turns: int = 1, **more: Any) -> Load:
    """A load of `count` conversations with lengths drawn uniformly between the bounds, both included.

    more: further fields of Load.
    """
    generator = torch.Generator().manual_seed(0)

    def drawn(low: int, high: int) -> tuple[int, ...]:
        return tuple(torch.randint(low, high + 1, (count * turns,), generator=generator).tolist())

    return Load(drawn(*inputs), drawn(*outputs), turns, **more)


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


class Spent:
    """Counts how the time of a load is spent.  It is an engine's observer, and calls the observer that was there
    before.

    seconds: by "prefill", "rounds" and "idle"; the time of a launch ends when its result is read.
    rows: that the target ran, padding of passes included, padding of a round to its graph's batch not.
    """

    def __init__(self, engine: Engine) -> None:
        self.layout = engine.layout
        self.captured_passes = engine.executor.captured_passes
        self.other: LaunchObserver | None = engine.observer
        self.seconds = {"prefill": 0.0, "rounds": 0.0, "idle": 0.0}
        self.rows = 0
        self._unread: deque[str] = deque()
        self._kind: str | None = None

    def on_launch(self, launch_input: LaunchInput) -> None:
        self._unread.append("prefill" if launch_input.is_prefill else "rounds")
        if launch_input.is_prefill:
            self.rows += launch_input.form(self.captured_passes).pass_rows
        else:
            batch = len(launch_input.slots)
            self.rows += batch * (launch_input.tree or self.layout.at(batch).tree).num_draft_tokens
        if self.other is not None:
            self.other.on_launch(launch_input)

    def before_result(self, handle: Handle) -> None:
        self._kind = self._unread.popleft()
        if self.other is not None:
            self.other.before_result(handle)

    def add(self, seconds: float) -> None:
        """The time of a step, or of a wait for requests."""
        kind = self._kind or (self._unread[0] if self._unread else "idle")
        self.seconds[kind] += seconds
        self._kind = None


@dataclass(frozen=True)
class Served:
    """A load after it ran.  seconds: from the first arrival to the last token."""

    load: Load
    seconds: float
    requests: list[Request]
    timelines: list[Timeline]
    spent: Spent

    @property
    def accept_length(self) -> float:
        rounds = sum(request.stats.rounds for request in self.requests)
        return sum(request.stats.emitted for request in self.requests) / rounds if rounds else 0.0

    def figures(self) -> dict[str, Any]:
        """cached_share: of the prompts' tokens, those that came from the prefix cache.

        outputs_hash: of all outputs; equal texts have equal hashes, in whatever order they came.
        wasted_rows: share of the target's rows that neither entered a token of a prompt nor emitted one.
        """
        tokens_out = sum(len(request.output) for request in self.requests)
        tokens_in = sum(len(request.prompt) for request in self.requests)
        computed = tokens_in - sum(request.cached_tokens for request in self.requests)
        busy = sum(self.spent.seconds.values())
        return {
            "requests": len(self.requests),
            "seconds": self.seconds,
            "tokens_in": tokens_in,
            "tokens_in_cached": tokens_in - computed,
            "cached_share": 1 - computed / tokens_in,
            "outputs_hash": self._outputs_hash(),
            "tokens_out": tokens_out,
            "tokens_in_per_second": tokens_in / self.seconds,
            "tokens_out_per_second": tokens_out / self.seconds,
            "accept_length": self.accept_length,
            "time_shares": {kind: seconds / busy for kind, seconds in self.spent.seconds.items()},
            "wasted_rows": max(0.0, 1 - (computed + tokens_out) / self.spent.rows),
            **latency_of(self.timelines),
        }

    def _outputs_hash(self) -> str:
        outputs = [each.output for each in sorted(self.requests, key=lambda each: each.arrival)]
        return hashlib.sha256(repr(outputs).encode()).hexdigest()[:12]


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
    """Run the load: greedy, each request to its full output length.  prompts: of load.lengths tokens."""
    texts, spent = load.texts(prompts), Spent(engine)
    begun = perf_counter()
    due = [begun + at for at in arrivals.due(load.count)]
    timelines: list[Timeline] = []
    requests: list[Request] = []
    # For each conversation: (when its next turn is due, its number, its turn, the text before).
    waiting: list[tuple[float, int, int, list[int]]] = [(due[i], i, 0, []) for i in range(load.count)]
    running: dict[str, tuple[int, int]] = {}
    max_running = arrivals.concurrency or load.count
    engine.observer, last = spent, perf_counter()

    def spend() -> None:
        nonlocal last
        now = perf_counter()
        spent.add(now - last)
        last = now

    while waiting or engine.has_work:
        while waiting and len(running) < max_running and perf_counter() >= waiting[0][0]:
            at, number, turn, said = heapq.heappop(waiting)
            timelines.append(Timeline(perf_counter() if arrivals.rate is None else at))
            requests.append(_request(load, texts[number], number, turn, said))
            running[requests[-1].id] = len(requests) - 1, number
            engine.add(requests[-1])
        if not engine.has_work:
            sleep(max(0.0, waiting[0][0] - perf_counter()))
            spend()
            continue
        for chunk in engine.step():
            place, number = running[chunk.request_id]
            if chunk.token_ids:
                timelines[place].chunks.append((perf_counter(), len(chunk.token_ids)))
            if chunk.finish_reason is not None:
                del running[chunk.request_id]
                turn = requests[place].arrival % load.turns + 1
                if turn < load.turns:
                    said = requests[place].prompt + requests[place].output
                    heapq.heappush(waiting, (perf_counter() + load.think, number, turn, said))
        spend()
    engine.observer = spent.other
    return Served(load, perf_counter() - timelines[0].due, requests, timelines, spent)


def _request(load: Load, text: Sequence[int], number: int, turn: int, said: list[int]) -> Request:
    """The request of a conversation's turn.  text: all that its user says; said: by both, before this turn."""
    own = load.of(number)
    begin = load.beginning + sum(own.inputs[:turn]) if turn else 0
    end = load.beginning + sum(own.inputs[: turn + 1])
    place = number * load.turns + turn
    return greedy_request(str(place), place, [*said, *text[begin:end]], own.outputs[turn])
