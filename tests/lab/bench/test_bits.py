"""`lab bits`: ranks that differ are counted bit by bit, and an engine's ranks do not differ."""

import pytest
import torch

from espalier.config import EngineConfig
from espalier.llm import prepare_engine
from lab.bench.bits import BitCounter, count_bits
from tests.builders import make_target
from tests.models.test_shards import on_ranks
from tests.ranks import KeptRanks, fork_ranks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_each_bit_that_a_rank_has_otherwise_is_counted(dtype):
    values = torch.randn(3, 5, generator=torch.Generator().manual_seed(1)).to(dtype)

    def counts(shards):
        counter, own = BitCounter(shards, torch.device("cpu")), values.clone()
        own.view(torch.uint8)[0, 0] ^= (0, 0b101, 0b1)[shards.rank]
        own.view(torch.uint8)[2, 1] ^= (0, 0, 0b10000000)[shards.rank]
        counter.add(values, own)
        counter.add(values)
        return counter.counts.tolist()

    assert on_ranks(3, counts) == [[2, 4]] * 3


def test_ranks_of_an_engine_do_not_differ(tmp_path):
    target = make_target(tmp_path / "target", hidden=64, heads=4, kv_heads=2)
    settings = {"device": "cpu", "max_batch": 2, "max_context": 512, "num_pages": 64, "speculation": None}
    ranks = KeptRanks(fork_ranks(2))
    try:
        counted = count_bits(ranks, prepare_engine(EngineConfig(model=target, tensor_parallel=2, **settings)), 12)
    finally:
        ranks.finish()
    assert counted.passes >= 12 and counted.tokens and not counted.differing_bits
