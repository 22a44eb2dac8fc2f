"""A round with a grammar starts before the round before it is read, and says what it says in lock-step."""

from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from espalier.engine.engine import Engine
from espalier.engine.launch_input import Launch
from espalier.engine.scheduler import Scheduler
from espalier.request import Request, SamplingParams
from tests.engine.alone import replace_request
from tests.grammar.test_lossless import asked, check_all_in_grammar, setup_of
from tests.harness import Setup, prompts, request, run


class Recorded:
    """A handle that notes what is done with it, by the number of its launch."""

    def __init__(self, handle: Any, calls: list[str], number: int):
        self.handle, self.calls, self.number = handle, calls, number

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.handle, name)

        def noted(*args: Any) -> Any:
            self.calls.append(f"{name} {self.number}")
            return call(*args)

        return noted


def record(engine: Engine) -> list[str]:
    """From now on every launch, and what becomes of it, is noted in the list that is returned."""
    calls: list[str] = []
    executor, launched = engine.executor, Counter[str]()

    launch = executor.launch

    def starting(launch_input: Any) -> Recorded:
        launched["all"] += 1
        calls.append(f"{'begin' if launch_input.is_staged else 'launch'} {launched['all']}")
        return Recorded(launch(launch_input), calls, launched["all"])

    executor.launch = starting  # type: ignore[method-assign]
    return calls


def test_a_round_begins_before_the_one_before_it_is_read():
    calls = {}
    for overlap in (False, True):
        engine = setup_of("eagle3", 4, 16, overlap=overlap).engine()
        calls[overlap] = record(engine)
        run(engine, asked(1, 0.0, count=1))
    # The prompt's pass is launch 1.
    for number in (2, 3):
        stages = [f"{stage} {number}" for stage in ("begin", "resume", "trees", "settle", "result")]
        first = calls[False].index(stages[0])
        assert calls[False][first - 1 : first + 5] == [f"result {number - 1}", *stages]
        first = calls[True].index(stages[0])
        before = [] if number == 2 else [f"trees {number - 1}", f"settle {number - 1}"]
        ahead = [f"begin {number}", f"result {number - 1}", f"resume {number}", f"trees {number}", f"settle {number}"]
        assert calls[True][first - len(before) : first + 5] == before + ahead
        assert calls[True][first + 5 : first + 7] == [f"begin {number + 1}", f"result {number}"]


def count_released(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Of the requests of rounds in stages: "free" counts those whose grammar was released since the round began."""
    seen: Counter[str] = Counter()
    right = Scheduler.maskers_of

    def maskers_of(self: Scheduler, launch: Launch) -> Any:
        found = right(self, launch)
        for (member, generation, _), masker in zip(launch.launched_requests, found, strict=True):
            if member.masker is not None:
                assert (masker is None) == (generation != member.generation)
                seen["free" if masker is None else "masked"] += 1
        return found

    monkeypatch.setattr(Scheduler, "maskers_of", maskers_of)
    return seen


STYLES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.2, "top_p": 0.9},
    "penalised": {"temperature": 0.7, "repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "with log-probabilities": {"temperature": 1.2, "logprobs": 2},
}


# A draw that penalties shaped is a draw: "penalised" stands for "sampled" of EAGLE-3, and of block drafts for both.
USUAL = [
    ("eagle3", "penalised"),
    ("eagle3", "with log-probabilities"),
    *(("ngram", "sampled"), ("dflash", "greedy")),
]
AHEAD = [
    pytest.param(*cell, marks=() if cell in USUAL else pytest.mark.full)
    for cell in product(("eagle3", "ngram", "dflash"), STYLES)
]


def with_style(setup: Setup, style: str, count: int = 8) -> list[Request]:
    requests = asked(3, **STYLES[style], count=count)
    ran = run(setup.engine(), requests)
    check_all_in_grammar(3, ran.requests)
    return ran.requests


@pytest.mark.parametrize(("algorithm", "style"), AHEAD)
def test_with_overlap_as_in_lock_step(algorithm, style, monkeypatch):
    """Requests end in the round before one that has begun: they ride through it, and nothing comes of it."""
    setup = setup_of(algorithm, 4, 4)
    lock_step, plain = with_style(setup, style), with_style(setup.plain(), style)
    seen = count_released(monkeypatch)
    ahead = with_style(replace(setup, overlap=True), style)
    assert seen["free"] and seen["masked"]
    outputs = [[each.output for each in ran] for ran in (ahead, lock_step, plain)]
    assert outputs[0] == outputs[1] == outputs[2]
    assert [each.finish_reason for each in ahead] == [each.finish_reason for each in lock_step]
    if style == "with log-probabilities":
        for one, other in zip(ahead, lock_step, strict=True):
            values = ([each.logprob for each in request.logprobs] for request in (one, other))
            assert len(one.logprobs) == len(one.output) and next(values) == pytest.approx(next(values))


@pytest.mark.parametrize("after", [4, 8])
def test_an_abort_ends_a_request_of_a_round_that_has_begun(after, monkeypatch):
    """after: tokens of the request that is aborted."""
    setup = setup_of("eagle3", 4, 4, overlap=True)
    whole = run(setup.engine(), asked(0, 1.2, count=4)).tokens
    seen = count_released(monkeypatch)
    engine, requests = setup.engine(), asked(0, 1.2, count=4)
    aborted = requests[0]
    for each in requests:
        each.streamed = True  # a second prompt enters when the first has begun
        engine.add(each)
    while len(aborted.output) < after or not all(each.output for each in requests):
        engine.step()
    assert engine.in_flight.unsettled_round is not None
    before = seen["free"]
    engine.abort(aborted.id)
    engine.step()
    assert aborted.finish_reason == "abort" and seen["free"] > before
    run(engine, [])
    assert aborted.output == whole[0][: len(aborted.output)] and len(aborted.output) < len(whole[0])
    assert [each.output for each in requests[1:]] == whole[1:]


def test_preempted_requests_go_on_under_their_grammars():
    setup = setup_of("eagle3", 4, 1, max_context=64, overlap=True)
    few = replace(setup, num_pages=85, prefix_cache=False)
    engine, requests = few.engine(), asked(2, 1.2, count=8)
    ran = run(engine, requests)
    assert engine.scheduler.num_preempted
    check_all_in_grammar(2, ran.requests)
    assert ran.tokens == run(setup.engine(), asked(2, 1.2, count=8)).tokens


def test_a_free_request_says_the_same_beside_a_grammar():
    setup = setup_of("eagle3", 4, 16, overlap=True)
    alone = run(setup.engine(), [each for each in asked(4, 1.2) if each.masker is None]).tokens
    beside = run(setup.engine(), asked(4, 1.2)).requests
    assert [each.output for each in beside if each.masker is None] == alone


def test_a_prompt_enters_between_two_rounds_in_stages():
    """A prefill pass is launched when the round before it is settled, and not read yet."""
    setup = setup_of("eagle3", 4, 16, overlap=True)
    engine = setup.engine()
    calls = record(engine)
    first, late = asked(0, 0.0, count=1)[0], request(9, prompts(5, (6,))[0], SamplingParams(max_tokens=6))
    first.streamed = True  # the late prompt does not wait for others
    engine.add(first)
    for _ in range(4):
        engine.step()
    engine.add(late)
    run(engine, [])
    entered = [place for place, call in enumerate(calls) if call.startswith("launch ")][1]
    number = int(calls[entered].removeprefix("launch "))
    assert calls[entered - 1 : entered + 2] == [f"settle {number - 1}", f"launch {number}", f"result {number - 1}"]
    assert calls[entered + 2 : entered + 4] == [f"begin {number + 1}", f"result {number}"]
    assert late.output == run(setup.engine(), [replace_request(late)]).tokens[0]
