"""Threads that share an LLM: each gets what it gets alone."""

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
