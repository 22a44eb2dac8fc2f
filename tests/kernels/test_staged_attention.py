"""Attention over staged rows only, and its merge with attention over committed rows."""

from dataclasses import replace

import pytest
import torch

from espalier.kernels.ops.attention import AttentionInputs, empty_prefix, merge_results, staged_attention
from espalier.kernels.ops.selection import kv_splits
from tests.kernels.attending import LSE_TOLERANCE, TOLERANCE, Case, doubled, draw, expected, run
from tests.pairwise import fewer

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


def over_staged(inputs: AttentionInputs) -> AttentionInputs:
    """The inputs with empty prefixes."""
    prefix, splits = empty_prefix(len(inputs.q), inputs.q.device)
    return inputs._replace(prefix=prefix, splits=splits)


def check(inputs: AttentionInputs) -> None:
    out, lse = staged_attention.triton(over_staged(inputs))
    expected_part = staged_attention.reference(over_staged(doubled(inputs)))
    torch.testing.assert_close(out.double(), expected_part[0], rtol=0, atol=TOLERANCE[inputs.q.dtype])
    torch.testing.assert_close(lse.double(), expected_part[1], rtol=1e-5, atol=LSE_TOLERANCE)


@cases
def test_kernel_equals_reference(case, kernel_device):
    check(draw(case, kernel_device))


def test_no_prefix_equals_splits_of_empty_requests(kernel_device):
    prefix, splits = empty_prefix(3, kernel_device)
    expected_splits = kv_splits.triton(prefix.length, 0, splits.policy)
    assert torch.equal(splits.table, expected_splits.table) and torch.equal(splits.starts, expected_splits.starts)


@pytest.mark.parametrize("case", fewer(CASES, lambda case: case not in (CASES[0], CASES[4])), ids=str)
@pytest.mark.parametrize("sink", [pytest.param(False, marks=pytest.mark.full), True])
def test_merged_parts_equal_the_fused_kernel(case, sink, kernel_device):
    inputs = draw(replace(case, sink=sink), kernel_device)
    alone = inputs._replace(sink=None)
    attend_prefix = run(alone, case.max_splits, staged=False)
    merged = merge_results.triton(attend_prefix, staged_attention.triton(over_staged(alone)), inputs.sink)
    for expected_part in (expected(inputs)[0], run(inputs, case.max_splits)[0].double()):
        torch.testing.assert_close(merged.double(), expected_part, rtol=0, atol=2 * TOLERANCE[case.dtype])


@pytest.mark.parametrize("chain", [False, True])
def test_wide_latent_rows(chain, kernel_device):
    """V is a part of K, and K too wide for the kernel of other layers."""
    inputs = draw(Case((7, 0), 5, None if chain else 5, heads=3, kv_heads=1, k_size=272, v_size=256), kernel_device)
    k = inputs.staged[0]
    check(inputs._replace(staged=(k, k[..., :256])))
