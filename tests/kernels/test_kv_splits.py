"""The plan of committed rows: the kernel is the reference, ranges cover a request's rows once, and no batch matters."""

from dataclasses import replace

import pytest
import torch

from espalier.kernels.attention.kv_splits import kv_splits_reference, kv_splits_triton
from espalier.layout import (
    LONGEST_RANGE,
    MAX_RANGES,
    RANGE_STEP,
    ROWS_A_REQUEST,
    SHORTEST_RANGE,
    KVSplitPolicy,
    RoundLayout,
    TreeShape,
)

LENGTHS = [0, 1, 127, 128, 129, 1024, 1025, 2048, 2049, 4096, 5000, 65536, 65537, 131072]


def used(made):
    return made.items[: int(made.starts[-1])].tolist()


CUTS = [
    KVSplitPolicy(256, 1),
    KVSplitPolicy(1024, 2),
    KVSplitPolicy(200, 3),
    KVSplitPolicy(2048, 8),
    KVSplitPolicy(128, 32),
]


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("first", [0, 1])
def test_kernel_is_reference(kernel_device, cut, first):
    length = torch.tensor(LENGTHS, device=kernel_device)
    made, expected = kv_splits_triton(length, first, cut), kv_splits_reference(length, first, cut)
    assert torch.equal(made.starts, expected.starts)
    assert used(made) == used(expected)


@pytest.mark.parametrize("window", [1, 100, 200, 4096])
def test_a_window_leaves_out_what_no_query_sees(kernel_device, window):
    length = torch.tensor(LENGTHS, device=kernel_device)
    positions = (length[:, None] + torch.tensor([3, 0, 1] * 7, device=kernel_device))[:, 1:]
    made = kv_splits_triton(length, 1, KVSplitPolicy(256, 8), positions, window)
    expected = kv_splits_reference(length, 1, KVSplitPolicy(256, 8), positions, window)
    assert torch.equal(made.starts, expected.starts)
    assert used(made) == used(expected)
    for request, begin, end, _ in used(made):
        lower = LENGTHS[request] - window + 1
        assert begin > lower - RANGE_STEP or begin == 0
        assert end <= max(LENGTHS[request], begin)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_ranges_cover_every_row_once_in_order(cut):
    made = kv_splits_reference(torch.tensor(LENGTHS), 0, cut)
    for request, length in enumerate(LENGTHS):
        mine = [item for item in used(made) if item[0] == request]
        assert 1 <= len(mine) <= cut.most and {item[3] for item in mine} == {len(mine)}
        assert [row for _, begin, end, _ in mine for row in range(begin, end)] == list(range(length))
        assert all(begin % RANGE_STEP == 0 for _, begin, _, _ in mine)


def test_a_request_has_the_same_ranges_in_any_batch(kernel_device):
    precompile = kv_splits_triton(torch.tensor(LENGTHS, device=kernel_device), 0, KVSplitPolicy(256, 8))
    for request, length in enumerate(LENGTHS):
        alone = kv_splits_triton(torch.tensor([length], device=kernel_device), 0, KVSplitPolicy(256, 8))
        assert [i[1:] for i in used(alone)] == [i[1:] for i in used(precompile) if i[0] == request]


def test_an_empty_batch_has_none(kernel_device):
    made = kv_splits_triton(torch.zeros(0, dtype=torch.int64, device=kernel_device), 0, KVSplitPolicy(256, 8))
    assert made.items.shape == (0, 4) and made.starts.shape == (1,)


def test_strided_lengths_are_read(kernel_device):
    wide = torch.tensor(LENGTHS, device=kernel_device)[:, None].expand(-1, 3).contiguous()
    assert used(kv_splits_triton(wide[:, 1], 0, KVSplitPolicy(256, 8))) == used(
        kv_splits_triton(wide[:, 1].contiguous(), 0, KVSplitPolicy(256, 8))
    )


def test_ranges_are_even_and_keep_to_the_most():
    spans = (0, 1, 128, 129, 1024, 1025, 2048, 2049, 16384, 16385)
    assert [KVSplitPolicy(256, 32).width(span) for span in spans] == [64, 64, 128, 192, 256, 256, 256, 256, 512, 576]
    assert [KVSplitPolicy(2048, 8).width(span) for span in spans] == [
        64,
        64,
        128,
        192,
        1024,
        1088,
        2048,
        1088,
        2048,
        2112,
    ]
    assert all(-(-span // cut.width(span)) <= cut.most for span in range(0, 70000, 77) for cut in CUTS)


def test_the_layout_bounds_what_waits_to_be_merged():
    """By the widest batch that it allows, and so by no batch there is."""
    layout = RoundLayout(64, 5, 8, 64, 16, 131072, 1, 2048)
    assert layout.cut(8) == KVSplitPolicy(LONGEST_RANGE, MAX_RANGES)
    assert layout.cut(64) == KVSplitPolicy(LONGEST_RANGE, 4)
    assert layout.cut(2048) == KVSplitPolicy(ROWS_A_REQUEST, 1)
    alone = RoundLayout(1, 5, 8, 64, 16, 131072, 1, 2048)
    assert alone.cut(64) == KVSplitPolicy(ROWS_A_REQUEST, 8)
    assert alone.cut(8) == KVSplitPolicy(SHORTEST_RANGE, MAX_RANGES)
    assert RoundLayout(1, 5, 8, 64, 16, 2048, 1, 2048).cut(8) == KVSplitPolicy(SHORTEST_RANGE, 17)
    eight = RoundLayout(8, 0, 1, 1, 16, 131072, 0, 2048)
    assert (eight.cut(1), eight.cut(1).width(1030)) == (KVSplitPolicy(512, MAX_RANGES), 384)
    small_at_two = replace(alone, max_batch=64, trees=((2, TreeShape(3, 2, 8)),))
    assert small_at_two.cut(64) == alone.cut(64), "no batch of two has 64 nodes"
    assert small_at_two.cut(8) == layout.cut(8)
    assert all(1 <= layout.cut(queries).most <= MAX_RANGES for queries in range(1, 5000))
