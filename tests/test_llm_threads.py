"""Threads that share an LLM: each gets what it gets alone.  So does who runs while a forgotten stream ends."""

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest

from espalier import LLM, SamplingParams, SpeculationConfig
from tests.harness import directories

PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8], [9]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture
def llm():
    target, draft = directories()
    tree = SpeculationConfig(steps=3, topk=2, num_draft_tokens=8)
    with LLM(model=target, draft=draft, dtype="float64", max_batch=4, max_context=64, speculation=tree) as llm:
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
    llm.engine.check_pages()
    assert not llm.engine.requests and not llm._unread


@pytest.mark.parametrize("name", ["next_launch", "harvest"])
def test_a_forgotten_stream_ends_in_a_step_without_another_step(llm, monkeypatch, name):
    """A stream in a cycle of references, as an exception makes one, is collected at any time: here within a step."""
    [alone] = llm.generate([PROMPTS[1]], GREEDY)
    depths, depth = [], 0
    step, right = llm.engine.step, getattr(llm.engine.scheduler, name)

    def counted():
        nonlocal depth
        depth += 1
        depths.append(depth)
        chunks = step()
        depth -= 1
        return chunks

    def collecting(*args):
        result = right(*args)
        gc.collect()
        return result

    forgotten = [llm.stream(PROMPTS[0], GREEDY)]
    next(forgotten[0])
    forgotten.append(forgotten)
    monkeypatch.setattr(llm.engine, "step", counted)
    monkeypatch.setattr(llm.engine.scheduler, name, collecting)
    assert len(llm.engine.requests) == 1
    del forgotten
    [output] = llm.generate([PROMPTS[1]], GREEDY)
    assert output.token_ids == alone.token_ids and set(depths) == {1}
    assert not llm.engine.requests and not llm._unread
    llm.engine.check_pages()
