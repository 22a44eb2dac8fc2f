"""Many JSON schemas on the bundled model: every output that ended is valid, and speculation changes none."""

import pytest

from espalier import LLM
from lab.bench.grammar import DRAFT_GUIDANCE, measure_schemas
from lab.bench.schemas import random_schema


@pytest.fixture(scope="module")
def llm():
    with LLM(dtype="float64", max_batch=8, max_context=512, page_size=16) as llm:
        yield llm


def check(llm, seeds) -> None:
    figures = measure_schemas(llm, [random_schema(seed) for seed in seeds])
    assert figures["valid of those"] == figures["ended by themselves"] > 0
    assert figures["equal with speculation off"] == figures["schemas"]
    lengths = {name: figures[f"accept length, draft told {name}"] for name in DRAFT_GUIDANCE}
    assert lengths["nothing"] < lengths["both at first"] < lengths["both"]


def test_some_schemas(llm):
    check(llm, range(1, 2))


@pytest.mark.full
def test_two_hundred_schemas(llm):
    check(llm, range(200))
