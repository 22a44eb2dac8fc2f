"""Where a layer has two ways to compute one thing, both agree."""

import pytest
import torch
import torch.nn.functional as F

from espalier.models.layers.linear import Linear
from espalier.models.layers.norm import RMSNorm
from espalier.models.weight_formats.base import LastRowsWeight, Weight
from espalier.models.weight_formats.dense import DenseWeight, PackedWeight, has_onednn_layout
from espalier.models.weight_formats.quantised import QuantisedWeight
from tests.kernels.quantised_inputs import drawn


@pytest.mark.parametrize("rows", [0, 1, 3, 16, 130])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_linears_agree_with_plain_ones(rows: int, bias: bool) -> None:
    weight, x = torch.randn(48, 40), torch.randn(rows, 40)
    offset = torch.randn(48) if bias else None
    if not has_onednn_layout(weight):
        pytest.skip("no packed layout on this machine")
    packed, plain = Linear(PackedWeight(weight), offset), Linear(DenseWeight(weight), offset)
    torch.testing.assert_close(packed(x), plain(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(packed(x.view(rows, 1, 40)), plain(x).view(rows, 1, 48), rtol=1e-5, atol=1e-5)
    assert torch.equal(plain(x), F.linear(x, weight, offset))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("first", [0, 64, 96])
@pytest.mark.parametrize("kind", ["dense", "packed", "fp8-block", "int4"])
def test_the_last_rows_of_a_layer_are_a_layer_in_its_memory(kind: str, first: int, bias: bool) -> None:
    dtype = torch.float64 if kind == "dense" else torch.float32
    plain, x = torch.randn(160, 256, dtype=dtype), torch.randn(5, 256, dtype=dtype)
    weight: Weight = DenseWeight(plain)
    memory = plain
    if kind == "packed":
        if not has_onednn_layout(plain):
            pytest.skip("no packed layout on this machine")
        weight = PackedWeight(plain)
    elif kind != "dense":
        matrix = drawn(kind, (), 160, 256, torch.device("cpu"))
        weight, memory = QuantisedWeight(matrix, kind), matrix.codes
    whole = Linear(weight, torch.randn(160, dtype=dtype) if bias else None)
    last = whole.rows_from(first)
    torch.testing.assert_close(last(x), whole(x)[:, first:], rtol=1e-5, atol=1e-5)
    assert last.shape == (160 - first, 256) and last(x).is_contiguous()
    if isinstance(last.weight, LastRowsWeight):
        # A packed weight cannot be cut, nor can a block of scales.
        assert kind == "packed" or (kind == "fp8-block" and first == 96)
        assert last.weight.whole_weight is weight and last.weight.nbytes == 0
    else:
        held = last.weight.tensor if kind == "dense" else last.weight.matrix.codes
        assert held.data_ptr() == memory[first:].data_ptr()


def test_only_float32_is_packed() -> None:
    assert not has_onednn_layout(torch.zeros(4, 4, dtype=torch.float64))
    assert not has_onednn_layout(torch.zeros(4, 4, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("exact", [False, True], ids=["weight of the rows' dtype", "weight in float32"])
@pytest.mark.parametrize("scale", [0.0, 1e-4, 1.0, 1e4])
def test_norms_agree_with_the_library(dtype: torch.dtype, scale: float, exact: bool) -> None:
    """Zeros and values below eps included."""
    weight = torch.randn(32, dtype=torch.promote_types(dtype, torch.float32) if exact else dtype)
    x = scale * torch.randn(2, 5, 32, dtype=dtype)
    expected = F.rms_norm(x.double(), (32,), weight.double(), 1e-5)
    norm = RMSNorm(weight, 1e-5)
    for ours in (norm(x), norm.add_and_norm(torch.zeros_like(x), x)[1]):
        assert ours.dtype == dtype
        # A weight that is rounded to bfloat16, or a length, would be two roundings away.
        bound = 0.51 if dtype == torch.bfloat16 else 4
        torch.testing.assert_close(ours.double(), expected, rtol=bound * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_norm_after_an_addition_is_of_the_rounded_sum(dtype: torch.dtype) -> None:
    norm, delta, residual = RMSNorm(torch.randn(32, dtype=dtype), 1e-5), *torch.randn(2, 5, 32, dtype=dtype)
    kept = residual.clone()
    total, normed = norm.add_and_norm(delta, residual)
    assert torch.equal(total, residual + delta) and torch.equal(normed, norm(total)) and torch.equal(residual, kept)
    total, normed = norm.add_and_norm(None, residual)
    assert total is residual and torch.equal(normed, norm(residual))
