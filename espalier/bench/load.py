"""Runs a load of requests on an engine.  Records when each token arrived, and how the engine's time was spent.

Requests arrive all at once, at a rate, or when earlier ones finish.  load_report.py prints the results.
"""

import hashlib
import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter, sleep
from typing import Any, NamedTuple, Protocol

import torch

from espalier.bench.drive import greedy_request
from espalier.engine.engine import Engine
from espalier.engine.executor import LaunchHandle, LaunchObserver
from espalier.engine.launch_input import LaunchInput
from espalier.request import Request

PERCENTILES = (50, 90, 99)
# The times for which latency_figures returns percentiles.
LATENCY_TIMES = ("ttft_ms", "between_pieces_ms", "per_token_ms", "end_to_end_ms")


@dataclass(frozen=True)
class Load:
    """A load: conversations of `num_turns` requests, in order of arrival.

    input_lengths: for each request, how many tokens the user adds.  output_lengths: for each request, the length of its
    output.  In both lists, the requests of one conversation are adjacent.  num_prefixes: how many different beginnings
    the conversations share, of prefix_tokens tokens each.  think_s: seconds from an answer to the next turn."""

    input_lengths: tuple[int, ...]
    output_lengths: tuple[int, ...]
    num_turns: int = 1
    num_prefixes: int = 0
    prefix_tokens: int = 0
    think_s: float = 0.0

    @property
    def num_conversations(self) -> int:
        return len(self.input_lengths) // self.num_turns

    @property
    def max_tokens(self) -> int:
        """The number of tokens of the longest conversation, outputs included."""
        talks = map(self.load_of_conversation, range(self.num_conversations))
        return self.shared_prefix_tokens + max(sum(talk.input_lengths + talk.output_lengths) for talk in talks)

    @property
    def shared_prefix_tokens(self) -> int:
        """The number of tokens of a shared beginning; 0 if no beginning is shared."""
        return self.prefix_tokens if self.num_prefixes else 0

    def load_of_conversation(self, index: int) -> "Load":
        """Returns the lengths of one conversation, without its shared beginning."""
        turns = slice(index * self.num_turns, (index + 1) * self.num_turns)
        return Load(self.input_lengths[turns], self.output_lengths[turns], self.num_turns)

    def user_texts(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Returns the users' token ids of each conversation, with its shared beginning.  prompts: random token ids, of
        the lengths in prompt_lengths."""
        beginnings = [list(prompt[: self.prefix_tokens]) for prompt in prompts[: self.num_prefixes]]
        texts = prompts[self.num_prefixes :]
        return [[*(beginnings[i % self.num_prefixes] if beginnings else ()), *text] for i, text in enumerate(texts)]

    @property
    def prompt_lengths(self) -> list[int]:
        """The lengths, in tokens, of the prompts that `user_texts` takes."""
        lengths = [sum(self.load_of_conversation(i).input_lengths) for i in range(self.num_conversations)]
        return [self.prefix_tokens] * self.num_prefixes + lengths


def random_load(
    count: int, input_bounds: tuple[int, int], output_bounds: tuple[int, int], num_turns: int = 1, **load_fields: Any
) -> Load:
    """Returns a load of `count` conversations.  The lengths of inputs and outputs are drawn uniformly between the
    bounds, both included.  load_fields: further fields of Load."""
    generator = torch.Generator().manual_seed(0)

    def draw_lengths(low: int, high: int) -> tuple[int, ...]:
        return tuple(torch.randint(low, high + 1, (count * num_turns,), generator=generator).tolist())

    return Load(draw_lengths(*input_bounds), draw_lengths(*output_bounds), num_turns, **load_fields)


@dataclass(frozen=True)
class Arrivals:
    """Defines when requests arrive: all at once, unless concurrency or rate is set.

    concurrency: the number of requests in progress; when one ends, the next arrives.  rate: arrivals a second, at
    random times (a Poisson process).  burst: with rate, requests arrive in evenly spaced groups of this size."""

    concurrency: int | None = None
    rate: float | None = None
    burst: int | None = None

    def arrival_times(self, num_requests: int) -> list[float]:
        """Returns the arrival time of each request, in seconds from the start of the load."""
        if self.rate is None:
            return [0.0] * num_requests
        if self.burst is not None:
            return [i // self.burst * self.burst / self.rate for i in range(num_requests)]
        generator = torch.Generator().manual_seed(0)
        uniform = torch.rand(num_requests, generator=generator, dtype=torch.float64)
        return (-torch.log1p(-uniform) / self.rate).cumsum(0).tolist()


@dataclass
class Timeline:
    """The times of one request, in seconds on perf_counter's clock.  planned_at: when it should arrive.  chunks: for
    each output chunk, (when it arrived, its number of tokens)."""

    planned_at: float
    chunks: list[tuple[float, int]] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        """Seconds from arrival to the first token."""
        return self.chunks[0][0] - self.planned_at

    @property
    def chunk_gaps(self) -> list[float]:
        """The seconds between consecutive chunks."""
        return [after[0] - before[0] for before, after in pairwise(self.chunks)]

    @property
    def tpot_s(self) -> float | None:
        """The mean seconds for a token after the first chunk; None if there is only one chunk."""
        later = sum(count for _, count in self.chunks[1:])
        return (self.chunks[-1][0] - self.chunks[0][0]) / later if later else None

    @property
    def latency_s(self) -> float:
        """Seconds from arrival to the last token."""
        return self.chunks[-1][0] - self.planned_at


class LaunchTimes:
    """An observer of the engine that measures how a load's time is spent.  It also calls the engine's former observer.

    seconds_by_kind: the seconds of "prefill", "rounds" and "idle".  A launch is a prefill pass or a round that the GPU
    runs.  A step counts for the kind of the launch whose result it reads.  num_target_rows: rows (tokens) that the
    target computed, with the padding of prefill passes, but without the padding of rounds."""

    def __init__(self, engine: Engine) -> None:
        self.layout = engine.layout
        self.captured_passes = engine.executor.captured_passes
        self.former_observer: LaunchObserver | None = engine.observer
        self.seconds_by_kind = {"prefill": 0.0, "rounds": 0.0, "idle": 0.0}
        self.num_target_rows = 0
        self._unread_kinds: deque[str] = deque()
        self._launch_kind: str | None = None

    def on_launch(self, launch_input: LaunchInput) -> None:
        """Counts the rows of a launch, and notes whether it is a prefill pass or a round."""
        self._unread_kinds.append("prefill" if launch_input.is_prefill else "rounds")
        if launch_input.is_prefill:
            self.num_target_rows += launch_input.form(self.captured_passes).pass_rows
        else:
            batch = len(launch_input.slots)
            self.num_target_rows += batch * (launch_input.tree or self.layout.for_batch(batch).tree).num_draft_tokens
        if self.former_observer is not None:
            self.former_observer.on_launch(launch_input)

    def before_result(self, handle: LaunchHandle) -> None:
        """Sets the kind of the step to the kind of the launch whose result comes next."""
        self._launch_kind = self._unread_kinds.popleft()
        if self.former_observer is not None:
            self.former_observer.before_result(handle)

    def add_seconds(self, seconds: float) -> None:
        """Adds the seconds of a step, or of a wait for the next request, to their kind."""
        kind = self._launch_kind or (self._unread_kinds[0] if self._unread_kinds else "idle")
        self.seconds_by_kind[kind] += seconds
        self._launch_kind = None


class AnsweredRequest(NamedTuple):
    """The figures of one answered request.  num_tokens: the output tokens.  num_rounds: None if not known."""

    category: str
    timeline: Timeline
    num_tokens: int
    num_rounds: float | None


def figures_by_category(answers: Sequence[AnsweredRequest]) -> dict[str, dict[str, Any]]:
    """Returns the figures of each category of requests.

    step_ms: the mean time from one round of a request to its next round.  tokens_per_second: the mean speed of one
    request, after its first chunk."""
    answers_by_category: dict[str, list[AnsweredRequest]] = {}
    for answer in answers:
        answers_by_category.setdefault(answer.category, []).append(answer)
    return {category: _figures_of_category(group) for category, group in answers_by_category.items()}


def _figures_of_category(answers: Sequence[AnsweredRequest]) -> dict[str, Any]:
    """Returns the figures of one category, from its answered requests."""
    streamed = [answer for answer in answers if len(answer.timeline.chunks) > 1]
    seconds = sum(answer.timeline.chunks[-1][0] - answer.timeline.chunks[0][0] for answer in streamed)
    tokens = sum(answer.num_tokens - answer.timeline.chunks[0][1] for answer in streamed)
    known_rounds = [answer.num_rounds for answer in streamed if answer.num_rounds is not None]
    rounds = sum(known_rounds) if len(known_rounds) == len(streamed) else None
    return {
        "requests": len(answers),
        "tokens_out": sum(answer.num_tokens for answer in answers),
        "accept_length": tokens / rounds if rounds else None,
        "step_ms": 1e3 * seconds / rounds if rounds else None,
        "tokens_per_second": tokens / seconds if seconds else None,
        **latency_figures([answer.timeline for answer in answers]),
    }


@dataclass(frozen=True)
class LoadResult:
    """The results of a load.  seconds: from the first arrival to the last token.  categories: one for each request."""

    seconds: float
    requests: list[Request]
    timelines: list[Timeline]
    launch_times: LaunchTimes
    categories: list[str]

    @property
    def accept_length(self) -> float:
        rounds = sum(request.stats.rounds for request in self.requests)
        return sum(request.stats.emitted for request in self.requests) / rounds if rounds else 0.0

    @property
    def answered_requests(self) -> list[AnsweredRequest]:
        rows = zip(self.categories, self.timelines, self.requests, strict=True)
        return [
            AnsweredRequest(category, timeline, len(request.output), request.stats.rounds)
            for category, timeline, request in rows
        ]

    def figures(self) -> dict[str, Any]:
        """Returns the figures of the report.

        cached_share: the share of the prompt tokens that came from the prefix cache.  outputs_hash: a hash of all
        outputs, sorted by Request.arrival_index.  wasted_rows: the share of the target's rows (tokens in its passes)
        that neither computed a prompt token nor gave an output token."""
        tokens_out = sum(len(request.output) for request in self.requests)
        tokens_in = sum(len(request.prompt) for request in self.requests)
        num_computed = tokens_in - sum(request.cached_tokens for request in self.requests)
        total = sum(self.launch_times.seconds_by_kind.values())
        return {
            "requests": len(self.requests),
            "seconds": self.seconds,
            "tokens_in": tokens_in,
            "tokens_in_cached": tokens_in - num_computed,
            "cached_share": 1 - num_computed / tokens_in,
            "outputs_hash": self._outputs_hash(),
            "tokens_out": tokens_out,
            "tokens_in_per_second": tokens_in / self.seconds,
            "tokens_out_per_second": tokens_out / self.seconds,
            "accept_length": self.accept_length,
            "time_shares": {kind: seconds / total for kind, seconds in self.launch_times.seconds_by_kind.items()},
            "wasted_rows": max(0.0, 1 - (num_computed + tokens_out) / self.launch_times.num_target_rows),
            **latency_figures(self.timelines),
            "categories": figures_by_category(self.answered_requests),
        }

    def _outputs_hash(self) -> str:
        outputs = [request.output for request in sorted(self.requests, key=lambda request: request.arrival_index)]
        return hashlib.sha256(repr(outputs).encode()).hexdigest()[:12]


def latency_figures(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """Returns percentiles, in ms, of each of LATENCY_TIMES."""
    per_token = [t.tpot_s for t in timelines if t.tpot_s is not None]
    gaps = [gap for t in timelines for gap in t.chunk_gaps]
    seconds = ([t.ttft_s for t in timelines], gaps, per_token, [t.latency_s for t in timelines])
    return {name: percentiles(values) for name, values in zip(LATENCY_TIMES, seconds, strict=True)}


def time_title(time_name: str) -> str:
    """Returns the title of one of LATENCY_TIMES, for a table."""
    return time_name.removesuffix("_ms").replace("_", " ")


def percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """Returns percentiles (nearest rank) in ms; None without values."""
    if not seconds:
        return None
    order = sorted(seconds)
    return {f"p{p}": 1e3 * order[-(-len(order) * p // 100) - 1] for p in PERCENTILES}


class BenchConversations(Protocol):
    """The conversations of a load, numbered by `index`.  think_s: seconds from an answer to the next turn."""

    @property
    def num_conversations(self) -> int: ...

    @property
    def think_s(self) -> float: ...

    def category(self, index: int) -> str: ...

    def num_turns(self, index: int) -> int: ...

    def next_request(self, index: int, earlier: Sequence[Request]) -> Request:
        """Returns the next request of conversation `index`.  earlier: the answered requests of its earlier turns."""
        ...


@dataclass(frozen=True)
class RandomConversations:
    """The conversations of a Load.  Requests are greedy, and their outputs have exactly the lengths in the Load.
    texts: the users' token ids of each conversation (Load.user_texts)."""

    load: Load
    texts: Sequence[Sequence[int]]

    @property
    def num_conversations(self) -> int:
        return self.load.num_conversations

    @property
    def think_s(self) -> float:
        return self.load.think_s

    def category(self, index: int) -> str:
        return ""

    def num_turns(self, index: int) -> int:
        return self.load.num_turns

    def next_request(self, index: int, earlier: Sequence[Request]) -> Request:
        """Returns the next request of conversation `index`.  earlier: the requests of its earlier turns."""
        turn, talk = len(earlier), self.load.load_of_conversation(index)
        begin = self.load.shared_prefix_tokens + sum(talk.input_lengths[:turn]) if turn else 0
        end = self.load.shared_prefix_tokens + sum(talk.input_lengths[: turn + 1])
        tokens_before = earlier[-1].prompt + earlier[-1].output if earlier else []
        prompt, number = [*tokens_before, *self.texts[index][begin:end]], index * self.load.num_turns + turn
        return greedy_request(str(number), number, prompt, talk.output_lengths[turn])


def serve_random(engine: Engine, prompts: Sequence[Sequence[int]], load: Load, arrivals: Arrivals) -> LoadResult:
    """Runs a load with greedy requests.  prompts: random token ids, of the lengths in load.prompt_lengths."""
    return serve_conversations(engine, RandomConversations(load, load.user_texts(prompts)), arrivals)


def serve_conversations(engine: Engine, conversations: BenchConversations, arrivals: Arrivals) -> LoadResult:
    """Runs conversations until all have ended."""
    launch_times, started_at = LaunchTimes(engine), perf_counter()
    arrival_times = [started_at + at for at in arrivals.arrival_times(conversations.num_conversations)]
    timelines: list[Timeline] = []
    requests: list[Request] = []
    categories: list[str] = []
    earlier_requests: list[list[Request]] = [[] for _ in range(conversations.num_conversations)]
    # A heap of the conversations that wait for their next turn: (time of the turn, index of the conversation).
    waiting = [(arrival_times[i], i) for i in range(conversations.num_conversations)]
    # {id of a request in progress: (index of the request, index of its conversation)}
    running: dict[str, tuple[int, int]] = {}
    max_running = arrivals.concurrency or conversations.num_conversations
    engine.observer, counted_until = launch_times, perf_counter()

    def count_time() -> None:
        nonlocal counted_until
        now = perf_counter()
        launch_times.add_seconds(now - counted_until)
        counted_until = now

    while waiting or engine.has_work:
        while waiting and len(running) < max_running and perf_counter() >= waiting[0][0]:
            at, conversation_index = heapq.heappop(waiting)
            request = conversations.next_request(conversation_index, earlier_requests[conversation_index])
            timelines.append(Timeline(perf_counter() if arrivals.rate is None else at))
            requests.append(request)
            categories.append(conversations.category(conversation_index))
            running[request.id] = len(requests) - 1, conversation_index
            engine.add(request)
        if not engine.has_work:
            sleep(max(0.0, waiting[0][0] - perf_counter()))
            count_time()
            continue
        for chunk in engine.step():
            request_index, conversation_index = running[chunk.request_id]
            if chunk.token_ids:
                timelines[request_index].chunks.append((perf_counter(), len(chunk.token_ids)))
            if chunk.finish_reason is not None:
                del running[chunk.request_id]
                earlier_requests[conversation_index].append(requests[request_index])
                if len(earlier_requests[conversation_index]) < conversations.num_turns(conversation_index):
                    heapq.heappush(waiting, (perf_counter() + conversations.think_s, conversation_index))
        count_time()
    engine.observer = launch_times.former_observer
    return LoadResult(perf_counter() - timelines[0].planned_at, requests, timelines, launch_times, categories)
