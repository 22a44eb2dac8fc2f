"""The convolutions within a block, of a sublayer's input and of its output, compared to plain loops in float64."""

import pytest
import torch
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.ops.drafts import block_conv, block_conv_norm
from tests.pairwise import in_turn_params

EPS = 1e-5
# (blocks, rows of a block, channels, channels of a group, taps): no rows, one row, more rows than a program has, fewer
# rows than taps, groups that do not fill a program, channels that do not fill a step.
SHAPES = [(0, 3, 32, 16, 2), (1, 1, 32, 16, 2), (3, 7, 96, 16, 2), (2, 2, 48, 4, 3), (1, 5, 144, 24, 1)]
LARGE = [pytest.param((4, 16, 4096, 16, 2), marks=pytest.mark.gpu)]
shapes = pytest.mark.parametrize("shape", [*SHAPES, *LARGE], ids=str)


def drawn(device: torch.device, dtype: torch.dtype, *shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).to(device)


def plain(x: Tensor, delta: Tensor, base: Tensor, width: int) -> Tensor:
    """Row by row and tap by tap: x [N, H], delta [N, T, G], base [T, H], in float64."""
    x, delta, base = x.double(), delta.double(), base.double()
    rows = []
    for row in range(len(x)):
        total = torch.zeros_like(x[row])
        for tap in range(min(len(base), row % width + 1)):
            of_channel = delta[row, tap].repeat_interleave(x.shape[1] // delta.shape[2])
            total = total + x[row - tap] * (base[tap] + of_channel)
        rows.append(total)
    return torch.stack(rows) if rows else x


def close(out: Tensor, expected: Tensor, terms: int = 1) -> None:
    """One rounding to the dtype after another order of summation; the interpreter truncates to bfloat16.

    terms: of a float32 sum of values near 1, whose rounding errors grow with its root.
    """
    eps = torch.finfo(out.dtype).eps
    torch.testing.assert_close(out.double(), expected.double(), rtol=4 * eps, atol=max(16, 2 * terms**0.5) * eps)


@shapes
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("make", [block_conv.triton, block_conv.reference])
def test_a_sublayers_input(make, shape, dtype, kernel_device):
    blocks, width, size, group, taps = shape
    groups = size // group
    x = drawn(kernel_device, dtype, blocks * width, size, seed=1)
    weight = drawn(kernel_device, dtype, 2 * taps * groups, size, seed=2) / size**0.5
    base = drawn(kernel_device, dtype, taps, size, seed=3)
    out, coefficients = make(x, weight, base, width)
    delta = (x.double() @ weight.double().T).view(len(x), 2, taps, groups)
    close(coefficients, delta[:, 1], size)
    # From the rounded product.
    rounded = (x.float() @ weight.float().T).to(dtype).view(len(x), 2, taps, groups)
    torch.testing.assert_close(
        out.double(), plain(x, rounded[:, 0], base, width), rtol=1e-2 if dtype == torch.float16 else 1e-5, atol=1e-2
    )


@shapes
@pytest.mark.parametrize(
    ("parts", "dtype"), in_turn_params([None, 1, 3], [torch.float64, torch.float32, torch.float16])
)
@pytest.mark.parametrize("make", [block_conv_norm.triton, block_conv_norm.reference])
def test_a_sublayers_output(make, shape, dtype, parts, kernel_device):
    blocks, width, size, group, taps = shape
    rows = blocks * width
    exact = torch.promote_types(dtype, torch.float32)
    whole = (rows, size) if parts is None else (parts, rows, size)
    delta = drawn(kernel_device, dtype if parts is None else exact, *whole, seed=1)
    coefficients = drawn(kernel_device, dtype, rows, taps, size // group, seed=2)
    base, residual = (drawn(kernel_device, dtype, n, size, seed=3 + n) for n in (taps, rows))
    weight = drawn(kernel_device, dtype, size, seed=4)
    total, normed = make(delta, coefficients, base, residual, weight, EPS, width)
    assert total.dtype == normed.dtype == dtype
    summed = delta if parts is None else delta.sum(0).to(dtype)
    close(total, residual.double() + plain(summed, coefficients, base, width))
    close(normed, torch.nn.functional.rms_norm(total.double(), (size,), weight.double(), EPS))


def test_sizes_that_do_not_fit_are_refused(kernel_device):
    x, weight, base = (drawn(kernel_device, torch.float32, *shape, seed=1) for shape in ((6, 32), (8, 32), (2, 32)))
    with pytest.raises(EspalierError, match="6 rows in blocks of 4, do not divide"):
        block_conv.triton(x, weight, base, 4)
    with pytest.raises(EspalierError, match="block_conv: weight needs shape"):
        block_conv.triton(x, weight[:7], base, 3)
    with pytest.raises(EspalierError, match="6 rows in blocks of 4"):
        block_conv_norm.triton(x, x.view(6, 2, 16), base, x, x[0], EPS, 4)
