"""Blocks of a layer given inputs that the norm before has rounded to FP8: the same results as from a tensor."""

from types import SimpleNamespace

import pytest
import torch

from espalier.kernels.layers.quantised import RoundedRows
from espalier.kernels.ops.linear import quantise_rows
from espalier.models.layers.attention import Attention
from espalier.models.layers.linear import Linear
from espalier.models.layers.mlp import GatedMLP
from espalier.models.weight_formats.quantised import QuantisedWeight
from tests.kernels.quantised_inputs import DTYPE, drawn

HIDDEN, HEADS = 64, 4


def layer(num_out, num_in, device, kind):
    return Linear(QuantisedWeight(drawn(kind, (), num_out, num_in, device), "fp8"))


def inputs(linear, device):
    """(x, x as a norm rounds it for the layer)."""
    x = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(1)).to(DTYPE).to(device)
    return x, RoundedRows(*quantise_rows.triton(x, linear.rounding), x.dtype)


def close(out, expected):
    """On a CPU a tensor takes the reference, which sums in another order."""
    torch.testing.assert_close(out.sum(0) if out.ndim == 3 else out, expected, rtol=4e-3, atol=4e-3, check_dtype=False)


@pytest.mark.parametrize("kind", ["fp8-channel-inputs", "fp8-block-inputs"])
def test_an_mlp(kernel_device, kind):
    mlp = GatedMLP(layer(256, HIDDEN, kernel_device, kind), layer(HIDDEN, 128, kernel_device, kind))
    x, rounded = inputs(mlp.gate_up, kernel_device)
    close(mlp.gate_up.activated_product(rounded), mlp.gate_up.activated_product(x))
    assert mlp(rounded).shape[-2:] == (3, HIDDEN)


def test_attention(kernel_device):
    kind = "fp8-channel-inputs"
    rope = SimpleNamespace(query_scales=None)
    qkv, out = (layer(HIDDEN, HIDDEN, kernel_device, kind) for _ in range(2))
    attention = Attention(qkv, out, HEADS, rope)
    seen = []

    class Written:
        def rotation(self, rope):
            pass

        def write(self, _, heads, *turn):
            seen.append((heads.sum(0) if heads.ndim == 4 else heads).to(DTYPE))

    x, rounded = inputs(attention.qkv, kernel_device)
    for given in (x, rounded):
        attention.write_kv(0, given, Written())
    torch.testing.assert_close(seen[1], seen[0], rtol=4e-3, atol=4e-3)
    close(attention.qkv(rounded), attention.qkv(x))
