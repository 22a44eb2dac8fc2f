"""Routing inside the expert product: the experts of `route`, and its weights to the bit."""

import pytest
import torch

from espalier.errors import EspalierError
from espalier.kernels.layers import experts_routed
from espalier.kernels.layers.activation import SILU, Activation
from espalier.kernels.layers.experts import grouped_experts_reference, grouped_experts_triton
from espalier.kernels.layers.experts_plan import ExpertsPlan, ProductPlan
from espalier.kernels.layers.experts_routed import routed_experts, routed_experts_triton
from espalier.kernels.layers.routing import Routing, route_reference, route_triton
from tests.kernels.test_experts import DTYPE, drawn, drawn_biases
from tests.kernels.test_experts_shared import assert_close, drawn_shared
from tests.kernels.treeing import poisoned

PLAN = ExpertsPlan(1, ProductPlan(16, 64, 2, 3), ProductPlan(32, 128, 4, 4))
ROUTINGS = {
    "v2-lite": Routing(64, 6),
    "qwen3": Routing(128, 8, norm_topk_prob=True),
    "v3": Routing(24, 3, "sigmoid", True, 2.5, n_group=4, topk_group=2, group_score="top2_sum", correction_bias=True),
    "gpt-oss": Routing(5, 4, "topk_softmax", logit_bias=True),
    "v2": Routing(60, 4, routed_scaling_factor=16.0, n_group=3, topk_group=1),
}


def inputs(routing, rows, device, dtype=DTYPE):
    """x, gate_up, down, logits and bias."""
    x, gate_up, down, _, _ = drawn(rows, routing.num_experts, routing.top_k, 40, 24, device, dtype)
    generator = torch.Generator().manual_seed(rows)
    exact = torch.promote_types(dtype, torch.float32)
    logits, bias = (torch.randn(*size, routing.num_experts, generator=generator, dtype=exact) for size in ((rows,), ()))
    has_bias = routing.correction_bias or routing.logit_bias
    return x, gate_up, down, logits.to(device), bias.to(device) if has_bias else None


@pytest.mark.parametrize("dtype", [DTYPE, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
def test_the_results_are_those_of_the_routing(kernel_device, routing, rows, dtype):
    x, gate_up, down, logits, bias = inputs(routing, rows, kernel_device, dtype)
    expected = grouped_experts_reference(x, gate_up, down, *route_reference(logits, bias, routing))
    with poisoned():
        found = routed_experts_triton(x, gate_up, down, logits, bias, routing, plan=PLAN)
    assert_close(found, expected.double(), dtype)


@pytest.mark.parametrize("warps", [1, 4, 8])
@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
def test_the_weights_are_those_of_the_launch_of_its_own_to_the_bit(kernel_device, routing, rows, warps):
    """For any number of warps and rows: then the products, which share a plan, are equal too."""
    x, gate_up, down, logits, bias = inputs(routing, rows, kernel_device)
    plan = ExpertsPlan(1, ProductPlan(16, 64, warps, 3), ProductPlan(32, 128, warps, 4))
    ids, weights = route_triton(logits, bias, routing)
    expected = grouped_experts_triton(x, gate_up, down, ids, weights, plan=plan)
    assert torch.equal(routed_experts_triton(x, gate_up, down, logits, bias, routing, plan=plan), expected)


@pytest.mark.parametrize("live", [[True, True], [False, True], [False, False]], ids=str)
def test_shared_experts_and_rows_without_expert(kernel_device, live):
    routing = ROUTINGS["v2-lite"]
    x, gate_up, down, logits, _ = inputs(routing, 2, kernel_device)
    shared, mask = drawn_shared(2, 40, 24, kernel_device), torch.tensor(live, device=kernel_device)
    ids, weights = route_reference(logits, None, routing)
    expected = grouped_experts_reference(x, gate_up, down, ids, weights, mask, shared=shared)
    logits[~mask] = torch.nan
    with poisoned():
        found = routed_experts_triton(x, gate_up, down, logits, None, routing, mask, shared=shared, plan=PLAN)
    assert_close(found, expected.double(), DTYPE)
    assert (found[:6, ~mask] == 0).all()


def test_biases_and_a_clamped_activation(kernel_device):
    routing = ROUTINGS["gpt-oss"]
    x, gate_up, down, logits, bias = inputs(routing, 2, kernel_device)
    how = {"biases": drawn_biases(gate_up, down), "activation": Activation(1.702, 1.0, 0.7), "extra": 1}
    ids, weights = route_reference(logits, bias, routing)
    expected = grouped_experts_reference(x, gate_up, down, ids, weights, **how)[:-1]
    found = routed_experts_triton(x, gate_up, down, logits, bias, routing, **how, plan=PLAN)
    assert found.shape == (5, 2, 40) and how["activation"] != SILU
    assert_close(found[:-1], expected.double(), DTYPE)


def test_equal_logits_choose_the_lower_experts_in_order(kernel_device):
    """And a row of NaN stays inside the experts."""
    routing = Routing(6, 2)
    x, gate_up, down, logits, _ = inputs(routing, 2, kernel_device)
    logits[0], logits[1] = torch.tensor([0.0, 2.0, 2.0, 1.0, 2.0, 0.0]), torch.nan
    ids = torch.tensor([[1, 2], [0, 1]], device=kernel_device)
    weights = route_reference(logits, None, routing)[1]
    expected = grouped_experts_reference(x, gate_up, down, ids, weights)
    found = routed_experts_triton(x, gate_up, down, logits, None, routing, plan=PLAN)
    assert_close(found[:, :1], expected[:, :1].double(), DTYPE)
    assert found[:, 1].isnan().all()


def test_where_a_launch_of_its_own_routes(monkeypatch):
    """On a CPU: the functions one after another."""
    routing = ROUTINGS["v3"]
    x, gate_up, down, logits, bias = inputs(routing, 3, "cpu", torch.float32)
    monkeypatch.setattr(experts_routed, "routed_experts_triton", None)
    expected = grouped_experts_reference(x, gate_up, down, *route_reference(logits, bias, routing))
    assert torch.equal(routed_experts(x, gate_up, down, logits, bias, routing), expected)
    assert torch.equal(routed_experts(x, gate_up, down, logits[None], bias, routing), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda logits, bias: (logits[:, 1:], bias), "logits needs shape"),
        (lambda logits, bias: (logits.double(), bias), "logits needs shape"),
        (lambda logits, bias: (logits, bias[1:]), "bias needs shape"),
    ],
)
def test_wrong_inputs_are_refused(change, message):
    routing = ROUTINGS["v3"]
    x, gate_up, down, logits, bias = inputs(routing, 2, "cpu")
    with pytest.raises(EspalierError, match=message):
        routed_experts_triton(x, gate_up, down, *change(logits, bias), routing, plan=PLAN)
