"""The routing kernel: the reference's experts and weights, ties to the lower id, nothing out of bounds for NaN."""

import pytest
import torch

from espalier.errors import EspalierError
from espalier.kernels.ops.experts import Routing, route
from tests.kernels.treeing import poisoned
from tests.pairwise import fewer, product_params

ROUTINGS = [
    Routing(4, 1),
    Routing(4, 4, norm_topk_prob=True),
    Routing(6, 2, norm_topk_prob=True),
    Routing(128, 8, norm_topk_prob=True),
    Routing(60, 4, routed_scaling_factor=2.5),
    Routing(32, 4, "topk_softmax"),
    Routing(32, 4, "topk_softmax", logit_bias=True),
    Routing(160, 6, n_group=8, topk_group=3, routed_scaling_factor=16.0),
    Routing(64, 4, "sigmoid", True, 1.8, correction_bias=True),
    Routing(256, 8, "sigmoid", True, 2.5, 8, 4, "top2_sum", correction_bias=True),
    Routing(300, 5, norm_topk_prob=True),
    Routing(12, 3, "sigmoid", False, 1.0, 6, 2, "top2_sum"),
    # Negative logits are chosen too.
    Routing(9, 7, "topk_softmax"),
]


SIZES = [(torch.float64, 1), (torch.float32, 19)]


def drawn(routing, rows, device, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(rows, routing.num_experts, generator=generator, dtype=dtype)
    bias = torch.randn(routing.num_experts, generator=generator, dtype=dtype)
    bias = bias if routing.correction_bias or routing.logit_bias else None
    return logits.to(device), None if bias is None else bias.to(device)


@pytest.mark.parametrize(
    ("dtype", "rows"), fewer(product_params([torch.float32, torch.float64], [0, 1, 19]), lambda *cell: cell in SIZES)
)
@pytest.mark.parametrize(
    "routing", ROUTINGS, ids=lambda r: f"{r.num_experts}-{r.top_k}-{r.scoring}-{r.n_group}-{r.logit_bias}"
)
def test_kernel_is_the_reference(kernel_device, routing, rows, dtype):
    logits, bias = drawn(routing, rows, kernel_device, dtype=dtype)
    scale = None if routing.top_k % 2 else 1 / torch.arange(2, 2 + routing.num_experts, device=kernel_device)
    expected_ids, expected_weights = route.reference(logits, bias, routing, scale)
    with poisoned():
        ids, weights = route.triton(logits, bias, routing, scale)
    assert torch.equal(ids, expected_ids) and weights.dtype == dtype
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=0)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "topk_softmax"])
@pytest.mark.parametrize("n_group", [1, 10])
def test_ties_go_to_the_lower_id(kernel_device, scoring, n_group):
    logits = torch.zeros(3, 200, device=kernel_device)
    # Equal to 0.
    logits[0, :50] = -0.0
    logits[1, 150], logits[2, 199], logits[2, 100:] = 1.0, 2.0, 1.0
    ids, _ = route.triton(logits, None, Routing(200, 3, scoring, n_group=n_group, topk_group=min(n_group, 2)))
    assert ids.tolist() == [[0, 1, 2], [0, 1, 150], [100, 101, 102]]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "routing", ROUTINGS, ids=lambda r: f"{r.num_experts}-{r.top_k}-{r.scoring}-{r.n_group}-{r.logit_bias}"
)
def test_ids_exist_whatever_the_logits_are(kernel_device, routing):
    """Ascending, so each is there once."""
    logits, bias = drawn(routing, 7, kernel_device)
    for row, value in enumerate((torch.nan, torch.inf, -torch.inf)):
        logits[2 * row], logits[2 * row + 1, 2] = value, value
    with poisoned():
        ids, _ = route.triton(logits, bias, routing)
    padded = torch.cat((ids.new_full((7, 1), -1), ids, ids.new_full((7, 1), routing.num_experts)), 1)
    assert (padded.diff(dim=1) > 0).all()


@pytest.mark.parametrize("routing", ROUTINGS[:1])
def test_no_rows(kernel_device, routing):
    ids, weights = route.triton(*drawn(routing, 0, kernel_device), routing)
    assert ids.shape == weights.shape == (0, routing.top_k)


def test_strided_logits(kernel_device):
    routing = Routing(6, 2)
    wide, _ = drawn(Routing(12, 2), 5, kernel_device)
    for logits in (wide[:, 6:], wide[:, ::2]):
        assert torch.equal(route.triton(logits, None, routing)[0], route.reference(logits, None, routing)[0])


@pytest.mark.parametrize("routing", [ROUTINGS[3], ROUTINGS[8], ROUTINGS[9]], ids=lambda r: str(r.num_experts))
def test_logits_in_parts(kernel_device, routing):
    """They are added in order, to the bit.  In another order the last expert of row 0 would tie with the others."""
    parts = torch.stack([drawn(routing, 5, kernel_device, seed)[0] for seed in range(3)])
    parts[:, 0], parts[:, 0, -1] = 0.0, torch.tensor([1e8, -1e8, 1.0], device=kernel_device)
    bias = drawn(routing, 5, kernel_device)[1]
    with poisoned():
        ids, weights = route.triton(parts, bias, routing)
    expected_ids, expected_weights = route.triton(parts[0] + parts[1] + parts[2], bias, routing)
    assert torch.equal(ids, expected_ids) and torch.equal(weights, expected_weights)
    assert torch.equal(ids, route.reference(parts, bias, routing)[0])


def test_wrong_shapes_are_refused(kernel_device):
    logits, bias = drawn(ROUTINGS[8], 3, kernel_device)
    with pytest.raises(EspalierError, match="route: logits"):
        route.triton(logits[:, 1:], bias, ROUTINGS[8])
    with pytest.raises(EspalierError, match="route: bias"):
        route.triton(logits, bias[1:], ROUTINGS[8])
