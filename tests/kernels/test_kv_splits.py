"""The plan of committed rows: the kernel is the reference, splits cover a request's rows once, and no batch matters."""

from functools import partial

import pytest
import torch

from espalier.kernels.attention.kv_splits import (
    MAX_PARTIAL_ROWS,
    MAX_SPLIT_ROWS,
    MAX_SPLITS,
    MIN_SPLIT_ROWS,
    ROWS_PER_REQUEST,
    SPLIT_STEP,
    KVSplitPolicy,
    kv_splits_reference,
    kv_splits_triton,
)
from espalier.layout import RoundLayout, bucket_of

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


@pytest.mark.parametrize("policy", CUTS, ids=str)
@pytest.mark.parametrize("first", [0, 1])
def test_kernel_is_reference(kernel_device, policy, first):
    length = torch.tensor(LENGTHS, device=kernel_device)
    made, expected = kv_splits_triton(length, first, policy), kv_splits_reference(length, first, policy)
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
        assert begin > lower - SPLIT_STEP or begin == 0
        assert end <= max(LENGTHS[request], begin)


@pytest.mark.parametrize("policy", CUTS, ids=str)
def test_ranges_cover_every_row_once_in_order(policy):
    made = kv_splits_reference(torch.tensor(LENGTHS), 0, policy)
    for request, length in enumerate(LENGTHS):
        mine = [item for item in used(made) if item[0] == request]
        assert 1 <= len(mine) <= policy.max_splits and {item[3] for item in mine} == {len(mine)}
        assert [row for _, begin, end, _ in mine for row in range(begin, end)] == list(range(length))
        assert all(begin % SPLIT_STEP == 0 for _, begin, _, _ in mine)


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
    assert all(-(-span // policy.width(span)) <= policy.max_splits for span in range(0, 70000, 77) for policy in CUTS)


def test_small_batches_make_many_splits():
    """By the batch's bucket, whatever max_batch is; partial results that wait to be merged are bounded."""
    alone, full = (partial(KVSplitPolicy.of, batch, max_rows=131072) for batch in (1, 64))
    assert full(queries=8) == KVSplitPolicy(MAX_SPLIT_ROWS, MAX_SPLITS)
    assert full(queries=64) == KVSplitPolicy(MAX_SPLIT_ROWS, 4)
    assert alone(queries=64) == KVSplitPolicy(ROWS_PER_REQUEST, 8)
    assert alone(queries=8) == KVSplitPolicy(MIN_SPLIT_ROWS, MAX_SPLITS)
    assert alone(queries=2048) == KVSplitPolicy(ROWS_PER_REQUEST, 1)
    assert KVSplitPolicy.of(1, 8, 17 * MIN_SPLIT_ROWS - 1) == KVSplitPolicy(MIN_SPLIT_ROWS, 17)
    assert KVSplitPolicy.of(8, 1, 131072).width(1030) == 384
    for batch in range(1, 65):
        for queries in (1, 2, 8, 16, 64, 129, 5000):
            policy = KVSplitPolicy.of(batch, queries, 131072)
            assert 1 <= policy.max_splits <= MAX_SPLITS
            assert policy.max_splits == 1 or batch * queries * policy.max_splits <= MAX_PARTIAL_ROWS


def test_a_padded_batch_splits_as_the_batch_does():
    layout = RoundLayout(20, 0, 1, 1, 16, 4096, 0, 2048)
    buckets = layout.batch_buckets(20)
    assert buckets == (1, 2, 3, 4, 6, 8, 12, 16, 20)
    for batch in range(1, 21):
        padded = bucket_of(batch, buckets)
        assert KVSplitPolicy.of(batch, 8, 4096) == KVSplitPolicy.of(padded, 8, 4096)
