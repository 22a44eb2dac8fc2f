"""What prompts cost to enter, beside the linear layers of their passes; how long those wait who decode meanwhile."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

from espalier.bench.engines import BenchEngine
from espalier.bench.floor import FloorBench
from espalier.bench.shaped import leave
from espalier.errors import EspalierError
from espalier.request import Request, SamplingParams
from espalier.speculate.drafters import WITHOUT_FILES

TURNS = 3
# Rounds of the running batch before the long prompt comes, and after it has entered.
BEFORE = 30
AFTER = 3

# When tokens came to each request, in seconds.
Times = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Prefill:
    """`batch` prompts of `length` tokens that arrive together, medians over turns.

    ms: to the last one's first token; passes: prefill passes; rounds: those that ran between them for who was done;
    linear_ms: of the linear layers at the rows of these passes, alone, None where they were not measured.
    """

    batch: int
    length: int
    ms: float
    tokens_per_second: float
    passes: int
    rounds: int
    linear_ms: float | None

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "linear_share": self.linear_ms / self.ms if self.linear_ms else None}


@dataclass(frozen=True)
class Pause:
    """ms between tokens that arrive at a running request: before a prompt of `length` comes, and until it has entered.

    running: requests that decode, from prompts of `context` tokens.
    """

    running: int
    context: int
    length: int
    median_before_ms: float
    longest_before_ms: float
    longest_during_ms: float


def prefill(stand: BenchEngine, batch: int, length: int, floors: FloorBench | None) -> Prefill:
    """After a turn to warm up.  floors: of the same shape."""
    prompts = stand.prompts([length] * batch)
    times = []
    for _ in range(1 + TURNS):
        _forget(stand)
        stand.watched.reset()
        times.append(_enter(stand, prompts))
    seconds = median(times[1:])
    seen = stand.watched.seen
    linear_ms = None if floors is None else _linear_ms(stand, seen.prefills, floors)
    return Prefill(
        batch, length, 1e3 * seconds, batch * length / seconds, len(seen.prefills), len(seen.rounds), linear_ms
    )


def _enter(stand: BenchEngine, prompts: Sequence[Sequence[int]]) -> float:
    """Seconds from arrival to the last one's first token."""
    engine = stand.engine
    requests = [_request(f"in{i}", i, prompt, 1) for i, prompt in enumerate(prompts)]
    begun = perf_counter()
    for request in requests:
        engine.add(request)
    while not all(request.output for request in requests):
        engine.step()
    seconds = perf_counter() - begun
    while engine.has_work:
        engine.step()
    return seconds


def _linear_ms(stand: BenchEngine, passes: Sequence[tuple[int, int]], floors: FloorBench) -> float:
    """Every pass runs all rows of its width, and each head for its requests alone."""
    drafts = stand.config.algorithm not in WITHOUT_FILES
    measured: dict[tuple[int, int], float] = {}
    for batch, width in set(passes):
        rows = batch * width
        draft = floors.shape.draft_pass(rows, batch, rows) if drafts else ()
        runs = (*floors.shape.target_pass(rows, batch), *draft)
        measured[batch, width] = floors.linears(runs, rows).fastest_ms
    return sum(measured[each] for each in passes)


def pause(stand: BenchEngine, running: int, context: int, length: int) -> Pause:
    """The second of two turns: the first compiles."""
    return [_pause(stand, running, context, length) for _ in range(2)][1]


def _pause(stand: BenchEngine, running: int, context: int, length: int) -> Pause:
    engine = stand.engine
    _forget(stand)
    *short, long = stand.prompts([context] * running + [length])
    longest = engine.layout.max_context - context - 1
    requests = [_request(f"run{i}", i, prompt, longest) for i, prompt in enumerate(short)]
    for request in requests:
        engine.add(request)
    while not all(request.output for request in requests):
        engine.step()
    before = _arrivals(stand, requests, BEFORE)
    entering = _request("long", running, long, 1)
    engine.add(entering)
    during = _arrivals(stand, requests, None, entering)
    after = _arrivals(stand, requests, AFTER)
    if any(request.done for request in requests):
        raise EspalierError(
            f"the running requests, of {longest} tokens each, had ended before a prompt of {length} had entered; raise "
            "--max-context, or lower --steps"
        )
    leave(engine, requests)
    calm = [gap for times in before for gap in _gaps(times)]
    waited = waits(before, during, after)
    return Pause(running, context, length, 1e3 * median(calm), 1e3 * max(calm), 1e3 * max(waited))


def waits(before: Times, during: Times, after: Times) -> list[float]:
    """Gaps of all requests from the last token before a prompt came to the first after it had entered."""
    precompile = zip(before, during, after, strict=True)
    return [gap for early, times, late in precompile for gap in _gaps([*early[-1:], *times, *late[:1]])]


def _arrivals(
    stand: BenchEngine, requests: Sequence[Request], steps: int | None, until: Request | None = None
) -> list[list[float]]:
    """When tokens came to each request, over so many steps, or until another has its first."""
    times: list[list[float]] = [[] for _ in requests]
    lengths = [len(request.output) for request in requests]
    taken = 0
    while taken != steps and not (until is not None and until.output):
        stand.engine.step()
        taken += 1
        now = perf_counter()
        for i, request in enumerate(requests):
            if len(request.output) > lengths[i]:
                times[i].append(now)
                lengths[i] = len(request.output)
    return times


def _gaps(times: Sequence[float]) -> list[float]:
    return [after - before for before, after in pairwise(times)]


def _forget(stand: BenchEngine) -> None:
    """Nothing is found in the prefix cache."""
    engine = stand.engine
    if engine.prefixes is not None:
        engine.prefixes.evict(engine.pool.num_pages)


def _request(name: str, arrival: int, prompt: Sequence[int], num_tokens: int) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True).resolve({}, ())
    return Request(name, list(prompt), params, seed=arrival, arrival=arrival)
