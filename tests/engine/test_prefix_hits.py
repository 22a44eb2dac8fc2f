"""A hit of any length, parting anywhere, changes nothing: not tokens, not trees, not a byte of what is shared."""

from dataclasses import replace

import pytest

from espalier.engine.engine import Engine
from espalier.request import Request, SamplingParams
from tests.engine.alone import alone
from tests.engine.test_disturbance import all_undisturbed
from tests.engine.watching import SharedPages, run_watched
from tests.harness import VOCAB, Setup, prompts, request
from tests.pages import check_pages
from tests.pairwise import fewer, in_turn_params, product_params

BASE = prompts(11, [36])[0]
SHORT = SamplingParams(temperature=0.0, max_tokens=3)
PAGE_SIZES = [1, 3, 16]
each_loop = pytest.mark.parametrize("overlap", [False, True], ids=["lockstep", "overlap"])

pages_and_loops_in_turn = pytest.mark.parametrize(
    ("page_size", "overlap"), fewer(in_turn_params(PAGE_SIZES, [False, True]), lambda page_size, *_: page_size != 16)
)


def parting(index: int, hit: int, tail: int) -> Request:
    """A prompt that follows the base for `hit` tokens and then goes its own way."""
    other = [(BASE[hit] + 1 + i * (hit + 3)) % VOCAB for i in range(tail)] if hit < len(BASE) else []
    return request(index, BASE[:hit] + other or [BASE[0]], SHORT)


@pytest.mark.parametrize(
    ("page_size", "overlap", "tail"),
    fewer(product_params(PAGE_SIZES, [False, True], [0, 3]), lambda *cell: cell in ((1, True, 3), (3, False, 0))),
)
def test_every_hit_and_every_parting(page_size: int, overlap: bool, tail: int) -> None:
    """tail 0: the whole prompt is a hit, or ends inside one."""
    base = BASE[: 20 if page_size == 16 else 9]
    setup = Setup(
        page_size=page_size, topk=4, steps=3, num_draft_tokens=10, overlap=overlap, max_batch=2, num_pages=600
    )
    engine = setup.engine()
    assert engine.prefix_tree is not None
    shared = SharedPages(engine)
    hits = [0, 1, 15, 16, 17, 19] if page_size == 16 else list(range(len(base)))
    requests = [request(0, base, SHORT)] + [parting(1 + i, hit, tail) for i, hit in enumerate(hits)]
    requests.append(request(len(requests), base, SHORT))
    for r in requests:
        engine.add(r)
        while engine.has_work:
            engine.step()
            check_pages(engine)
            shared.check()
    engine.close()
    assert shared.compared > 100 // page_size
    for r in requests[1:]:
        common = next((i for i, (a, b) in enumerate(zip(r.prompt, base, strict=False)) if a != b), len(r.prompt))
        assert r.cached_tokens == common // page_size * page_size
    all_undisturbed(setup, requests)


@pytest.mark.parametrize(
    ("page_size", "algorithm"),
    fewer(in_turn_params(PAGE_SIZES, ["eagle3", "none"]), lambda page_size, *_: page_size != 16),
)
def test_hits_while_their_owner_still_runs(page_size: int, algorithm: str) -> None:
    """Pages are shared from the moment they are whole: while who computed them goes on writing behind them, and while
    they are evicted as soon as nobody holds them."""
    setup = Setup(page_size=page_size, overlap=True, max_batch=4, num_pages=1 + 4 * -(-60 // page_size))
    setup = setup.plain() if algorithm == "none" else replace(setup, steps=2, topk=3, num_draft_tokens=7)
    requests = [request(0, BASE, replace(SHORT, max_tokens=30))]
    requests += [parting(1 + i, hit, 3) for i, hit in enumerate(range(2, 36, 4))]
    engine = setup.engine()

    def evict(step: int) -> None:
        if step % 4 == 3 and engine.prefix_tree is not None:
            engine.prefix_tree.evict(2)

    run_watched(engine, [(1 + 2 * i, r) for i, r in enumerate(requests)], evict)
    assert sum(r.cached_tokens for r in requests) > 0
    all_undisturbed(setup, requests)


@pages_and_loops_in_turn
def test_equal_prompts_at_once(page_size: int, overlap: bool) -> None:
    """Nobody has computed it when all arrive: each computes its own, one copy is filed, the others are given back."""
    setup = Setup(page_size=page_size, overlap=overlap, max_batch=4, num_pages=400)
    requests = [request(i, BASE, SamplingParams(temperature=1.0, max_tokens=10), seed=i) for i in range(6)]
    run_watched(setup.engine(), [(0, r) for r in requests])
    all_undisturbed(setup, requests)


@pages_and_loops_in_turn
def test_samples_share_their_prompt(page_size: int, overlap: bool) -> None:
    """n > 1: the others wait for the first one's prompt and hit all of its whole pages."""
    setup = Setup(page_size=page_size, overlap=overlap, max_batch=3, num_pages=400)
    requests = [request(i, BASE, SamplingParams(temperature=1.0, max_tokens=10), seed=i) for i in range(5)]
    for r in requests[1:]:
        r.prefix_leader = requests[0]
    stranger = request(5, BASE[::-1], SHORT)
    run_watched(setup.engine(), [(0, r) for r in [*requests, stranger]])
    assert [r.cached_tokens for r in requests] == [0] + [len(BASE) // page_size * page_size] * 4
    all_undisturbed(setup, [*requests, stranger])


@each_loop
def test_samples_whose_first_is_aborted(overlap: bool) -> None:
    setup = Setup(page_size=2, overlap=overlap, chunk_size=16)
    for delay in range(5):
        engine = setup.engine()
        requests = [request(i, BASE, replace(SHORT, max_tokens=5)) for i in range(3)]
        requests[1].prefix_leader = requests[2].prefix_leader = requests[0]
        run_watched(
            engine, [(0, r) for r in requests], lambda step, e=engine, d=delay: e.abort("r0") if step == d else None
        )
        assert requests[0].finish_reason == "abort"
        all_undisturbed(setup, requests[1:])


@pytest.mark.parametrize("page_size", fewer(PAGE_SIZES, lambda page_size: page_size == 3))
def test_output_is_shared_too(page_size: int) -> None:
    """What a request said is as good a prefix as what it was asked: rows that a tree commits are those of a prompt
    pass."""
    setup = Setup(page_size=page_size, topk=4, steps=3, num_draft_tokens=10, num_pages=600)
    engine = setup.engine()
    first = request(0, BASE[:10], replace(SHORT, max_tokens=12))
    said = alone(setup, first)
    talk = first.prompt + said.tokens
    requests = [first] + [request(i, talk[:i], SHORT) for i in range(12 - len(talk) % 2, len(talk) + 1, 2)]
    for r in requests:
        run_to_end(engine, r)
    assert requests[-1].cached_tokens >= (len(talk) - 1) // page_size * page_size
    all_undisturbed(setup, requests)


def run_to_end(engine: Engine, r: Request) -> None:
    engine.add(r)
    while engine.has_work:
        engine.step()
        check_pages(engine)
