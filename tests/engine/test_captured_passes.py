"""Prefill passes as CUDA graphs: the GPU executor, on a fake of CUDA, says what the CPU executor says."""

from collections.abc import Callable

import pytest

from espalier.attention import GroupedBackend
from espalier.engine.cuda import CudaExecutor
from espalier.engine.launch_input import LaunchInput
from espalier.request import Request, SamplingParams
from tests.engine.fake_cuda import FakeGraph, engine_on_fake_cuda, fake_cuda
from tests.grammar.test_lossless import asked, setup_of
from tests.harness import Ran, Setup, prompts, request, run

LENGTHS = (20, 30, 3, 40)


def in_graphs(
    setup: Setup, requests: Callable[[], list[Request]], patch: pytest.MonkeyPatch
) -> tuple[Ran, Ran, list[bool]]:
    """(by the CPU executor, by the GPU executor with captured passes, whether each pass was a graph)."""
    expected = run(setup.engine(), requests())
    patch.setattr(GroupedBackend, "captures_prefill", True)
    fake_cuda(patch)
    engine = engine_on_fake_cuda(setup, setup.max_batch)
    executor = engine.executor
    assert isinstance(executor, CudaExecutor) and executor.captured_passes
    launch, replayed = executor.launch, []

    def launching(launch_input: LaunchInput):
        before = FakeGraph.replayed
        handle = launch(launch_input)
        if launch_input.is_prefill:
            replayed.append(FakeGraph.replayed > before)
        return handle

    executor.launch = launching  # type: ignore[method-assign]
    return expected, run(engine, requests()), replayed


@pytest.mark.parametrize(("algorithm", "max_batch"), [("eagle3", 2), ("none", 4)])
def test_every_pass_that_fits_is_a_graph(algorithm, max_batch, monkeypatch):
    setup = Setup(algorithm=algorithm, attention="reference", max_batch=max_batch, chunk_size=64, overlap=True)
    setup = setup.plain() if algorithm == "none" else setup
    params = SamplingParams(temperature=1.3, max_tokens=5, repetition_penalty=1.2)

    def requests() -> list[Request]:
        return [request(i, prompt, params) for i, prompt in enumerate(prompts(3, LENGTHS))]

    expected, ran, replayed = in_graphs(setup, requests, monkeypatch)
    assert ran.tokens == expected.tokens and all(replayed)


def test_what_only_eager_passes_can_do(monkeypatch):
    """With fewer slots than a pass has pieces, the form of an eager pass may be that of a graph."""
    setup = setup_of("eagle3", 4, 16, overlap=True, attention="reference", max_batch=1, chunk_size=64)
    params = SamplingParams(max_tokens=3, prompt_logprobs=1)

    def requests() -> list[Request]:
        masked = asked(2, 1.2, count=3, max_tokens=5)
        reporting = [request(10 + i, prompt, params) for i, prompt in enumerate(prompts(3, LENGTHS))]
        return [*masked, *reporting]

    expected, ran, _ = in_graphs(setup, requests, monkeypatch)
    assert ran.tokens == expected.tokens
    assert [r.error for r in ran.requests] == [r.error for r in expected.requests]
    lengths = [[len(r.prompt_logprobs) for r in x.requests] for x in (ran, expected)]
    assert lengths[0] == lengths[1] and max(lengths[0]) == max(LENGTHS) - 1
