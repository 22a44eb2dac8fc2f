"""Attention over staged rows only, and its merge with attention over committed rows."""

from dataclasses import replace

import pytest
import torch

from espalier.kernels.ops.attention import NoPrefix, Staged, merge, staged_attention
from espalier.kernels.ops.kv_splits import kv_splits
from tests.kernels.attending import LSE_TOLERANCE, TOLERANCE, Case, draw, expected, run

CASES = [
    Case((17, 0, 300), queries=3),
    Case((17, 1, 130), queries=2, rows=6),
    Case((5, 64), queries=4, rows=4, k_size=8, v_size=5, heads=3, kv_heads=1),
    Case((40, 9), queries=3, rows=5, window=4, first=1),
    Case((40, 9), queries=20, window=7),
    Case((40, 9), queries=3, rows=5, softcap=1.5, scale=1.0),
    Case((), queries=2, rows=2),
    pytest.param(
        Case((1000, 3), queries=64, rows=64, heads=32, kv_heads=8, k_size=128, v_size=128, dtype=torch.bfloat16),
        marks=pytest.mark.gpu,
    ),
]
cases = pytest.mark.parametrize("case", CASES, ids=str)


@cases
def test_kernel_equals_reference(case, kernel_device):
    inputs = draw(case, kernel_device)
    exact = replace(inputs.staged, k=inputs.staged.k.double(), v=inputs.staged.v.double())
    no_prefix = NoPrefix.of(len(case.lengths), kernel_device)
    out, lse = staged_attention.triton(
        inputs.q, inputs.staged, inputs.positions, inputs.scale, inputs.window, no_prefix, None, inputs.softcap
    )
    expected_part = staged_attention.reference(
        inputs.q.double(), exact, inputs.positions, inputs.scale, inputs.window, no_prefix, None, inputs.softcap
    )
    torch.testing.assert_close(out.double(), expected_part[0], rtol=0, atol=TOLERANCE[case.dtype])
    torch.testing.assert_close(lse.double(), expected_part[1], rtol=1e-5, atol=LSE_TOLERANCE)


def test_no_prefix_equals_splits_of_empty_requests(kernel_device):
    no_prefix = NoPrefix.of(3, kernel_device)
    expected_splits = kv_splits.triton(no_prefix.length, 0, no_prefix.splits.policy)
    assert torch.equal(no_prefix.splits.table, expected_splits.table) and torch.equal(
        no_prefix.splits.starts, expected_splits.starts
    )


@cases
@pytest.mark.parametrize("sink", [False, True])
def test_merged_parts_equal_the_fused_kernel(case, sink, kernel_device):
    inputs = draw(replace(case, sink=sink), kernel_device)
    no_prefix = NoPrefix.of(len(case.lengths), kernel_device)
    over_prefix = run(replace(inputs, sink=None), case.max_splits, staged=False)
    among = staged_attention.triton(
        inputs.q, inputs.staged, inputs.positions, inputs.scale, inputs.window, no_prefix, None, inputs.softcap
    )
    merged = merge.triton(over_prefix, among, inputs.sink)
    for expected_part in (expected(inputs)[0], run(inputs, case.max_splits)[0].double()):
        torch.testing.assert_close(merged.double(), expected_part, rtol=0, atol=2 * TOLERANCE[case.dtype])


@pytest.mark.parametrize("chain", [False, True])
def test_wide_latent_rows(chain, kernel_device):
    """V is a part of K, and K too wide for the kernel of other layers."""
    generator = torch.Generator().manual_seed(3)
    q, rows = (torch.randn(2, 5, heads, 272, generator=generator).to(kernel_device) for heads in (3, 1))
    positions = torch.tensor([[7], [0]]) + torch.arange(5)
    bits = torch.tensor([1, 3, 5, 9, 25]).expand(2, 5)[..., None].contiguous().to(kernel_device)
    staged = Staged(rows, rows[..., :256], positions.to(kernel_device), None if chain else bits)
    no_prefix = NoPrefix.of(2, kernel_device)
    out, lse = staged_attention.triton(q, staged, positions.to(kernel_device), 0.1, None, no_prefix)
    exact = replace(staged, k=staged.k.double(), v=staged.v.double())
    expected_part = staged_attention.reference(q.double(), exact, staged.row_positions, 0.1, None, no_prefix)
    torch.testing.assert_close(out.double(), expected_part[0], rtol=0, atol=TOLERANCE[torch.float32])
    torch.testing.assert_close(lse.double(), expected_part[1], rtol=1e-5, atol=LSE_TOLERANCE)
