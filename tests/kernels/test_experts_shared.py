"""Shared experts as tiles of the expert product: close to float64, and in the same order for every number of rows."""

import pytest
import torch
import torch.nn.functional as F

from espalier.errors import EspalierError
from espalier.kernels.layers.experts_plan import ProductPlan
from espalier.kernels.ops.activation import Activation
from espalier.kernels.ops.experts import MAX_SHARED_ROWS, ExpertBiases, SharedExperts, grouped_experts, scale_by_gate
from espalier.kernels.runtime.launch import Chip
from tests.kernels.test_experts import DTYPE, PLANS, assert_close, drawn, exact_parts, exactly_drawn
from tests.kernels.treeing import poisoned
from tests.pairwise import in_turn_params, product_params

# (rows, experts, choices, hidden size, intermediate size), pieces
CASES = [
    ((1, 4, 1, 16, 8), 1),
    ((1, 64, 6, 40, 24), 2),
    ((2, 5, 5, 33, 17), 3),
    ((7, 6, 2, 72, 65), 2),
    ((16, 8, 3, 24, 40), 1),
]
LARGE = [((rows, 64, 6, 2048, 1408), 2) for rows in (1, 4, 16)] + [((1, 16, 8, 7168, 2048), 1)]


def drawn_shared(pieces, hidden, inner, device, dtype=DTYPE):
    generator = torch.Generator().manual_seed(pieces)
    gate_up = torch.randn(2 * pieces * inner, hidden, generator=generator) * hidden**-0.5
    down = torch.randn(hidden, pieces * inner, generator=generator) * 0.2
    return SharedExperts(*(tensor.to(dtype).to(device) for tensor in (gate_up, down)))


def exact_pieces(x, shared, inner):
    """Each piece's share of the shared MLP, in float64."""
    gate, up = F.linear(x.double(), shared.gate_up.double()).chunk(2, dim=1)
    gated, down = F.silu(gate) * up, shared.down.double()
    pieces = zip(gated.split(inner, 1), down.split(inner, 1), strict=True)
    return torch.stack([F.linear(columns, weight) for columns, weight in pieces])


@pytest.mark.parametrize(
    ("dtype", "case"),
    [
        *in_turn_params([DTYPE, torch.float32, torch.float64], CASES),
        *product_params([DTYPE, torch.float32, torch.float64], LARGE, marks=pytest.mark.gpu),
    ],
)
def test_kernel_and_reference_are_the_product(kernel_device, case, dtype):
    """Every row has weight 1 for every piece, and is in each once."""
    shape, pieces = case
    inputs = drawn(*shape, kernel_device, dtype)
    shared = drawn_shared(pieces, *shape[3:], kernel_device, dtype)
    exact = torch.cat((exact_parts(*inputs), exact_pieces(inputs[0], shared, shape[4])))
    assert_close(grouped_experts.reference(*inputs, shared_experts=shared), exact, dtype)
    with poisoned():
        assert_close(grouped_experts.triton(*inputs, shared_experts=shared), exact, dtype)


@pytest.mark.parametrize(("plan", "rows"), in_turn_params(PLANS, [1, 9, 16]))
def test_every_plan_gives_the_product(kernel_device, rows, plan):
    """With and without a sort, for rows that go to no routed expert too: the shared MLP takes every row."""
    inputs = drawn(rows, 6, 3, 48, 40, kernel_device)
    shared = drawn_shared(2, 48, 40, kernel_device)
    live = torch.arange(rows, device=kernel_device) % 3 == 1
    routed = exact_parts(*inputs)
    routed[:, ~live] = 0.0
    exact = torch.cat((routed, exact_pieces(inputs[0], shared, 40)))
    inputs[4][~live] = torch.nan
    with poisoned():
        parts = grouped_experts.triton(*inputs, live, shared_experts=shared, plan=plan)
    assert (parts[:3, ~live] == 0).all()
    assert_close(parts, exact, DTYPE)


def test_the_routed_parts_keep_their_bits(kernel_device):
    inputs, shared = drawn(5, 8, 3, 40, 24, kernel_device), drawn_shared(2, 40, 24, kernel_device)
    for make in (grouped_experts.reference, grouped_experts.triton):
        parts = make(*inputs, shared_experts=shared, num_extra_parts=1)
        assert parts.shape == (6, 5, 40) and torch.equal(parts[:3], make(*inputs))


def test_a_rows_bits_do_not_depend_on_the_batch(kernel_device):
    """Alone, in another order, or beside a row of NaN."""
    inputs, shared = exactly_drawn(16, 8, 3, 24, 20, kernel_device), drawn_shared(2, 24, 20, kernel_device)
    # Products that are exact in float32, as exactly_drawn makes them.
    shared.gate_up[:40], shared.gate_up[40:] = 0, shared.gate_up[40:].sign()
    shared.gate_up[:40:2, 0] = 64
    shared.down.copy_(shared.down.sign())
    x, gate_up, down, ids, weights = inputs
    together = grouped_experts.triton(*inputs, shared_experts=shared)
    turned = torch.arange(15, -1, -1, device=x.device)
    other = grouped_experts.triton(x[turned], gate_up, down, ids[turned], weights[turned], shared_experts=shared)
    assert torch.equal(other, together[:, turned])
    for row in (0, 7, 15):
        one = slice(row, row + 1)
        alone = grouped_experts.triton(x[one], gate_up, down, ids[one], weights[one], shared_experts=shared)
        assert torch.equal(alone, together[:, one])
    x[3], others = torch.nan, torch.arange(16, device=x.device) != 3
    with_nan = grouped_experts.triton(*inputs, shared_experts=shared)
    assert torch.equal(with_nan[:, others], together[:, others]) and with_nan[:, 3].isnan().all()


@pytest.mark.parametrize("shape", [(0, 4, 2, 8, 8), (3, 4, 2, 0, 8)], ids=str)
def test_empty_inputs(kernel_device, shape):
    x, gate_up, down, ids, weights = drawn(shape[0], 4, 2, 8, 8, kernel_device)
    hidden = shape[3]
    inputs = (x[:, :hidden], gate_up[..., :hidden].contiguous(), down[:, :hidden], ids, weights)
    shared = SharedExperts(gate_up[0].repeat(2, 1)[:, :hidden].contiguous(), down[0].repeat(1, 2)[:hidden].contiguous())
    assert grouped_experts.triton(*inputs, shared_experts=shared).shape == (4, shape[0], hidden)


@pytest.mark.parametrize(
    ("rows", "change", "how"),
    [
        (MAX_SHARED_ROWS + 1, lambda s: s, {}),
        (3, lambda s: drawn_shared(1, 16, 9, "cpu"), {}),
        (3, lambda s: SharedExperts(s.gate_up, s.down.T.contiguous().T), {}),
        (3, lambda s: s, {"activation": Activation(limit=1.0)}),
        (3, lambda s: s, {"biases": ExpertBiases(torch.zeros(4, 16).to(DTYPE), torch.zeros(4, 16).to(DTYPE))}),
    ],
)
def test_what_must_run_apart_is_refused(rows, change, how):
    shared = change(drawn_shared(2, 16, 8, "cpu"))
    with pytest.raises(EspalierError, match="run them as an MLP of their own"):
        grouped_experts.triton(*drawn(rows, 4, 2, 16, 8, "cpu"), shared_experts=shared, **how)


def test_wrong_shapes_are_refused():
    inputs, shared = drawn(3, 4, 2, 16, 8, "cpu"), drawn_shared(2, 16, 8, "cpu")
    with pytest.raises(EspalierError, match="shared gate_up needs shape"):
        grouped_experts.triton(*inputs, shared_experts=SharedExperts(shared.gate_up[:-1], shared.down))
    with pytest.raises(EspalierError, match="shared down needs shape"):
        grouped_experts.triton(*inputs, shared_experts=SharedExperts(shared.gate_up, shared.down[:-1]))


def test_all_programs_of_a_few_tiles_run_at_once():
    """176 programs on 132 multiprocessors: two must share one, so each holds three stages in place of four."""
    hopper, plan = Chip(227 * 1024, 132, (9, 0)), ProductPlan(64, 128, 4, 4)
    assert plan.one_wave_stages(hopper, 4, 2, 1, 2, 132) == 4
    assert plan.one_wave_stages(hopper, 4, 2, 1, 2, 176) == 3
    assert plan.one_wave_stages(hopper, 4, 2, 1, 2, 1000) == 4


@pytest.mark.parametrize("dtype", [DTYPE, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(1, 0, 40, 33), (5, 3, 33, 1500), (2, 1, 200, 64)], ids=str)
def test_a_gate_scales_the_result(kernel_device, shape, dtype):
    """(rows, parts, columns in, columns out); 0 parts: a result in the model's dtype.  Rows have any stride."""
    rows, parts, num_in, num_out = shape
    generator, exact = torch.Generator().manual_seed(rows), torch.promote_types(dtype, torch.float32)

    def normal(*sizes):
        return torch.randn(sizes, generator=generator).to(kernel_device)

    x, gate = normal(rows, num_in + 3).to(dtype)[:, :num_in], (normal(1, num_in) / num_in**0.5).to(dtype)
    result = normal(parts, rows, num_out).to(exact) if parts else normal(rows, num_out).to(dtype)
    made = []
    for run in (scale_by_gate.triton, scale_by_gate.reference):
        out = torch.full((rows, num_out), torch.nan, dtype=exact, device=kernel_device)
        with poisoned():
            run(result, x, gate, out)
        made.append(out)
    ulp = torch.finfo(dtype).eps
    torch.testing.assert_close(*made, rtol=2 * ulp, atol=2 * ulp)
    gates = torch.sigmoid(x.double() @ gate.double().T)
    expected = (result.double().sum(0) if parts else result.double()) * gates
    torch.testing.assert_close(made[0].double(), expected, rtol=4 * ulp, atol=4 * ulp)
