"""Who came first goes first; nobody who runs waits longer than one prefill pass."""

from random import Random

import pytest

from espalier.engine.engine import Engine
from espalier.layout import RoundLayout
from espalier.request import Request, SamplingParams
from tests.engine.symbolic import SymbolicDevice, continuation, symbolic_engine
from tests.harness import request
from tests.pages import check_pages

each_loop = pytest.mark.parametrize("overlap", [False, True], ids=["lockstep", "overlap"])


def make_engine(overlap: bool, num_pages: int = 200, max_batch: int = 3, chunk_size: int = 16) -> Engine:
    return symbolic_engine(RoundLayout(max_batch, 3, 2, 8, 4, 128, 1, chunk_size), num_pages, overlap, random=Random(1))


def asked(index: int, prompt_len: int = 10, max_tokens: int = 12) -> Request:
    prompt = [(index * 5 + i * i) % 16 for i in range(prompt_len)]
    return request(index, prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens))


def launches(engine: Engine) -> str:
    """P for a prefill pass, R for a round, in order."""
    device = engine.executor
    assert isinstance(device, SymbolicDevice)
    return "".join("P" if launch_input.is_prefill else "R" for launch_input in device.launch_inputs)


@each_loop
def test_admitted_in_order_of_arrival(overlap: bool) -> None:
    """Whatever the order of adding, and although later ones would fit where an earlier, longer one does not."""
    engine = make_engine(overlap, num_pages=1 + 24, max_batch=4)
    requests = [asked(i, prompt_len=50 if i in (2, 5) else 8) for i in range(9)]
    for r in reversed(requests):
        engine.add(r)
    entered: list[int] = []
    while engine.has_work:
        engine.step()
        check_pages(engine)
        entered += [r.arrival_index for r in engine.scheduler.running if r.arrival_index not in entered]
    assert entered == sorted(entered)


@each_loop
def test_preempted_goes_back_to_its_place(overlap: bool) -> None:
    """The latest arrival gives way, waits before all that came after it, and enters before them."""
    engine = make_engine(overlap, num_pages=1 + 16, max_batch=3)
    requests = [asked(i, prompt_len=8, max_tokens=40) for i in range(3)] + [asked(i, 8, 4) for i in (3, 4, 5)]
    for r in requests:
        engine.add(r)
    victims: list[int] = []
    right = engine.scheduler._preempt

    def preempt(r: Request) -> None:
        assert r is max(engine.scheduler.running, key=lambda other: other.arrival_index)
        assert not engine.scheduler._launches_in_flight, "what is in flight may free pages: it is read first"
        right(r)
        victims.append(r.arrival_index)
        assert [w.arrival_index for w in engine.scheduler.waiting] == sorted(
            w.arrival_index for w in engine.scheduler.waiting
        )

    engine.scheduler._preempt = preempt  # type: ignore[method-assign]
    while engine.has_work:
        engine.step()
        check_pages(engine)
        running, waiting = engine.scheduler.running, engine.scheduler.waiting
        assert not (running and waiting) or running[-1].arrival_index < next(iter(waiting)).arrival_index
    assert victims
    assert 0 not in victims, "the oldest is never preempted"
    assert all((r.output, r.finish_reason) == continuation(r, 128) for r in requests)


@each_loop
@pytest.mark.parametrize("streamed", [True, False])
def test_long_prompts_let_rounds_through(overlap: bool, streamed: bool) -> None:
    """Where somebody reads, chunks of long prompts and rounds of those who already run take turns; where nobody does,
    the batch is filled first; where nobody runs, chunks follow each other."""
    engine = make_engine(overlap)
    reader = asked(0, 5, max_tokens=60)
    reader.streamed = streamed
    engine.add(reader)
    for _ in range(3):
        engine.step()
    before = len(launches(engine))
    engine.add(asked(1, 96, max_tokens=3))
    engine.add(asked(2, 64, max_tokens=3))
    for _ in range(20):
        engine.step()
    assert launches(engine)[before:].startswith("PRPRPRPRPRPRPRPRPRPR" if streamed else "PPPPPPPPPPRR")
    alone = make_engine(overlap)
    alone.add(asked(3, 96, max_tokens=3))
    while alone.has_work:
        alone.step()
    assert launches(alone).startswith("PPPPPPR")


@each_loop
def test_short_prompts_share_a_pass(overlap: bool) -> None:
    """A pass takes requests oldest first, in pieces of a width that leaves little padding."""
    engine = make_engine(overlap, max_batch=8, chunk_size=64)
    lengths = (5, 16, 12, 9, 40, 3, 60)
    for i, n in enumerate(lengths):
        engine.add(asked(i, n, max_tokens=2))
    while engine.has_work:
        engine.step()
    device = engine.executor
    assert isinstance(device, SymbolicDevice)
    passes = [
        (launch_input.width, launch_input.lengths) for launch_input in device.launch_inputs if launch_input.is_prefill
    ]
    assert passes == [(16, (5, 16, 12, 9)), (16, (40, 3)), (64, (60,))]


@each_loop
def test_samples_do_not_hold_up_others(overlap: bool) -> None:
    """Who waits for a sibling's prompt lets those behind pass, and enters as soon as the prompt is there."""
    engine = make_engine(overlap, max_batch=3, chunk_size=16)
    leader, sibling, other = asked(0, 60), asked(0, 60), asked(2, 8)
    sibling.id, sibling.arrival_index, sibling.prefix_leader = "r1", 1, leader
    for r in (leader, sibling, other):
        engine.add(r)
    engine.step()
    assert [r.arrival_index for r in engine.scheduler.running] == [0, 2]
    while not leader.prompt_cached:
        engine.step()
    engine.step()
    assert sibling in engine.scheduler.running or sibling.is_done
    assert sibling.cached_tokens == 60
    while engine.has_work:
        engine.step()
        check_pages(engine)
    assert all((r.output, r.finish_reason) == continuation(r, 128) for r in (leader, sibling, other))
