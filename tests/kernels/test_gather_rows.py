"""Values along a path against indexing one by one, and the kernel against its reference: exactly."""

import pytest
import torch

from espalier.errors import EspalierError
from espalier.kernels.tree.gather_rows import gather_rows, gather_rows_reference, gather_rows_triton
from tests.kernels.treeing import poisoned, random


def drawn(batch, nodes, width, size, dtype=torch.float32, seed=0):
    """Values and rows that are slices of wider tensors."""
    generator = random(seed)
    values = torch.randn(batch, nodes, size + 3, generator=generator).to(dtype)[..., 1 : size + 1]
    return values, torch.randint(0, nodes, (batch, 2 * width), generator=generator)[:, ::2]


def test_the_reference_is_indexing():
    values, rows = drawn(3, 5, 4, 7)
    taken = gather_rows_reference(values, rows)
    assert all(torch.equal(taken[b, w], values[b, rows[b, w]]) for b in range(3) for w in range(4))


SMALL = [(0, 2, 3, 4), (1, 1, 1, 1), (3, 5, 4, 7), (2, 3, 0, 5), (1, 4, 2, 2500)]
LARGE = [(64, 8, 4, 12288), (1, 64, 6, 12288), (257, 3, 2, 4096)]


@pytest.mark.parametrize("shape", [*SMALL, *(pytest.param(s, marks=pytest.mark.gpu) for s in LARGE)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_kernel_is_the_reference(kernel_device, shape, dtype):
    values, rows = drawn(*shape, dtype)
    with poisoned():
        taken = gather_rows_triton(values.to(kernel_device), rows.to(kernel_device))
    assert taken.dtype == dtype and torch.equal(taken.cpu(), gather_rows_reference(values, rows))


def test_sizes_that_disagree_are_refused(kernel_device):
    values, rows = (value.to(kernel_device) for value in drawn(3, 5, 4, 7))
    with pytest.raises(EspalierError, match="along: values"):
        gather_rows_triton(values[1:], rows)
    with pytest.raises(EspalierError, match="along: rows"):
        gather_rows_triton(values, rows.int())
    with pytest.raises(EspalierError, match="dense"):
        gather_rows_triton(values.transpose(1, 2), rows)


def test_a_cpu_needs_no_kernel():
    given = drawn(2, 3, 2, 4)
    assert torch.equal(gather_rows(*given), gather_rows_reference(*given))
