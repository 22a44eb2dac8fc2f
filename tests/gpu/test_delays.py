"""Whatever sleeps where, an overlapped engine says what a lock-step engine says."""

from dataclasses import replace
from random import Random

import pytest

from tests.engine.alone import replace_request
from tests.gpu.conftest import FIGURES
from tests.gpu.delays import SEGMENTS, delay_segments, delay_streams, host_sleep
from tests.gpu.engines import DeviceSetup
from tests.gpu.traffic import mixed
from tests.harness import run
from tests.pages import check_pages

SETUP = DeviceSetup(
    page_size=3, topk=3, steps=3, num_draft_tokens=12, max_batch=4, max_context=64, attention="reference", num_pages=60
)


def test_every_segment_has_its_name():
    """Here, where there may be no GPU: a segment that was renamed would be delayed no longer."""
    for owner, names in SEGMENTS:
        assert all(callable(getattr(owner, name)) for name in names)


@pytest.mark.gpu
@pytest.mark.parametrize("graph_batch", [None, 0], ids=["graphs", "eager"])
@pytest.mark.parametrize("algorithm", ["eagle3", "ngram"])
@pytest.mark.parametrize("seed", range(3))
def test_sleeps_change_nothing(seed, algorithm, graph_batch, monkeypatch, put_on_record):
    random = Random(seed)
    setup = replace(SETUP, algorithm=algorithm, graph_batch=graph_batch)
    right = run(replace(setup, overlap=False).engine(), mixed(14, seed=seed)).tokens
    delay_segments(monkeypatch, random)
    engine = setup.engine()
    delay_streams(engine, random)
    requests = [replace_request(r) for r in mixed(14, seed=seed)]
    for r in requests:
        engine.add(r)
    steps = 0
    while engine.has_work:
        host_sleep(random)
        engine.step()
        check_pages(engine)
        steps += 1
    engine.close()
    assert [r.output for r in requests] == right
    put_on_record(
        FIGURES, f"delays, {algorithm}, {'eager' if graph_batch == 0 else 'graphs'}, seed {seed}: {steps} steps"
    )
