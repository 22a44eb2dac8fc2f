"""Threads that share an LLM: each gets what it gets alone."""

import contextlib
import gc
import signal
import sys
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from unittest.mock import patch

import pytest

from espalier import LLM, SamplingParams, SpeculationConfig
from espalier import engine_lock as turns
from espalier.engine_lock import EngineLock
from tests.harness import directories
from tests.pages import check_pages

PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8], [9]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(params=[pytest.param(False, marks=pytest.mark.full), True], ids=["lock-step", "overlap"])
def llm(request):
    target, draft = directories()
    tree = SpeculationConfig(steps=3, topk=2, num_draft_tokens=8)
    settings = {"dtype": "float64", "max_batch": 4, "max_context": 64, "overlap": request.param}
    with LLM(model=target, draft=draft, speculation=tree, **settings) as llm:
        yield llm


def streamed(llm, prompt):
    return [token for piece in llm.stream(prompt, GREEDY) for token in piece.token_ids]


def test_calls_and_streams_of_several_threads_give_what_they_give_alone(llm):
    alone = [streamed(llm, prompt) for prompt in PROMPTS]
    with ThreadPoolExecutor(8) as threads:
        streams = [threads.submit(streamed, llm, prompt) for prompt in PROMPTS]
        calls = [threads.submit(llm.generate, [prompt], GREEDY) for prompt in PROMPTS]
        assert [each.result() for each in streams] == alone
        assert [each.result()[0].token_ids for each in calls] == alone
    require_idle(llm)


def require_idle(llm):
    check_pages(llm.engine)
    assert not llm.engine.requests and not llm._unread_chunks


def test_a_stream_that_python_drops_in_the_middle_of_a_step_changes_no_token(llm):
    alone = [each.token_ids for each in llm.generate(PROMPTS[:2], GREEDY)]
    abandoned = [llm.stream(PROMPTS[2], GREEDY)]
    next(abandoned[0])
    # A cycle: it is dropped when garbage is collected.
    abandoned.append(abandoned)
    del abandoned
    scheduler, calls = llm.engine.scheduler, []
    process_results = scheduler.process_results

    def collecting(*args):
        calls.append(args)
        if len(calls) == 3:
            gc.collect()
        return process_results(*args)

    gc.disable()
    try:
        with patch.object(scheduler, "process_results", collecting):
            assert [each.token_ids for each in llm.generate(PROMPTS[:2], GREEDY)] == alone
    finally:
        gc.enable()
    require_idle(llm)


def test_what_comes_in_the_middle_of_a_step_runs_behind_it():
    turn, events = EngineLock(), []
    with turn.run_postponed_after(), turn.lock:
        with turn.uninterrupted_turn():
            turn.run_when_free(lambda: events.append("later"))
            events.append("step")
        assert events == ["step", "later"]
        turn.run_when_free(lambda: events.append("at once"))
        assert events == ["step", "later", "at once"]


def test_a_thread_leaves_what_it_has_to_do_to_the_thread_whose_turn_it_is():
    """It never waits: that thread may wait for it, as for the thread that runs launches."""
    turn, events = EngineLock(), []
    with turn.run_postponed_after(), turn.lock:
        other = threading.Thread(target=turn.run_when_free, args=(lambda: events.append("other"),), daemon=True)
        other.start()
        other.join(60)
        assert not other.is_alive() and not events
    assert events == ["other"]


def test_an_action_that_is_left_while_another_is_looked_for_is_found():
    """One thread sees an action and takes the lock; another has run it; a third leaves its own and goes."""

    class Raced(deque):
        looks = 0

        def __bool__(self):
            self.looks += 1
            if self.looks == 2:
                self.clear()
                leave()
                return False
            return len(self) > 0

    turn, events = EngineLock(), []
    turn._postponed_actions = Raced()

    def leave():
        with ThreadPoolExecutor(1) as thread:
            thread.submit(turn.run_when_free, lambda: events.append("third")).result()

    turn.run_when_free(lambda: events.append("first"))
    assert events == ["third"]


def interrupt(turn: EngineLock, moment: int) -> bool:
    """Ctrl-C at this event of the code of a turn, counted from 0.  False if there are fewer.

    What the interpreter does by itself, as `with` takes a lock, is no event: no signal is handled there either.
    """
    events, files, before, pressed = count(), (turns.__file__, contextlib.__file__), sys.gettrace(), []

    def press(frame, *_):
        if frame.f_code.co_filename not in files:
            return None
        if next(events) == moment:
            pressed.append(moment)
            signal.raise_signal(signal.SIGINT)
        return press

    sys.settrace(press)
    try:
        with turn.run_postponed_after(), turn.lock, turn.uninterrupted_turn():
            turn.run_when_free(list)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return bool(pressed)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_at_any_line_of_a_turn_leaves_the_lock_to_other_threads():
    turn, moments = EngineLock(), count()

    def is_free():
        taken = turn.lock.acquire(blocking=False)
        if taken:
            turn.lock.release()
        return taken

    with ThreadPoolExecutor(1) as other:
        while interrupt(turn, next(moments)):
            assert other.submit(is_free).result()
    assert next(moments) > 50
