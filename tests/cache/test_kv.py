"""PagedKV, staging and commit: where rows go, for any page size and for layers of different shapes."""

import pytest
import torch

from espalier.cache.kv import PagedKV, StagedKV, bytes_per_token
from espalier.cache.layer_spec import KVHeads, LayerSpec
from espalier.errors import EspalierError
from espalier.layout import DUMMY_ROW, RoundLayout

CPU = torch.device("cpu")
# Two layers of one shape with another between them, then a draft of a third.
GEOMETRY = (
    LayerSpec(4, KVHeads(2, 4, 4)),
    LayerSpec(2, KVHeads(1, 6, 3)),
    LayerSpec(4, KVHeads(2, 4, 4), window=8),
    LayerSpec(1, KVHeads(1, 2, 5)),
)
TARGET_LAYERS = 3
PAGE_SIZES = [1, 2, 3, 16, 64, 256, 512]


def made(page_size: int, num_pages: int | None = None) -> tuple[RoundLayout, PagedKV, StagedKV]:
    layout = RoundLayout(2, 3, 2, 8, page_size, 600, 1, 32)
    pages = PagedKV(layout, num_pages or 1 + 2 * layout.table_width, GEOMETRY, TARGET_LAYERS, torch.float64, CPU)
    return layout, pages, StagedKV(GEOMETRY, range(TARGET_LAYERS), layout.verify_rows, torch.float64, CPU)


def shuffled_table(layout: RoundLayout, pages: PagedKV, seed: int = 0) -> torch.Tensor:
    """[2, table_width]: every page but the dummy, in no order."""
    order = 1 + torch.randperm(pages.num_pages - 1, generator=torch.Generator().manual_seed(seed))
    return order[: 2 * layout.table_width].view(2, -1).int()


def stage(
    staging: StagedKV, layer: int, k: torch.Tensor, v: torch.Tensor, width: int, at: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Put k, v [B, Q, ...] where a pass puts them; all that is staged so far."""
    places = staging.staging_rows(k[..., 0, 0], width, at)
    for value, buffer in zip((k, v), staging.layers[layer], strict=True):
        buffer[places] = value.flatten(0, 1)
    return staging.staged_planes(layer, *k.shape[:2], width, at)


def test_layers_of_one_shape_share_a_stack():
    _, pages, staging = made(16)
    assert [stack.layers for stack in pages.target_stacks] == [(0, 2), (1,)] == [s.layers for s in staging.stacks]
    assert [stack.layers for stack in pages.draft_stacks] == [(3,)]
    for layer, g in enumerate(GEOMETRY):
        k, v = pages.layers[layer]
        kept = g.cache_spec
        assert k.shape[1:] == (kept.kv_heads, kept.k_size) and v.shape[1:] == (kept.kv_heads, kept.v_size)


def test_bytes_of_a_token_are_summed_over_layers():
    assert bytes_per_token(GEOMETRY, torch.bfloat16) == 2 * (16 + 9 + 16 + 7)
    _, pages, _ = made(16)
    held = sum(buffer.nbytes for stack in pages.target_stacks + pages.draft_stacks for buffer in stack.planes)
    assert held == bytes_per_token(GEOMETRY, torch.float64) * pages.num_pages * 16


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_position_is_a_row_of_its_page(page_size):
    layout, pages, _ = made(page_size)
    table = shuffled_table(layout, pages)
    positions = torch.tensor([[0, 1, 2, 15, 16, 63, 64, 255, 511, 512, 599]]).expand(2, -1)
    rows = pages.rows(table, positions)
    for b in range(2):
        expected = [int(table[b, p // page_size]) * page_size + p % page_size for p in positions[b].tolist()]
        assert rows[b].tolist() == expected
    kept = pages.rows(table, positions, positions < 64)
    assert torch.equal(kept, torch.where(positions < 64, rows, DUMMY_ROW))


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_commit_copies_staged_rows_in_order_and_nothing_else(page_size):
    layout, pages, staging = made(page_size)
    table, width = shuffled_table(layout, pages), layout.num_draft_tokens
    generator = torch.Generator().manual_seed(page_size)
    staged = {}
    for layer in range(TARGET_LAYERS):
        g = GEOMETRY[layer].cache_spec
        k = torch.randn(2, width, g.kv_heads, g.k_size, generator=generator, dtype=torch.float64)
        v = torch.randn(2, width, g.kv_heads, g.v_size, generator=generator, dtype=torch.float64)
        stage(staging, layer, k, v, width, at=0)
        staged[layer] = k, v
    # Request 0 keeps three nodes around a page's edge, request 1 its root alone.
    source = torch.tensor([0, 3, 6, width + 0, 0, 0])
    edge = 2 * page_size - 1 if page_size > 1 else 5
    positions = torch.tensor([[edge, edge + 1, edge + 2], [7, 8, 9]])
    rows = pages.rows(table, positions, torch.tensor([[True, True, True], [True, False, False]]))
    pages.commit(staging, source, rows.flatten())
    for layer in range(TARGET_LAYERS):
        for buffer, value in zip(pages.layers[layer], staged[layer], strict=True):
            expected = torch.zeros_like(buffer)
            for place, (b, node) in zip(rows.flatten().tolist()[:4], [(0, 0), (0, 3), (0, 6), (1, 0)], strict=True):
                expected[place] = value[b, node]
            assert torch.equal(buffer, expected)
    assert not any(plane.any() for stack in pages.draft_stacks for plane in stack.planes)


def test_staging_hands_back_all_rows_so_far():
    _, _, staging = made(16)
    first, second = (torch.randn(2, n, 1, 9, dtype=torch.float64) for n in (2, 3))
    stage(staging, 1, first[..., :6], first[..., 6:], width=8, at=0)
    k, v = stage(staging, 1, second[..., :6], second[..., 6:], width=8, at=2)
    assert torch.equal(k, torch.cat((first, second), 1)[..., :6]) and torch.equal(
        v, torch.cat((first, second), 1)[..., 6:]
    )


@pytest.mark.parametrize(("batch", "queries", "width", "at"), [(3, 1, 8, 0), (1, 9, 8, 0), (1, 2, 8, 7), (2, 1, 9, 0)])
def test_a_pass_larger_than_staging_is_refused(batch, queries, width, at):
    _, _, staging = made(16)
    for ask in (
        lambda: staging.staging_rows(torch.zeros(batch, queries), width, at),
        lambda: staging.staged_planes(0, batch, queries, width, at),
    ):
        with pytest.raises(EspalierError, match="staging holds 16 rows"):
            ask()


def test_no_requests_commit_nothing():
    layout, pages, staging = made(16)
    none = torch.zeros(0, dtype=torch.int64)
    pages.commit(staging, none, none)
    k, v = stage(staging, 0, *torch.zeros(2, 0, 2, 2, 4, dtype=torch.float64), layout.num_draft_tokens, 0)
    assert k.shape == v.shape == (0, 2, 2, 4)


def test_views_of_staging_are_kept_for_one_size_of_each_layer():
    """Prompts have many lengths: views of all of them would be a leak."""
    _, _, staged = made(16)
    for width in (1, 2, 3, 2):
        for layer in staged.layers:
            views = staged.staged_planes(layer, 1, width, width, 0)
            assert [view.shape[:2] for view in views] == [(1, width)] * len(views)
            assert staged.staged_planes(layer, 1, width, width, 0) is views
            assert [view.data_ptr() for view in views] == [plane.data_ptr() for plane in staged.layers[layer]]
    assert len(staged._views) == len(staged.layers)
