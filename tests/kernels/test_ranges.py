"""The plan of committed rows: the kernel is the reference, ranges cover a request's rows once, and no batch matters."""

import pytest
import torch

from espalier.kernels.ranges import range_width, ranges_reference, ranges_triton
from espalier.layout import MAX_RANGES, SHORTEST_RANGE, RoundLayout

LENGTHS = [0, 1, 127, 128, 129, 1024, 1025, 2048, 2049, 4096, 5000, 65536, 65537, 131072]


def used(made):
    return made.items[: int(made.starts[-1])].tolist()


@pytest.mark.parametrize("max_ranges", [1, 2, 3, 8, 32])
@pytest.mark.parametrize("first", [0, 1])
def test_kernel_is_reference(kernel_device, max_ranges, first):
    length = torch.tensor(LENGTHS, device=kernel_device)
    made, expected = ranges_triton(length, first, max_ranges), ranges_reference(length, first, max_ranges)
    assert torch.equal(made.starts, expected.starts)
    assert used(made) == used(expected)


@pytest.mark.parametrize("window", [1, 100, 200, 4096])
def test_a_window_leaves_out_what_no_query_sees(kernel_device, window):
    length = torch.tensor(LENGTHS, device=kernel_device)
    positions = (length[:, None] + torch.tensor([3, 0, 1] * 7, device=kernel_device))[:, 1:]
    made = ranges_triton(length, 1, 8, positions, window)
    expected = ranges_reference(length, 1, 8, positions, window)
    assert torch.equal(made.starts, expected.starts)
    assert used(made) == used(expected)
    for request, begin, end, _ in used(made):
        lower = LENGTHS[request] - window + 1
        assert begin > lower - SHORTEST_RANGE or begin == 0
        assert end <= max(LENGTHS[request], begin)


@pytest.mark.parametrize("max_ranges", [1, 3, 32])
def test_ranges_cover_every_row_once_in_order(max_ranges):
    made = ranges_reference(torch.tensor(LENGTHS), 0, max_ranges)
    for request, length in enumerate(LENGTHS):
        mine = [item for item in used(made) if item[0] == request]
        assert 1 <= len(mine) <= max_ranges and {item[3] for item in mine} == {len(mine)}
        assert [row for _, begin, end, _ in mine for row in range(begin, end)] == list(range(length))
        assert all(begin % SHORTEST_RANGE == 0 for _, begin, _, _ in mine)


def test_a_request_has_the_same_ranges_in_any_batch(kernel_device):
    together = ranges_triton(torch.tensor(LENGTHS, device=kernel_device), 0, 8)
    for request, length in enumerate(LENGTHS):
        alone = ranges_triton(torch.tensor([length], device=kernel_device), 0, 8)
        assert [i[1:] for i in used(alone)] == [i[1:] for i in used(together) if i[0] == request]


def test_an_empty_batch_has_none(kernel_device):
    made = ranges_triton(torch.zeros(0, dtype=torch.int64, device=kernel_device), 0, 8)
    assert made.items.shape == (0, 4) and made.starts.shape == (1,)


def test_strided_lengths_are_read(kernel_device):
    wide = torch.tensor(LENGTHS, device=kernel_device)[:, None].expand(-1, 3).contiguous()
    assert used(ranges_triton(wide[:, 1], 0, 8)) == used(ranges_triton(wide[:, 1].contiguous(), 0, 8))


def test_widths_grow_with_the_request_and_keep_to_the_most_ranges():
    assert [range_width(span, 32) for span in (1, 1024, 1025, 2048, 2049, 16384, 16385)] == [
        128,
        128,
        256,
        256,
        512,
        512,
        640,
    ]
    assert all(-(-span // range_width(span, most)) <= most for span in range(0, 70000, 77) for most in (1, 2, 7, 32))


def test_the_layout_bounds_what_waits_to_be_merged():
    """No number of it depends on a batch: only on the widest that the layout allows."""
    layout = RoundLayout(64, 5, 8, 64, 16, 131072, 1, 2048)
    assert layout.max_ranges(8) == MAX_RANGES
    assert layout.max_ranges(64) == 4
    assert layout.max_ranges(2048) == 1
    assert RoundLayout(1, 5, 8, 64, 16, 131072, 1, 2048).max_ranges(64) == MAX_RANGES
    assert RoundLayout(1, 5, 8, 64, 16, 2048, 1, 2048).max_ranges(64) == 8
    assert all(1 <= layout.max_ranges(queries) <= MAX_RANGES for queries in range(1, 5000))
