"""What a layer keeps is declared once: planes and how they are read, bytes, groups."""

from dataclasses import replace

import pytest
import torch

from espalier.cache.kv import PagedKV, StagedKV, bytes_beside_pages, bytes_per_token
from espalier.cache.layer_spec import KVHeads, LatentKV, LayerSpec, group_layers, with_row_dtype
from espalier.errors import EspalierError
from espalier.kernels.layers.quantised import FP8
from espalier.kernels.state.kv_scales import KVScales
from tests.harness import Setup

CPU = torch.device("cpu")
HEADS, LATENT = LayerSpec(4, KVHeads(2, 8, 6)), LayerSpec(4, LatentKV(24, 16))
SPECS = (HEADS, LATENT, HEADS)
LAYOUT = Setup(page_size=4, max_batch=3).layout


def test_planes_are_read_as_k_and_v():
    k, v = torch.randn(3, 2, 8), torch.randn(3, 2, 6)
    assert HEADS.cache_spec.read((k, v)) == (k, v)
    latent = torch.randn(3, 1, 24)
    keys, values = LATENT.cache_spec.read((latent,))
    assert keys is latent and torch.equal(values, latent[..., :16])
    assert values.data_ptr() == latent.data_ptr()


def test_layers_that_keep_the_same_are_a_group():
    windowed = replace(HEADS, window=3)
    groups = group_layers((HEADS, LATENT, windowed), range(3))
    assert list(groups.items()) == [(HEADS.cache_spec, (0, 2)), (LATENT.cache_spec, (1,))]


def test_pools_and_staging_follow_from_what_layers_keep():
    pages = PagedKV(LAYOUT, 5, SPECS, len(SPECS), torch.float32, CPU)
    staged = StagedKV(SPECS, range(len(SPECS)), LAYOUT.target_rows, torch.float32, CPU)
    for buffers, rows in ((pages.target_stacks, 5 * 4), (staged.stacks, LAYOUT.target_rows)):
        assert [stack.layers for stack in buffers] == [(0, 2), (1,)]
        assert [[tuple(plane.shape) for plane in stack.planes] for stack in buffers] == [
            [(2, rows, 2, 8), (2, rows, 2, 6)],
            [(1, rows, 1, 24)],
        ]
    held = sum(plane.nbytes for stack in pages.target_stacks for plane in stack.planes)
    assert held == bytes_per_token(SPECS, torch.float32) * 5 * 4


def test_rows_in_fp8_take_a_byte_a_value_and_are_copied_as_bytes():
    """Staged and committed alike; layers of another dtype are a group of their own; the other sizes do not change."""
    specs = (*with_row_dtype((HEADS, LATENT), FP8), HEADS)
    pages = PagedKV(LAYOUT, 5, specs, len(specs), torch.float64, CPU)
    staged = StagedKV(specs, range(len(specs)), LAYOUT.target_rows, torch.float64, CPU)
    assert [stack.layers for stack in pages.target_stacks] == [(0,), (1,), (2,)]
    for made in (pages, staged):
        assert [made.layers[layer][0].dtype for layer in (0, 1, 2)] == [FP8, FP8, torch.float64]
    assert bytes_per_token(specs, torch.float64) == (28 + 24) + 8 * 28
    assert pages.scales.keys() == {0, 1} and all(torch.equal(s.k, torch.ones(len(s.k))) for s in pages.scales.values())
    plain = bytes_beside_pages(LAYOUT, (HEADS, LATENT, HEADS), (), torch.float64)
    assert plain - bytes_beside_pages(LAYOUT, specs, (), torch.float64) == 7 * (28 + 24) * LAYOUT.target_rows
    # Every byte, NaN included.
    codes = torch.arange(256, dtype=torch.uint8).repeat(2)
    for plane in staged.layers[0]:
        plane.view(torch.uint8)[:4].view(-1).copy_(codes[: plane[:4].numel()])
    pages.commit(staged, torch.tensor([2, 0]), torch.tensor([7, 5]))
    for source, plane in zip(staged.layers[0], pages.layers[0], strict=True):
        source, plane = source.view(torch.uint8), plane.view(torch.uint8)
        assert torch.equal(plane[[7, 5]], source[[2, 0]]) and not plane[[0, 1, 2, 3, 4, 6]].any()


@pytest.mark.parametrize("dtype", [None, FP8])
def test_a_layer_that_shares_rows_has_those_of_the_other_layer(dtype):
    """In pages, in staging, with their scales, and also where one model's layer reads another's; it takes no bytes."""
    own = with_row_dtype((HEADS, HEADS), dtype)
    specs = (
        *own,
        *(replace(spec, window=3, shares_with=layer) for layer, spec in enumerate(own)),
        replace(own[0], shares_with=1),
    )
    given = KVScales.ones(2, torch.float32, CPU)
    pages = PagedKV(LAYOUT, 5, specs, 4, torch.float32, CPU, {1: given})
    staged = StagedKV(specs, range(4), LAYOUT.target_rows, torch.float32, CPU)
    stacks = (*pages.target_stacks, *pages.draft_stacks)
    assert [stack.layers for stack in stacks] == [(0, 1)] == [s.layers for s in staged.stacks]
    for made, count in ((pages.layers, 5), (staged.layers, 4)):
        for layer, other in ((2, 0), (3, 1), (4, 1))[: count - 2]:
            assert all(a.data_ptr() == b.data_ptr() for a, b in zip(made[layer], made[other], strict=True))
    assert bytes_per_token(specs, torch.float32) == bytes_per_token(own, torch.float32)
    if dtype == FP8:
        assert pages.scales[1] is pages.scales[3] is pages.scales[4] is given and pages.scales[2] is pages.scales[0]
    with pytest.raises(EspalierError, match="keeps a latent row cannot read the rows of layer 0"):
        replace(LATENT, shares_with=0)
