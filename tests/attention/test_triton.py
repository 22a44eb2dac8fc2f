"""The GPU backend against the float64 reference, with pages and plans as in a round."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from espalier.attention import Nodes, Prefix, backend, triton
from espalier.cache.kv import PagedKV
from espalier.cache.layer_spec import KVHeads, LatentKV, LayerSpec, with_row_dtype
from espalier.errors import EspalierError
from espalier.kernels.attention.ancestor_bits import pack_bits
from espalier.kernels.layers.quantised import FP8
from espalier.kernels.ops.attention import count_contiguous_blocks, tree_attention
from espalier.kernels.ops.selection import IndexerQueries
from espalier.kernels.state.kv_scales import KVScales
from espalier.layout import RoundLayout
from tests.pairwise import fewer

# float32 (IEEE): a few roundings of sums of terms of size one.
TOLERANCE = 2e-5
GEOMETRY = (
    LayerSpec(4, KVHeads(2, 8, 8)),
    LayerSpec(4, KVHeads(4, 6, 3)),
    LayerSpec(3, KVHeads(1, 5, 7), window=4, scale=0.2),
    LayerSpec(4, KVHeads(2, 8, 8)),
    LayerSpec(3, KVHeads(1, 5, 7), window=150),
    LayerSpec(3, LatentKV(8, 5)),
    LayerSpec(4, KVHeads(2, 8, 8), window=40, scale=1.0, softcap=2.0, shares_with=3),
    LayerSpec(3, LatentKV(272, 256)),
)
SINK = torch.tensor([1.5, -0.5, 3.0, -torch.inf])
LENGTHS = [17, 1, 300, 0]


def scales_of(layer: int, keeps: KVHeads | LatentKV, device: torch.device) -> KVScales:
    """No two equal, but for a latent row's."""
    k = 0.5 + 0.1 * layer + 0.2 * torch.arange(keeps.kv_heads, device=device)
    return KVScales(k, k if isinstance(keeps, LatentKV) else 1.3 * k, torch.float32)


def pages_in(
    dtype: torch.dtype,
    device: torch.device,
    page_size: int = 16,
    in_fp8: bool = False,
    layers: Sequence[LayerSpec] = GEOMETRY,
) -> tuple[PagedKV, torch.Tensor]:
    """Pages full of noise and a shuffled page table; the same values in every dtype of the model.  in_fp8: rounded."""
    layout = RoundLayout(4, 2, 2, 4, page_size, 400, 0, 16)
    specs = with_row_dtype(layers, FP8 if in_fp8 else None)
    scales = {layer: scales_of(layer, spec.cache_spec, device) for layer, spec in enumerate(specs)}
    pages = PagedKV(layout, 1 + 4 * layout.table_width, specs, len(specs), dtype, device, scales)
    generator = torch.Generator().manual_seed(0)
    for plane in (each for stack in pages.target_stacks for each in stack.planes):
        plane.copy_(torch.randn(plane.shape, generator=generator))
    table = 1 + torch.randperm(4 * layout.table_width, generator=generator).view(4, -1).int()
    return pages, table.to(device)


def tree(length: torch.Tensor, queries: int, rows: int) -> Nodes:
    mask = torch.rand(len(length), rows, rows, generator=torch.Generator().manual_seed(rows)).tril() > 0.5
    mask |= torch.eye(rows, dtype=torch.bool)
    positions = length[:, None] + mask.sum(2).to(length.device) - 1
    return Nodes(positions[:, rows - queries :], positions, pack_bits(mask[:, rows - queries :]).to(length.device))


def drawn(g: LayerSpec, queries: int, rows: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    kept = g.cache_spec
    shapes = (queries, g.heads, kept.k_size), (rows, kept.kv_heads, kept.k_size), (rows, kept.kv_heads, kept.v_size)
    return [torch.randn(4, *shape, generator=generator) for shape in shapes]


def captured(run: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph, out


# A draft's rows begin at 1.  A round has no tree over a draft's rows and no levels over a target's.  The test in FP8
# has a chain, and those of chosen rows a tree, from row 0 on.
@pytest.mark.parametrize(
    ("shape", "first"),
    [
        ("levels", 1),
        pytest.param("tree", 0, marks=pytest.mark.full),
        pytest.param("chain", 0, marks=pytest.mark.full),
        pytest.param("chain", 1, marks=pytest.mark.full),
        pytest.param("tree", 1, marks=pytest.mark.full),
        pytest.param("levels", 0, marks=pytest.mark.full),
    ],
)
def test_layers_of_one_pass(kernel_device, shape, first):
    """One plan for layers with different heads, sizes and windows: out, and lse over the prefix."""
    # A split of 128 rows and a part of one, and more rows than any window.
    length = torch.tensor([17, 1, 170, 0], device=kernel_device)
    queries, rows = {"tree": (4, 4), "levels": (2, 6), "chain": (3, 3)}[shape]
    nodes = Nodes.chain(length[:, None] + torch.arange(3, device=kernel_device))
    if shape != "chain":
        nodes = tree(length, queries, rows)
    pages, table = pages_in(torch.float32, kernel_device)
    exact_pages, _ = pages_in(torch.float64, kernel_device)
    made = backend("triton").plan(pages, GEOMETRY, Prefix(table, length, first), nodes)
    exact = backend("reference").plan(exact_pages, GEOMETRY, Prefix(table, length, first), nodes)
    for layer, g in enumerate(GEOMETRY):
        q, k, v = (value.to(kernel_device) for value in drawn(g, queries, rows))
        if isinstance(g.cache_spec, LatentKV):
            k, v = g.cache_spec.read([k])
        sinks = [SINK[: g.heads].to(kernel_device)] if isinstance(g.cache_spec, KVHeads) else [None]
        # The test in FP8 has all layers without sinks.
        for sink in [None, *sinks] if layer == 0 else sinks:
            out, expected = (
                made.attend(layer, q, k, v, sink),
                exact.attend(layer, *(x.double() for x in (q, k, v)), sink),
            )
            torch.testing.assert_close(out.double(), expected, rtol=0, atol=TOLERANCE)
        (out, lse), (expected, expected_lse) = made.attend_prefix(q, layer), exact.attend_prefix(q.double(), layer)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("in_fp8", [pytest.param(False, marks=pytest.mark.full), True])
def test_one_query_of_a_chain(kernel_device, in_fp8):
    """A query in any place of a chain has the values that it has among all queries, with sinks and windows too."""
    length, row = (torch.tensor(values, device=kernel_device) for values in ([17, 1, 170, 0], [69, 0, 63, 64]))
    chain = Nodes.chain(length[:, None] + torch.arange(70, device=kernel_device))
    pages, table = pages_in(torch.float32, kernel_device, in_fp8=in_fp8)
    exact_pages, _ = pages_in(torch.float64, kernel_device, in_fp8=in_fp8)
    made = backend("triton").plan(pages, GEOMETRY, Prefix(table, length), chain.single_query(row))
    exact = backend("reference").plan(exact_pages, GEOMETRY, Prefix(table, length), chain)
    for layer, g in enumerate(GEOMETRY):
        q, k, v = (value.to(kernel_device) for value in drawn(g, 70, 70))
        if isinstance(g.cache_spec, LatentKV):
            k, v = g.cache_spec.read([k])
        sink = SINK[: g.heads].to(kernel_device) if isinstance(g.cache_spec, KVHeads) else None
        stored = FP8 if in_fp8 else torch.float32
        rows = g.cache_spec.read([k.to(stored)]) if isinstance(g.cache_spec, LatentKV) else (k.to(stored), v.to(stored))
        requests = torch.arange(4, device=kernel_device)
        out = made.attend(layer, q[requests, row][:, None], *rows, sink)
        if not in_fp8:
            rows = [each.double() for each in rows]
        expected = exact.attend(layer, q.double(), *rows, sink)[requests, row][:, None]
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("shape", [pytest.param("tree", marks=pytest.mark.full), "chain"])
def test_layers_in_fp8(kernel_device, shape):
    """Committed and staged rows in FP8, each layer with its own scales."""
    length = torch.tensor(LENGTHS, device=kernel_device)
    nodes = Nodes.chain(length[:, None] + torch.arange(3, device=kernel_device))
    if shape == "tree":
        nodes = tree(length, 3, 3)
    pages, table = pages_in(torch.float32, kernel_device, in_fp8=True)
    exact_pages, _ = pages_in(torch.float64, kernel_device, in_fp8=True)
    made = backend("triton").plan(pages, GEOMETRY, Prefix(table, length), nodes)
    exact = backend("reference").plan(exact_pages, GEOMETRY, Prefix(table, length), nodes)
    plain = backend("reference").plan(pages_in(torch.float64, kernel_device)[0], GEOMETRY, Prefix(table, length), nodes)
    for layer, g in enumerate(GEOMETRY):
        q, k, v = (value.to(kernel_device) for value in drawn(g, 3, 3))
        if isinstance(g.cache_spec, LatentKV):
            k, v = g.cache_spec.read([k])
        stored = k.to(FP8)
        rows = (stored, g.cache_spec.read([stored])[1]) if isinstance(g.cache_spec, LatentKV) else (stored, v.to(FP8))
        expected = exact.attend(layer, q.double(), *rows)
        torch.testing.assert_close(made.attend(layer, q, *rows).double(), expected, rtol=0, atol=TOLERANCE)
        # By hand: the same rows times their scales, without scales.
        scales = pages.scales[layer]
        for plane, of_fp8, scale in zip(
            plain.pages.layers[layer], exact_pages.layers[layer], (scales.k, scales.v), strict=False
        ):
            plane.copy_(of_fp8.double() * scale[:, None])
        meant = (row.double() * scale[:, None] for row, scale in zip(rows, (scales.k, scales.v), strict=True))
        by_hand = plain.attend(layer, q.double(), *meant)
        torch.testing.assert_close(expected, by_hand, rtol=0, atol=1e-12)


# Narrow rows and rows with a kernel of their own.  Two requests of each batch have no more rows than are chosen.
CHOOSING = tuple(LayerSpec(3, replace(keeps, index_size=16), topk=19) for keeps in (LatentKV(8, 5), LatentKV(272, 256)))


@pytest.mark.parametrize("in_fp8", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "shape", fewer(["tree", "levels", "chain", "one of a chain"], lambda shape: shape in ("tree", "one of a chain"))
)
def test_chosen_rows(kernel_device, shape, in_fp8):
    """Against the reference; of requests whose rows all fit the choice, as attention without one, to the bit."""
    length = torch.tensor([17, 1, 170, 0], device=kernel_device)
    queries, rows = {"tree": (4, 4), "levels": (2, 6), "chain": (3, 3), "one of a chain": (1, 3)}[shape]
    nodes = Nodes.chain(length[:, None] + torch.arange(3, device=kernel_device))
    if shape == "one of a chain":
        nodes = nodes.single_query(torch.tensor([2, 0, 1, 2], device=kernel_device))
    elif shape != "chain":
        nodes = tree(length, queries, rows)
    pages, table = pages_in(torch.float32, kernel_device, 16, in_fp8, CHOOSING)
    exact_pages, _ = pages_in(torch.float64, kernel_device, 16, in_fp8, CHOOSING)
    generator = torch.Generator().manual_seed(8)
    made = backend("triton").plan(pages, CHOOSING, Prefix(table, length), nodes)
    exact = backend("reference").plan(exact_pages, CHOOSING, Prefix(table, length), nodes)
    for layer, g in enumerate(CHOOSING):
        q, k, _ = (value.to(kernel_device) for value in drawn(g, queries, rows))
        k, v = g.cache_spec.read([k.to(FP8) if in_fp8 else k])
        of_heads = torch.randn(4, queries, 6, 16, generator=generator), torch.randn(4, queries, 6, generator=generator)
        asking = IndexerQueries(*(value.to(kernel_device) for value in of_heads))
        keys = torch.randn(4, rows, 1, 16, generator=generator).to(kernel_device)
        choice = made.select(layer, asking, keys)
        expected = exact.select(layer, IndexerQueries(*(value.double() for value in asking)), keys.double())
        held = choice.counts + (choice.bits[..., None] >> torch.arange(rows, device=kernel_device) & 1).sum((2, 3))
        assert torch.equal(held[[0, 2]], expected.mask.sum(2)[[0, 2]]) and not choice.counts[[1, 3]].any()
        out = made.attend(layer, q, k, v, selected=choice)
        staged = (k, v) if in_fp8 else (k.double(), v.double())
        torch.testing.assert_close(
            out.double(), exact.attend(layer, q.double(), *staged, selected=expected), rtol=0, atol=TOLERANCE
        )
        assert torch.equal(out[[1, 3]], made.attend(layer, q, k, v)[[1, 3]])


def test_a_prompt_chooses_in_chunks_of_queries(kernel_device, monkeypatch):
    pages, table = pages_in(torch.float32, kernel_device, layers=CHOOSING)
    length = torch.tensor([17, 1, 170, 0], device=kernel_device)
    nodes = Nodes.chain(length[:, None] + torch.arange(3, device=kernel_device))
    generator = torch.Generator().manual_seed(9)
    of_heads = torch.randn(4, 3, 6, 16, generator=generator), torch.randn(4, 3, 6, generator=generator)
    asking = IndexerQueries(*(value.to(kernel_device) for value in of_heads))
    keys = torch.randn(4, 3, 1, 16, generator=generator).to(kernel_device)
    made = backend("triton").plan(pages, CHOOSING, Prefix(table, length), nodes)
    whole = made.select(0, asking, keys)
    monkeypatch.setattr(triton, "MAX_INDEX_SCORES", 1)
    chunked = made.select(0, asking, keys)
    assert all(torch.equal(one, other) for one, other in zip(whole, chunked, strict=True))


def test_layouts_whose_rows_all_fit_choose_nothing(kernel_device):
    pages, table = pages_in(torch.float32, kernel_device, layers=CHOOSING)
    length = torch.tensor([17, 1, 30, 0], device=kernel_device)
    nodes = tree(length, 4, 4)
    specs = [replace(g, topk=table.shape[1] * pages.page_size + 4) for g in CHOOSING]
    made = backend("triton").plan(pages, specs, Prefix(table, length), nodes)
    asking = IndexerQueries(torch.zeros(4, 4, 6, 16), torch.zeros(4, 4, 6))
    assert made.select(0, asking, torch.zeros(4, 4, 1, 16)) is None


def test_splits_are_shared_by_the_passes_over_a_prefix(kernel_device):
    """The levels of a draft have the same number of queries and the same prefix: the splits are computed once."""
    length = torch.tensor(LENGTHS, device=kernel_device)
    pages, table = pages_in(torch.float32, kernel_device)
    prefix = Prefix(table, length)
    for rows in (2, 6):
        q, k, v = (value.to(kernel_device) for value in drawn(GEOMETRY[0], 2, rows))
        backend("triton").plan(pages, GEOMETRY, prefix, tree(length, 2, rows)).attend(0, q, k, v)
    assert len(prefix.plan_cache) == 1
    assert not Prefix(table, length).plan_cache


def test_a_sink_over_wide_latent_rows_is_refused(kernel_device):
    length = torch.tensor(LENGTHS, device=kernel_device)
    pages, table = pages_in(torch.float32, kernel_device)
    layer = len(GEOMETRY) - 1
    q, k, _ = (value.to(kernel_device) for value in drawn(GEOMETRY[layer], 2, 2))
    made = backend("triton").plan(pages, GEOMETRY, Prefix(table, length), tree(length, 2, 2))
    with pytest.raises(EspalierError, match="no sinks over wide latent rows; use attention=reference"):
        made.attend(layer, q, *GEOMETRY[layer].cache_spec.read([k]), SINK[:3].to(kernel_device))


def test_an_empty_batch_is_legal(kernel_device):
    pages, table = pages_in(torch.float32, kernel_device)
    none = torch.zeros(0, dtype=torch.int64, device=kernel_device)
    q, k, v = (value[:0].to(kernel_device) for value in drawn(GEOMETRY[2], 2, 2))
    made = backend("triton").plan(pages, GEOMETRY, Prefix(table[:0], none), tree(none, 2, 2))
    assert made.attend(2, q, k, v).shape == (0, 2, 3, 7)


def test_blocks_are_counted_once_for_a_prefix(kernel_device, monkeypatch):
    """If a launch uses contiguous blocks, they are counted once for all layers with the same splits."""
    length = torch.tensor(LENGTHS, device=kernel_device)
    pages, _ = pages_in(torch.float32, kernel_device)
    table = 1 + torch.arange(4 * pages.layout.table_width, device=kernel_device, dtype=torch.int32).view(4, -1)
    given = []

    launch = tree_attention.triton

    def seen(inputs, partials, num_contiguous_blocks):
        given.append((inputs.splits, num_contiguous_blocks))
        return launch(inputs, partials, num_contiguous_blocks=num_contiguous_blocks)

    monkeypatch.setattr(triton, "block_rows_to_count", lambda *_: 64)
    monkeypatch.setattr(tree_attention, "triton", seen)
    for broken in (False, True):
        if broken:
            table[2, 5] = 0
        made = backend("triton").plan(pages, GEOMETRY, Prefix(table, length), tree(length, 4, 4))
        given.clear()
        for layer in (0, 1):
            made.attend(layer, *(value.to(kernel_device) for value in drawn(GEOMETRY[layer], 4, 4)))
        assert all(counts is given[0][1] for _, counts in given)
        splits, counts = given[0]
        used = len(splits.used_rows)
        expected = count_contiguous_blocks.reference(splits, table, pages.page_size, 0, 64)
        assert torch.equal(counts[:used], expected[:used])
        # 300 rows in splits of 128, 128 and 44 rows have four whole blocks.  The broken page is in the second of them.
        assert int(counts[:used].sum()) == (3 if broken else 4)


@pytest.mark.gpu
def test_a_replay_counts_contiguous_blocks_again(kernel_device):
    """Pages that were contiguous at capture and are not at replay."""
    layer_specs = [LayerSpec(32, KVHeads(8, 128, 128))]
    layout = RoundLayout(4, 5, 8, 64, 16, 1000, 0, 256)
    pages = PagedKV(layout, 1 + 4 * layout.table_width, layer_specs, 1, torch.bfloat16, kernel_device)
    for plane in pages.target_stacks[0].planes:
        plane.normal_()
    in_order = 1 + torch.arange(4 * layout.table_width, device=kernel_device, dtype=torch.int32).view(4, -1)
    table, length = in_order.clone(), torch.tensor([900, 1, 640, 63], device=kernel_device)
    q, k, v = (torch.randn(4, 64, heads, 128, device=kernel_device, dtype=torch.bfloat16) for heads in (32, 8, 8))
    nodes = tree(length, 64, 64)

    def run() -> torch.Tensor:
        return backend("triton").plan(pages, layer_specs, Prefix(table, length), nodes).attend(0, q, k, v)

    graph, out = captured(run)
    for lengths, step in (([900, 1, 640, 63], -1), ([128, 999, 65, 0], 1), ([800, 800, 300, 0], -1)):
        length.copy_(torch.tensor(lengths))
        table.copy_(in_order.flip(1) if step < 0 else in_order)
        graph.replay()
        assert torch.equal(out, run())


@pytest.mark.gpu
def test_a_captured_pass_follows_the_lengths(kernel_device):
    """A replay reads the current lengths, pages and ancestor bits, and equals the eager pass bit for bit."""
    length = torch.tensor(LENGTHS, device=kernel_device)
    pages, table = pages_in(torch.float32, kernel_device)
    nodes = tree(length, 4, 4)
    q, k, v = (value.to(kernel_device) for value in drawn(GEOMETRY[0], 4, 4))

    def run() -> torch.Tensor:
        return backend("triton").plan(pages, GEOMETRY, Prefix(table, length), nodes).attend(0, q, k, v)

    graph, out = captured(run)
    for lengths in ([300, 2, 0, 77], [0, 0, 0, 0], [399, 130, 129, 128]):
        length.copy_(torch.tensor(lengths))
        graph.replay()
        assert torch.equal(out, run())
