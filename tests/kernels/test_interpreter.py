"""What the tests change in Triton's interpreter gives the results of every operand: numbers that are equal and not the
same, types, and shapes that are broadcast in either direction."""

import torch
import triton.language as tl

from espalier.kernels.runtime.jit import kernel


@kernel
def _numbers_kernel(x_ptr, out_ptr):
    x = tl.load(x_ptr)
    tl.store(out_ptr, x + 1)
    tl.store(out_ptr + 1, (x + 1.0).to(tl.int32))
    tl.store(out_ptr + 2, x - 1)
    tl.store(out_ptr + 3, 1 - x)


def test_an_integer_is_no_float_and_sides_differ(kernel_device):
    """2^24 + 1 is no float32."""
    x = torch.tensor([2**24], dtype=torch.int32, device=kernel_device)
    out = x.new_zeros(4)
    _numbers_kernel[(1,)](x, out)
    assert out.tolist() == [2**24 + 1, 2**24, 2**24 - 1, 1 - 2**24]


@kernel
def _types_kernel(ints_ptr, longs_ptr, floats_ptr, out_ptr):
    """out: int64; a sum wraps in the type of its operands."""
    column = tl.arange(0, 4)
    tl.store(out_ptr + column, (tl.load(ints_ptr + column) + 1).to(tl.int64))
    tl.store(out_ptr + 4 + column, tl.load(longs_ptr + column) + 1)
    tl.store(out_ptr + 8 + column, (tl.load(floats_ptr + column) + 1).to(tl.int64))
    tl.store(out_ptr + 12 + column, (tl.load(floats_ptr + column) + 1.5).to(tl.int64))
    tl.store(out_ptr + 16, (1 - tl.load(ints_ptr)).to(tl.int64))
    tl.store(out_ptr + 17 + column, (1 - tl.load(ints_ptr + column)).to(tl.int64))
    tl.store(out_ptr + 21 + column, 1 - (tl.load(longs_ptr + column) + 5))


def test_a_number_has_the_type_of_the_tensor_beside_it(kernel_device):
    most = 2**31 - 1
    ints = torch.tensor([0, 1, -1, most], dtype=torch.int32, device=kernel_device)
    floats = torch.tensor([0.0, 1.0, 2.0, 3.0], device=kernel_device)
    out = torch.zeros(25, dtype=torch.int64, device=kernel_device)
    _types_kernel[(1,)](ints, ints.long(), floats, out)
    assert out[:16].tolist() == [1, 2, 0, -most - 1, 1, 2, 0, most + 1, 1, 2, 3, 4, 1, 2, 3, 4]
    assert out[16:].tolist() == [1, 1, 0, 2, 1 - most, -4, -5, -3, -4 - most]


@kernel
def _shapes_kernel(x_ptr, y_ptr, out_ptr):
    row, column = tl.arange(0, 2), tl.arange(0, 4)
    x, y = tl.load(x_ptr + row), tl.load(y_ptr + column)
    place = row[:, None] * 4 + column
    tl.store(out_ptr + place, x[:, None] - y)
    tl.store(out_ptr + 8 + place, y[None, :] - x[:, None])
    tl.store(out_ptr + 16 + place, tl.sum(x, 0) - (x[:, None] + tl.zeros((2, 4), tl.float32)))


def test_shapes_are_broadcast_from_either_side(kernel_device):
    x, y = torch.tensor([1.0, 10.0], device=kernel_device), torch.arange(4.0, device=kernel_device)
    out = torch.zeros(3, 2, 4, device=kernel_device)
    _shapes_kernel[(1,)](x, y, out)
    difference = x[:, None] - y
    assert torch.equal(out, torch.stack((difference, -difference, (11 - x)[:, None].expand(2, 4))))
