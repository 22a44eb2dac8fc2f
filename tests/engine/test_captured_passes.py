"""The GPU executor's prefill passes, on a CUDA of the CPU: what is captured and repeated is what the CPU executor
computes."""

import pytest
import torch

from espalier.attention import GroupedBackend
from espalier.engine.cuda import CudaExecutor
from espalier.engine.launch_input import LaunchInput
from espalier.errors import EspalierError
from espalier.kernels.ops import drafts
from espalier.request import Request
from tests.engine.fake_cuda import engine_on_fake_cuda, fake_cuda
from tests.grammar.test_lossless import asked, setup_of
from tests.harness import run


@pytest.mark.parametrize(
    ("asks", "algorithm"),
    [pytest.param("nothing", "eagle3", marks=pytest.mark.full), ("grammars", "eagle3"), ("prompt_logprobs", "ngram")],
)
def test_the_gpu_executor_says_what_the_cpu_executor_says(asks, algorithm, monkeypatch):
    """Passes with grammars or prompt log-probabilities run eagerly, also those of as many requests and pieces as a
    captured form has: with two slots, a form of three pieces has two requests."""
    setup = setup_of(algorithm, 4, 16, overlap=True, attention="reference", max_batch=2, chunk_size=64)
    # What only a CPU's path reads: a GPU's kernels end where the text does.
    monkeypatch.setattr(drafts, "max_history_length", lambda root: setup.layout.history_width)

    def requests() -> list[Request]:
        reported = {"prompt_logprobs": 1} if asks == "prompt_logprobs" else {}
        made = asked(2, 1.2, count=6, max_tokens=5, **reported)
        for each in made:
            each.masker = each.masker if asks == "grammars" else None
        return made

    expected = run(setup.engine(), requests())
    fake_cuda(monkeypatch)
    monkeypatch.setattr(GroupedBackend, "captures_prefill", True)
    engine = engine_on_fake_cuda(setup, graph_batch=2)
    executor, passes = engine.executor, set()
    launch = executor.launch

    def launching(launch_input: LaunchInput):
        if launch_input.is_prefill:
            passes.add((launch_input.is_eager_only, executor.form_of(launch_input) in executor.graphs))
        return launch(launch_input)

    monkeypatch.setattr(executor, "launch", launching)
    ran = run(engine, requests())
    assert ran.tokens == expected.tokens
    assert [len(r.prompt_logprobs) for r in ran.requests] == [len(r.prompt_logprobs) for r in expected.requests]
    assert (asks != "nothing", True) in passes, "a pass has the form of a graph"


@pytest.mark.parametrize("captured_before", [0, 4])
def test_a_capture_that_runs_out_of_memory_names_its_graph(captured_before, monkeypatch):
    setup = setup_of("eagle3", 4, 16, overlap=True, attention="reference", max_batch=2, chunk_size=64)
    fake_cuda(monkeypatch)
    monkeypatch.setattr(GroupedBackend, "captures_prefill", True)
    captured, forms = CudaExecutor.capture_graph, []

    def capturing(executor, form, pool):
        forms.append(form)
        if len(forms) > captured_before:
            raise torch.OutOfMemoryError
        return captured(executor, form, pool)

    monkeypatch.setattr(CudaExecutor, "capture_graph", capturing)
    with pytest.raises(EspalierError) as raised:
        engine_on_fake_cuda(setup, graph_batch=2)
    batch, width, pieces, _ = forms[-1]
    named = f"a prefill pass of {width * (pieces or batch)} rows" if width else f"a round of batch {batch}"
    assert f"the CUDA graph of {named} does not fit" in str(raised.value)
    assert bool(width) == bool(captured_before), "both kinds of graphs are tried"


@pytest.mark.parametrize("run_before", [0, 3])
def test_a_launch_of_dummies_that_runs_out_of_memory_is_not_called_a_graph(run_before, monkeypatch):
    """It compiles kernels, before anything is captured."""
    setup = setup_of("eagle3", 4, 16, overlap=True, attention="reference", max_batch=2, chunk_size=64)
    fake_cuda(monkeypatch)
    run_eagerly, launches = CudaExecutor.run_eagerly, []

    def running(executor, launch_input):
        launches.append(launch_input)
        if len(launches) > run_before:
            raise torch.OutOfMemoryError
        run_eagerly(executor, launch_input)

    monkeypatch.setattr(CudaExecutor, "run_eagerly", running)
    with pytest.raises(EspalierError, match="a launch that compiles kernels does not fit"):
        engine_on_fake_cuda(setup, graph_batch=2)
    assert len(launches) == run_before + 1
