"""Merging two attention results equals attention over the union; the reference attention equals a plain loop."""

import math

import pytest
import torch

from espalier.kernels.ops.attention import masked_attention, merge_results

# float64: a few roundings of sums of about ten terms of size one.
TOLERANCE = 1e-12
SCALE = 0.37


def drawn(batch=2, queries=3, rows=9, heads=4, kv_heads=2, k_size=5, v_size=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, queries, heads, k_size, generator=generator, dtype=torch.float64)
    k = torch.randn(batch, rows, kv_heads, k_size, generator=generator, dtype=torch.float64)
    v = torch.randn(batch, rows, kv_heads, v_size, generator=generator, dtype=torch.float64)
    mask = torch.rand(batch, queries, rows, generator=generator) < 0.6
    return q, k, v, mask


def in_loops(q, k, v, mask):
    """Attention of one query and head at a time."""
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=q.dtype)
    group = q.shape[2] // k.shape[2]
    for b, i, h in ((b, i, h) for b in range(q.shape[0]) for i in range(q.shape[1]) for h in range(q.shape[2])):
        seen = mask[b, i].nonzero()[:, 0].tolist()
        if seen:
            weights = [math.exp(float(q[b, i, h] @ k[b, r, h // group]) * SCALE) for r in seen]
            lse[b, i, h] = math.log(sum(weights))
            out[b, i, h] = sum(w * v[b, r, h // group] for w, r in zip(weights, seen, strict=True)) / sum(weights)
    return out, lse


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_reference_attention_in_loops(kv_heads):
    q, k, v, mask = drawn(kv_heads=kv_heads)
    mask[0, 0] = False
    out, lse = masked_attention(q, k, v, mask, SCALE)
    expected_out, expected_lse = in_loops(q, k, v, mask)
    assert torch.allclose(out, expected_out, rtol=0, atol=TOLERANCE)
    assert torch.allclose(lse, expected_lse, rtol=0, atol=TOLERANCE)


def test_a_query_that_sees_no_rows_gets_zeros_and_minus_infinity():
    q, k, v, mask = drawn()
    mask[1] = False
    out, lse = masked_attention(q, k, v, mask, SCALE)
    assert (out[1] == 0).all() and (lse[1] == -torch.inf).all()
    out, lse = masked_attention(q, k[:, :0], v[:, :0], mask[..., :0], SCALE)
    assert (out == 0).all() and (lse == -torch.inf).all()


def test_a_batch_of_no_requests_is_legal():
    q, k, v, mask = (value[:0] for value in drawn())
    out, lse = masked_attention(q, k, v, mask, SCALE)
    assert out.shape == (0, 3, 4, 3) and lse.shape == (0, 3, 4)
    assert merge_results((out, lse), (out, lse)).shape == out.shape


@pytest.mark.parametrize("boundary", [0, 1, 4, 9])
@pytest.mark.parametrize("sink", [False, True])
def test_merged_parts_are_the_union(boundary, sink):
    q, k, v, mask = drawn(seed=boundary)
    mask[0, 0, :boundary] = False
    logits = torch.tensor([0.3, -1.0, 2.0, -torch.inf], dtype=torch.float64) if sink else None
    first = masked_attention(q, k[:, :boundary], v[:, :boundary], mask[..., :boundary], SCALE)
    second = masked_attention(q, k[:, boundary:], v[:, boundary:], mask[..., boundary:], SCALE)
    out, lse = masked_attention(q, k, v, mask, SCALE)
    if logits is not None:
        # A sink is one more key with value zero: it only takes weight.
        out = out * torch.sigmoid(lse - logits).nan_to_num(0)[..., None]
    assert torch.allclose(merge_results(first, second, logits), out, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_kernel_equals_reference(kernel_device, rows, sink, dtype):
    """The rows cover all cases: a query sees rows in no part, in one part, in both."""
    generator = torch.Generator().manual_seed(rows)
    exact = torch.promote_types(dtype, torch.float32)
    parts = []
    for hidden in (1, 2):
        lse = torch.randn(rows, 3, generator=generator).to(exact)
        lse.view(-1)[:: hidden + 1] = -torch.inf
        parts.append((torch.randn(rows, 3, 5, generator=generator).to(dtype), lse))
    logits = torch.tensor([0.3, -1.0, -torch.inf], dtype=exact) if sink else None
    on_device = [tuple(value.to(kernel_device) for value in part) for part in parts]
    made = merge_results.triton(*on_device, None if logits is None else logits.to(kernel_device)).cpu()
    right = merge_results.reference(*parts, logits)
    assert made.dtype == right.dtype and made.isfinite().all()
    tolerance = 4 * torch.finfo(dtype).eps
    assert torch.allclose(made.double(), right.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("sink", [None, torch.zeros(4)])
def test_two_empty_results_merge_to_zeros(sink):
    empty = torch.zeros(2, 3, 4, 5), torch.full((2, 3, 4), -torch.inf)
    assert torch.equal(merge_results(empty, empty, sink), torch.zeros(2, 3, 4, 5))


def test_out_keeps_the_dtype_of_the_queries_and_lse_is_float32():
    q, k, v, mask = drawn()
    out, lse = masked_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), mask, SCALE)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert merge_results((out, lse), (out, lse)).dtype == torch.bfloat16
