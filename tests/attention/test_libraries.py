"""The backends of libraries: every cell of their declaration runs against the reference, or is refused.

The libraries are stand-ins (fake_libraries.py); tests/gpu/test_backends.py runs the cells on the libraries themselves.
"""

from collections import Counter

import pytest
import torch

from espalier.attention import CommittedLengths, Nodes, Prefix, backend, grouped_backend
from espalier.cache.layer_spec import KVHeads, LatentKV, LayerSpec
from espalier.errors import EspalierError
from tests.attention.cells import CELLS, PAGE_SIZES, Cell, lengths_around, pages_of, pass_of
from tests.attention.fake_libraries import NAMES, installed

# float64: a few roundings of sums of some hundred terms of size one.
TOLERANCE = 1e-11
# Of cells.NODES, which the GPU runs all: chains, a tree, and more nodes than an ancestor word holds.
FEW_NODES = (1, 8, 6, 65)
each = pytest.mark.parametrize("name", NAMES)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def libraries():
    with installed():
        yield


def attends_as_the_reference(name: str, cell: Cell, queries: int, lengths: list[int], exact: bool = True) -> None:
    made, (pages, table) = backend(name), pages_of(cell, lengths, torch.float64, CPU)
    prefix, nodes, (q, k, v) = pass_of(cell, pages, table, lengths, queries)
    bounds = tuple(lengths) if exact else tuple(length + 5 for length in lengths)
    made.prepare(CommittedLengths(bounds, exact))
    plan = made.plan(pages, cell.specs, prefix, nodes)
    reference = backend("reference").plan(pages, cell.specs, Prefix(table, prefix.length, prefix.first_position), nodes)
    for layer, spec in enumerate(cell.specs):
        sink = None if isinstance(spec.cache_spec, LatentKV) else torch.randn(spec.heads).double()
        out, expected = (made.attend(layer, q, k, v, sink) for made in (plan, reference))
        torch.testing.assert_close(out, expected, rtol=0, atol=TOLERANCE)
        for part, expected in zip(plan.attend_prefix(q, layer), reference.attend_prefix(q, layer), strict=True):
            torch.testing.assert_close(part, expected, rtol=0, atol=TOLERANCE)


@each
@pytest.mark.parametrize(
    ("page_size", "firsts"),
    [(64, (0, 1)), *(pytest.param(page, (0, 1, 2), marks=pytest.mark.full) for page in PAGE_SIZES)],
)
def test_every_cell_runs_or_is_refused(name, page_size, firsts):
    """The declaration says which; the library's own limit stands in the refusal."""
    count: Counter[str] = Counter()
    for turn, cell in enumerate(cell for cell in CELLS if cell.page_size == page_size and cell.first in firsts):
        for exact in (True, False) if name == "flashinfer" else (False,):
            place = ("cpu", torch.float64, page_size, cell.specs, range(len(cell.specs)), cell.first > 0, exact)
            try:
                grouped_backend(name, *place)
            except EspalierError as refusal:
                count["refused"] += 1
                assert any(f"({limit})" in str(refusal) for limit in backend(name).support.limit_reasons.values()), (
                    refusal
                )
                continue
            count["run"] += 1
            attends_as_the_reference(name, cell, FEW_NODES[turn % len(FEW_NODES)], lengths_around(page_size), exact)
    assert count["refused"], "the odd sizes"
    assert count["run"] or page_size not in backend(name).support.page_sizes


@each
def test_a_missing_library_is_refused_with_what_installs_it(name, monkeypatch):
    support = type(backend(name)).support
    monkeypatch.setattr("espalier.attention.support.find_spec", lambda _: None)
    assert not support.is_installed
    with pytest.raises(EspalierError, match=rf"attention={name} needs a library .*, run pip install -e '\.\["):
        grouped_backend(name, "cuda", torch.bfloat16, 64, [LayerSpec(4, KVHeads(2, 64, 64))], range(1))


@each
def test_an_empty_batch_is_legal(name):
    cell = next(cell for cell in CELLS if cell.page_size == 64 and cell.first == 1)
    attends_as_the_reference(name, cell, 3, [])


@each
@pytest.mark.parametrize("window", [None, 20])
def test_one_query_of_a_chain(name, window):
    """After the whole chain over the same prefix, as in the last layer of a prefill pass."""
    cell = Cell(64, 1, (LayerSpec(4, KVHeads(2, 64, 64), window=window),))
    lengths, row = [65, 200, 1], torch.tensor([5, 0, 3])
    made, (pages, table) = backend(name), pages_of(cell, lengths, torch.float64, CPU)
    prefix, nodes, (q, k, v) = pass_of(cell, pages, table, lengths, 6)
    made.prepare(CommittedLengths(tuple(lengths), exact=True))
    requests = torch.arange(3)
    of_all = made.plan(pages, cell.specs, prefix, nodes).attend(0, q, k, v)
    of_one = made.plan(pages, cell.specs, prefix, nodes.single_query(row)).attend(0, q[requests, row][:, None], k, v)
    torch.testing.assert_close(of_one, of_all[requests, row][:, None], rtol=0, atol=TOLERANCE)


def test_plans_of_a_graph_are_made_again_before_each_replay():
    """The eager run before a capture makes them; capture and replays only read their buffers."""
    cell = Cell(64, 1, (LayerSpec(4, KVHeads(2, 64, 64)),))
    made = backend("flashinfer")
    plans = None
    for lengths in ([65, 200, 1], [65, 200, 1], [129, 64, 700], [0, 0, 0]):
        pages, table = pages_of(cell, [700] * 3, torch.float64, CPU)
        prefix, nodes, (q, k, v) = pass_of(cell, pages, table, lengths, 4)
        made.prepare(CommittedLengths(tuple(lengths), exact=True, in_graph=True))
        out = made.plan(pages, cell.specs, prefix, nodes).attend(0, q, k, v)
        expected = backend("reference").plan(pages, cell.specs, prefix, nodes).attend(0, q, k, v)
        torch.testing.assert_close(out, expected, rtol=0, atol=TOLERANCE)
        plans = plans or dict(made.captured_plans[3])
        assert made.captured_plans == {3: plans} and len(plans) == 1 and not made.eager_plans


def test_a_graph_without_exact_lengths_is_planned_once(monkeypatch):
    """In overlap a plan must not depend on lengths: nothing is planned on the host after the capture."""
    cell = Cell(64, 0, (LayerSpec(4, KVHeads(2, 64, 64)),))
    made = backend("flashinfer")
    pages, table = pages_of(cell, [700] * 2, torch.float64, CPU)
    for turn, lengths in enumerate(([65, 200], [70, 1], [129, 700])):
        prefix, nodes, (q, k, v) = pass_of(cell, pages, table, lengths, 4)
        made.prepare(CommittedLengths((700, 700), exact=False, in_graph=True))
        if turn == 1:
            [plan] = made.captured_plans[2].values()
            monkeypatch.setattr(plan, "_plan_wrapper", lambda rows: pytest.fail("planned again"))
        out = made.plan(pages, cell.specs, prefix, nodes).attend(0, q, k, v)
        expected = backend("reference").plan(pages, cell.specs, prefix, nodes).attend(0, q, k, v)
        torch.testing.assert_close(out, expected, rtol=0, atol=TOLERANCE)


def test_bounds_are_never_taken_for_lengths():
    cell = Cell(64, 0, (LayerSpec(4, LatentKV(576, 512)),))
    with pytest.raises(EspalierError, match="planned a pass with exact lengths, and now has only bounds"):
        attends_as_the_reference("flashinfer", cell, 2, [65, 3], exact=False)


def test_long_passes_run_on_fa3_and_do_not_depend_on_the_batch_before():
    cell = Cell(16, 0, (LayerSpec(4, KVHeads(2, 64, 64)),))
    made = backend("flashinfer")
    for batch in ([300, 5], [7], [0, 33, 2]):
        pages, table = pages_of(cell, [300] * len(batch), torch.float64, CPU)
        length = torch.tensor(batch)
        nodes = Nodes.chain(length[:, None] + torch.arange(256))
        q, k, v = (torch.randn(len(batch), 256, heads, 64).double() for heads in (4, 2, 2))
        made.prepare(CommittedLengths(tuple(batch), exact=True))
        out = made.plan(pages, cell.specs, Prefix(table, length), nodes).attend(0, q, k, v)
        expected = backend("reference").plan(pages, cell.specs, Prefix(table, length), nodes).attend(0, q, k, v)
        torch.testing.assert_close(out, expected, rtol=0, atol=TOLERANCE)
    assert [plan.wrapper.backend for plan in made.eager_plans.values()] == ["fa3"] * 3
