"""Seeded storms over a device of symbols: few pages, many arrivals, aborts and evictions, until requests preempt each
other all the time.  Random where Hypothesis is thorough: what needs three requests and two launches to meet is found
here."""

from random import Random

import pytest

from espalier.engine.engine import Engine
from espalier.engine.launch_input import Launch
from espalier.layout import RoundLayout, max_draft_tokens
from espalier.request import Request, SamplingParams
from tests.engine.symbolic import VOCAB, continuation, symbolic_engine
from tests.engine.traffic import TRUNK
from tests.harness import request
from tests.pages import check_pages
from tests.pairwise import fewer


def layout_of(random: Random) -> RoundLayout:
    steps, topk = random.choice([(0, 1), (1, 3), (3, 2), (5, 8)])
    nodes = min(8, max_draft_tokens(steps, topk))
    page_size = random.choice([1, 2, 3, 4, 16])
    context, chunk = random.choice([48, 64]), random.choice([16, 24, 64])
    return RoundLayout(random.randint(1, 5), steps, topk, nodes, page_size, context, min(steps, 1), chunk)


def request_of(random: Random, index: int) -> Request:
    own = [random.randrange(VOCAB) for _ in range(random.randint(0, 4))]
    stop = [random.randrange(VOCAB)] if random.random() < 0.3 else []
    params = SamplingParams(temperature=0.0, max_tokens=random.randint(1, 20), stop_token_ids=stop)
    made = request(index, TRUNK[: random.randint(1, 30)] + own, params)
    made.streamed = random.random() < 0.3
    return made


def watch(engine: Engine) -> None:
    """Hold the order of launches against what is promised: arrivals in order; where somebody reads, one prefill pass
    between rounds at most; else no prompt waits longer than a pass of its own would take; and the pages of what may be
    decided."""
    scheduler, layout = engine.scheduler, engine.layout
    right, last_was_prefill, waited = scheduler.next_launch, False, 0.0

    def next_launch() -> Launch | None:
        nonlocal last_was_prefill, waited
        launch = right()
        if scheduler.running and scheduler.waiting:
            assert scheduler.running[-1].arrival_index < next(iter(scheduler.waiting)).arrival_index, (
                "somebody was overtaken"
            )
        if launch is not None:
            members = [r for r, _, _ in launch.launched_requests]
            others = [r for r in scheduler.running if r.num_prefilled >= r.prefill_len and r not in members]
            decoding = [r for r in others if not r.ends_in_flight(layout.max_context)]
            is_read = any(r.streamed for r in decoding)
            assert not (launch.launch_input.is_prefill and last_was_prefill and is_read), "two prefill passes in a row"
            last_was_prefill = launch.launch_input.is_prefill
            prompts = [r for r in scheduler.running if r.num_prefilled < r.prefill_len]
            if last_was_prefill or not prompts or any(r.streamed for r in members):
                waited = 0.0
            else:
                assert waited < 256, "a prompt waits longer than a pass of its own would take"
                nodes = len(members) * layout.for_batch(len(members)).num_draft_tokens
                waited += (256 + nodes) * len(prompts) / len(members)
            for r in members:
                rounds = scheduler.rounds_in_flight if launch.launch_input.is_prefill else max(r.rounds_in_flight, 1)
                if not launch.launch_input.is_prefill:
                    certain = r.num_known + r.rounds_in_flight  # this round not included
                    assert certain < r.max_num_tokens(layout.max_context), (
                        "a round for a request that is sure to have ended"
                    )
                assert layout.pages_needed(r.num_known, rounds, r.max_num_tokens(layout.max_context)) <= len(r.pages)
        return launch

    scheduler.next_launch = next_launch  # type: ignore[method-assign]


def storm(seed: int) -> int:
    """Returns how often somebody was preempted."""
    random = Random(seed)
    layout = layout_of(random)
    most = layout.pages_for(layout.max_context + 1)
    pages = 1 + most + random.randint(0, most)
    engine = symbolic_engine(layout, pages, random.random() < 0.7, random.random() < 0.8, random)
    watch(engine)
    requests: list[Request] = []
    for turn in range(3000):
        if turn < 60 and random.random() < 0.3:
            requests.append(request_of(random, len(requests)))
            engine.add(requests[-1])
        if random.random() < 0.03 and requests:
            engine.abort(random.choice(requests).id)
        if random.random() < 0.05 and engine.prefix_tree is not None:
            engine.prefix_tree.evict(3)
        engine.step()
        check_pages(engine)
        if turn > 60 and not engine.has_work:
            break
    assert not engine.has_work, "the engine goes nowhere"
    assert engine.pool.num_free + len(engine.prefix_tree or ()) + 1 == pages
    for r in requests:
        tokens, reason = continuation(r, layout.max_context)
        if r.finish_reason == "abort":
            assert r.aborted
            assert r.output == tokens[: len(r.output)]
        else:
            assert (r.output, r.finish_reason) == (tokens, reason)
    return engine.scheduler.num_preempted


@pytest.mark.parametrize("first", fewer(range(0, 120, 30), lambda first: first == 0))
def test_storm(first: int) -> None:
    assert sum(storm(seed) for seed in range(first, first + 30)) > 20


@pytest.mark.full
@pytest.mark.parametrize("first", range(200, 20200, 500))
def test_many_storms(first: int) -> None:
    assert sum(storm(seed) for seed in range(first, first + 500)) > 100
