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
from espalier.kernels.ranks.collectives import PeerCollectives

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
        assert llm.engine.executor.own_executor.graphs  # type: ignore[attr-defined]
    assert all(captured)


def test_ranks_join_in_peer_memory():
    """As often as the rounds of the bundled model need: NCCL joins what is too large."""
    how: dict[str, Any] = {"max_batch": 2, "max_context": 512, "tensor_parallel": 2}
    with LLM("bundled", device="cuda", **how) as llm:
        target = llm.engine.executor.runner.target
        joined = target.layers[0].attention.out.weight.shards.collectives
        assert isinstance(joined, PeerCollectives)
        before = int(joined.memory.num_launches[0])
        llm.generate(PROMPTS[0], PARAMS[1])
        rounds = int(joined.memory.num_launches[0]) - before
    assert rounds > 2 * len(target.layers)


@pytest.mark.parametrize(
    ("sent", "match", "seconds"),
    [(signal.SIGKILL, "has ended by SIGKILL", 5), (signal.SIGSTOP, "does not answer", 20)],
    ids=["dies", "stops"],
)
def test_a_rank_that_fails_ends_all(sent, match, seconds):
    """Its peers wait for it inside of kernels.  The GPUs are free for the next engine."""
    how: dict[str, Any] = {"max_batch": 2, "max_context": 512, "tensor_parallel": 2, "num_pages": 256}
    with LLM("bundled", device="cuda", **how) as llm:
        stream = llm.stream("Once", SamplingParams(max_tokens=400))
        next(stream)
        process = llm.engine.executor.ranks.peers[0].process  # type: ignore[attr-defined]
        os.kill(process.pid, sent)
        began = time.monotonic()
        with pytest.raises(RankFailed, match=match):
            list(stream)
        assert time.monotonic() - began < seconds
    assert process.poll() is not None
    with LLM("bundled", device="cuda", **how) as llm:
        assert llm.generate(PROMPTS[0], PARAMS[1])[0].token_ids
