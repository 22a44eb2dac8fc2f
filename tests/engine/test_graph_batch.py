"""Which batches are captured: decided at start, and refused by name where it cannot be."""

import pytest

from espalier import LLM, EspalierError
from espalier.layout import RoundLayout
from tests.harness import directories

LAYOUT = RoundLayout(24, 3, 2, 8, 16, 64, 1, 32)


def test_none_are_captured_on_a_cpu_and_asking_for_some_is_refused():
    target, draft = directories()
    with LLM(model=target, draft=draft, device="cpu", max_batch=4, max_context=64) as llm:
        assert llm.config.graph_batch == 0
    with pytest.raises(EspalierError, match=r"graph_batch=2 needs device=cuda; use 0 or 'auto' on cpu"):
        LLM(model=target, draft=draft, device="cpu", max_batch=4, max_context=64, graph_batch=2)


@pytest.mark.parametrize("value", [-1, 1.5, "all", True])
def test_a_graph_batch_that_is_no_count_is_refused(value):
    with pytest.raises(EspalierError, match="graph_batch="):
        LLM("bundled", graph_batch=value)


@pytest.mark.parametrize("largest", range(25))
def test_every_batch_up_to_the_largest_has_a_bucket_less_than_half_empty(largest):
    buckets = LAYOUT.batch_buckets(largest)
    assert list(buckets) == sorted(set(buckets)) and (not buckets or buckets[-1] == largest)
    for batch in range(1, largest + 1):
        bucket = min(bucket for bucket in buckets if bucket >= batch)
        assert bucket < 2 * batch
