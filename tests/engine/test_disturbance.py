"""Whatever happens around a request, it says what it says alone, from the same trees."""

from dataclasses import replace
from random import Random

import pytest

from espalier.engine.engine import Engine
from espalier.request import Request, SamplingParams
from tests.engine.alone import alone, plainly
from tests.engine.watching import jitter, run_watched
from tests.harness import Setup, prompts, request
from tests.pairwise import fewer, in_turn_params

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
WISHES = [
    GREEDY,
    SamplingParams(temperature=1.0, max_tokens=13),
    SamplingParams(temperature=0.8, top_k=6, top_p=0.9, max_tokens=8),
    SamplingParams(temperature=0.0, max_tokens=9, repetition_penalty=1.2, presence_penalty=0.3),
    SamplingParams(temperature=1.0, max_tokens=11, frequency_penalty=0.4, min_p=0.05),
    SamplingParams(temperature=0.0, speculation=False, max_tokens=6),
    SamplingParams(temperature=0.0, logit_bias={2: 1.5, 7: -100.0}, min_tokens=4, stop_token_ids=[1], max_tokens=11),
    SamplingParams(temperature=0.5, max_draft_depth=2, stop_token_ids=[4], max_tokens=11),
]
TREES = [
    Setup(page_size=1, topk=2, steps=3, num_draft_tokens=8),
    Setup(page_size=2, topk=8, steps=5, num_draft_tokens=24),
    Setup(page_size=3, topk=4, steps=1, num_draft_tokens=5),
    Setup(page_size=16, topk=1, steps=4, num_draft_tokens=5),
    Setup(page_size=4, topk=3, steps=3, num_draft_tokens=9, algorithm="ngram"),
    Setup(page_size=2, topk=3, steps=3, num_draft_tokens=9, family="mistral", window=6, draft_vocab=11),
    Setup(page_size=3).plain(),
]
TREE_IDS = [f"{tree.algorithm}-page{tree.page_size}-topk{tree.topk}" for tree in TREES]
# One of n-grams, and one with a window and a smaller vocabulary; chains, other pages and a full vocabulary are in
# `make test-full`.  The more trees, the more requests run alone.
FEW_TREES = ("ngram-page4-topk3", "eagle3-page2-topk3")


some_trees = pytest.mark.parametrize(
    "tree",
    [
        pytest.param(tree, id=name, marks=() if name in FEW_TREES else pytest.mark.full)
        for tree, name in zip(TREES, TREE_IDS, strict=True)
    ],
)


# Who proposes is not known where results are late and prompts are cut: one with a draft's rows.
one_tree = pytest.mark.parametrize(
    "tree", fewer([pytest.param(t, id=i) for t, i in zip(TREES, TREE_IDS, strict=True)], lambda tree: tree is TREES[5])
)


def trees_in_turn(*factors: list[bool]) -> list:
    return fewer(in_turn_params(TREE_IDS, *factors), lambda tree, *_: tree in FEW_TREES)


in_overlap = pytest.mark.parametrize(
    "overlap", [pytest.param(False, marks=pytest.mark.full), True], ids=["lockstep", "overlap"]
)


def named(tree: str) -> Setup:
    return TREES[TREE_IDS.index(tree)]


def mixed() -> list[Request]:
    """The same in every test, so that each is run alone once a tree."""
    lengths = (1, 9, 30, 17, 2, 40, 25, 33)
    return [request(i, p, wish) for i, (p, wish) in enumerate(zip(prompts(0, lengths), WISHES, strict=True))]


def all_undisturbed(setup: Setup, requests: list[Request]) -> None:
    for r in requests:
        said = alone(setup, r)
        assert (r.output, r.finish_reason) == (said.tokens, said.reason)
        assert r.output == plainly(setup, r).tokens
        assert r.from_draft == said.from_draft


@one_tree
def test_batch_of_many_equals_each_alone_in_either_loop_whoever_is_late(tree: Setup) -> None:
    """Arrivals are ragged, so that every round has another membership.  The worker and the host sleep at random; with
    overlap stops are read a round late, and that round is thrown away."""
    ran = []
    for overlap in (False, True):
        engine, requests = replace(tree, overlap=overlap).engine(), mixed()
        late = jitter(engine, Random(1))
        run_watched(engine, [(2 * i, r) for i, r in enumerate(requests)], lambda _, late=late: late())
        all_undisturbed(tree, requests)
        ran.append([r.stats for r in requests])
    assert ran[0] == ran[1]


@pytest.mark.parametrize(("tree", "prefix_cache"), trees_in_turn([True, False]))
def test_preempted_after_any_round(tree: str, prefix_cache: bool) -> None:
    """Preempted after each of its steps, among mates and after several of them; the root is given, not picked again."""
    setup = replace(named(tree), prefix_cache=prefix_cache, max_batch=3)
    for first in (2, 4, 6) if prefix_cache else (3,):
        engine, requests = setup.engine(), mixed()[1:4]

        def preempt(step: int, engine: Engine = engine, first: int = first) -> None:
            if step >= first and (step - first) % 5 == 0 and engine.scheduler.running:
                engine.scheduler._preempt(engine.scheduler.running[step % len(engine.scheduler.running)])

        run_watched(engine, [(0, r) for r in requests], preempt)
        assert engine.scheduler.num_preempted
        all_undisturbed(setup, requests)


@pytest.mark.parametrize(("tree", "overlap", "prefix_cache"), trees_in_turn([False, True], [False, True]))
def test_few_pages(tree: str, overlap: bool, prefix_cache: bool) -> None:
    """A pool that holds one request to its end and little more: they preempt each other, oldest first to finish."""
    setup = replace(named(tree), overlap=overlap, prefix_cache=prefix_cache, max_context=64)
    most = setup.layout.pages_for(65)
    engine, requests = replace(setup, num_pages=1 + most + most // 3).engine(), mixed()
    run_watched(engine, [(i, r) for i, r in enumerate(requests)])
    all_undisturbed(named(tree), requests)


@pytest.mark.full
def test_few_pages_do_preempt() -> None:
    """Short prompts that all grow long: who is preempted comes back to be preempted again."""
    setup = Setup(page_size=2, overlap=True, max_context=64, num_pages=40)
    long = SamplingParams(temperature=1.0, max_tokens=40)
    engine, requests = setup.engine(), [request(i, p, long) for i, p in enumerate(prompts(7, (8,) * 4))]
    run_watched(engine, [(0, r) for r in requests])
    assert engine.scheduler.num_preempted >= 4
    all_undisturbed(setup, requests)


@pytest.mark.parametrize(("tree", "overlap"), trees_in_turn([True, False]))
def test_mates_that_are_aborted(tree: str, overlap: bool) -> None:
    """Every other request is aborted, one at each step from its arrival on; what it said until then stands."""
    setup = replace(named(tree), overlap=overlap, num_pages=80)
    for delay in (0, 6) if overlap else (3,):
        engine, requests = setup.engine(), mixed()

        def abort(step: int, engine: Engine = engine, delay: int = delay) -> None:
            if step >= delay and step - delay < 8 and (step - delay) % 2:
                engine.abort(f"r{step - delay}")

        run_watched(engine, [(i, r) for i, r in enumerate(requests)], abort)
        all_undisturbed(setup, [r for r in requests if not r.aborted])
        for r in (r for r in requests if r.aborted):
            assert r.finish_reason in ("abort", alone(setup, r).reason)
            assert r.output == alone(setup, r).tokens[: len(r.output)]
            assert r.error is None


@one_tree
def test_chunked_equals_whole(tree: Setup) -> None:
    """The longest chunks and the shortest, for every length around a chunk's and a page's end."""
    lengths = (1, 15, 16, 17, 32, 33, 40, 41, 65)
    for chunk_size in (16, 40, 512):
        setup = replace(tree, chunk_size=chunk_size, overlap=chunk_size == 40, max_batch=9)
        requests = [request(i, p, replace(GREEDY, max_tokens=3)) for i, p in enumerate(prompts(5, lengths))]
        run_watched(setup.engine(), [(0, r) for r in requests])
        all_undisturbed(tree, requests)


@in_overlap
def test_a_request_that_arrives_as_another_ends(overlap: bool) -> None:
    """A slot is handed on in the very step that frees it, while a round of its last owner is still in flight."""
    setup = Setup(page_size=2, max_batch=1, overlap=overlap, num_pages=60)
    requests = [request(i, p, replace(GREEDY, max_tokens=1 + i % 5)) for i, p in enumerate(prompts(6, (5,) * 10))]
    run_watched(setup.engine(), [(0, r) for r in requests])
    all_undisturbed(setup, requests)
