"""Two GPUs that share a model: in float64 the tokens of one GPU; with graphs in bfloat16, equal bits on both ranks.

The engine itself compares them at every launch (espalier/engine/ranks.py).
"""

import os
import signal
import time
from typing import Any

import pytest
import torch

from espalier import LLM, Grammar, SamplingParams
from espalier.engine.ranks import RankFailed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
PROMPTS = ["Once upon a time", "The red", "A long day " * 20]
PARAMS = [
    SamplingParams(max_tokens=48, temperature=0, logprobs=1),
    SamplingParams(max_tokens=48, temperature=0.8, seed=3),
    SamplingParams(max_tokens=24, temperature=0.8, seed=4, grammar=Grammar("regex", "[a-z ]{8,40}")),
]
EXACT: dict[str, Any] = {"dtype": "float64", "attention": "reference", "max_batch": 4, "max_context": 512}


def said(**settings: Any) -> list[list[int]]:
    with LLM("bundled", device="cuda", **settings) as llm:
        return [output.token_ids for output in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize("overlap", [False, True])
def test_two_gpus_say_what_one_says(overlap):
    assert said(**EXACT, overlap=overlap, tensor_parallel=2) == said(**EXACT, overlap=overlap)


def test_graphs_replay_on_both_ranks():
    how: dict[str, Any] = {"dtype": "bfloat16", "max_batch": 4, "max_context": 512, "tensor_parallel": 2}
    with LLM("bundled", device="cuda", **how) as llm:
        captured = [output.token_ids for output in llm.generate(PROMPTS * 3, PARAMS * 3)]
        assert llm.engine.executor.own.graphs  # type: ignore[attr-defined]
    assert all(captured)


def test_a_rank_that_dies_ends_all():
    with LLM("bundled", device="cuda", max_batch=2, max_context=512, tensor_parallel=2) as llm:
        stream = llm.stream("Once", SamplingParams(max_tokens=400))
        next(stream)
        os.kill(llm.engine.executor.ranks.peers[0].process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        began = time.monotonic()
        with pytest.raises(RankFailed, match="has ended by SIGKILL"):
            list(stream)
        assert time.monotonic() - began < 10
