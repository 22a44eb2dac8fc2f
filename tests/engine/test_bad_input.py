"""What cannot run is refused before anything is lost: one line, the value, the remedy; and who runs goes on."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from types import FrameType

import pytest

from espalier.engine.engine import Engine
from espalier.engine.scheduler import Scheduler
from espalier.errors import EspalierError
from espalier.request import SamplingParams
from tests.engine.test_disturbance import all_undisturbed
from tests.harness import Setup, prompts, request
from tests.pages import check_pages

CONTEXT = 64
in_overlap = pytest.mark.parametrize(
    "overlap", [pytest.param(False, marks=pytest.mark.full), True], ids=["lockstep", "overlap"]
)


def make_engine(overlap: bool = True, **fields: object) -> Engine:
    return Setup(page_size=4, max_context=CONTEXT, overlap=overlap, num_pages=13, **fields).engine()


BAD = {
    "longer than the context": ([1] * 65, None, "65 tokens", "shorten the prompt to 63"),
    "no room for an answer": ([1] * 64, None, "64 tokens", "raise max_context (the model has "),
    "never fits the pages": ([1] * 40, 20, "60 tokens", "raise num_pages"),
    "never fits to the context's end": ([1] * 4, None, "64 tokens", "lower max_tokens"),
    "empty": ([], 8, "empty", "at least one token"),
    "above the vocabulary": ([3, 16, 2], 8, "16", "0 to 15"),
    "negative": ([3, -1, 2], 8, "-1", "0 to 15"),
    "not a token": ([3, 2.5, 2], 8, "2.5", "0 to 15"),
    "a bool": ([True], 8, "True", "0 to 15"),
    "more least tokens than there is room": ([1] * 40, (30, 30), "min_tokens=30", "use at most 24, or leave it out"),
}


@in_overlap
def test_refused_and_nobody_notices(overlap: bool) -> None:
    """One after another, between the steps of running requests."""
    engine = make_engine(overlap)
    params = SamplingParams(temperature=0.0, max_tokens=20)
    requests = [request(i, p, params) for i, p in enumerate(prompts(41, (6, 20, 11)))]
    for r in requests[:2]:
        engine.add(r)
    for case in BAD:
        assert engine.has_work, "nobody is there to notice"
        engine.step()
        check_pages(engine)
        refused(engine, case)
    engine.add(requests[2])
    while engine.has_work:
        engine.step()
        check_pages(engine)
    engine.close()
    all_undisturbed(Setup(max_context=CONTEXT), requests)


def refused(engine: Engine, case: str) -> None:
    prompt, max_tokens, value, remedy = BAD[case]
    least, max_tokens = max_tokens if isinstance(max_tokens, tuple) else (0, max_tokens)
    bad = SamplingParams(temperature=0.0, min_tokens=least, max_tokens=max_tokens)
    with pytest.raises(EspalierError) as refusal:
        engine.add(request(9, prompt, bad))
    message = str(refusal.value)
    assert "\n" not in message and value in message and remedy in message, (case, message)


@in_overlap
def test_the_longest_that_fits_does(overlap: bool) -> None:
    """The bound is exact: with one page more than refused it runs to its end in a pool of nothing else."""
    for prompt_len, limit in ((44, 3), (1, 47), (47, 1)):
        r = request(0, prompts(42, (prompt_len,))[0], SamplingParams(temperature=0.0, max_tokens=limit))
        ahead = int(overlap)
        pages = -(-(prompt_len + limit + ahead) // 4)
        setup = Setup(page_size=4, max_context=CONTEXT, overlap=overlap, num_pages=pages)
        with pytest.raises(EspalierError, match="can never fit"):
            setup.engine().add(r)
        engine = Setup(**{**vars(setup), "num_pages": pages + 1}).engine()
        engine.add(r)
        while engine.has_work:
            engine.step()
        engine.close()
        all_undisturbed(setup, [r])


def test_an_abort_of_nobody() -> None:
    """Unknown, finished and waiting ids; twice; before the first step."""
    engine = make_engine()
    params = SamplingParams(temperature=0.0, max_tokens=5)
    first, second = (request(i, p, params) for i, p in enumerate(prompts(43, (6, 9))))
    engine.abort("nobody")
    engine.add(first)
    engine.add(second)
    for _ in range(2):
        engine.abort(second.id)
    pieces = []
    while engine.has_work:
        pieces += engine.step()
    engine.abort(first.id)
    engine.abort(second.id)
    assert not engine.has_work
    assert engine.step() == []
    assert (second.output, second.finish_reason, second.error) == ([], "abort", None)
    assert [p.finish_reason for p in pieces if p.request_id == second.id] == ["abort"]
    all_undisturbed(Setup(max_context=CONTEXT), [first])


def test_an_id_that_is_running_is_refused() -> None:
    """An abort would not know whom it means."""
    engine = make_engine()
    first, again, later = (request(0, [index + 1], SamplingParams(temperature=0.0, max_tokens=3)) for index in range(3))
    engine.add(first)
    with pytest.raises(EspalierError, match="request 'r0' is running already; use another id"):
        engine.add(again)
    while engine.has_work:
        engine.step()
    assert first.is_done and not again.is_done
    engine.add(later)


@pytest.mark.parametrize("overlap", [False, True], ids=["lockstep", "overlap"])
def test_an_abort_at_any_line_that_drops_aborted_requests_is_not_lost(overlap: bool) -> None:
    """A step may be interrupted by an abort: the request ends in that step or in the next, before it has a slot."""
    for line in count():
        engine = Setup(max_context=CONTEXT, max_batch=1, overlap=overlap).engine()
        running, first, second = (
            request(i, p, SamplingParams(temperature=0.0, max_tokens=30)) for i, p in enumerate(prompts(44, (6, 9, 7)))
        )
        for r in (running, first, second):
            engine.add(r)
        engine.step()
        engine.abort(first.id)
        with calling_at(Scheduler._drop_aborted, line, partial(engine.abort, second.id)) as called:
            engine.step()
        engine.step()
        engine.close()
        if not called:
            break
        assert (first.finish_reason, second.finish_reason, running.is_done) == ("abort", "abort", False), line
    assert line > 3


@contextmanager
def calling_at(function: Callable[..., object], line: int, action: Callable[[], object]) -> Iterator[list[int]]:
    """Call `action` before a line of `function` runs.  line: from 0, in the order in which lines run."""
    left, called = iter(range(line, -1, -1)), []

    def at_line(frame: FrameType, event: str, _: object) -> Callable[..., object]:
        if event == "line" and next(left, None) == 0:
            called.append(frame.f_lineno)
            action()
        return at_line

    def at_call(frame: FrameType, event: str, _: object) -> Callable[..., object] | None:
        return at_line if frame.f_code is function.__code__ else None

    before = sys.gettrace()
    sys.settrace(at_call)
    try:
        yield called
    finally:
        sys.settrace(before)
