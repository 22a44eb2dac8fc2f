"""The backends of libraries on a GPU: cells against the reference, graphs against eager passes, and whole rounds.

A library that is not installed, or not made for this GPU, skips its tests.  Everything runs in bfloat16, which is what
the libraries have.
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch

from espalier.attention import BACKENDS, CommittedLengths, Prefix, backend, grouped_backend
from espalier.cache.layer_spec import KVHeads, LatentKV, LayerSpec
from espalier.errors import EspalierError
from espalier.request import Request, SamplingParams
from tests.attention.cells import CELLS, NODES, PAGE_SIZES, Cell, lengths_around, pages_of, pass_of
from tests.attention.fake_libraries import NAMES
from tests.builders import make_eagle3, make_target
from tests.folders import new_folder
from tests.gpu.conftest import EQUALITIES, FIGURES, NEAR_TIES
from tests.gpu.engines import DeviceSetup, rounded
from tests.gpu.near_ties import judged, oracle, report
from tests.gpu.test_latent_targets import talk
from tests.gpu.watching import DeviceWatch
from tests.harness import VOCAB, prompts, request, run
from tests.properties.watch import run_watched

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
# Values of size one to four, rounded to bfloat16 (2^-9 of each) by the library, by our part and by the merge.
TOLERANCE = {"rtol": 0.02, "atol": 0.02}
LSE_TOLERANCE = 2e-3


def runs_here(name: str) -> bool:
    support = BACKENDS[name].support
    major = torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 0
    return support.is_installed and major in (support.compute_majors or (major,))


@pytest.fixture(params=NAMES)
def name(request) -> str:
    if not runs_here(request.param):
        pytest.skip(f"attention={request.param} does not run here")
    return request.param


def compared(name: str, cell: Cell, queries: int, lengths: list[int], exact: bool) -> None:
    made, (pages, table) = backend(name), pages_of(cell, lengths, torch.bfloat16, GPU)
    if name == "fa3":
        # The engine clears the pages of requests that were not finite: this library multiplies stale rows by zero.
        for plane in (plane for planes in pages.layers.values() for plane in planes):
            plane.nan_to_num_(1e4)
    precise, _ = pages_of(cell, lengths, torch.bfloat16, GPU)
    precise.layers = {layer: tuple(plane.double() for plane in planes) for layer, planes in precise.layers.items()}
    prefix, nodes, (q, k, v) = pass_of(cell, pages, table, lengths, queries)
    bounds = tuple(lengths) if exact else tuple(length + 5 for length in lengths)
    made.prepare(CommittedLengths(bounds, exact))
    plan = made.plan(pages, cell.specs, prefix, nodes)
    expected = backend("reference").plan(
        precise, cell.specs, Prefix(table, prefix.length, prefix.first_position), nodes
    )
    spec = cell.specs[0]
    sink = None if isinstance(spec.cache_spec, LatentKV) else torch.randn(spec.heads, device=GPU)
    exact_sink = None if sink is None else sink.double()
    (out, lse), (wanted, wanted_lse) = plan.attend_prefix(q, 0), expected.attend_prefix(q.double(), 0)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=0, atol=LSE_TOLERANCE)
    torch.testing.assert_close(out.double(), wanted, **TOLERANCE)
    out = plan.attend(0, q, k, v, sink)
    wanted = expected.attend(0, q.double(), k.double(), v.double(), exact_sink)
    torch.testing.assert_close(out.double(), wanted, **TOLERANCE)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_every_cell_runs_or_is_refused(name, page_size, put_on_record):
    count: Counter[str] = Counter()
    for turn, cell in enumerate(cell for cell in CELLS if cell.page_size == page_size):
        for exact in (True, False) if name == "flashinfer" else (False,):
            place = ("cuda", torch.bfloat16, page_size, cell.specs, range(1), cell.first > 0, exact)
            try:
                grouped_backend(name, *place)
            except EspalierError:
                count["refused"] += 1
                continue
            compared(name, cell, NODES[turn % len(NODES)], lengths_around(page_size), exact)
            count["run"] += 1
    figures = f"attention={name}, page {page_size}: {count['run']} cells run, {count['refused']} refused"
    put_on_record(FIGURES, figures)


SHAPES = {
    "heads": LayerSpec(32, KVHeads(8, 128, 128)),
    "latent": LayerSpec(16, LatentKV(576, 512)),
}


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("exact", [True, False], ids=["lock-step", "overlap"])
@pytest.mark.parametrize(("first", "page_size"), [(0, 64), (1, 64), (1, 1)])
def test_a_replay_equals_the_eager_pass(name, kind, exact, first, page_size):
    """For lengths, pages and ancestors that changed since the capture, to the bit."""
    if kind == "latent" and name == "flashinfer" and not exact:
        pytest.skip("refused in overlap")
    cell = Cell(page_size, first, (SHAPES[kind],))
    made, eager = backend(name), backend(name)
    pages, table = pages_of(cell, [901] * 4, torch.bfloat16, GPU)
    # Every page may hold rows of any length: none is left NaN.
    for planes in pages.layers.values():
        for plane in planes:
            plane.nan_to_num_(0.5)
    prefix, nodes, (q, k, v) = pass_of(cell, pages, table, [900, 1, 640, 63], 64)
    bounds = (900,) * 4

    def attend(of_backend):
        fresh = Prefix(prefix.page_table, prefix.length, first)
        return of_backend.plan(pages, cell.specs, fresh, nodes).attend(0, q, k, v)

    def announce(of_backend, in_graph: bool) -> None:
        told = tuple(prefix.length.tolist()) if exact else bounds
        of_backend.prepare(CommittedLengths(told, exact, in_graph))

    announce(made, in_graph=True)
    attend(made)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(made)
    for lengths in ([900, 1, 640, 63], [128, 899, 65, 0], [800, 800, 300, 1], [0, 0, 0, 0]):
        prefix.length.copy_(torch.tensor(lengths))
        table.copy_(table.flip(1))
        announce(made, in_graph=True)
        graph.replay()
        announce(eager, in_graph=False)
        expected = attend(eager)
        torch.cuda.synchronize()
        assert expected.isfinite().all()
        assert torch.equal(out, expected)


# A round


@lru_cache
def heads_of_64(kv_heads: int) -> tuple[Path, Path]:
    """A tiny target and its EAGLE-3 draft with heads that the libraries take."""
    root = new_folder("heads-")
    target = make_target(root / "target", vocab=VOCAB, head_dim=64, kv_heads=kv_heads)
    return rounded((target, make_eagle3(root / "draft", target, seed=1)))


@dataclass(frozen=True)
class LibrarySetup(DeviceSetup):
    kv_heads: int = 2
    dtype: torch.dtype = torch.bfloat16

    @property
    def paths(self) -> tuple[Path, Path]:
        return super().paths if self.family.startswith("deepseek") else heads_of_64(self.kv_heads)


TREE = {"topk": 8, "steps": 5, "num_draft_tokens": 64}
NAMED: dict[str, tuple[LibrarySetup, tuple[int, ...]]] = {
    "EAGLE-3 page 64 topk 8, overlap": (
        LibrarySetup(page_size=64, overlap=True, max_context=160, chunk_size=64, max_batch=3, **TREE),
        (1, 63, 64, 65, 127),
    ),
    "Llama-2 shape page 4 topk 8, lock-step": (
        LibrarySetup(page_size=4, overlap=False, max_context=64, max_batch=3, kv_heads=4, **TREE),
        (1, 3, 4, 5, 31, 40),
    ),
    "page 2 topk 8": (LibrarySetup(page_size=2, max_context=64, max_batch=3, **TREE), (1, 2, 3, 31)),
    "page 256 topk 8, long prompt": (
        LibrarySetup(page_size=256, max_context=500, chunk_size=512, max_batch=2, **TREE),
        (470, 7),
    ),
    "latent topk 4 under graphs": (
        LibrarySetup(
            family="deepseek_v3_wide_dense",
            page_size=32,
            overlap=False,
            max_context=128,
            max_batch=3,
            topk=4,
            steps=4,
            num_draft_tokens=16,
        ),
        (1, 31, 33, 80),
    ),
}


def asked(lengths: tuple[int, ...]) -> list[Request]:
    return [
        request(i, prompt, SamplingParams(temperature=2.0 * (i % 2), max_tokens=14))
        for i, prompt in enumerate(prompts(20, lengths))
    ]


def on(name: str, setup: LibrarySetup) -> LibrarySetup:
    pages = BACKENDS[name].support.page_sizes
    if setup.page_size not in pages:
        pytest.skip(f"attention={name} has no pages of {setup.page_size}")
    return replace(setup, attention=name)


@pytest.mark.parametrize("named", NAMED)
def test_whole_rounds(name, named, put_on_record):
    """The committed rows are right, in graphs as the batch shrinks; the tokens are those of our own backend."""
    setup, lengths = NAMED[named]
    setup = on(name, setup)
    figures = run_watched(DeviceWatch(setup), asked(lengths))
    put_on_record(EQUALITIES, {"name": f"attention={name}, {named}", **figures})
    ours, theirs = (run(replace(setup, attention=of).engine(), asked(lengths)).tokens for of in ("triton", name))
    logits, ties = oracle(setup), []
    for one, a, b in zip(asked(lengths), ours, theirs, strict=True):
        tie = judged(one, a, b, logits, torch.bfloat16)
        assert tie is None or tie.is_explained, tie
        ties += [tie] if tie else []
    put_on_record(NEAR_TIES, report(f"{name}, {named}", len(ours), sum(map(len, ours)), ties))


def test_page_512_several_turns(name, put_on_record):
    pages = {"page_size": 512, "max_context": 1100, "chunk_size": 512, "max_batch": 2, "num_pages": 7}
    figures = talk(DeviceWatch(on(name, LibrarySetup(**pages, **TREE))), turns=4, told=230, said=12)
    put_on_record(EQUALITIES, {"name": f"attention={name}, page 512, several turns", **figures})


def test_an_empty_batch_is_legal(name):
    cell = Cell(64, 1, (SHAPES["heads"],))
    compared(name, cell, 3, [], exact=True)


def test_latent_rows_on_flashinfer_are_refused_in_overlap():
    setup = replace(NAMED["latent topk 4 under graphs"][0], overlap=True)
    if not runs_here("flashinfer"):
        pytest.skip("attention=flashinfer does not run here")
    with pytest.raises(EspalierError, match=r"BatchMLAPagedAttentionWrapper\.plan divides rows on the host"):
        replace(setup, attention="flashinfer").engine()
