"""What goes wrong on a GPU ends by name, and leaves an interpreter and a GPU that can be used."""

import gc
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from espalier import LLM, EspalierError, SamplingParams
from tests.gpu.conftest import FIGURES
from tests.gpu.engines import make_executor
from tests.pages import check_pages

pytestmark = pytest.mark.gpu

SETTINGS = {"device": "cuda", "dtype": "float32", "max_batch": 4, "max_context": 1024, "num_pages": 300}
PROMPTS = [[(7 * i * j + 3 * j) % 6000 + 4 for j in range(5 + 9 * i)] for i in range(3)]
SHORT = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, ignore_eos=True)
MIB = 2**20


def said(llm: LLM) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(PROMPTS, SHORT)]


@pytest.fixture(scope="module")
def right() -> list[list[int]]:
    with LLM("bundled", **SETTINGS) as llm:
        return said(llm)


@pytest.mark.parametrize("where", ["launch", "graph", "_copy_to_graph", "_run_eager_launch", "start_readback"])
def test_an_error_inside_a_launch_stops_the_engine_by_name(where, right, monkeypatch):
    def broken(*_):
        raise RuntimeError("the device is broken")

    with LLM("bundled", **SETTINGS) as llm:
        executor = make_executor(llm.engine)
        if where == "graph":
            # The same as a graph that cannot be launched.
            monkeypatch.setattr("espalier.engine.cuda._copy_to_pinned", broken)
        else:
            monkeypatch.setattr(executor, where, broken)
        # A pass that reports the prompt's log-probabilities is not captured.
        params = replace(SHORT, prompt_logprobs=1) if where == "_run_eager_launch" else SHORT
        with pytest.raises(RuntimeError, match="the device is broken"):
            llm.generate(PROMPTS, params)
        monkeypatch.undo()
        with pytest.raises(EspalierError, match=r"the engine stopped \(RuntimeError: the device is broken\)"):
            llm.generate(PROMPTS, SHORT)
    with LLM("bundled", **SETTINGS) as llm:
        assert said(llm) == right


def from_a_timer(_: LLM) -> Callable[..., None]:
    timer = threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    return lambda piece: None


def from_a_piece(_: LLM) -> Callable[..., None]:
    pieces = []

    def press(piece):
        pieces.append(piece)
        if len(pieces) == 20:
            signal.raise_signal(signal.SIGINT)

    return press


def inside_a_launch(llm: LLM) -> Callable[..., None]:
    executor, launches = make_executor(llm.engine), []
    launch = executor.launch

    def launching(launch_input):
        launches.append(launch_input)
        if len(launches) == 12:
            signal.raise_signal(signal.SIGINT)
        return launch(launch_input)

    executor.launch = launching
    return lambda piece: None


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("press", [from_a_timer, from_a_piece, inside_a_launch])
def test_ctrl_c_leaves_an_engine_that_goes_on(press, right):
    with LLM("bundled", **SETTINGS) as llm:
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, LONG, on_chunk=press(llm))
        assert not (llm.engine.scheduler.running or llm.engine.scheduler.waiting)
        check_pages(llm.engine)
        assert said(llm) == right


def held() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def test_close_gives_the_memory_back_time_after_time(right, put_on_record):
    """A workspace of a library may stay, once; pages and weights may not, whoever still holds the LLM."""
    before, seen, closed = held(), [], []
    for _ in range(3):
        llm = LLM("bundled", **{**SETTINGS, "num_pages": 4000, "max_batch": 64})
        assert said(llm) == right
        running = held()
        llm.close()
        closed.append(llm)
        seen.append((running - before, held() - before))
    figures = ", ".join(f"{running / MIB:.0f} -> {after / MIB:.0f}" for running, after in seen)
    put_on_record(FIGURES, f"MiB allocated while three LLMs ran in turn, and after each was closed: {figures}")
    assert seen[0][0] > 1000 * MIB
    assert all(after < running / 10 for running, after in seen), figures


def test_a_dropped_llm_gives_the_memory_back_without_close(right):
    before = held()
    llm = LLM("bundled", **{**SETTINGS, "num_pages": 4000, "max_batch": 64})
    assert said(llm) == right
    running = held() - before
    del llm
    assert held() - before < running / 10
