"""gather_rows: the reference equals indexing row by row, and the kernel equals the reference, exactly."""

import pytest
import torch

from espalier.errors import EspalierError
from espalier.kernels.ops.tree import gather_rows
from tests.kernels.treeing import poisoned, random


def random_inputs(batch, nodes, width, size, dtype=torch.float32, seed=0):
    """values and rows, as slices of wider tensors."""
    generator = random(seed)
    values = torch.randn(batch, nodes, size + 3, generator=generator).to(dtype)[..., 1 : size + 1]
    return values, torch.randint(0, nodes, (batch, 2 * width), generator=generator)[:, ::2]


def test_the_reference_is_indexing():
    values, rows = random_inputs(3, 5, 4, 7)
    out = gather_rows.reference(rows, values)
    assert all(torch.equal(out[b, w], values[b, rows[b, w]]) for b in range(3) for w in range(4))


SMALL = [(0, 2, 3, 4), (1, 1, 1, 1), (3, 5, 4, 7), (2, 3, 0, 5), (1, 4, 2, 2500)]
LARGE = [(64, 8, 4, 12288), (1, 64, 6, 12288), (257, 3, 2, 4096)]


@pytest.mark.parametrize("shape", [*SMALL, *(pytest.param(s, marks=pytest.mark.gpu) for s in LARGE)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_kernel_is_the_reference(kernel_device, shape, dtype):
    values, rows = random_inputs(*shape, dtype)
    with poisoned():
        out = gather_rows.triton(rows.to(kernel_device), values.to(kernel_device))
    assert out.dtype == dtype and torch.equal(out.cpu(), gather_rows.reference(rows, values))


@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_parts_are_gathered_side_by_side(kernel_device, shape):
    values, rows = random_inputs(*shape)
    parts = torch.stack((values, -values, values + 3))
    expected = gather_rows.reference(rows, torch.cat(parts.unbind(), 2))
    assert torch.equal(gather_rows.reference(rows, *parts), expected)
    with poisoned():
        assert torch.equal(gather_rows.triton(rows.to(kernel_device), *parts.to(kernel_device)).cpu(), expected)


def test_wrong_shapes_dtypes_and_strides_are_refused(kernel_device):
    values, rows = (value.to(kernel_device) for value in random_inputs(3, 5, 4, 7))
    with pytest.raises(EspalierError, match="gather_rows: values"):
        gather_rows.triton(rows, values[1:])
    with pytest.raises(EspalierError, match="gather_rows: rows"):
        gather_rows.triton(rows.int(), values)
    with pytest.raises(EspalierError, match="contiguous"):
        gather_rows.triton(rows, values.transpose(1, 2))
    wider = torch.cat((values, values), 2)[..., : values.shape[2]]
    with pytest.raises(EspalierError, match="the same strides"):
        gather_rows.triton(rows, wider.contiguous(), wider)


def test_cpu_tensors_use_the_reference():
    inputs = random_inputs(2, 3, 2, 4)
    assert torch.equal(gather_rows(*reversed(inputs)), gather_rows.reference(*reversed(inputs)))
