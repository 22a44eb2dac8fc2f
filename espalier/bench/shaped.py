"""What a round costs at a named shape, cell by cell: engines of each cell's layout around weights made once.

A cell enters its prompts by real prefill, decodes them greedily until every round is one of the full batch, and times
such rounds alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter
from typing import Any

from espalier.bench.cells import WARM, Cell
from espalier.bench.floor import FloorBench, RoundFloor
from espalier.bench.instrument import Watched
from espalier.bench.synthetic_models import Start, SyntheticModels
from espalier.bench.timing import Ceilings
from espalier.engine.engine import Engine
from espalier.request import Request, SamplingParams

ROUNDS = 40


@dataclass(frozen=True)
class Settings:
    """How every cell is run.  rounds: that count; all_buckets: capture as an engine for users does."""

    rounds: int = ROUNDS
    chunk_size: int = 2048
    attention: str | None = None
    overlap: bool = True
    all_buckets: bool = False


@dataclass(frozen=True)
class Rounds:
    """Full-batch rounds of one cell.

    context: tokens of a request, in the mean over requests and rounds; round_ms: median by the wall; gpu_ms and
    idle_share: by events around the graphs, None without them; host_ms: in which the host did not wait for results;
    replays: graphs a round; follows: requests whose text is the chain's.
    """

    context: float
    round_ms: float
    gpu_ms: float | None
    idle_share: float | None
    host_ms: float
    replays: float
    accept_length: float
    tokens_per_second: float
    follows: int


@dataclass(frozen=True)
class Measured:
    """A cell.  floor and ceilings: None where there is no GPU; seconds: that measuring it took."""

    cell: Cell
    rounds: Rounds
    start: Start
    floor: RoundFloor | None
    ceilings: Ceilings | None
    seconds: float

    @property
    def over_floor(self) -> float | None:
        return self.rounds.round_ms / self.floor.ms if self.floor else None

    def as_dict(self, plain: "Measured | None") -> dict[str, Any]:
        """Flat, but for the groups; with plain decoding of the same batch and context beside it."""
        steps, topk, nodes = self.cell.tree
        rate = plain.rounds.tokens_per_second if plain else None
        return {
            "cell": self.cell.name,
            "batch": self.cell.batch,
            "context": self.cell.context,
            "steps": steps,
            "topk": topk,
            "num_draft_tokens": nodes,
            "page_size": self.cell.page_size,
            "rounds": asdict(self.rounds),
            "floor": asdict(self.floor) if self.floor else None,
            "round_over_floor": self.over_floor,
            "plain_tokens_per_second": rate,
            "tree_over_plain": self.rounds.tokens_per_second / rate if rate and self.cell.drafts else None,
            "start": asdict(self.start),
            "seconds": self.seconds,
        }


def measure(
    cast: SyntheticModels, cells: Sequence[Cell], settings: Settings, floors: FloorBench | None
) -> Iterator[Measured]:
    """Cell by cell, as they are done.  floors: measured beside them where there is a GPU."""
    ceilings = floors.ceilings() if floors else None
    for cell in cells:
        begun = perf_counter()
        layout = cell.layout(settings.chunk_size, settings.rounds)
        how = (settings.attention, settings.overlap, settings.all_buckets)
        with cast.engine(layout, *how) as (engine, watched, start):
            rounds = full_rounds(engine, watched, cast, cell, settings.rounds)
        floor = _floor(cell, rounds.context, floors, ceilings)
        yield Measured(cell, rounds, start, floor, ceilings, perf_counter() - begun)


def _floor(cell: Cell, context: float, floors: FloorBench | None, ceilings: Ceilings | None) -> RoundFloor | None:
    if floors is None or ceilings is None:
        return None
    return floors.round(cell.batch, context, *cell.tree, ceilings, cell.drafts)


def full_rounds(engine: Engine, watched: Watched, cast: SyntheticModels, cell: Cell, count: int) -> Rounds:
    """Enter the cell's prompts, run `count` rounds of all of them, and drop them."""
    prompts = cast.prompts([cell.context] * cell.batch)
    requests = enter(engine, prompts, engine.layout.max_context - cell.context)
    for _ in range(WARM):
        engine.step()
    before = [request.num_tokens for request in requests]
    watched.reset()
    times = []
    for _ in range(count):
        begun = perf_counter()
        engine.step()
        times.append(perf_counter() - begun)
    seen = watched.seen
    after = [request.num_tokens for request in requests]
    if seen.prefills or seen.rounds != [cell.batch] * count or engine.scheduler.num_preempted:
        raise AssertionError(f"{cell.name}: not every round was of the full batch: {seen.prefills}, {seen.rounds}")
    gpu_ms, idle_share = seen.gpu() if seen.replays else (None, None)
    decided = sum(after) - sum(before)
    rounds = Rounds(
        context=(sum(after) + sum(before)) / 2 / cell.batch,
        round_ms=1e3 * median(times),
        gpu_ms=gpu_ms,
        idle_share=idle_share,
        host_ms=1e3 * (sum(times) - seen.waited) / count,
        replays=len(seen.replays) / count,
        accept_length=decided / cell.batch / count,
        tokens_per_second=decided / sum(times),
        follows=sum(cast.follows(request.prompt, request.output) for request in requests),
    )
    leave(engine, requests)
    return rounds


def enter(engine: Engine, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[Request]:
    """Requests that have all decided their first token."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens).resolve({}, ())
    requests = [Request(f"in{i}", list(prompt), params, seed=i, arrival=i) for i, prompt in enumerate(prompts)]
    for request in requests:
        engine.add(request)
    while not all(request.output for request in requests):
        engine.step()
    return requests


def leave(engine: Engine, requests: Sequence[Request]) -> None:
    for request in requests:
        engine.abort(request.id)
    while engine.has_work:
        engine.step()


def plain_beside(all_measured: Sequence[Measured], one: Measured) -> Measured | None:
    """Plain decoding of the same batch and context, at the same page size where that was measured."""
    same = [
        each
        for each in all_measured
        if not each.cell.drafts and (each.cell.batch, each.cell.context) == (one.cell.batch, one.cell.context)
    ]
    return min(same, key=lambda each: each.cell.page_size != one.cell.page_size, default=None)
