"""Host time of the engine with many queued requests or cached pages: `python -m scripts.step_cost`.

Launches run on a symbolic device (tests/engine/symbolic.py), so only the host's time is measured.
"""

from itertools import pairwise
from random import Random
from statistics import median
from time import perf_counter

from espalier import LLM, SamplingParams
from espalier.engine.engine import Engine
from espalier.layout import RoundLayout
from espalier.request import OutputChunk
from tests.engine.symbolic import symbolic_engine
from tests.harness import request

STEPS = 100
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


class StepsDone(Exception):
    """All timed steps have run."""


def make_engine(num_pages: int) -> Engine:
    return symbolic_engine(RoundLayout(16, 3, 2, 8, 1, 128, 1, 64), num_pages, False, random=Random(1))


def step_ms(llm: LLM, num_prompts: int) -> float:
    """Median time from one engine step to the next under LLM.generate."""
    engine = llm.engine = make_engine(4_000)
    began: list[float] = []
    step = engine.step

    def timed() -> list[OutputChunk]:
        began.append(perf_counter())
        if len(began) > STEPS:
            # Leave without the aborts, which abort_ms measures.
            engine.stop_error, llm._is_closed = "measured", True
            raise StepsDone
        return step()

    engine.step = timed  # type: ignore[method-assign]
    engine.abort = lambda request_id: None  # type: ignore[method-assign]
    try:
        llm.generate([[1, 2, 3, 4]] * num_prompts, GREEDY)
    except StepsDone:
        llm._is_closed = False
    return 1e3 * median(after - before for before, after in pairwise(began))


def abort_ms(num_requests: int) -> float:
    """Mean time of an abort among num_requests queued requests, its part of the next step included."""
    engine = make_engine(4_000)
    for index in range(num_requests):
        engine.add(request(index, [1, 2, 3, 4], GREEDY))
    engine.step()
    names = [f"r{index}" for index in range(num_requests - 100, num_requests)]
    began = perf_counter()
    for name in names:
        engine.abort(name)
    engine.step()
    return 1e3 * (perf_counter() - began) / len(names)


def admission_ms(num_pages: int) -> float:
    """Median time of a step that must evict pages to admit a request."""
    engine = make_engine(num_pages + 1)
    assert engine.prefix_tree is not None
    for first in range(0, num_pages, 100):
        pages = engine.pool.allocate(min(100, num_pages - first))
        engine.prefix_tree.insert(range(16 + first, 16 + first + len(pages)), pages)
        engine.pool.release(pages)
    times = []
    for index in range(20):
        engine.add(request(index, [index % 16, 1, 2, 3], SamplingParams(temperature=0.0, max_tokens=1)))
        began = perf_counter()
        engine.step()
        times.append(1e3 * (perf_counter() - began))
    return median(times)


def main() -> None:
    with LLM(speculation=None) as llm:
        engine = llm.engine
        for count in (16, 50_000):
            print(f"{count:7d} queued prompts: {step_ms(llm, count):8.3f} ms a step")
        llm.engine = engine
    for count in (100, 50_000):
        print(f"{count:7d} queued requests: {abort_ms(count):8.3f} ms an abort")
    for count in (1_000, 200_000):
        print(f"{count:7d} cached pages: {admission_ms(count):8.3f} ms an admission")


if __name__ == "__main__":
    main()
