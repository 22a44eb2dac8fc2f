"""The norm and the router in one launch equal the two one after another, and no row's bits depend on the others."""

from types import SimpleNamespace

import pytest
import torch

from espalier.errors import EspalierError
from espalier.kernels.layers.quantised import FP8, InputScales, QuantisedMatrix, RoundedRows
from espalier.kernels.ops.experts import Routing, grouped_experts, scale_by_gate
from espalier.kernels.ops.linear import quantise_rows
from espalier.kernels.ops.norm import add_rms_norm, norm_router
from espalier.models.layers import mlp as layer
from espalier.models.layers import recurrent
from espalier.models.layers.linear import Linear
from espalier.models.layers.mlp import GatedMLP, MixtureMLP
from espalier.models.layers.norm import RMSNorm
from espalier.models.weight_formats.dense import DenseWeight
from espalier.models.weight_formats.quantised import QuantisedWeight
from tests.kernels.treeing import poisoned

# Triton's interpreter does not round to bfloat16 as a GPU does.
DTYPES = [torch.float16, *([torch.bfloat16] if torch.cuda.is_available() else [])]
# rows, hidden size, experts, parts of delta (0: one, in the dtype of the residual)
SHAPES = [(1, 2048, 128, 4), (4, 200, 6, 0), (3, 64, 5, 10), (2, 2880, 32, 1), (1, 7168, 9, 2)]


def drawn(rows, size, experts, parts, device, dtype=torch.float16):
    generator = torch.Generator().manual_seed(rows)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(device)

    delta = normal(parts, rows, size) if parts else normal(rows, size).to(dtype)
    residual = normal(rows, size + 16).to(dtype)[:, :size]
    # Norms of 1 + w have weights in float32.
    weight = (1 + normal(size) / 5).to(torch.float32 if rows == 3 else dtype)
    return delta, residual, weight, 1e-6, (normal(experts, size) / size**0.5).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_two_launches(kernel_device, shape, dtype):
    """The sum to the bit; the norm within two ulps; the logits as far as their own norm gives them in float32."""
    inputs = drawn(*shape, kernel_device, dtype)
    with poisoned():
        total, normed, rows, logits = norm_router.triton(*inputs)
    assert rows is normed
    expected_total, expected_normed, _, expected_logits = norm_router.reference(*inputs)
    assert torch.equal(total, expected_total) and torch.equal(total, add_rms_norm.triton(*inputs[:4])[0])
    ulp = torch.finfo(dtype).eps
    torch.testing.assert_close(normed, expected_normed, rtol=2 * ulp, atol=2 * ulp)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), normed.double() @ inputs[4].double().T, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits, expected_logits, rtol=0, atol=4 * ulp)
    assert torch.equal(norm_router.triton(*inputs, dtype=dtype)[3], logits.to(dtype))


@pytest.mark.parametrize("group", [None, 64])
def test_the_norm_is_also_rounded(kernel_device, group):
    """As by a launch of its own, to the bit, and the other results stay."""
    inputs = drawn(3, 200, 70, 2, kernel_device)
    total, normed, rounded, logits = norm_router.triton(*inputs, InputScales(group))
    expected_total, expected, _, expected_logits = norm_router.triton(*inputs)
    assert torch.equal(total, expected_total) and torch.equal(normed, expected) and torch.equal(logits, expected_logits)
    values, scales = quantise_rows.triton(expected, InputScales(group))
    assert torch.equal(rounded.values.view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(rounded.scales, scales)
    by_reference = norm_router.reference(*inputs, InputScales(group))[2]
    torch.testing.assert_close(by_reference.scales, scales, rtol=2e-3, atol=0)
    assert by_reference.values.shape == values.shape and by_reference.dtype == rounded.dtype
    with pytest.raises(EspalierError, match="groups of a power of two, not 48"):
        norm_router.triton(*inputs, InputScales(48))


def test_a_rows_bits_do_not_depend_on_the_others(kernel_device):
    delta, residual, *weights = drawn(4, 300, 12, 3, kernel_device)
    together = norm_router.triton(delta, residual, *weights)
    for row in range(4):
        alone = norm_router.triton(delta[:, row : row + 1], residual[row : row + 1], *weights)
        assert all(torch.equal(one[0], all_rows[row]) for one, all_rows in zip(alone, together, strict=True))


def test_what_it_does_not_take_is_refused(kernel_device):
    delta, residual, weight, eps, router = drawn(3, 64, 8, 2, kernel_device)
    for wrong in (
        (delta[..., 1:], residual, weight, eps, router),
        (delta.double(), residual, weight, eps, router),
        (delta, residual, weight[1:], eps, router),
        (delta, residual, weight, eps, router[:, 1:]),
        (delta, residual, weight, eps, router.T.contiguous().T),
        (delta.repeat(1, 2, 1), residual.repeat(2, 1), weight, eps, router),
        (delta[:, :0], residual[:0], weight, eps, router),
    ):
        with pytest.raises(EspalierError, match="norm_router"):
            norm_router.triton(*wrong)


@pytest.mark.parametrize("rows", [1, 4])
def test_a_mixtures_block_is_the_norm_and_then_the_block(kernel_device, monkeypatch, rows):
    delta, residual, weight, eps, router = drawn(rows, 64, 8, 2, kernel_device)
    generator = torch.Generator().manual_seed(1)
    gate_up, down = (torch.randn(shape, generator=generator) / 8 for shape in ((8, 40, 64), (8, 64, 20)))
    mlp = MixtureMLP(
        Routing(8, 2), router, None, *(tensor.to(kernel_device, router.dtype) for tensor in (gate_up, down))
    )
    norm, live = RMSNorm(weight, eps), torch.arange(rows, device=kernel_device) != 1
    monkeypatch.setattr(layer, "supports_norm_router", lambda residual: False)
    expected_total, routed = mlp.norm_input(norm, delta, residual)
    expected = mlp(routed, live)
    monkeypatch.setattr(layer, "supports_norm_router", lambda residual: True)
    total, routed = mlp.norm_input(norm, delta, residual)
    parts = mlp(routed, live)
    assert torch.equal(total, expected_total) and parts.any()
    torch.testing.assert_close(parts, expected, rtol=2e-2, atol=1e-3)


def fp8_matrix(shape, seed, device, inputs):
    generator = torch.Generator().manual_seed(seed)
    codes = (torch.randn(shape, generator=generator) * 60).to(FP8).to(device)
    return QuantisedMatrix(
        "fp8", codes, torch.full((*shape[:-1], 1), 1e-3, device=device), shape[-1], input_scales=inputs
    )


@pytest.mark.parametrize("few", [True, False])
def test_fp8_experts_take_what_the_norm_rounds(kernel_device, monkeypatch, few):
    """The same bits as from a norm that does not round."""
    delta, residual, weight, eps, router = drawn(4, 64, 8, 2, kernel_device)
    inputs = InputScales()
    matrices = [fp8_matrix(shape, 1, kernel_device, inputs) for shape in ((8, 64, 64), (8, 64, 32))]
    mlp, norm = MixtureMLP(Routing(8, 2), router, None, *matrices), RMSNorm(weight, eps)
    monkeypatch.setattr(layer, "supports_norm_router", lambda residual: few)
    monkeypatch.setattr(layer, "grouped_experts", grouped_experts.triton)
    found = []
    for rounding in (None, inputs):
        monkeypatch.setattr(layer, "rounding_in_norm", lambda gate_up, x, rounding=rounding: rounding)
        total, routed = mlp.norm_input(norm, delta, residual)
        found.append((total, mlp(routed)))
    (expected_total, expected), (total, parts) = found
    assert torch.equal(total, expected_total) and torch.equal(parts, expected) and parts.any()


@pytest.mark.parametrize(("routes", "rounds"), [(True, True), (True, False), (False, True)])
def test_a_delta_block_reads_the_same_in_fewer_launches(kernel_device, monkeypatch, routes, rounds):
    delta, residual, weight, eps, ba = drawn(4, 64, 12, 2, kernel_device)
    qkvz = Linear(QuantisedWeight(fp8_matrix((40, 64), 2, kernel_device, InputScales()), "fp8"))
    block, norm = SimpleNamespace(qkvz=qkvz, ba=Linear(DenseWeight(ba))), RMSNorm(weight, eps)
    found = []
    for in_router, in_norm in ((False, False), (routes, rounds)):
        monkeypatch.setattr(recurrent, "supports_norm_router", lambda x, taken=in_router: taken)
        monkeypatch.setattr(recurrent, "is_rounded_in_launch", lambda *_, taken=in_norm: taken)
        total, (of_qkvz, of_ba) = recurrent.DeltaNet.norm_input(block, norm, delta, residual)
        assert isinstance(of_qkvz, RoundedRows) == in_norm
        found.append((total, qkvz(of_qkvz), of_ba))
    for one, other in zip(*found, strict=True):
        assert one.dtype == other.dtype == residual.dtype
        torch.testing.assert_close(one, other, rtol=2e-2, atol=4e-3)


@pytest.mark.parametrize("rounds", [False, True])
def test_a_gated_shared_expert_takes_the_rows_of_the_others(kernel_device, monkeypatch, rounds):
    delta, residual, weight, eps, router = drawn(4, 64, 8, 2, kernel_device)
    inputs, norm = InputScales(), RMSNorm(weight, eps)
    stacks = [fp8_matrix(shape, 1, kernel_device, inputs) for shape in ((8, 64, 64), (8, 64, 32))]
    own = [fp8_matrix(shape, 2, kernel_device, inputs) for shape in ((64, 64), (64, 32))]
    shared = GatedMLP(*(Linear(QuantisedWeight(matrix, "fp8")) for matrix in own))
    gate = Linear(DenseWeight(torch.randn(1, 64, device=kernel_device).to(residual.dtype) / 8))
    mlp = MixtureMLP(Routing(8, 2), router, None, *stacks, shared, gate)
    monkeypatch.setattr(layer, "rounding_in_norm", lambda gate_up, x: inputs)
    monkeypatch.setattr(layer, "is_rounded_in_launch", lambda *_: rounds)
    monkeypatch.setattr(layer, "grouped_experts", grouped_experts.triton)
    monkeypatch.setattr(layer, "scale_by_gate", scale_by_gate.triton)
    _, routed = mlp.norm_input(norm, delta, residual)
    assert (layer._shared_mlp_rows(shared, mlp.gate_up, *routed[:2]) is routed.expert_rows) == rounds
    expected = shared(routed.x).double() * gate(routed.x).double().sigmoid()
    torch.testing.assert_close(mlp(routed)[-1].double(), expected, rtol=5e-3, atol=1e-3)
