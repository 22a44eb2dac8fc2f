"""Merging partial results: the kernel equals the reference."""

import pytest
import torch

from espalier.errors import EspalierError
from espalier.kernels.attention.merge import MAX_SMALL_BLOCK_SPLITS, PROGRAMS_PER_PROCESSOR
from espalier.kernels.ops.attention import PartialResults, merge_splits
from espalier.kernels.ops.selection import KVSplitPolicy, kv_splits
from espalier.kernels.runtime.launch import chip
from tests.pairwise import fewer, in_turn_params

# float32: a few roundings of sums of up to 32 terms of size one.
TOLERANCE = 5e-6
POLICY = KVSplitPolicy(8, 8)


def drawn(device, lengths=(0, 1, 300, 5000), queries=3, heads=5, v_size=7, seed=0, policy=POLICY):
    generator = torch.Generator().manual_seed(seed)
    splits = kv_splits.reference(torch.tensor(lengths, device=device), 0, policy)
    partials = PartialResults.allocate(splits, queries, heads, v_size)
    partials.out.copy_(torch.randn(partials.out.shape, generator=generator))
    partials.lse.copy_(torch.randn(partials.lse.shape, generator=generator) * 3)
    used = len(splits.used_rows)
    partials.out[used:] = partials.lse[used:] = torch.nan
    # One query sees no rows in the last split; another query sees no rows at all.
    partials.lse[used - 1 : used, 0] = -torch.inf
    partials.lse[:used, 1, 2] = -torch.inf
    out = torch.full((len(lengths), queries, heads, v_size), 7.0, device=device)
    return partials, splits, out, torch.full(out.shape[:3], 7.0, device=device)


def assert_equals_reference(partials, splits, out, lse):
    partials.out[:, 1, 2] = 0
    expected_out, expected_lse = out.clone(), lse.clone()
    merge_splits.triton(partials, splits, out, lse)
    merge_splits.reference(partials, splits, expected_out, expected_lse)
    torch.testing.assert_close(out, expected_out, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_equals_reference(kernel_device, sink, dtype):
    partials, splits, out, lse = drawn(kernel_device)
    partials.out[:, 1, 2] = 0
    logits = torch.tensor([0.3, -1.0, 2.0, -torch.inf, 0.0], device=kernel_device) if sink else None
    out = out.to(dtype)
    expected_out, expected_lse = out.clone(), lse.clone()
    merge_splits.triton(partials, splits, out, lse, logits)
    merge_splits.reference(partials, splits, expected_out, expected_lse, logits)
    # bfloat16: the two float32 results may round to neighbouring values.
    relative = 0 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(out, expected_out, rtol=relative, atol=TOLERANCE)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=TOLERANCE)
    assert (out[:2] == 7).all() and (lse[:2] == 7).all(), "requests with one split are not merged"
    assert (out[2:, 1, 2] == 0).all() and (lse[2:, 1, 2] == -torch.inf).all()


def test_more_to_merge_than_programs(kernel_device):
    """Programs take turns; each (query, head) pair is merged exactly once."""
    partials, splits, out, lse = drawn(kernel_device, (300, 0, 600), queries=4, heads=13)
    assert out.shape[:3].numel() > chip(out).processors * PROGRAMS_PER_PROCESSOR or out.is_cuda
    assert_equals_reference(partials, splits, out, lse)


@pytest.mark.parametrize(("v_size", "max_splits"), [(128, 32), (200, 32), (300, 64), (40, 128)])
def test_many_splits(kernel_device, v_size, max_splits):
    """One pair at a time, in parts of 128 values (32 splits), of 64 or of 32."""
    policy = KVSplitPolicy(max_splits, max_splits)
    assert_equals_reference(*drawn(kernel_device, (1, 600, 9000, 5000), 2, 3, v_size, policy=policy))


@pytest.mark.parametrize(
    ("num_splits", "heads"), fewer(in_turn_params([1, 4, 8], [12, 5]), lambda num_splits, _: num_splits != 1)
)
def test_short_and_long_requests_of_one_batch(kernel_device, num_splits, heads):
    """Few splits are merged several pairs at a time, many one pair at a time; programs take turns."""
    policy = KVSplitPolicy(num_splits, 32)
    partials, splits, out, lse = drawn(kernel_device, (20000, 300, 7, 60000, 3000), 9, heads, 128, policy=policy)
    counts = splits.used_rows[:, 3]
    assert (
        int(counts.max()) > MAX_SMALL_BLOCK_SPLITS and int(counts.min()) == 1 and ((counts > 1) & (counts <= 4)).any()
    )
    assert_equals_reference(partials, splits, out, lse)


@pytest.mark.parametrize(
    ("num_splits", "max_splits", "heads"),
    fewer([(8, 8, 5), (32, 32, 5), (128, 128, 5), (4, 32, 8)], lambda num_splits, *_: num_splits < 32),
)
def test_bits_do_not_depend_on_the_batch(kernel_device, num_splits, max_splits, heads):
    """A request's bits are the same alone and in a batch."""
    lengths, policy = (600, 0, 5000, 1, 300, 9000, 40000), KVSplitPolicy(num_splits, max_splits)
    partials, splits, out, lse = drawn(kernel_device, lengths, 3, heads, 128, policy=policy)
    merge_splits.triton(partials, splits, out, lse)
    for request, length in enumerate(lengths):
        alone_splits = kv_splits.reference(torch.tensor([length], device=kernel_device), 0, policy)
        start, count = int(splits.starts[request]), int(splits.starts[len(lengths) + 1 + request])
        of_request = slice(start, start + count)
        alone_partials = PartialResults.allocate(alone_splits, 3, heads, 128)
        (
            alone_partials.out[: of_request.stop - of_request.start],
            alone_partials.lse[: of_request.stop - of_request.start],
        ) = partials.out[of_request], partials.lse[of_request]
        again, again_lse = torch.full_like(out[:1], 7.0), torch.full_like(lse[:1], 7.0)
        merge_splits.triton(alone_partials, alone_splits, again, again_lse)
        assert torch.equal(again[0], out[request]) and torch.equal(again_lse[0], lse[request])


def test_offsets_that_need_64_bits_are_refused():
    splits = kv_splits.reference(torch.tensor([300]), 0, KVSplitPolicy(32, 32))
    out, lse = torch.empty(1, 2**14, 8, 512, device="meta"), torch.empty(1, 2**14, 8, device="meta")
    partials = PartialResults(*(torch.empty(32, *each.shape[1:], device="meta") for each in (out, lse)))
    with pytest.raises(EspalierError, match="64-bit offsets; use fewer splits"):
        merge_splits.triton(partials, splits, out, lse)


def test_an_empty_batch_is_legal(kernel_device):
    merge_splits.triton(*drawn(kernel_device, lengths=()))


@pytest.mark.gpu
@pytest.mark.parametrize("policy", [POLICY, KVSplitPolicy(4, 32)])
@pytest.mark.parametrize("queries", [1, 8, 129])
@pytest.mark.parametrize("v_size", [64, 128, 256])
def test_grid(kernel_device, queries, v_size, policy):
    lengths = (100, 70000, 4096, 0) * 8
    assert_equals_reference(*drawn(kernel_device, lengths, max(queries, 2), 32, v_size, policy=policy))
