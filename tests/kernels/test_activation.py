"""The activation of gate and up equals float64 arithmetic within the stated tolerance, for every kind."""

import pytest
import torch
import torch.nn.functional as F

from espalier.errors import EspalierError
from espalier.kernels.layers.quantised import InputScales, RoundedRows, quantise_inputs
from espalier.kernels.ops.activation import (
    GELU_TANH,
    RELU2,
    SILU,
    Activation,
    activation_rounded_once,
    gated_activation,
)
from espalier.kernels.ops.linear import (
    activate_partial_sums,
    add_partial_sums,
    linear,
    linear_gated,
    linear_quantised,
    linear_quantised_gated,
    quantise_rows,
)
from espalier.models.layers.linear import Linear
from espalier.models.layers.mlp import GatedMLP
from espalier.models.weight_formats.base import LastRowsWeight
from espalier.models.weight_formats.dense import DenseWeight, dense_weight
from espalier.models.weight_formats.quantised import QuantisedWeight
from tests.kernels.quantised_inputs import DTYPE, drawn
from tests.pairwise import fewer, in_turn_params, product_params

SMALL = [(0, 4), (1, 1), (2, 7), (3, 1500)]
LARGE = [(1, 14336), (64, 14336), (4096, 14336), (5, 28672)]
GPT_OSS = Activation(alpha=1.702, up_offset=1.0, limit=7.0)
KINDS = {"silu": SILU, "gpt_oss": GPT_OSS, "gelu_tanh": GELU_TANH, "relu2": RELU2}
# The interpreter warns of an exponential that overflows where the result is 0.
pytestmark = pytest.mark.filterwarnings("ignore:overflow")
AFTER_THE_PRODUCT = [("dense", "gelu_tanh"), ("fp8-channel", "gpt_oss"), ("int4", "relu2")]
of_each = pytest.mark.parametrize("activation", KINDS.values(), ids=KINDS)


def exactly(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    if activation is RELU2:
        return F.relu(x.double()) ** 2
    gate, up = x.double().chunk(2, -1)
    if activation is GPT_OSS:
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    return (F.gelu(gate, approximate="tanh") if activation is GELU_TANH else F.silu(gate)) * up


@of_each
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "size"), [*SMALL, *(pytest.param(*shape, marks=pytest.mark.gpu) for shape in LARGE)])
def test_gate(rows, size, dtype, activation, kernel_device):
    generator = torch.Generator().manual_seed(size)
    x = (4 * torch.randn(rows, 2 * size, generator=generator, dtype=torch.float64)).to(dtype).to(kernel_device)
    x_before, expected = x.clone(), exactly(x, activation)
    out = gated_activation.triton(x, activation)
    assert out.dtype == dtype and torch.equal(x, x_before)
    # The reference rounds both silu(gate) and the product.  In float32 a GPU computes exp as 2**x with a rounded x, an
    # error of |x| ulps; with a standard deviation of 4, |gate| reaches about 20.  The exponent of GPT_OSS is steeper.
    info, most = torch.finfo(dtype), float(x.abs().max()) ** 2 if x.numel() else 0.0
    ulps = 20 * (1.702 if activation is GPT_OSS else 1) if dtype == torch.float32 else 4
    tolerance = {"rtol": ulps * info.eps, "atol": 4 * info.tiny}
    if activation is GELU_TANH:
        # Where GELU is nearly 0, PyTorch's 1 + tanh loses the digits that the kernel's exponential keeps.
        tolerance["atol"] += most * (2**-50 if dtype == torch.float64 else 2**-22)
    torch.testing.assert_close(out.double(), expected, **tolerance)
    torch.testing.assert_close(gated_activation.reference(x, activation).double(), expected, **tolerance)
    torch.testing.assert_close(activation_rounded_once(x, activation).double(), expected, **tolerance)


@pytest.mark.parametrize(("name", "shape"), in_turn_params(list(KINDS), [(4, 2, 1500), (1, 3, 7), (2, 0, 4)]))
def test_parts_of_gate_and_up_are_added_first(shape, name, kernel_device):
    """(parts, rows, columns)"""
    activation, (parts, rows, size) = KINDS[name], shape
    generator = torch.Generator().manual_seed(size)
    halves = torch.randn(parts, rows, activation.num_matrices * size, generator=generator).to(kernel_device)
    made = activate_partial_sums.triton(halves, torch.float16, activation)
    assert made.dtype == torch.float16 and made.shape == (rows, size)
    assert torch.equal(made, gated_activation.triton(add_partial_sums.triton(halves, torch.float16), activation))
    expected = activate_partial_sums.reference(halves, torch.float16, activation)
    torch.testing.assert_close(made, expected, rtol=4e-3, atol=1e-4)
    assert torch.equal(
        activate_partial_sums.triton(halves[0], torch.float32, activation),
        gated_activation.triton(halves[0], activation),
    )
    for rounding in (InputScales(), InputScales(4), InputScales(None, torch.full((1,), 0.1, device=kernel_device))):
        rounded = activate_partial_sums.triton(halves, torch.float16, activation, rounding)
        values, scales = quantise_rows.triton(made, rounding)
        assert torch.equal(rounded.values.view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(rounded.scales, scales) and rounded.dtype == torch.float16
    with pytest.raises(EspalierError, match="not rounded in groups of 3"):
        activate_partial_sums.triton(halves, torch.float16, activation, InputScales(3))


@pytest.mark.parametrize("activation", [SILU, GELU_TANH])
def test_large_gates_do_not_overflow(kernel_device, activation):
    x = torch.tensor([[-1e4, 1e4, -200.0, 0.0, 2.0, 3.0, 5.0, 7.0]], device=kernel_device)
    assert gated_activation.triton(x, activation).tolist() == [[-0.0, 3e4, -0.0, 0.0]]


@of_each
def test_rows_may_be_strided(kernel_device, activation):
    wide = torch.randn(4, 30, device=kernel_device, dtype=torch.float64)
    out = gated_activation.triton(wide[:, 6:26], activation)
    torch.testing.assert_close(out, gated_activation.reference(wide[:, 6:26].contiguous(), activation))


@pytest.mark.parametrize("shape", [(2, 7), (2, 3, 8)])
def test_wrong_shapes_are_refused(shape, kernel_device):
    with pytest.raises(EspalierError, match="gate_up"):
        gated_activation.triton(torch.zeros(shape, device=kernel_device))


@pytest.mark.parametrize(
    ("kind", "name"),
    fewer(
        product_params(["dense", "fp8-channel", "fp8-block-inputs", "int4", "mxfp4"], list(KINDS)),
        lambda kind, name: name == "silu" or (kind, name) in AFTER_THE_PRODUCT,
    ),
)
def test_products_of_every_format_take_every_activation(kernel_device, name, kind):
    """Silu in the product's epilogue, others in a launch after it: the bits of the product, then `gated_activation`."""
    activation = KINDS[name]
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(1)).to(kernel_device, DTYPE)
    if kind == "dense":
        weight = torch.randn(2 * 64, 128, generator=torch.Generator().manual_seed(2)).to(kernel_device, DTYPE)
        made = linear_gated(x, weight, None, None, activation)
        assert torch.equal(made, gated_activation(linear(x, weight, None, None), activation))
        return
    matrix = drawn(kind, (), 2 * 64, 128, kernel_device)
    for product, of_gated, act in (
        (linear_quantised.triton, linear_quantised_gated.triton, gated_activation.triton),
        (linear_quantised, linear_quantised_gated, gated_activation),
    ):
        made = of_gated(x, matrix, None, None, activation)
        assert torch.equal(made, act(product(x, matrix, None), activation))


@of_each
def test_an_mlp_takes_it_with_every_weight(activation):
    """As rows of the product, in the form in which the weight gives them: dense, packed, cut and quantised."""
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    dense = torch.randn(2 * 32, 64, generator=torch.Generator().manual_seed(2))
    cpu = torch.device("cpu")
    quantised = QuantisedWeight(drawn("int4", (), 3 * 32, 64, cpu), "int4")
    rounded = QuantisedWeight(drawn("fp8-channel-inputs", (), 2 * 32, 64, cpu), "fp8")
    for weight in (
        DenseWeight(dense),
        dense_weight(dense),
        LastRowsWeight(quantised, 32),
        quantised.rows_from(32),
        rounded,
    ):
        gate_up = Linear(weight)
        down = Linear(DenseWeight(torch.eye(64 // activation.num_matrices)))
        assert torch.equal(GatedMLP(gate_up, down, activation)(x), gated_activation(gate_up(x), activation))
    values = RoundedRows(*quantise_inputs(x, rounded.rounding), x.dtype)
    assert torch.equal(
        Linear(rounded).activated_product(values, activation), gated_activation(Linear(rounded)(values), activation)
    )
