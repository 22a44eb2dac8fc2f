"""The check of addresses under which kernels run in the interpreter (tests/kernels/bounds.py) sees what it is for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from espalier.kernels.runtime.launch import kernel

if TYPE_CHECKING:
    import triton.language as tl

pytest.importorskip("triton", reason="needs Triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="of the interpreter, on the CPU")


@kernel
def _copy_kernel(from_ptr, to_ptr, read, written, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(from_ptr + at, mask=at < read, other=0.0)
    tl.store(to_ptr + at, value, mask=at < written)


def copy(read, written):
    values = torch.arange(10.0)
    # A neighbour that a wrong address could fall into.
    out, _beside = torch.zeros(10), torch.zeros(64)
    _copy_kernel[(1,)](values, out, read, written, BLOCK=16)
    return out


@pytest.mark.parametrize(("read", "written", "what"), [(11, 10, "a load"), (10, 11, "a store"), (16, 16, "a load")])
def test_a_place_past_an_argument_is_noticed(kernel_device, read, written, what):
    with pytest.raises(Exception, match=f"{what} of"):
        copy(read, written)


def test_what_the_mask_leaves_out_is_not_asked_for(kernel_device):
    assert torch.equal(copy(10, 10), torch.arange(10.0))
