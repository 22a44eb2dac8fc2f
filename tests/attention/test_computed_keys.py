"""A wide prompt chunk of a latent layer computes keys and values: the same results as with absorbed queries."""

import pytest
import torch

from espalier import layout
from espalier.attention import Nodes, Prefix, backend, computed_keys, triton
from espalier.attention.base import CommittedLengths
from espalier.attention.computed_keys import LatentUp
from espalier.attention.staged import LatentProjections, StagedPass
from espalier.cache.kv import PagedKV, StagedKV
from espalier.cache.layer_spec import LatentKV, LayerSpec
from espalier.kernels.layers.latent import LatentRopeAndNorm
from espalier.layout import RoundLayout

# float32 (IEEE): a few roundings of sums of terms of size one.
TOLERANCE = 5e-5
HEADS, NOPE, ROPE, RANK, V_SIZE, WIDTH = 3, 10, 6, 16, 12, 5
SPECS = (LayerSpec(HEADS, LatentKV(RANK + ROPE, RANK), scale=0.2),)
PAGE_SIZE = 3


def projections(batch: int, dtype: torch.dtype, device: torch.device) -> LatentProjections:
    """The first requests of a batch of four."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    angle = normal(4 * WIDTH, ROPE // 2)[: batch * WIDTH]
    cos, sin = torch.cat((angle.cos(),) * 2, 1), torch.cat((-angle.sin(), angle.sin()), 1)
    up = LatentUp(normal(HEADS, NOPE, RANK) / 4, normal(HEADS, V_SIZE, RANK) / 4)
    q, latent = (normal(4, WIDTH, *shape)[:batch] for shape in ((HEADS, NOPE + ROPE), (1, RANK + ROPE)))
    return LatentProjections(q, latent, LatentRopeAndNorm(cos, sin, normal(RANK), 1e-6, interleaved=True), up)


def attended(device: torch.device, lengths: list[int], first: int = 0, dtype=torch.float32, name="triton"):
    """(out [B, WIDTH, HEADS, V_SIZE], staged rows) of one pass over pages of noise, NaN where no row exists."""
    made_for = RoundLayout(4, 2, 2, 4, PAGE_SIZE, 100, 0, 4 * WIDTH + 16)
    width = made_for.table_width
    pages = PagedKV(made_for, 1 + 4 * width, SPECS, 1, dtype, device)
    generator = torch.Generator().manual_seed(2)
    table = 1 + torch.randperm(4 * width, generator=generator).view(4, width).int()[: len(lengths)]
    [plane] = pages.layers[0]
    noise = torch.randn(plane.shape, generator=generator)
    noise[PAGE_SIZE:] = noise[PAGE_SIZE:].masked_fill(~held(table, lengths, first, len(noise)), torch.nan)
    noise[:PAGE_SIZE] = 0
    plane.copy_(noise)
    made = backend(name)
    made.prepare(CommittedLengths(tuple(lengths), exact=True))
    length = torch.tensor(lengths, device=device)
    nodes = Nodes.chain(length[:, None] + torch.arange(WIDTH, device=device))
    staged = StagedKV(SPECS, range(1), made_for.target_rows, dtype, device)
    plan = made.plan(pages, SPECS, Prefix(table.to(device), length, first), nodes)
    out = StagedPass(plan, staged, WIDTH)(0, projections(len(lengths), dtype, device))
    return out, staged.layers[0][0]


def held(table: torch.Tensor, lengths: list[int], first: int, rows: int) -> torch.Tensor:
    """[rows - PAGE_SIZE, 1, 1] bool: whether a row of the pool, without the dummy page, is a row of a request."""
    exists = torch.zeros(rows, dtype=torch.bool)
    for pages, length in zip(table.tolist(), lengths, strict=True):
        for position in range(first, length):
            exists[pages[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE] = True
    return exists[PAGE_SIZE:, None, None]


@pytest.fixture
def small_pieces(monkeypatch):
    """Pieces of 16 rows, and keys computed from a width of 2 on."""
    for module in (layout, computed_keys):
        monkeypatch.setattr(module, "COMPUTED_PAGE", 16)
    monkeypatch.setattr(layout, "COMPUTED_BYTES", 1)
    monkeypatch.setattr(triton, "COMPUTED_KEYS_WIDTH", 2)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("lengths", [[0], [1, 16, 17, 70], [33, 0]], ids=str)
def test_computed_keys_equal_absorbed_queries(kernel_device, small_pieces, first, lengths):
    out, staged = attended(kernel_device, lengths, first)
    expected, expected_staged = attended(kernel_device, lengths, first, torch.float64, "reference")
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(staged.double(), expected_staged, rtol=0, atol=TOLERANCE)


def test_the_width_decides(kernel_device, small_pieces, monkeypatch):
    """Both ways give the same result; only one of them computes keys."""
    calls = []
    attend = computed_keys.ComputedKeys.attend
    monkeypatch.setattr(computed_keys.ComputedKeys, "attend", lambda *a: (calls.append(1), attend(*a))[1])
    computed, _ = attended(kernel_device, [20])
    monkeypatch.setattr(triton, "COMPUTED_KEYS_WIDTH", WIDTH + 1)
    absorbed, _ = attended(kernel_device, [20])
    assert len(calls) == 1
    torch.testing.assert_close(computed, absorbed, rtol=0, atol=TOLERANCE)


def test_bits_do_not_depend_on_the_neighbours(kernel_device, small_pieces):
    """The pass has as many pieces as its longest request needs."""
    out, _ = attended(kernel_device, [20, 3])
    longer, _ = attended(kernel_device, [20, 90])
    assert torch.equal(out[0], longer[0])


def test_pieces_follow_from_the_batch_and_fit_the_workspace():
    row = 128 * 320 * 2
    assert [layout.computed_rows(batch, row) for batch in (1, 2, 3, 8)] == [3072, 1536, 1024, 512]
    assert layout.computed_rows(5, row // 8) == layout.computed_rows(6, row // 8)
    assert layout.computed_rows(64, row) == layout.COMPUTED_PAGE
