"""KV splits: the kernel equals the reference, splits cover each row once, and do not depend on the other requests."""

from functools import partial

import pytest
import torch

from espalier.kernels.hopper.config import choose_hopper_config
from espalier.kernels.ops.selection import (
    MAX_MANY_TILES_SPLIT_ROWS,
    MAX_PARTIAL_VALUES,
    MAX_SPLIT_ROWS,
    MAX_SPLITS,
    MAX_SPLITS_OF_FEW_HEADS,
    MIN_LARGE_TILE_SPLIT_ROWS,
    MIN_SHORT_SPLIT_ROWS,
    MIN_SPLIT_ROWS,
    SMALL_TILE_QUERIES,
    SPLIT_ALIGNMENT,
    KVSplitPolicy,
    kv_splits,
)
from espalier.kernels.runtime.launch import Chip
from espalier.layout import RoundLayout, padded_batch

LENGTHS = [0, 1, 127, 128, 129, 1024, 1025, 2048, 2049, 4096, 5000, 65536, 65537, 131072]


def used(made):
    return made.used_rows.tolist()


POLICIES = [
    KVSplitPolicy(1, 1),
    KVSplitPolicy(2, 2),
    KVSplitPolicy(1, 8),
    KVSplitPolicy(4, 8),
    KVSplitPolicy(32, 32),
    KVSplitPolicy(1, 8, 4096),
]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("first", [0, 1, 3])
def test_kernel_equals_reference(kernel_device, policy, first):
    length = torch.tensor(LENGTHS, device=kernel_device)
    made, expected = kv_splits.triton(length, first, policy), kv_splits.reference(length, first, policy)
    assert torch.equal(made.starts, expected.starts)
    assert used(made) == used(expected)


@pytest.mark.parametrize("window", [1, 100, 200, 4096])
def test_rows_that_no_window_reaches_are_left_out(kernel_device, window):
    length = torch.tensor(LENGTHS, device=kernel_device)
    positions = (length[:, None] + torch.tensor([3, 0, 1] * 7, device=kernel_device))[:, 1:]
    made = kv_splits.triton(length, 1, KVSplitPolicy(8, 8), positions, window)
    expected = kv_splits.reference(length, 1, KVSplitPolicy(8, 8), positions, window)
    assert torch.equal(made.starts, expected.starts)
    assert used(made) == used(expected)
    for request, begin, end, _ in used(made):
        num_lower = LENGTHS[request] - window + 1
        assert begin > num_lower - SPLIT_ALIGNMENT or begin == 0
        assert end <= max(LENGTHS[request], begin)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_splits_cover_every_row_once_in_order(policy):
    made = kv_splits.reference(torch.tensor(LENGTHS), 0, policy)
    for request, length in enumerate(LENGTHS):
        splits = [split for split in used(made) if split[0] == request]
        assert 1 <= len(splits) <= policy.max_splits and {split[3] for split in splits} == {len(splits)}
        assert [row for _, begin, end, _ in splits for row in range(begin, end)] == list(range(length))
        assert all(begin % SPLIT_ALIGNMENT == 0 for _, begin, _, _ in splits)


def test_a_request_has_the_same_splits_in_any_batch(kernel_device):
    together = kv_splits.triton(torch.tensor(LENGTHS, device=kernel_device), 0, KVSplitPolicy(8, 8))
    for request, length in enumerate(LENGTHS):
        alone = kv_splits.triton(torch.tensor([length], device=kernel_device), 0, KVSplitPolicy(8, 8))
        assert [i[1:] for i in used(alone)] == [i[1:] for i in used(together) if i[0] == request]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_requests_with_longer_splits_come_first(kernel_device, policy):
    """Else a program may take the longest splits of a batch last, and the others wait for it."""
    made = kv_splits.triton(torch.tensor(LENGTHS * 3, device=kernel_device), 0, policy)
    widths = [policy.rows_per_split(length) for length in LENGTHS * 3]
    order = list(dict.fromkeys(request for request, *_ in used(made)))
    assert [widths[request] for request in order] == sorted(widths, reverse=True)
    assert order != sorted(order)


def test_an_empty_batch_has_no_splits(kernel_device):
    made = kv_splits.triton(torch.zeros(0, dtype=torch.int64, device=kernel_device), 0, KVSplitPolicy(8, 8))
    assert made.table.shape == (0, 4) and made.starts.shape == (1,)


def test_strided_lengths_are_read(kernel_device):
    wide = torch.tensor(LENGTHS, device=kernel_device)[:, None].expand(-1, 3).contiguous()
    assert used(kv_splits.triton(wide[:, 1], 0, KVSplitPolicy(8, 8))) == used(
        kv_splits.triton(wide[:, 1].contiguous(), 0, KVSplitPolicy(8, 8))
    )


def test_splits_are_even_and_bounded():
    spans = (0, 1, 128, 129, 1024, 1025, 2048, 2049, 16384, 16385)
    widths = [64, 64, 128, 128, 256, 320, 512, 576, 2048, 2112]
    assert [KVSplitPolicy(4, 8).rows_per_split(extent_of) for extent_of in spans] == widths
    for policy in POLICIES:
        for extent_of in range(0, 70000, 77):
            count = -(-extent_of // policy.rows_per_split(extent_of))
            assert count <= policy.max_splits
            assert count in (0, policy.max_splits) or policy.rows_per_split(extent_of) <= policy.max_split_rows


def test_small_batches_make_many_splits():
    """Splits depend on the batch's bucket, not on max_batch; the number of partial results is bounded."""
    of = partial(KVSplitPolicy.choose, kv_heads=8, group_size=4, max_rows=32768, v_size=128)
    assert [of(batch, 1).num_splits for batch in (1, 2, 4, 8, 12, 32, 64)] == [32, 16, 8, 4, 2, 1, 1]
    assert [of(batch, 64).num_splits for batch in (1, 2, 8)] == [8, 4, 1]
    assert of(64, 1).num_splits == 1 and of(64, 1).max_splits == MAX_SPLITS, (
        "a long request is split, whatever the batch"
    )
    assert of(64, 64) == KVSplitPolicy(1, 4)
    assert of(1, 2048) == KVSplitPolicy(1, 1, MAX_MANY_TILES_SPLIT_ROWS)
    assert KVSplitPolicy.choose(64, 1, 8, 4, max_rows=MAX_SPLIT_ROWS, v_size=128).max_splits == 1, "none is ever split"
    for batch in range(1, 65):
        for queries in (1, 2, 8, 16, 64, 129, 5000):
            policy = of(batch, queries)
            assert 1 <= policy.num_splits <= policy.max_splits <= MAX_SPLITS
            assert policy.max_splits == 1 or batch * queries * policy.max_splits * 32 * 128 <= MAX_PARTIAL_VALUES


def test_pieces_of_prompts_have_long_splits():
    """Eight heads with eight tiles of queries each: a request alone keeps half of a GPU busy, so a prompt of 8k is not
    split, and a long one is."""
    of = partial(KVSplitPolicy.choose, 8, kv_heads=8, group_size=4, v_size=128)
    assert of(256, max_rows=8192).max_splits == 1
    long = of(256, max_rows=32768)
    assert (long.num_splits, long.max_splits) == (1, 2) and [long.rows_per_split(rows) for rows in (8192, 8256)] == [
        8192,
        4160,
    ]
    assert of(224, max_rows=8192).max_splits == 2 and of(224, max_rows=32768).rows_per_split(8192) == 4096


def test_few_queries_have_shorter_splits():
    """Up to 16 packed queries: their partial results are few."""
    of = partial(KVSplitPolicy.choose, 1, kv_heads=8, max_rows=17 * MIN_SPLIT_ROWS - 1, v_size=128)
    assert of(1, group_size=4) == of(4, group_size=4) == KVSplitPolicy(32, 32, min_split_rows=MIN_SHORT_SPLIT_ROWS)
    assert (
        of(SMALL_TILE_QUERIES // 4 + 1, group_size=4)
        == of(1, group_size=SMALL_TILE_QUERIES + 1)
        == KVSplitPolicy(17, 17)
    )
    assert (
        of(1, group_size=4).rows_per_split(1024) == MIN_SHORT_SPLIT_ROWS
        and of(5, group_size=4).rows_per_split(1024) == MIN_SPLIT_ROWS
    )


def test_large_tiles_of_a_short_layout_have_longer_splits():
    """From 65 packed queries on their partial results are many.  In a layout for long requests two warpgroups share a
    program, and longer splits would leave most multiprocessors idle."""
    of = partial(KVSplitPolicy.choose, 1, kv_heads=8, group_size=4, v_size=128)
    assert [of(queries, max_rows=1280).rows_per_split(1056) for queries in (16, 17, 64)] == [128, 320, 320]
    assert [of(queries, max_rows=32768).rows_per_split(1056) for queries in (16, 17, 64)] == [128, 128, 192]
    for queries, max_rows in ((17, 1280), (64, 1280), (17, 32768), (64, 32768)):
        policy = of(queries, max_rows=max_rows)
        work_items = 8 * -(-4 * queries // 128) * policy.max_splits
        config = choose_hopper_config(Chip(227 * 1024, 132, (9, 0)), 4 * queries, work_items, 128, 64)
        assert (config.warpgroups == 1) == (policy.min_split_rows == MIN_LARGE_TILE_SPLIT_ROWS)
    assert of(64, max_rows=32768).rows_per_split(32768) == 4096, "a long request has as many splits as fill a GPU"


@pytest.mark.parametrize(("kv_heads", "splits"), [(32, 8), (16, 16), (8, 32), (4, 64), (2, 128), (1, 128)])
def test_one_query_over_few_kv_heads_fills_a_gpu(kv_heads, splits):
    """More than MAX_SPLITS only where they fill the GPU: a larger batch keeps no room for them."""
    of = partial(KVSplitPolicy.choose, kv_heads=kv_heads, group_size=8, max_rows=32768, v_size=128)
    assert of(1, 1).num_splits == splits and of(2, 1).num_splits == 128 // kv_heads
    assert of(16, 1).max_splits <= MAX_SPLITS


def test_wide_latent_rows_fill_a_gpu_within_the_limit_of_partial_results():
    """A partial result of 128 heads has 65,536 values, of 16 heads 8,192.  One tile has 64 packed queries."""

    def of(batch, queries, heads, max_rows=65536):
        return KVSplitPolicy.choose(batch, queries, 1, heads, max_rows, v_size=512, is_wide_latent=True)

    def counts(*sizes, **named):
        policy = of(*sizes, **named)
        return policy.num_splits, policy.max_splits

    assert counts(1, 1, 16) == counts(1, 4, 16) == (128, 128) and counts(1, 1, 128) == (64, 64)
    assert counts(1, 16, 16) == (32, 32) and counts(1, 16, 128) == (4, 4)
    assert counts(1, 64, 128) == counts(1, 2048, 128) == (1, 1), "one request fills the GPU without splits"
    assert counts(8, 16, 16) == (4, 32) and counts(32, 16, 16) == (1, 16)
    assert counts(1, 1, 16, max_rows=1000) == (16, 16), "one tile: splits of 64 rows"
    assert counts(1, 1, 128, max_rows=1000) == (8, 8)
    assert of(32, 16, 16).rows_per_split(4096) == 4096 and of(32, 16, 16).rows_per_split(4160) == 2112
    for batch in range(1, 65):
        for queries in (1, 2, 8, 16, 64, 129, 5000):
            for heads in (1, 16, 128):
                policy = of(batch, queries, heads)
                assert 1 <= policy.num_splits <= policy.max_splits <= MAX_SPLITS_OF_FEW_HEADS
                values = batch * queries * heads * 512 * policy.max_splits
                assert policy.max_splits == 1 or values <= MAX_PARTIAL_VALUES


def test_a_padded_batch_splits_as_the_batch_does():
    layout = RoundLayout(20, 0, 1, 1, 16, 4096, 0, 2048)
    buckets = layout.batch_buckets(20)
    assert buckets == (1, 2, 3, 4, 6, 8, 12, 16, 20)
    for batch in range(1, 21):
        padded = padded_batch(batch, buckets)
        assert KVSplitPolicy.choose(batch, 8, 2, 4, 4096, 128) == KVSplitPolicy.choose(padded, 8, 2, 4, 4096, 128)
