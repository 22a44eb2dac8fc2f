"""A running request holds the pages of what may be decided before it is read again, and none beyond."""

from random import Random

import pytest

from espalier.engine.engine import Engine
from espalier.layout import RoundLayout
from espalier.request import Request, SamplingParams
from tests.engine.symbolic import continuation, symbolic_engine
from tests.engine.test_disturbance import all_undisturbed
from tests.engine.traffic import pages_beyond
from tests.harness import Setup, prompts, request
from tests.pages import check_pages
from tests.pairwise import in_turn_params

BIG = Setup(
    page_size=256, topk=8, steps=5, num_draft_tokens=64, max_batch=8, max_context=1024, chunk_size=512, num_pages=33
)


def mixed(count: int, longest: int, most_tokens: int) -> list[Request]:
    random = Random(7)
    lengths = [random.choice([1, 5, 40, longest // 4, longest // 2, longest - 1, longest]) for _ in range(count)]
    wishes = [SamplingParams(temperature=i % 3 * 0.5, max_tokens=random.randint(1, most_tokens)) for i in range(count)]
    return [request(i, p, w) for i, (p, w) in enumerate(zip(prompts(8, lengths), wishes, strict=True))]


def largest_excess(engine: Engine, requests: list[Request]) -> int:
    """Most pages that any running request held, after any step, beyond the R·(S + 1) + 1 tokens past its root."""
    for r in requests:
        engine.add(r)
    excess = []
    while engine.has_work:
        engine.step()
        check_pages(engine)
        excess += [pages_beyond(engine, r) for r in engine.scheduler.running]
    engine.close()
    assert max(excess) == 0, "what is needed is held, or the figure means nothing"
    return max(excess)


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.full), True], ids=["lockstep", "overlap"])
def test_mixed_requests_at_page_256(overlap: bool) -> None:
    setup = Setup(**{**vars(BIG), "overlap": overlap})
    requests = mixed(20, 300, 8)
    assert largest_excess(setup.engine(), requests) == 0
    all_undisturbed(setup, requests[::5])


@pytest.mark.parametrize(("page_size", "overlap"), in_turn_params([1, 3, 16, 256], [False, True]))
def test_mixed_requests_at_any_page_size(page_size: int, overlap: bool) -> None:
    """Over a device of symbols, which accepts any number of tokens a round."""
    layout = Setup(**{**vars(BIG), "page_size": page_size}).layout
    engine = symbolic_engine(layout, 1 + 8 * layout.table_width, overlap, random=Random(page_size))
    assert largest_excess(engine, mixed(24, 300, 60)) == 0


def test_thirteen_tokens_ahead() -> None:
    """The figure of the design at steps 5, against 2 · max(ceil((page - 1 + steps) / page) · page · topk, D)."""
    layout = BIG.layout
    assert (layout.max_tokens_ahead(1), layout.max_tokens_ahead(2)) == (7, 13)
    per_branch = 2 * max(-(-(256 - 1 + 5) // 256) * 256 * 8, 64)
    assert per_branch == 8192


def test_pages_of_a_launch_that_did_not_start_do_not_reach_the_next_owner_of_the_slot() -> None:
    """The pool is empty after the first request's reservation, so the launch waits.  Then the first request ends."""
    layout = RoundLayout(
        max_batch=2,
        steps=1,
        topk=1,
        num_draft_tokens=2,
        page_size=1,
        max_context=32,
        num_recomputed_tokens=1,
        chunk_size=32,
    )
    engine = symbolic_engine(layout, 35, overlap=True, prefix_cache=False, random=Random(0))
    first, second, third = (
        request(i, prompt, SamplingParams(max_tokens=26)) for i, prompt in enumerate(prompts(1, [1, 1, 6]))
    )
    for r in (first, second, third):
        engine.add(r)
    while not engine.scheduler._appended_pages:
        engine.step()
    assert {slot for slot, _, _ in engine.scheduler._appended_pages} == {first.slot}
    engine.abort(first.id)
    while engine.has_work:
        engine.step()
    assert [r.output for r in (second, third)] == [continuation(r, 32)[0] for r in (second, third)]
