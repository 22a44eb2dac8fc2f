"""A launch that fails leaves device state half written: every request is answered, and none goes on as if nothing
were."""

import gc
import weakref

import pytest

from espalier.errors import EspalierError
from tests.harness import Setup, prompts, request
from tests.pages import check_pages


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("fails_at", [1, 2, 4])
def test_a_failed_launch_ends_every_request_by_name(overlap, fails_at):
    engine = Setup(overlap=overlap, max_batch=2).engine()
    launches, right = [], engine.executor.run

    def run(launch_input):
        launches.append(launch_input)
        if len(launches) == fails_at:
            raise MemoryError("no memory is left")
        return right(launch_input)

    engine.executor.run = run
    requests = [request(i, prompt) for i, prompt in enumerate(prompts(0, [5, 9, 7]))]
    for r in requests:
        engine.add(r)
    with pytest.raises(MemoryError):
        for _ in range(20):
            engine.step()
    assert [r.finish_reason for r in requests] == ["abort"] * 3
    assert [r.error for r in requests] == ["the engine stopped (MemoryError: no memory is left)"] * 3
    check_pages(engine)
    assert engine.pool.num_free + len(engine.prefix_tree) + 1 == engine.pool.num_pages
    assert {piece.request_id for piece in engine.step()} == {r.id for r in requests}
    assert not engine.has_work
    with pytest.raises(EspalierError, match=r"the engine stopped.*make another"):
        engine.add(request(9, [1, 2]))
    engine.close()


@pytest.mark.parametrize("overlap", [False, True], ids=["lockstep", "overlap"])
def test_a_closed_engine_holds_nothing_of_the_device_and_says_so(overlap):
    engine = Setup(overlap=overlap).engine()
    for r in (request(i, prompt) for i, prompt in enumerate(prompts(3, [5, 9]))):
        engine.add(r)
    for _ in range(3):
        engine.step()
    held = weakref.ref(engine.executor.runner)
    engine.close()
    engine.close()
    gc.collect()
    assert held() is None
    with pytest.raises(EspalierError, match="closed; make another"):
        engine.add(request(9, [1, 2]))
    with pytest.raises(EspalierError, match="closed; make another"):
        engine.step()
