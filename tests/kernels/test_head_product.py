"""Each head's product is its own, close to float64, and no row's bits depend on the other rows."""

import pytest
import torch

from espalier.errors import EspalierError
from espalier.kernels.ops.rope import head_product
from tests.kernels.treeing import poisoned

# float16 on a CPU: Triton's interpreter does not multiply bfloat16.
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float16
# rows, heads, inputs, outputs
SHAPES = [(1, 3, 6, 12), (5, 2, 33, 70), (16, 4, 128, 129), (2, 3, 512, 24)]
LARGE = [(1, 16, 128, 512), (16, 128, 128, 512), (1, 16, 512, 128), (16, 128, 512, 128)]


def drawn(rows, heads, num_in, num_out, device):
    """x, a slice of wider rows; the weight, as k_up lies in kv_b_proj; out, a slice of wider rows full of 7."""
    generator = torch.Generator().manual_seed(rows)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(device, DTYPE)

    x, weight = normal(rows, heads, num_in + 8)[..., :num_in], normal(heads, num_in + 3, num_out)[:, :num_in]
    return x, weight * num_in**-0.5, torch.full((rows, heads, num_out + 5), 7.0, dtype=DTYPE, device=device)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, *(pytest.param(s, marks=pytest.mark.gpu) for s in LARGE)], ids=str)
@pytest.mark.parametrize("make", [head_product.triton, head_product.reference])
def test_is_the_product_of_each_head(kernel_device, make, shape, transposed):
    x, weight, out = drawn(*shape, kernel_device)
    weight = weight.transpose(1, 2).contiguous().transpose(1, 2) if transposed else weight
    with poisoned():
        make(x, weight, out[..., : shape[3]])
    exact = torch.einsum("nhi,hio->nho", x.double(), weight.double())
    torch.testing.assert_close(out[..., : shape[3]].double(), exact, rtol=2**-7, atol=2**-8)
    assert (out[..., shape[3] :] == 7).all(), "written past the outputs"


def test_a_rows_bits_do_not_depend_on_the_others(kernel_device):
    x, weight, out = drawn(16, 3, 40, 24, kernel_device)
    head_product.triton(x, weight, out[..., :24])
    for row in range(16):
        alone = torch.empty_like(out[:1, :, :24])
        head_product.triton(x[row : row + 1], weight, alone)
        assert torch.equal(alone[0], out[row, :, :24])


@pytest.mark.parametrize(
    "wrong", [lambda x: x[:0], lambda x: x.repeat(9, 1, 1), lambda x: x.float(), lambda x: x.repeat(1, 1, 2)[..., ::2]]
)
def test_what_it_does_not_take_is_refused(kernel_device, wrong):
    x, weight, out = drawn(2, 3, 40, 24, kernel_device)
    with pytest.raises(EspalierError, match="head_product"):
        given = wrong(x)
        head_product.triton(given, weight.to(given.dtype), out[:1, :, :24].repeat(len(given), 1, 1).to(given.dtype))
