"""Every CPU backend against attention in plain loops: prefixes of different lengths, windows, empty prefixes."""

import pytest
import torch

from espalier.attention import BACKENDS, Nodes, Prefix, backend, default_backend
from espalier.attention.support import Provider, Support
from espalier.cache.kv import PagedKV
from espalier.cache.layer_spec import KVHeads, LatentKV, LayerSpec, with_row_dtype
from espalier.errors import EspalierError
from espalier.kernels.attention.ancestor_bits import pack_bits
from espalier.kernels.layers.quantised import FP8
from espalier.layout import RoundLayout
from tests.pairwise import fewer, product_params

# float64: a few roundings of sums over some sixty terms of size one.
TOLERANCE = 1e-12
CPU = torch.device("cpu")
GEOMETRY = (
    LayerSpec(4, KVHeads(2, 6, 6)),
    LayerSpec(4, KVHeads(4, 6, 3)),
    LayerSpec(3, KVHeads(1, 5, 7), window=4, scale=0.2),
    LayerSpec(4, LatentKV(6, 4)),
    LayerSpec(4, KVHeads(2, 6, 6), window=9, scale=1.5, softcap=2.0, shares_with=0),
)
SINK = torch.tensor([1.5, -0.5, 3.0, -torch.inf], dtype=torch.float64)
ON_CPU = [name for name, made in BACKENDS.items() if "cpu" in made.support.devices]
backends = pytest.mark.parametrize("name", ON_CPU)


def filled_pages(page_size: int, seed: int = 0) -> tuple[PagedKV, torch.Tensor]:
    """Pages full of noise, also in rows that do not exist, and a shuffled page table of four requests."""
    layout = RoundLayout(4, 2, 2, 4, page_size, 40, 0, 16)
    width = layout.table_width
    pages = PagedKV(layout, 1 + 4 * width, GEOMETRY, len(GEOMETRY), torch.float64, CPU)
    generator = torch.Generator().manual_seed(seed)
    for plane in (each for stack in pages.target_stacks for each in stack.planes):
        plane.normal_(generator=generator)
    return pages, 1 + torch.randperm(4 * width, generator=generator).view(4, width).int()


def tree_nodes(length: torch.Tensor, queries: int, rows: int, seed: int) -> Nodes:
    """Staged rows with random ancestors after prefixes of these lengths; the last `queries` rows are the queries."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(len(length), rows, rows, generator=generator).tril() > 0.5
    mask |= torch.eye(rows, dtype=torch.bool)
    positions = length[:, None] + mask.sum(2) - 1
    return Nodes(positions[:, rows - queries :], positions, pack_bits(mask[:, rows - queries :]))


def in_loops(pages: PagedKV, layer: int, prefix: Prefix, nodes: Nodes, q, k, v, sink=None) -> torch.Tensor:
    """One request, query and head at a time: gather the visible rows, softmax, sum."""
    g = GEOMETRY[layer]
    kv_heads = g.cache_spec.kv_heads
    out = torch.zeros(*q.shape[:3], g.cache_spec.v_size, dtype=q.dtype)
    seen = nodes.visible_rows(None)
    for b in range(q.shape[0]):
        for i in range(q.shape[1]):
            at = int(nodes.positions[b, i])
            lowest = prefix.first_position if g.window is None else max(prefix.first_position, at - g.window + 1)
            below = range(lowest, int(prefix.length[b]))
            rows = [
                int(prefix.page_table[b, p // pages.page_size]) * pages.page_size + p % pages.page_size for p in below
            ]
            among = [
                r
                for r in range(k.shape[1])
                if seen[b, i, r] and (g.window is None or at - int(nodes.row_positions[b, r]) < g.window)
            ]
            for h in range(g.heads):
                head = h // (g.heads // kv_heads)
                keys, values = (
                    torch.cat((held[rows, head], new[b, among, head]))
                    for held, new in zip(g.cache_spec.read(pages.layers[layer]), (k, v), strict=True)
                )
                scores = keys @ q[b, i, h] * g.softmax_scale
                if g.softcap is not None:
                    scores = g.softcap * torch.tanh(scores / g.softcap)
                if sink is not None:
                    scores = torch.cat((scores, sink[h : h + 1]))
                out[b, i, h] = torch.softmax(scores, 0)[: len(values)] @ values
    return out


def drawn(layer: int, batch: int, queries: int, rows: int, seed: int):
    g, generator = GEOMETRY[layer], torch.Generator().manual_seed(seed)
    shapes = [
        (batch, queries, g.heads, g.cache_spec.k_size),
        *((batch, rows, *shape) for shape in g.cache_spec.planes.values()),
    ]
    q, *planes = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return q, *g.cache_spec.read(planes)


@pytest.mark.parametrize(
    ("name", "page_size", "layer", "first"),
    # Each backend with each layer.
    fewer(
        product_params(ON_CPU, [1, 3, 16, 64], range(len(GEOMETRY)), [0, 1]),
        lambda name, page_size, layer, first: (
            (page_size, first) == ((1, 64)[(layer + ON_CPU.index(name)) % 2], (layer // 2 + ON_CPU.index(name)) % 2)
        ),
    ),
)
def test_nodes_over_a_prefix(name, page_size, layer, first):
    pages, table = filled_pages(page_size)
    of_pass = zip(((5, 5), (1, 1), (2, 6)), ([17, 1, 3, 40], [first] * 4, [first, first, first, 9]), strict=True)
    for (queries, rows), lengths in of_pass:
        prefix = Prefix(table, torch.tensor(lengths), first)
        nodes = tree_nodes(prefix.length, queries, rows, seed=rows)
        q, k, v = drawn(layer, 4, queries, rows, seed=page_size)
        attention = backend(name).plan(pages, GEOMETRY, prefix, nodes)
        for sink in (None, SINK[: q.shape[2]]):
            out = attention.attend(layer, q, k, v, sink)
            expected = in_loops(pages, layer, prefix, nodes, q, k, v, sink)
            assert torch.allclose(out, expected, rtol=0, atol=TOLERANCE)


@backends
def test_an_empty_batch_is_legal(name):
    pages, table = filled_pages(3)
    none = torch.zeros(0, dtype=torch.int64)
    for rows in (1, 4):
        nodes = tree_nodes(none, rows, rows, seed=0)
        q, k, v = drawn(0, 0, rows, rows, seed=0)
        out = backend(name).plan(pages, GEOMETRY, Prefix(table[:0], none), nodes).attend(0, q, k, v)
        assert out.shape == (0, rows, 4, 6)


@backends
def test_a_request_does_not_depend_on_its_batch(name):
    """Alone and in a batch: equal up to rounding, because the batch sets the length of the gather."""
    pages, table = filled_pages(3)
    prefix = Prefix(table, torch.tensor([4, 38, 0, 11]))
    nodes = tree_nodes(prefix.length, 3, 3, seed=5)
    q, k, v = drawn(2, 4, 3, 3, seed=6)
    together = backend(name).plan(pages, GEOMETRY, prefix, nodes).attend(2, q, k, v)
    for b in range(4):
        own = Nodes(nodes.positions[b : b + 1], nodes.row_positions[b : b + 1], nodes.ancestor_bits[b : b + 1])
        alone = backend(name).plan(pages, GEOMETRY, Prefix(table[b : b + 1], prefix.length[b : b + 1]), own)
        out = alone.attend(2, q[b : b + 1], k[b : b + 1], v[b : b + 1])
        assert torch.allclose(out, together[b : b + 1], rtol=0, atol=TOLERANCE)


def test_over_prefix_gives_the_log_sum_exp_and_zeros_for_an_empty_prefix():
    pages, table = filled_pages(3)
    prefix = Prefix(table, torch.tensor([1, 9, 0, 2]), first_position=1)
    nodes = tree_nodes(prefix.length, 2, 2, seed=1)
    q, _, _ = drawn(0, 4, 2, 2, seed=2)
    out, lse = backend("reference").plan(pages, GEOMETRY, prefix, nodes).attend_prefix(q, 0)
    for b in (0, 2):
        assert (out[b] == 0).all() and (lse[b] == -torch.inf).all()
    held = pages.layers[0][0][pages.rows(table[1:2], torch.arange(1, 9)[None])[0]]
    expected = torch.logsumexp(torch.einsum("qhd,khd->qhk", q[1], held.repeat_interleave(2, 1)) * 6**-0.5, -1)
    assert torch.allclose(lse[1], expected, rtol=0, atol=TOLERANCE)


def test_bfloat16_is_close_and_keeps_its_dtype():
    pages, table = filled_pages(16)
    prefix = Prefix(table, torch.tensor([17, 1, 3, 40]))
    nodes = tree_nodes(prefix.length, 3, 3, seed=1)
    exact = [drawn(0, 4, 3, 3, seed=3)]
    expected = in_loops(pages, 0, prefix, nodes, *exact[0])
    pages.layers = {layer: tuple(p.bfloat16() for p in planes) for layer, planes in pages.layers.items()}
    for name in ON_CPU:
        out = backend(name).plan(pages, GEOMETRY, prefix, nodes).attend(0, *(value.bfloat16() for value in exact[0]))
        assert out.dtype == torch.bfloat16
        # bfloat16 has 8 bits: inputs near three have an error of about 1 %, and so have the weights.
        assert torch.allclose(out.double(), expected, rtol=0, atol=0.1)


def test_an_unknown_backend_is_refused_by_name():
    with pytest.raises(
        EspalierError,
        match="attention='flash' is unknown; use one of triton, sdpa, reference, flashinfer, fa3, trtllm, or 'auto'",
    ):
        backend("flash")


NOTHING = Support("picky", ("cuda",), (torch.bfloat16,), lacks_first_rows=Provider.NOTHING, page_sizes=(16, 64))


WINDOWED = LayerSpec(4, KVHeads(2, 6, 6), window=4)


@pytest.mark.parametrize(
    ("device", "dtype", "page_size", "layer_specs", "value"),
    [
        ("cpu", torch.bfloat16, 16, GEOMETRY[:1], "device=cpu; it supports devices cuda"),
        ("cuda", torch.float64, 16, GEOMETRY[:1], "dtype=float64; it supports dtypes bfloat16"),
        ("cuda", torch.bfloat16, 128, GEOMETRY[:1], "page_size=128; it supports page_size 16, 64"),
        ("cuda", torch.bfloat16, 16, GEOMETRY[1:2], "k and v heads of different sizes"),
        ("cuda", torch.bfloat16, 16, (*GEOMETRY[:1], WINDOWED), "a sliding window"),
        (
            "cuda",
            torch.bfloat16,
            16,
            GEOMETRY[3:],
            "layers that keep a latent row; it supports layers that",
        ),
        (
            "cuda",
            torch.bfloat16,
            16,
            with_row_dtype(GEOMETRY[:1], FP8),
            "kv_dtype=fp8_e4m3; it supports K and V in the model's dtype",
        ),
    ],
)
def test_support_refuses_by_name(device, dtype, page_size, layer_specs, value):
    with pytest.raises(EspalierError, match=f"attention=picky does not support {value}"):
        NOTHING.require(device, dtype, page_size, layer_specs)
    NOTHING.require("cuda", torch.bfloat16, 64, GEOMETRY[:1])
    with pytest.raises(EspalierError, match="does not support a prefix whose first rows do not exist"):
        NOTHING.require("cuda", torch.bfloat16, 64, GEOMETRY[:1], lacks_first_rows=True)


def test_heads_too_large_for_a_backend_are_refused():
    wide = [LayerSpec(2, KVHeads(2, 64, 640))]
    with pytest.raises(EspalierError, match="does not support heads of size 640; it supports sizes up to 512"):
        backend("triton").support.require("cuda", torch.bfloat16, 16, wide)
    for latent, size in ((LatentKV(640, 512), 640), (LatentKV(576, 544), 544)):
        with pytest.raises(EspalierError, match=f"heads of size {size}; .* latent rows up to 576, 512 of them V"):
            backend("triton").support.require("cuda", torch.bfloat16, 16, [LayerSpec(2, latent)])
    backend("triton").support.require("cuda", torch.bfloat16, 16, [LayerSpec(2, LatentKV(576, 512))])
    with pytest.raises(EspalierError, match="a sliding window over wide latent rows"):
        backend("triton").support.require("cuda", torch.bfloat16, 16, [LayerSpec(2, LatentKV(576, 512), window=8)])


def test_auto_is_the_first_backend_for_the_device_that_computes_in_the_dtype():
    assert default_backend("cuda") == default_backend("cuda", torch.bfloat16) == "triton"
    assert default_backend("cuda", torch.float64) == "reference"
    assert default_backend("cpu") == default_backend("cpu", torch.float64) == "sdpa"
