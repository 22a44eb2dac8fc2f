"""Rounds with grammars on the GPU: in stages, begun before the round before them is read, eager and as CUDA graphs."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from espalier import LLM, Grammar, SamplingParams
from espalier.engine.engine import Engine
from espalier.request import Request
from tests.gpu.conftest import FIGURES
from tests.gpu.delays import delay_segments, delay_streams, host_sleep
from tests.gpu.engines import DeviceSetup, make_executor
from tests.gpu.test_no_sync import no_sync
from tests.grammar.test_ahead import record
from tests.grammar.test_lossless import END, asked, check_all_in_grammar, masker_of
from tests.harness import Ran, prompts, request, run
from tests.pages import check_pages

pytestmark = pytest.mark.gpu

SETUP = DeviceSetup(
    page_size=16,
    topk=3,
    steps=3,
    num_draft_tokens=10,
    max_batch=4,
    max_context=96,
    attention="reference",
    capture_stages=True,
)
SEED = 3


def ran(setup: DeviceSetup, temperature: float, engine: Engine | None = None) -> Ran:
    made = run(engine or setup.engine(), asked(SEED, temperature, count=8))
    check_all_in_grammar(SEED, made.requests)
    return made


def eagerly(engine: Engine) -> Engine:
    """From now on its rounds run without graphs, padded to the same batches."""
    executor = make_executor(engine)
    executor.graphs.clear()
    executor.stage_graphs.clear()
    return engine


@pytest.mark.parametrize("temperature", [0.0, 1.2])
@pytest.mark.parametrize("algorithm", ["eagle3", "ngram"])
def test_on_is_off_with_overlap_and_in_lock_step(algorithm, temperature):
    setup = replace(SETUP, algorithm=algorithm)
    plain = ran(setup.plain(), temperature).tokens
    ahead, lock_step = (ran(replace(setup, overlap=overlap), temperature) for overlap in (True, False))
    assert ahead.tokens == lock_step.tokens == plain


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("overlap", [False, True], ids=["lockstep", "overlap"])
@pytest.mark.parametrize("algorithm", ["eagle3", "ngram"])
def test_graphs_of_stages_are_eager(algorithm, overlap, dtype):
    attention = "reference" if dtype == torch.float64 else "auto"
    setup = replace(SETUP, algorithm=algorithm, overlap=overlap, dtype=dtype, attention=attention)
    engine = setup.engine()
    replayed = ran(setup, 1.2, engine)
    eager = ran(setup, 1.2, eagerly(setup.engine()))
    assert replayed.tokens == eager.tokens
    assert vars(replayed.stats) == vars(eager.stats)


def test_a_free_request_says_the_same_beside_a_grammar():
    free = [each for each in asked(SEED, 1.2, count=8) if each.masker is None]
    beside = [each.output for each in ran(SETUP, 1.2).requests if each.masker is None]
    assert beside == run(SETUP.engine(), free).tokens


def test_a_round_begins_before_the_one_before_it_is_read():
    engine = SETUP.engine()
    calls = record(engine)
    run(engine, asked(1, 0.0, count=1))
    began = calls.index("begin 3")
    assert calls[began - 2 : began + 3] == ["trees 2", "settle 2", "begin 3", "result 2", "resume 3"]


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("seed", range(2))
def test_sleeps_change_nothing(seed, graphs, monkeypatch):
    random = Random(seed)
    right = ran(replace(SETUP, overlap=False), 1.2).tokens
    delay_segments(monkeypatch, random)
    engine = SETUP.engine() if graphs else eagerly(SETUP.engine())
    delay_streams(engine, random)
    requests = asked(SEED, 1.2, count=8)
    for each in requests:
        engine.add(each)
    while engine.has_work:
        host_sleep(random)
        engine.step()
        check_pages(engine)
    engine.close()
    assert [each.output for each in requests] == right


def beside_one(count: int) -> list[Request]:
    """`count` requests, the first of them under a grammar.  The others go on for longer, a token a round."""
    requests = [
        request(i, prompt, SamplingParams(temperature=1.2, max_tokens=70, speculation=not i))
        for i, prompt in enumerate(prompts(SEED, range(3, 3 + count)))
    ]
    requests[0].masker = masker_of(Grammar("regex", "(ab|ba){20,24}"))
    requests[0].stop_ids = frozenset((END,))
    return requests


def test_the_host_waits_for_trees_and_results_alone(monkeypatch, put_on_record):
    """Where most requests have no grammar, the draft asks nothing."""
    setup = replace(SETUP, dtype=torch.bfloat16, attention="auto")
    engine, requests = setup.engine(), beside_one(4)
    for each in requests:
        engine.add(each)
    while engine.has_work and not all(each.output for each in requests):
        engine.step()
    executor, stages = make_executor(engine), 0
    assert sorted(executor.stage_graphs) == [1, 2, 3, 4]
    launch = executor.launch

    def watched(call: Any) -> Any:
        def calling(*args: Any) -> Any:
            nonlocal stages
            stages += 1
            with no_sync():
                return call(*args)

        return calling

    def launching(launch_input: Any) -> Any:
        if not launch_input.is_staged:
            return launch(launch_input)
        handle = watched(launch)(launch_input)
        handle.resume, handle.settle = watched(handle.resume), watched(handle.settle)
        return handle

    monkeypatch.setattr(executor, "launch", launching)
    run(engine, [])
    assert stages >= 6
    put_on_record(FIGURES, f"sync debug mode 'error', rounds with a grammar: {stages} stages")


SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["note", "report"]}, "text": {"type": "string"}},
    "required": ["kind", "text"],
}


def said(llm: LLM, masked: Sequence[bool]) -> tuple[list[list[int]], int]:
    """Tokens of each request, and rounds; every second one sampled, and those of `masked` under a schema."""
    grammar = Grammar.of_json_schema(SCHEMA)
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=32, grammar=grammar if is_masked else None)
        for i, is_masked in enumerate(masked)
    ]
    outputs = llm.generate([f"A record as JSON, the {i + 1}th: " for i in range(len(masked))], params)
    return [output.token_ids for output in outputs], sum(output.speculation.rounds for output in outputs)


@pytest.mark.parametrize("masked", [[True] * 4, [True, False, False, False]], ids=["all", "one"])
def test_the_bundled_model_under_a_schema(masked):
    """With a real vocabulary: graphs are eager, and overlap is lock-step.

    The draft asks by the batch, which overlap changes, so rounds are compared with overlap alone.
    """
    settings = {"device": "cuda", "dtype": "float32", "max_batch": 4, "max_context": 512, "num_pages": 160}
    with LLM("bundled", **settings) as llm:
        tokens, rounds = said(llm, masked)
    with LLM("bundled", overlap=False, **settings) as llm:
        assert said(llm, masked)[0] == tokens
    with LLM("bundled", **settings) as llm:
        eagerly(llm.engine)
        assert said(llm, masked) == (tokens, rounds)
