"""Rounds of the full batch of a cell: enters the prompts by real prefill, decodes greedily, and times only rounds that
run every request."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter, sleep

from espalier.bench.drive import empty_prefix_cache, greedy_request, require_positions
from espalier.engine.engine import Engine
from espalier.errors import EspalierError
from espalier.layout import RoundLayout
from espalier.request import Request
from lab.bench.cells import EXPERT_COUNT_ROUNDS, RoundCell
from lab.bench.checks import require_pages
from lab.bench.experts_touched import experts_touched
from lab.bench.instrument import record_launches
from lab.bench.synthetic_models import SyntheticModels

# A prefill makes a GPU lower its clocks for longer than the warm-up takes.  On an H200, rounds of 32 requests with 8
# nodes took 10.4 ms right after their prefill, and 9.4 ms after this pause.
PAUSE_AFTER_PREFILL_S = 0.7


@dataclass(frozen=True)
class FullRounds:
    """Full-batch rounds of one cell.

    context: tokens of a request, the mean over requests and rounds.
    round_ms: median by the wall clock.
    gpu_ms, idle_share: by events around the CUDA graphs; None without graphs.
    host_ms: the part of a round's time in which the host did not wait for results.
    replays: the number of CUDA graphs that a round replays.
    follows: the number of requests whose output is the text of the chain (lab/synthetic/chain.py).
    experts_touched: by the target's pass in one layer, the mean over layers and a few rounds after the timed ones; None
    for a dense target.
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
    experts_touched: float | None


def require_cell_fits(layout: RoundLayout, positions: int, cell: RoundCell, num_rounds: int) -> None:
    """Check, before anything is loaded, that an engine of this layout runs the whole cell.

    positions: how many positions the model supports.  Raises EspalierError.
    """
    needed = cell.context + cell.max_tokens(layout, num_rounds)
    require_positions(positions, needed, f"cell {cell.name}", f"--rounds {num_rounds}")
    if cell.batch > layout.max_batch:
        raise EspalierError(f"cell {cell.name} is above max_batch={layout.max_batch}; give --max-batch {cell.batch}")
    if needed > layout.max_context:
        raise EspalierError(
            f"cell {cell.name} needs {needed} tokens a request and max_context={layout.max_context}; give "
            f"--max-context {needed}"
        )


def measure_full_rounds(engine: Engine, models: SyntheticModels, cell: RoundCell, num_rounds: int) -> FullRounds:
    """Prefill the cell's prompts, time num_rounds rounds of all requests, and abort the requests.

    Raises EspalierError if the engine's pages do not hold the requests.
    """
    max_tokens = cell.max_tokens(engine.layout, num_rounds)
    require_pages(engine, f"cell {cell.name}", cell.batch, cell.context + max_tokens)
    launches = record_launches(engine)
    prompts = models.prompts([cell.context] * cell.batch)
    requests: list[Request] = []
    for rounds_before in cell.rounds_before:
        abort_requests(engine, requests)
        empty_prefix_cache(engine)
        requests = enter_requests(engine, prompts, max_tokens)
        if engine.executor.runner.pages.device.type == "cuda":
            sleep(PAUSE_AFTER_PREFILL_S)
        for _ in range(rounds_before):
            engine.step()
    before = [request.num_tokens for request in requests]
    launches.reset()
    times = []
    for _ in range(num_rounds):
        begun = perf_counter()
        engine.step()
        times.append(perf_counter() - begun)
    after = [request.num_tokens for request in requests]
    all_full = launches.rounds == [cell.batch] * num_rounds
    if launches.prefills or not all_full or engine.scheduler.num_preempted:
        raise AssertionError(
            f"{cell.name}: not every round was of the full batch: {launches.prefills}, {launches.rounds}"
        )
    gpu_ms, idle_share = launches.gpu_times() if launches.replays else (None, None)
    num_tokens = sum(after) - sum(before)
    rounds = FullRounds(
        context=(sum(after) + sum(before)) / 2 / cell.batch,
        round_ms=1e3 * median(times),
        gpu_ms=gpu_ms,
        idle_share=idle_share,
        host_ms=1e3 * (sum(times) - launches.waited_seconds) / num_rounds,
        replays=len(launches.replays) / num_rounds,
        accept_length=num_tokens / cell.batch / num_rounds,
        tokens_per_second=num_tokens / sum(times),
        follows=sum(models.follows(request.prompt, request.output) for request in requests),
        experts_touched=experts_touched(engine, lambda: [engine.step() for _ in range(EXPERT_COUNT_ROUNDS)]),
    )
    abort_requests(engine, requests)
    return rounds


def enter_requests(engine: Engine, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[Request]:
    """Add requests, and step until each has its first token."""
    requests = [greedy_request(f"in{i}", i, prompt, num_tokens) for i, prompt in enumerate(prompts)]
    for request in requests:
        engine.add(request)
    while not all(request.output for request in requests):
        engine.step()
    return requests


def abort_requests(engine: Engine, requests: Sequence[Request]) -> None:
    """Abort the requests, and step until the engine is empty."""
    for request in requests:
        engine.abort(request.id)
    while engine.has_work:
        engine.step()
