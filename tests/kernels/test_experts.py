"""The expert product: close to float64, parts in the order of the choices, no row's bits depend on the batch."""

import pytest
import torch
import torch.nn.functional as F

from espalier.errors import EspalierError
from espalier.kernels.layers import experts_tiles
from espalier.kernels.layers.experts_plan import ExpertsPlan, ProductPlan
from espalier.kernels.layers.experts_tiles import make_expert_tiles
from espalier.kernels.ops.activation import GELU_TANH, RELU2, SILU, Activation
from espalier.kernels.ops.experts import ExpertBiases, grouped_experts
from espalier.kernels.ops.linear import add_partial_sums
from tests.kernels.treeing import poisoned
from tests.pairwise import fewer, in_turn_params, pairwise_params, product_params

# float16 on a CPU: Triton's interpreter does not multiply bfloat16.
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float16
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-5, torch.float64: 1e-13}
# (rows, experts, choices, hidden size, intermediate size)
SHAPES = [
    (1, 4, 1, 16, 8),
    (1, 64, 8, 40, 24),
    (2, 5, 5, 33, 17),
    (7, 6, 2, 32, 24),
    (16, 8, 3, 72, 65),
    (33, 4, 2, 24, 40),
    (70, 20, 8, 48, 20),
    (70, 4, 1, 20, 12),
]
LARGE = [(1, 128, 8, 2048, 768), (16, 128, 8, 2048, 768), (512, 64, 6, 2048, 1408), (3000, 16, 4, 1024, 512)]


def drawn(rows, experts, top_k, hidden, inner, device, dtype=DTYPE, seed=0):
    """x, gate_up, down, ids (ascending in a row, as `route` gives them) and weights."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, scale=1.0):
        return (torch.randn(shape, generator=generator) * scale).to(dtype).to(device)

    x = normal(rows, hidden)
    gate_up, down = normal(experts, 2 * inner, hidden, scale=hidden**-0.5), normal(experts, hidden, inner, scale=0.2)
    ids = torch.rand(rows, experts, generator=generator).topk(top_k).indices.sort(-1).values.to(device)
    exact = torch.promote_types(dtype, torch.float32)
    weights = torch.rand(rows, top_k, generator=generator, dtype=exact).to(device)
    return x, gate_up, down, ids, weights


def exact_parts(x, gate_up, down, ids, weights, live=None, biases=None, activation=SILU):
    """The parts in float64, expert by expert and row by row."""
    x, gate_up, down, weights = x.double(), gate_up.double(), down.double(), weights.double()
    parts = x.new_zeros(ids.shape[1], *x.shape)
    gate_up_bias, down_bias = (x.new_zeros(t.shape[:2]) for t in (gate_up, down))
    if biases is not None:
        gate_up_bias, down_bias = biases.gate_up.double(), biases.down.double()
    for row, experts in enumerate(ids.tolist()):
        for choice, expert in enumerate(experts):
            product = F.linear(x[row], gate_up[expert], gate_up_bias[expert])
            gate, up = (product, product) if activation is RELU2 else product.chunk(2)
            if activation.limit is not None:
                gate = gate.clamp(max=activation.limit)
                up = up.clamp(-activation.limit, activation.limit)
            if activation.kind == "gelu_tanh":
                act = F.gelu(gate, approximate="tanh")
            elif activation is RELU2:
                act = F.relu(gate)
            else:
                act = gate / (1 + torch.exp(-activation.alpha * gate))
            gated = (up + activation.up_offset) * act
            parts[choice, row] = weights[row, choice] * F.linear(gated, down[expert], down_bias[expert])
    return parts


@pytest.mark.parametrize("make", [grouped_experts.reference, grouped_experts.triton])
def test_extra_parts_are_left_to_the_caller(make, kernel_device):
    given = drawn(7, 6, 2, 32, 24, kernel_device)
    parts, more = make(*given), make(*given, num_extra_parts=2)
    assert more.shape == (4, 7, 32) and torch.equal(more[:2], parts)


def assert_close(parts, exact, dtype):
    """Relative to the largest value: three roundings to dtype, and sums in float32 at least."""
    assert parts.shape == exact.shape
    assert (parts.double() - exact).abs().max() <= TOLERANCE[dtype] * exact.abs().max()


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        *in_turn_params([DTYPE, torch.float32, torch.float64], SHAPES),
        *product_params([DTYPE, torch.float32, torch.float64], LARGE, marks=pytest.mark.gpu),
    ],
)
def test_kernel_and_reference_are_the_product(kernel_device, shape, dtype):
    inputs = drawn(*shape, kernel_device, dtype)
    exact = exact_parts(*inputs)
    assert_close(grouped_experts.reference(*inputs), exact, dtype)
    with poisoned():
        assert_close(grouped_experts.triton(*inputs), exact, dtype)


def drawn_biases(gate_up, down):
    generator = torch.Generator().manual_seed(1)
    return ExpertBiases(
        *(torch.randn(t.shape[:2], generator=generator).to(t.dtype).to(t.device) for t in (gate_up, down))
    )


@pytest.mark.parametrize("dtype", fewer([DTYPE, torch.float32, torch.float64], lambda dtype: dtype == DTYPE), ids=str)
@pytest.mark.parametrize(
    ("shape", "activation"),
    [
        *((SHAPES[i], Activation(alpha=1.702, up_offset=1.0, limit=0.7)) for i in (2, 4, 6)),
        *((SHAPES[4], kind) for kind in (GELU_TANH, RELU2)),
    ],
    ids=str,
)
def test_biases_and_other_activations(kernel_device, shape, activation, dtype):
    """Rows that are not live get no bias either.  The limit cuts a fourth of the gates."""
    x, gate_up, down, ids, weights = drawn(*shape, kernel_device, dtype)
    gate_up = gate_up[:, -activation.num_matrices * shape[-1] :].contiguous()
    live = torch.arange(len(x), device=x.device) % 3 != 1
    how = (live, drawn_biases(gate_up, down), activation)
    exact = exact_parts(x, gate_up, down, ids, weights, *how)
    exact[:, ~live] = 0.0
    assert_close(grouped_experts.reference(x, gate_up, down, ids, weights, *how), exact, dtype)
    with poisoned():
        assert_close(grouped_experts.triton(x, gate_up, down, ids, weights, *how), exact, dtype)


def test_nan_passes_the_limits(kernel_device):
    """A limit in place of NaN would hide from the round that a request has failed.

    A GPU's minimum returns the limit for NaN; the interpreter's returns NaN.
    """
    x, gate_up, down, ids, weights = drawn(2, 4, 2, 16, 8, kernel_device)
    x[1] = torch.nan
    for run in (grouped_experts.triton, grouped_experts.reference):
        parts = run(x, gate_up, down, ids, weights, activation=Activation(limit=1.0))
        assert parts[:, 1].isnan().all() and parts[:, 0].isfinite().all()


@pytest.mark.parametrize("rows", [1, 40, 70])
def test_all_rows_to_one_expert(kernel_device, rows):
    """More tiles than one for one expert, and none for the others."""
    x, gate_up, down, ids, weights = drawn(rows, 8, 1, 24, 20, kernel_device)
    inputs = (x, gate_up, down, torch.full_like(ids, 5), weights)
    with poisoned():
        assert_close(grouped_experts.triton(*inputs), exact_parts(*inputs), DTYPE)


def test_an_expert_without_rows_is_not_read(kernel_device):
    x, gate_up, down, ids, weights = drawn(9, 6, 2, 24, 20, kernel_device)
    ids = torch.tensor([[0, 4]], device=ids.device).repeat(9, 1)
    expected = grouped_experts.triton(x, gate_up, down, ids, weights)
    for expert in (1, 2, 3, 5):
        gate_up[expert], down[expert] = torch.nan, torch.nan
    for run in (grouped_experts.triton, grouped_experts.reference):
        assert_close(run(x, gate_up, down, ids, weights), expected.double(), DTYPE)


@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("live", [[], [0], [3], [0, 1, 2, 3, 4, 5, 6]], ids=str)
def test_rows_that_are_not_live_go_to_no_expert(kernel_device, live, top_k):
    """Their parts are 0, whatever the rows hold, and their experts are not read."""
    x, gate_up, down, ids, weights = drawn(7, 5, top_k, 24, 20, kernel_device)
    mask = torch.zeros(7, dtype=torch.bool, device=x.device)
    mask[live] = True
    exact = exact_parts(x, gate_up, down, ids, weights)
    exact[:, ~mask] = 0.0
    x[~mask], weights[~mask] = torch.nan, torch.nan
    for expert in {*range(5)} - {*ids[mask].flatten().tolist()}:
        gate_up[expert], down[expert] = torch.nan, torch.nan
    reference = grouped_experts.reference(x, gate_up, down, ids, weights, mask)
    with poisoned():
        parts = grouped_experts.triton(x, gate_up, down, ids, weights, mask)
    for found in (parts, reference):
        assert (found[:, ~mask] == 0).all()
        if live:
            assert_close(found, exact, DTYPE)


@pytest.mark.parametrize(
    ("shape", "most", "with_live"),
    pairwise_params(
        [(1, 4, 2), (9, 64, 8), (70, 4, 3), (300, 9, 5)], [0, 100, experts_tiles.MAX_HISTOGRAM_PAIRS], [False, True]
    ),
)
def test_sorted_pairs(kernel_device, monkeypatch, shape, most, with_live):
    """By expert, and by row within an expert; each tile is inside its expert, and all pairs are in one tile each.

    With more than `most` pairs, a launch of its own counts them.
    """
    monkeypatch.setattr(experts_tiles, "MAX_HISTOGRAM_PAIRS", most)
    rows, experts, top_k = shape
    ids = drawn(rows, experts, top_k, 1, 1, kernel_device)[3]
    live = torch.rand(rows, generator=torch.Generator().manual_seed(1)).to(ids.device) < 0.6 if with_live else None
    with poisoned():
        pairs = make_expert_tiles(ids, live, experts, tile_rows=16)
    flat = (ids if live is None else ids.masked_fill(~live[:, None], experts)).flatten()
    assert torch.equal(pairs.pair_order.long(), flat.argsort(stable=True))
    assert torch.equal(pairs.pair_ends.long(), flat.bincount(minlength=experts + 1).cumsum(0))
    begins = [0, *pairs.pair_ends.tolist()]
    wanted = [(e, b) for e in range(experts + 1) for b in range(begins[e], begins[e + 1], 16)]
    listed = list(zip(pairs.tile_experts.tolist(), pairs.tile_begins.tolist(), strict=True))
    assert listed[: len(wanted)] == wanted and all(expert == -1 for expert, _ in listed[len(wanted) :])


def exactly_drawn(rows, experts, top_k, hidden, inner, device):
    """Inputs whose products are exact in float32 in any order (the interpreter's order depends on the place in a tile):
    the gate is 64 or 0 where silu is exact, the rest are small integers.  Weights are any floats, so that a sum over
    the choices is inexact and shows its order."""
    x, gate_up, down, ids, weights = drawn(rows, experts, top_k, hidden, inner, device)
    generator = torch.Generator().manual_seed(7)
    for tensor, bound in ((x, 4), (gate_up, 2), (down, 4)):
        tensor.copy_(torch.randint(-bound, bound + 1, tensor.shape, generator=generator))
    x[:, 0] = 1
    gate_up[:, :inner] = 0
    gate_up[:, :inner:2, 0] = 64
    return x, gate_up, down, ids, weights


@pytest.mark.parametrize(
    "shape", [pytest.param((20, 8, 3, 24, 20), marks=pytest.mark.full), (70, 16, 8, 16, 12)], ids=str
)
def test_a_rows_bits_do_not_depend_on_the_batch(kernel_device, shape):
    """Alone, in another order, or beside a row of NaN: the same parts, and the same bits of their sum."""
    x, gate_up, down, ids, weights = exactly_drawn(*shape, kernel_device)
    together = grouped_experts.triton(x, gate_up, down, ids, weights)
    total = add_partial_sums.reference(together, DTYPE)
    turned = torch.arange(len(x) - 1, -1, -1, device=x.device)
    other = grouped_experts.triton(x[turned], gate_up, down, ids[turned], weights[turned])
    assert torch.equal(other, together[:, turned])
    for row in (0, 7, len(x) - 1):
        one = slice(row, row + 1)
        alone = grouped_experts.triton(x[one], gate_up, down, ids[one], weights[one])
        assert torch.equal(alone, together[:, one]) and torch.equal(
            add_partial_sums.reference(alone, DTYPE), total[one]
        )
    x[3], weights[3] = torch.nan, torch.nan
    others = torch.arange(len(x), device=x.device) != 3
    assert torch.equal(grouped_experts.triton(x, gate_up, down, ids, weights)[:, others], together[:, others])


@pytest.mark.parametrize("shape", [(0, 4, 2, 8, 8), (3, 4, 2, 0, 8)], ids=str)
def test_empty_inputs(kernel_device, shape):
    inputs = drawn(*shape, kernel_device) if shape[3] else drawn(3, 4, 2, 1, 8, kernel_device)
    if not shape[3]:
        inputs = (inputs[0][:, :0], inputs[1][..., :0].contiguous(), inputs[2][:, :0], *inputs[3:])
    assert grouped_experts.triton(*inputs).shape == (2, shape[0], shape[3])


def test_strided_rows(kernel_device):
    x, *others = drawn(8, 4, 2, 48, 16, kernel_device)
    gate_up = others[0][..., :24].contiguous()
    down = others[1][:, :24].contiguous()
    inputs = (x[:, 24:], gate_up, down, *others[2:])
    assert_close(grouped_experts.triton(*inputs), exact_parts(*inputs), DTYPE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, g, d, i, w: (x.int(), g.int(), d.int(), i, w), "floating-point dtype"),
        (lambda x, g, d, i, w: (x, g[:, :, :-1], d, i, w), "gate_up needs shape"),
        (lambda x, g, d, i, w: (x, g[:, :-1], d, i, w), "even number"),
        (lambda x, g, d, i, w: (x, g, d[1:], i, w), "down needs shape"),
        (lambda x, g, d, i, w: (x, g, d, i.int(), w), "ids needs shape"),
        (lambda x, g, d, i, w: (x, g, d, i, w.double()), "weights needs shape"),
        (lambda x, g, d, i, w: (x, g, d, i, w, torch.ones(2, dtype=torch.bool)), "live needs shape"),
        (lambda x, g, d, i, w: (x, g, d, i, w, None, ExpertBiases(g[:, 1:, 0], d[..., 0])), "of gate_up needs shape"),
        (lambda x, g, d, i, w: (x, g, d, i, w, None, ExpertBiases(g[..., 0], d[:, 1:, 0])), "of down needs shape"),
        (lambda x, g, d, i, w: (x, g, d, i, w, None, ExpertBiases(g[..., 0], d[..., 0])), "contiguous experts"),
        (lambda x, g, d, i, w: (x, g.transpose(0, 1).contiguous().transpose(0, 1), d, i, w), "contiguous experts"),
    ],
)
def test_wrong_inputs_are_refused(change, message):
    with pytest.raises(EspalierError, match=message):
        grouped_experts.triton(*change(*drawn(3, 4, 2, 16, 8, "cpu")))


PLANS = [
    ExpertsPlan(1, ProductPlan(16, 256, 2, 3), ProductPlan(32, 128, 4, 4)),
    ExpertsPlan(16, ProductPlan(32, 16, 4, 2), ProductPlan(64, 64, 4, 3)),
    ExpertsPlan(32, ProductPlan(64, 64, 4, 2), ProductPlan(16, 16, 2, 6)),
]


@pytest.mark.parametrize(
    ("plan", "shape"), in_turn_params(PLANS, [(1, 64, 8, 48, 32), (9, 4, 3, 64, 40), (37, 5, 2, 40, 16)])
)
def test_every_plan_gives_the_product(kernel_device, plan, shape):
    """With and without a sort; tiles that divide the sizes, and tiles that do not; rows without expert."""
    inputs = drawn(*shape, kernel_device)
    live = torch.arange(shape[0], device=kernel_device) % 3 != 1
    exact = exact_parts(*inputs)
    for mask in (None, live):
        with poisoned():
            parts = grouped_experts.triton(*inputs, mask, plan=plan)
        if mask is not None:
            assert (parts[:, ~mask] == 0).all()
            exact[:, ~mask] = 0
        assert_close(parts, exact, DTYPE)
