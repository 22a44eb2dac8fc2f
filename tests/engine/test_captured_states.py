"""Layers that keep a state under the GPU executor, on a CUDA of the CPU: graphs of rounds and passes read and write the
same states as the CPU executor."""

from dataclasses import replace

import pytest

from espalier import layout
from espalier.attention import GroupedBackend
from espalier.engine.engine import Engine
from espalier.request import Request, SamplingParams
from tests.engine.fake_cuda import FakeGraph, engine_on_fake_cuda, fake_cuda
from tests.harness import Setup, prompts, request, run

SETUP = Setup(
    steps=3, topk=2, num_draft_tokens=8, page_size=4, max_batch=3, max_context=96, chunk_size=64, attention="reference"
)


def two_turns(engine: Engine) -> list[list[int]]:
    """Five requests over three slots, then each text goes on; the engine's second turn begins at snapshots."""
    engine.scheduler.state_keeper.decode_interval = 5
    close, engine.close = engine.close, lambda: None  # type: ignore[method-assign]
    first = [asked(i, prompt) for i, prompt in enumerate(prompts(11, [23, 1, 34, 18, 40]))]
    said = run(engine, first).tokens
    engine.close = close  # type: ignore[method-assign]
    turns = [asked(10 + i, [*r.prompt, *r.output, 5, 2]) for i, r in enumerate(first)]
    said += run(engine, turns).tokens
    assert sum(r.cached_tokens for r in turns) > 0
    return said


def asked(index: int, prompt: list[int]) -> Request:
    return request(index, prompt, SamplingParams(temperature=(0.0, 1.2, 6.0)[index % 3], max_tokens=6))


@pytest.mark.parametrize(
    ("fields", "graph_batch", "overlap"),
    [
        # A batch of three runs eagerly.
        ({"keeps": "hybrid"}, 2, True),
        pytest.param({"family": "qwen3_5"}, 3, False, marks=pytest.mark.full),
        pytest.param({"keeps": "hybrid_conv"}, 3, True, marks=pytest.mark.full),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else str(value),
)
def test_the_gpu_executor_says_what_the_cpu_executor_says(fields, graph_batch, overlap, monkeypatch):
    monkeypatch.setattr(layout, "CAPTURED_WIDTHS", (16, 32, 64))
    monkeypatch.setattr(layout, "MAX_CAPTURED_ROWS", 32)
    setup = replace(SETUP, overlap=overlap, **fields)
    expected = two_turns(setup.engine())
    fake_cuda(monkeypatch)
    monkeypatch.setattr(GroupedBackend, "captures_prefill", True)
    engine = engine_on_fake_cuda(setup, graph_batch)
    executor, replayed = engine.executor, []
    assert [form.pass_rows for form in engine.layout.captured_full_passes] == [64, 64]
    full = [id(executor.graphs[form]) for form in engine.layout.captured_full_passes]
    copied = executor._copy_to_graph
    monkeypatch.setattr(executor, "_copy_to_graph", lambda *args: (replayed.append(id(args[-1])), copied(*args)))
    assert two_turns(engine) == expected
    assert FakeGraph.replayed > 0 and set(full) & set(replayed)
