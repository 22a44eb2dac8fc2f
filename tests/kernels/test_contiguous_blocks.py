"""Counts of contiguous blocks: the kernel equals the reference, and known tables give known counts."""

import pytest
import torch

from espalier.kernels.attention.kv_splits import BLOCKS_PER_STEP
from espalier.kernels.ops.attention import count_contiguous_blocks
from espalier.kernels.ops.selection import KVSplitPolicy, kv_splits
from tests.pairwise import in_turn_params

POLICIES, PAGE_SIZES, FIRSTS = [KVSplitPolicy(3, 3), KVSplitPolicy(1, 8)], [1, 16, 48, 64], [0, 1, 130]
LENGTHS = (0, 1, 63, 64, 65, 129, 1000, 64 * (BLOCKS_PER_STEP + 5) + 3, 5000)


def tables(lengths, page_size, broken=()):
    """A page table of contiguous pages, except each (request, page) in `broken`, which is another page."""
    width = max(lengths) // page_size + 2
    table = 7 + torch.arange(len(lengths) * width, dtype=torch.int32).view(-1, width)
    for request, page in broken:
        table[request, page] += 100_000
    return table


def counted(splits, table, page_size, first, count, block_rows=64):
    return count(splits, table, page_size, first, block_rows)[: len(splits.used_rows)].tolist()


@pytest.mark.parametrize(("page_size", "first", "policy"), in_turn_params(PAGE_SIZES, FIRSTS, POLICIES))
def test_kernel_equals_reference(kernel_device, page_size, first, policy):
    length = torch.tensor(LENGTHS, device=kernel_device)
    splits = kv_splits.triton(length, first, policy)
    for seed in range(2):
        draws = torch.Generator().manual_seed(seed)
        pages = [(r, int(torch.randint(n // page_size + 1, (), generator=draws))) for r, n in enumerate(LENGTHS)]
        table = tables(LENGTHS, page_size, pages if seed else ()).to(kernel_device)
        counts, expected = (
            [counted(splits, table, page_size, first, count, rows) for rows in (32, 64)]
            for count in (count_contiguous_blocks.triton, count_contiguous_blocks.reference)
        )
        assert counts == expected and counts[0] != counts[1]


@pytest.mark.parametrize("page_size", [1, 16])
def test_counts_up_to_the_first_block_that_is_not_contiguous(kernel_device, page_size):
    length = torch.tensor([1000, 1000, 1000, 1000], device=kernel_device)
    broken = [(1, 0), (2, 200 // page_size), (3, 999 // page_size)]
    table = tables(length.tolist(), page_size, broken).to(kernel_device)
    assert counted(
        kv_splits.triton(length, 0, KVSplitPolicy(1, 8)), table, page_size, 0, count_contiguous_blocks.triton
    ) == [
        15,
        0,
        3,
        15,
    ]
    # With first=1, block 0 is masked and not counted.
    assert counted(
        kv_splits.triton(length, 1, KVSplitPolicy(1, 8)), table, page_size, 1, count_contiguous_blocks.triton
    ) == [
        14,
        14,
        2,
        14,
    ]
    two_splits_each = counted(
        kv_splits.triton(length, 0, KVSplitPolicy(2, 8)), table, page_size, 0, count_contiguous_blocks.triton
    )
    assert two_splits_each == [8, 7, 0, 7, 3, 7, 8, 7]


def test_pages_in_another_order_are_not_contiguous(kernel_device):
    table = tables([256], 16).to(kernel_device)
    table[0, 4], table[0, 5] = table[0, 5].clone(), table[0, 4].clone()
    splits = kv_splits.triton(torch.tensor([256], device=kernel_device), 0, KVSplitPolicy(1, 8))
    assert counted(splits, table, 16, 0, count_contiguous_blocks.triton) == [1]


def test_an_empty_batch_is_legal(kernel_device):
    empty = torch.zeros(0, 4, dtype=torch.int32, device=kernel_device)
    splits = kv_splits.triton(empty[:, 0].long(), 0, KVSplitPolicy(1, 8))
    assert count_contiguous_blocks.triton(splits, empty, 16, 0, 64).numel() == 0
