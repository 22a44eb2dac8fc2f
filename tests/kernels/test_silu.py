"""silu(gate) · up equals float64 arithmetic within the stated tolerance."""

import pytest
import torch
import torch.nn.functional as F

from espalier.errors import EspalierError
from espalier.kernels.ops.activation import silu_mul

SMALL = [(0, 4), (1, 1), (2, 7), (3, 1500)]
LARGE = [(1, 14336), (64, 14336), (4096, 14336), (5, 28672)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "size"), [*SMALL, *(pytest.param(*shape, marks=pytest.mark.gpu) for shape in LARGE)])
def test_gate(rows, size, dtype, kernel_device):
    generator = torch.Generator().manual_seed(size)
    x = (4 * torch.randn(rows, 2 * size, generator=generator, dtype=torch.float64)).to(dtype).to(kernel_device)
    x_before = x.clone()
    out = silu_mul.triton(x)
    assert out.dtype == dtype and torch.equal(x, x_before)
    gate, up = x.double().chunk(2, -1)
    # The reference rounds both silu(gate) and the product.  In float32 a GPU computes exp as 2**x with a rounded x, an
    # error of |gate| ulps; with a standard deviation of 4, |gate| reaches about 20.
    rtol = 20 if dtype == torch.float32 else 4
    tolerance = {"rtol": rtol * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).tiny}
    torch.testing.assert_close(out.double(), F.silu(gate) * up, **tolerance)
    torch.testing.assert_close(silu_mul.reference(x).double(), F.silu(gate) * up, **tolerance)


@pytest.mark.filterwarnings("ignore:overflow")
def test_large_gates_do_not_overflow(kernel_device):
    x = torch.tensor([[-1e4, 1e4, -200.0, 0.0, 2.0, 3.0, 5.0, 7.0]], device=kernel_device)
    assert silu_mul.triton(x).tolist() == [[-0.0, 3e4, -0.0, 0.0]]


def test_rows_may_be_strided(kernel_device):
    wide = torch.randn(4, 30, device=kernel_device)
    torch.testing.assert_close(silu_mul.triton(wide[:, 6:26]), silu_mul.reference(wide[:, 6:26].contiguous()))


@pytest.mark.parametrize("shape", [(2, 7), (2, 3, 8)])
def test_wrong_shapes_are_refused(shape, kernel_device):
    with pytest.raises(EspalierError, match="gate_up"):
        silu_mul.triton(torch.zeros(shape, device=kernel_device))
