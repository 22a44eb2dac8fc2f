"""The engine process's loop, without the process: what it is told, what it says."""

import os
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import pytest
import zmq

from espalier import LLM, SamplingParams, SpeculationConfig
from espalier.errors import EspalierError
from espalier.masking.compile import CompilerBusy
from espalier.request import ResolvedParams
from espalier.server import protocol
from espalier.server.protocol import (
    AbortPrompt,
    PromptRefused,
    Shutdown,
    StartEngine,
    StepOutput,
    SubmitPrompts,
    SubmittedPrompt,
)
from espalier.server.worker import EngineWorker, unpack_settings, wait_for_start
from tests.harness import directories
from tests.pages import check_pages

SETTINGS = {
    "dtype": "float64",
    "max_batch": 1,
    "max_context": 64,
    "page_size": 4,
    "speculation": SpeculationConfig(steps=2, topk=2, num_draft_tokens=4),
}
PARAMS = ResolvedParams(temperature=0.0, max_tokens=8)


@pytest.fixture
def engine():
    """(worker, the API server's socket)"""
    target, draft = directories()
    with zmq.Context() as context, context.socket(zmq.PAIR) as frontend, context.socket(zmq.PAIR) as socket:
        frontend.bind("inproc://engine")
        socket.connect("inproc://engine")
        with LLM(model=target, draft=draft, **SETTINGS) as llm:
            yield EngineWorker(socket, llm, StartEngine({}, 0.05, "info", False), os.getppid()), frontend


def submit(frontend, name, params=PARAMS, priority=0, prompt=(1, 2, 3)):
    frontend.send(protocol.encode(SubmitPrompts([SubmittedPrompt(name, list(prompt), params, priority, False)])))


def run(worker, frontend):
    """Everything that is said until nothing runs."""
    frontend.send(protocol.encode(Shutdown()))
    while worker.llm.engine.has_work or worker._receive_messages():
        worker._send(worker.llm.step() if worker.llm.engine.has_work else [])
        worker.num_steps += 1
    return said(frontend)


def said(frontend):
    messages = []
    while frontend.poll(50):
        messages.append(protocol.decode_from_engine(frontend.recv()))
    return messages


def iter_parts(messages):
    return [part for message in messages if isinstance(message, StepOutput) for part in message.parts]


def test_samples_are_the_offline_llms_and_their_last_part_has_their_usage(engine):
    worker, frontend = engine
    params = SamplingParams(temperature=0.0, max_tokens=8)
    [expected] = worker.llm.generate([[1, 2, 3]], params)
    submit(frontend, "a")
    worker._receive_messages()
    found = iter_parts(run(worker, frontend))
    assert [token for part in found for token in part.output.token_ids] == expected.token_ids
    assert [part.usage is not None for part in found] == [part.output.finish_reason is not None for part in found]
    assert found[-1].usage.completion_tokens == 8 and found[-1].speculation == expected.speculation
    assert worker.running_prompts == {}


def test_a_lower_priority_number_goes_first(engine):
    worker, frontend = engine
    for name, priority in (("first", 0), ("late", 5), ("urgent", -1)):
        submit(frontend, name, priority=priority)
    worker._receive_messages()
    ended = [part.name for part in iter_parts(run(worker, frontend)) if part.output.finish_reason]
    assert ended == ["urgent", "first", "late"]


def test_what_can_never_run_is_refused_and_nothing_of_it_stays(engine):
    worker, frontend = engine
    submit(frontend, "never", replace(PARAMS, min_tokens=200, max_tokens=None))
    submit(frontend, "good")
    worker._receive_messages()
    messages = run(worker, frontend)
    [refused] = [message for message in messages if isinstance(message, PromptRefused)]
    assert refused.name == "never" and "min_tokens=200" in refused.error
    assert {part.name for part in iter_parts(messages)} == {"good"}


def test_a_prompt_whose_requests_cannot_be_made_is_refused_alone(engine, monkeypatch):
    def group(prompt, params, name, *more):
        if name == "never":
            raise EspalierError("never")
        return make(prompt, params, name, *more)

    worker, frontend = engine
    make = worker.llm.new_requests
    monkeypatch.setattr(worker.llm, "new_requests", group)
    submit(frontend, "never")
    submit(frontend, "good")
    worker._receive_messages()
    messages = run(worker, frontend)
    assert [message.error for message in messages if isinstance(message, PromptRefused)] == ["never"]
    assert {part.name for part in iter_parts(messages)} == {"good"}


@pytest.mark.parametrize("error", [CompilerBusy("later"), EspalierError("never")])
def test_a_refusal_says_whether_a_retry_may_succeed(engine, monkeypatch, error):
    worker, frontend = engine
    compiling = Future()
    compiling.set_exception(error)
    monkeypatch.setattr(worker.llm, "start_compile", lambda grammar: compiling)
    submit(frontend, "a")
    worker._receive_messages()
    [refused] = [message for message in run(worker, frontend) if isinstance(message, PromptRefused)]
    assert (refused.error, refused.busy) == (str(error), isinstance(error, CompilerBusy))


def test_rounds_of_a_captured_bucket_are_graphs_with_log_probabilities_too(engine):
    worker, frontend = engine
    worker.batch_buckets = (1, 2)
    submit(frontend, "a", replace(PARAMS, logprobs=1))
    worker._receive_messages()
    reports = [message.report for message in run(worker, frontend) if message.report is not None]
    [(bucket, is_graph, count)] = reports[-1].rounds_by_bucket
    assert (bucket, is_graph, count) == (1, True, reports[-1].speculation.rounds)


def test_an_abort_is_carried_out_in_one_step_and_reported(engine):
    worker, frontend = engine
    submit(frontend, "a", replace(PARAMS, max_tokens=40, n=2))
    worker._receive_messages()
    worker._send(worker.llm.step())
    frontend.send(protocol.encode(AbortPrompt("a")))
    frontend.send(protocol.encode(AbortPrompt("unknown")))
    worker._receive_messages()
    worker.num_steps += 1
    worker._send(worker.llm.step())
    reports = [message.report for message in said(frontend)]
    assert [report.abort_steps for report in reports] == [[], [1]]
    assert (reports[-1].num_running, reports[-1].num_waiting, reports[-1].pages_owned) == (0, 0, 0)
    check_pages(worker.llm.engine)


def test_a_launch_that_fails_tells_every_request_before_it_is_raised(engine, monkeypatch):
    worker, frontend = engine
    submit(frontend, "a")
    submit(frontend, "b")

    def launch(launch_input):
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(worker.llm.engine.executor, "launch", launch)
    with pytest.raises(RuntimeError, match="the device is lost"):
        worker.run()
    found = iter_parts(said(frontend))
    assert [part.name for part in found] == ["b", "a"] or [part.name for part in found] == ["a", "b"]
    assert all("the device is lost" in part.output.error for part in found)


def test_a_worker_whose_front_is_gone_leaves(engine):
    worker, _ = engine
    worker.api_server_pid = -1
    worker.run()


def test_a_worker_whose_front_is_gone_before_the_first_message_does_not_wait_for_it():
    """Such as a batch that is killed while its engine process still imports PyTorch."""
    polled = []
    silent = SimpleNamespace(poll=lambda ms: polled.append(ms) or 0)
    assert wait_for_start(silent, api_server_pid=-1) is None
    assert len(polled) == 1


def test_messages_come_back_as_they_went():
    params = ResolvedParams(logit_bias={3: -1.5}, stop=("x",), stop_token_ids=(1, 2), seed=2**63 - 1, logprobs=2)
    sent = SubmitPrompts([SubmittedPrompt("a", [1, 2], params, -3, True), SubmittedPrompt("b", [3], params, 0, False)])
    assert protocol.decode_to_engine(protocol.encode(sent)) == sent
    tree = unpack_settings({"speculation": {"steps": 2, "topk": 1}, "model": "x"})["speculation"]
    assert tree == SpeculationConfig(steps=2, topk=1)
