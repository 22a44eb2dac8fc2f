"""Every depth and every sibling rank is accepted at least once, or what the other tests hold would be held of
nothing."""

from itertools import product

import pytest

from espalier.layout import max_draft_tokens
from espalier.request import SamplingParams
from tests.harness import Setup, prompts, request
from tests.properties.layouts import MOST_NODES, reference_of
from tests.properties.summary import COVERAGE
from tests.properties.watch import TOKENS, Watch, run_watched

# Where noise is loud a random draft, which knows it, reaches every depth; where it is low every rank has its turn.
LOUD, LOW = 12.0, 0.7


# A chain, and the largest tree; the rest of the product is for the marker `full`.
CHOSEN = {(5, 1), (8, 8)}
CELLS = [
    pytest.param(*cell, marks=() if cell in CHOSEN else pytest.mark.full)
    for cell in product([1, 3, 5, 8], [1, 2, 4, 8])
]


@pytest.mark.parametrize(("steps", "topk"), CELLS)
def test_every_depth_and_rank_is_accepted(steps, topk, put_on_record):
    nodes = min(max_draft_tokens(steps, topk), MOST_NODES)
    setup = Setup(steps=steps, topk=topk, num_draft_tokens=nodes, page_size=3, max_batch=8, max_context=64)
    watch = Watch(setup.engine(), "eagle3", reference_of(setup), {TOKENS})
    traffic = [
        request(i, prompt, SamplingParams(temperature=LOUD if i % 2 else LOW, max_tokens=36))
        for i, prompt in enumerate(prompts(3, [6] * 8))
    ]
    put_on_record(COVERAGE, run_watched(watch, traffic))
    assert set(watch.coverage.depths) == set(range(1, steps + 1))
    assert set(watch.coverage.ranks) == set(range(topk))
