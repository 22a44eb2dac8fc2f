"""The memory checker for kernels in the interpreter (tests/kernels/bounds.py) reports accesses outside of arguments."""

from __future__ import annotations

import pytest
import torch
import triton.language as tl

from espalier.kernels.runtime.jit import kernel

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the checker is for the interpreter, on the CPU")


@kernel
def _copy_kernel(from_ptr, to_ptr, num_read, num_written, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    value = tl.load(from_ptr + index, mask=index < num_read, other=0.0)
    tl.store(to_ptr + index, value, mask=index < num_written)


def copy(num_read, num_written):
    values = torch.arange(10.0)
    # A neighbouring tensor that a wrong address could hit.
    out, _neighbour = torch.zeros(10), torch.zeros(64)
    _copy_kernel[(1,)](values, out, num_read, num_written, BLOCK=16)
    return out


@pytest.mark.parametrize(
    ("num_read", "num_written", "access"), [(11, 10, "a load"), (10, 11, "a store"), (16, 16, "a load")]
)
def test_an_access_past_an_argument_is_reported(kernel_device, num_read, num_written, access):
    with pytest.raises(Exception, match=f"{access} outside of all arguments"):
        copy(num_read, num_written)


def test_masked_addresses_are_not_checked(kernel_device):
    assert torch.equal(copy(10, 10), torch.arange(10.0))
