"""A backend for each group of layers, and a backend from a file outside the package."""

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from espalier.attention import BACKENDS, choose_backends, grouped_backend
from espalier.cache.layer_spec import KVHeads, LatentKV, LayerSpec
from espalier.engine.cuda import CudaExecutor
from espalier.errors import EspalierError
from espalier.request import Request, SamplingParams
from espalier.startup.measure_memory import largest_prefill_pass, smaller_prefill_passes
from lab.faults.planted import plant
from tests.attention.fake_libraries import NAMES, installed
from tests.engine.fake_cuda import fake_cuda
from tests.harness import Setup, prompts, request
from tests.pairwise import fewer, in_turn_params
from tests.properties.layouts import reference_of
from tests.properties.mtp_setup import MTPSetup, mtp_reference_of
from tests.properties.watch import PROPOSAL, Watch, run_watched

SETUP = Setup(steps=3, topk=3, num_draft_tokens=10, page_size=3, max_batch=2)
HEADS, LATENT = LayerSpec(4, KVHeads(2, 8, 8)), LayerSpec(4, LatentKV(640, 448))


@pytest.fixture
def library() -> Iterator[str]:
    """The name of a backend that a file registers; it is removed after the test."""
    importlib.import_module("tests.attention.one_file_backend")
    yield "library"
    del BACKENDS["library"], sys.modules["tests.attention.one_file_backend"]


def traffic() -> list[Request]:
    params = [SamplingParams(temperature=temperature, max_tokens=12) for temperature in (0.0, 2.0, 6.0)]
    return [request(i, prompt, params[i]) for i, prompt in enumerate(prompts(5, [7, 3, 20]))]


def holds(setup: Setup) -> None:
    run_watched(Watch(setup.engine(), setup.algorithm, reference_of(setup)), traffic())


@pytest.mark.parametrize(("overlap", "keeps"), in_turn_params([False, True], ["kv", "latent"]))
def test_a_backend_of_one_file_holds_every_property(library, keeps, overlap):
    """`prepare` gives it the lengths before each launch: exact in lock-step, otherwise upper bounds."""
    holds(replace(SETUP, attention=library, keeps=keeps, overlap=overlap))


@pytest.mark.parametrize(
    ("name", "keeps", "overlap", "page_size"),
    [
        ("flashinfer", "kv", True, 3),
        ("flashinfer", "kv", False, 1),
        ("flashinfer", "latent", False, 2),
        ("fa3", "kv", True, 2),
        ("trtllm", "kv", True, 16),
    ],
)
def test_whole_rounds_on_a_library_hold_every_property(name, keeps, overlap, page_size):
    """Target and draft, whose rows begin at 1; the library is a stand-in that takes any sizes."""
    with installed(head_sizes=None, latent_rows=()):
        holds(replace(SETUP, attention=name, keeps=keeps, overlap=overlap, page_size=page_size))


@pytest.mark.parametrize("name", fewer(NAMES, lambda name: name == "flashinfer"))
def test_a_start_runs_its_passes_of_dummies_on_a_library(name, monkeypatch):
    """Some have more pieces than requests, and a library plans by piece."""
    fake_cuda(monkeypatch)
    setup = replace(SETUP, attention=name, page_size=16, max_batch=6, chunk_size=256, max_context=300)
    largest_rounds = (largest_prefill_pass(setup.layout, width) for width in setup.layout.chunk_widths)
    with installed(head_sizes=None, latent_rows=()):
        executor = CudaExecutor(setup.engine().executor.runner, graph_batch=0)
        for made in (*largest_rounds, *smaller_prefill_passes(setup.layout, 16)):
            executor.run_dummy_launch(made)


@pytest.mark.parametrize("page_size", [1, pytest.param(16, marks=pytest.mark.full)])
def test_three_mtp_layers_on_a_library_hold_every_property(page_size):
    """Each module has a left bound of its own, and lengths that only have bounds."""
    setup = MTPSetup(
        form=(3, "chain"),
        family="llama",
        steps=3,
        topk=2,
        num_draft_tokens=9,
        max_batch=3,
        page_size=page_size,
        attention="flashinfer",
        overlap=False,
        max_context=64,
        chunk_size=16,
    )
    with installed(head_sizes=None, latent_rows=()):
        run_watched(Watch(setup.engine(), "mtp", mtp_reference_of(setup)), traffic())


def test_a_planted_fault_is_caught_on_flashinfer():
    """Report 27460: topk 4 over latent rows."""
    setup = replace(SETUP, attention="flashinfer", keeps="latent", topk=4, num_draft_tokens=16)
    with installed(head_sizes=None, latent_rows=()):
        watch = Watch(setup.engine(), setup.algorithm, reference_of(setup), [PROPOSAL])
        with plant("27460"), pytest.raises(AssertionError):
            run_watched(watch, traffic())
        run_watched(Watch(setup.engine(), setup.algorithm, reference_of(setup), [PROPOSAL]), traffic())


def test_latent_rows_on_flashinfer_are_refused_in_overlap():
    with (
        installed(head_sizes=None, latent_rows=()),
        pytest.raises(EspalierError, match="are not known exactly, of layers"),
    ):
        replace(SETUP, attention="flashinfer", keeps="latent", overlap=True).engine()


@pytest.mark.parametrize(
    "names",
    [("sdpa, reference", "sdpa"), pytest.param(("reference", "sdpa"), marks=pytest.mark.full), ("sdpa", "reference")],
)
def test_model_groups_and_draft_can_have_different_backends(names):
    setup = replace(SETUP, keeps="mixed", attention=names[0], draft_attention=names[1])
    holds(setup)
    round = setup.engine().executor.runner
    found = [(layers, made.support.name) for layers, made in round.cache.backend.groups]
    listed = names[0].split(", ")
    assert found == [((0, 2), listed[0]), ((1,), listed[-1])]
    assert [made.support.name for _, made in round.drafter.cache.backend.groups] == [names[1]]


def test_a_backend_that_cannot_run_a_group_is_refused_by_name():
    with pytest.raises(EspalierError, match="attention=triton does not support heads of size 640"):
        grouped_backend("triton", "cuda", torch.bfloat16, 16, [HEADS, LATENT], range(2))
    with pytest.raises(EspalierError, match="names 2 backends, but the model has 1 group of layers"):
        grouped_backend("triton, reference", "cuda", torch.bfloat16, 16, [HEADS], range(1))


def test_auto_chooses_for_each_group():
    assert choose_backends(None, "cuda", torch.bfloat16, [HEADS, LATENT], range(2)) == "triton, reference"
    assert choose_backends(None, "cuda", torch.bfloat16, [HEADS, HEADS], range(2)) == "triton"
    assert choose_backends("sdpa", "cpu", torch.float32, [HEADS, LATENT], range(2)) == "sdpa"
