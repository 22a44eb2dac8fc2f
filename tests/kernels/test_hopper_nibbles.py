"""Products of few rows with weights in 4 bits on Hopper: which are taken, and the same bits as Triton's kernel."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from espalier.kernels.hopper.plans import TILE_SHAPE, max_stages, num_splits_for, supports_hopper_product
from espalier.kernels.layers import experts, linear_quantised, quantised_plans
from espalier.kernels.layers.experts_plan import ExpertsPlan, ProductPlan
from espalier.kernels.layers.linear_plans import TritonPlan
from espalier.kernels.layers.quantised import (
    E2M1_CODES,
    FP8,
    QuantisedMatrix,
    dequantise,
    make_nibble_matrix,
    pack_nibbles,
)
from espalier.kernels.layers.quantised_plans import plan_by_rule_for
from espalier.kernels.ops.activation import Activation, gated_activation
from espalier.kernels.ops.experts import ExpertBiases, grouped_experts
from espalier.kernels.ops.linear import linear_quantised_gated, linear_quantised_partial_sums
from espalier.kernels.runtime.launch import HOPPER, Chip, chip
from tests.kernels.gluon_numpy import hopper_linear
from tests.kernels.quantised_inputs import drawn
from tests.pairwise import fewer, product_params

H200 = Chip(shared_memory=232448, processors=132, capability=HOPPER)
PLAN = TritonPlan(64, 256, 1, 4, 3)
KINDS = ["int4", "int4-zeros", *E2M1_CODES]


def matrix(kind: str, num_out: int, num_in: int, device="cpu", lead: tuple[int, ...] = ()) -> QuantisedMatrix:
    """int4 in groups of 128 columns."""
    if kind in E2M1_CODES:
        return drawn(kind, lead, num_out, num_in, device, seed=num_out)
    generator = torch.Generator().manual_seed(num_out)
    groups = -(-num_in // 128)
    packed = torch.randint(0, 256, (*lead, num_out, num_in // 2), generator=generator).to(torch.uint8)
    scales = torch.rand(*lead, num_out, groups, generator=generator).to(torch.bfloat16)
    zeros = torch.randint(0, 16, (*lead, num_out, groups), generator=generator).to(torch.uint8).to(device)
    return make_nibble_matrix(
        "int4", packed.to(device), scales.to(device), 128, zeros if kind == "int4-zeros" else None
    )


@pytest.mark.parametrize("kind", KINDS)
def test_which_products_it_takes(kind):
    weight, x = matrix(kind, 64, 512), torch.zeros(16, 528, dtype=torch.bfloat16)
    assert supports_hopper_product(x[:, :512], weight, 16, TILE_SHAPE, H200)
    assert not supports_hopper_product(x[:, :512], weight, 17, TILE_SHAPE, H200)
    assert not supports_hopper_product(x[:, :512], weight, 16, (64, 128, 4), H200)
    assert not supports_hopper_product(x[:, :512], weight, 16, TILE_SHAPE, replace(H200, capability=(10, 0)))
    assert not supports_hopper_product(x[:, :512].half(), weight, 16, TILE_SHAPE, H200)
    # A copy takes 16 bytes.
    assert not supports_hopper_product(x[:, 1:513], weight, 16, TILE_SHAPE, H200)
    assert not supports_hopper_product(torch.zeros(16, 520, dtype=x.dtype)[:, :512], weight, 16, TILE_SHAPE, H200)


@pytest.mark.parametrize("kind", ["int4", "int4-zeros", "int4-channel", "fp8-channel"])
def test_it_takes_no_other_groups_and_formats(kind):
    x = torch.zeros(1, 512, dtype=torch.bfloat16)
    assert not supports_hopper_product(x, drawn(kind, (), 64, 512, "cpu"), 16, TILE_SHAPE, H200)


def test_all_programs_that_share_a_multiprocessor_fit_it():
    for tile, programs, (code, scales) in product((8, 16), (1, 132, 264, 448, 5000), (("mxfp4", 8), ("nvfp4", 16))):
        stage = 64 * 128 + 64 * scales + tile * 512
        sharing, count = min(-(-programs // H200.processors), 4), max_stages(tile, code, programs, H200)
        assert count >= 3 and sharing * (count * stage + 1024) <= H200.shared_memory + 1024


def of_rows(row: QuantisedMatrix, num_out: int) -> QuantisedMatrix:
    """That many times the same row: a plan follows from shapes alone."""
    tensors = {name: value for name, value in vars(row).items() if isinstance(value, torch.Tensor)}
    return replace(row, **{name: value.expand(num_out, *value.shape[1:]) for name, value in tensors.items()})


def test_columns_are_split_until_four_programs_share_a_multiprocessor(monkeypatch):
    monkeypatch.setattr(quantised_plans, "chip", lambda tensor: H200)
    assert [num_splits_for(*shape, H200) for shape in ((4096, 14336), (6144, 4096), (64, 1024))] == [8, 5, 2]
    for kind, rows, splits in (("mxfp4", 1, 8), ("nvfp4", 1, 8), ("int4", 16, 8), ("mxfp4", 17, 4)):
        x = torch.empty(rows, 4096, dtype=torch.bfloat16)
        assert plan_by_rule_for(of_rows(matrix(kind, 1, 4096), 4096), x).splits == splits
        # Where nothing was split nothing is: gate and up are multiplied in one launch then.
        assert plan_by_rule_for(of_rows(matrix(kind, 1, 512), 2 * 8192), x[:, :512]).splits == 1


# (rows, out, in, splits, stages): one and two tiles of rows of each size, ragged in every direction, fewer steps than
# stages.
SHAPES = [(1, 70, 288, 1, 2), (11, 70, 288, 1, 4), (3, 192, 1056, 2, 3), (16, 64, 2048, 3, 4), (8, 64, 1024, 1, 2)]


# Each shape with copies of both kinds, each format with each of them.
FEW = [(shape, (i + turn) % 2 > 0, KINDS[(i + 2 * turn) % 4]) for turn in range(2) for i, shape in enumerate(SHAPES)]


@pytest.mark.parametrize(
    ("shape", "is_late", "kind"), fewer(product_params(SHAPES, [True, False], KINDS), lambda *cell: cell in FEW)
)
def test_its_functions_give_the_product_of_the_dequantised_matrix(kind, is_late, shape):
    """In NumPy, with copies that land late or at once."""
    rows, num_out, num_in, splits, stages = shape
    generator, weight = torch.Generator().manual_seed(rows), matrix(kind, num_out, num_in)
    x, bias = (torch.randn(size, generator=generator).bfloat16() for size in ((rows, num_in), (num_out,)))
    dense = dequantise(weight, torch.float64)
    exact = x.double() @ dense.T + bias.double()
    magnitude = x.double().abs() @ dense.abs().T + bias.double().abs()
    out = hopper_linear(x, weight, bias, splits, False, stages, is_late).double().sum(0)
    # The tolerance of linear_quantised.py.
    rounding = 2.0**-8 * 1.01 if splits == 1 else 0
    assert ((out - exact).abs() <= rounding * exact.abs() + num_in * 2.0**-23 * magnitude).all()
    if splits == 1:
        given = hopper_linear(x, weight, bias, splits, True, stages, is_late)[0]
        torch.testing.assert_close(given, gated_activation.reference(out.float()), rtol=2.0**-7, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_out", "num_in", "splits"), [(70, 288, 1), (192, 1056, 2), (64, 2048, 3)])
@pytest.mark.parametrize("rows", [1, 3, 8, 11, 16])
def test_it_has_the_bits_of_tritons_kernel(kernel_device, monkeypatch, kind, num_out, num_in, splits, rows):
    weight, plan = matrix(kind, num_out, num_in, kernel_device), replace(PLAN, splits=splits)
    x = torch.randn(rows, num_in, generator=torch.Generator().manual_seed(rows)).bfloat16().to(kernel_device)
    bias = torch.randn(num_out, generator=torch.Generator().manual_seed(1)).bfloat16().to(kernel_device)
    if not supports_hopper_product(x, weight, rows, TILE_SHAPE, chip(x)):
        pytest.skip("not a Hopper GPU")
    functions = linear_quantised_partial_sums.triton, linear_quantised_gated.triton
    ours = [function(x, weight, bias, plan) for function in functions]
    monkeypatch.setattr(linear_quantised, "supports_hopper_product", lambda *args: False)
    for function, result in zip(functions, ours, strict=True):
        assert torch.equal(function(x, weight, bias, plan), result)


def test_every_nibble_and_scale_of_nvfp4(kernel_device):
    """All 16 values of E2M1 with all 127 scales from 0 on, in each group of a step: to the bits of the matrix."""
    scales = ((torch.arange(127)[:, None] + 31 * torch.arange(16)) % 127).to(torch.uint8)
    codes = pack_nibbles(torch.arange(16, dtype=torch.uint8).repeat(127, 16))
    factors = torch.full((127,), 0.25, dtype=torch.float64, device=kernel_device)
    parts = codes.to(kernel_device), scales.to(kernel_device).view(FP8)
    weight = make_nibble_matrix("nvfp4", *parts, 16, row_scales=factors)
    units = torch.eye(256, dtype=torch.bfloat16, device=kernel_device)
    if kernel_device.type == "cpu":
        out = [hopper_linear(each, weight, None, 1, False, 2, True)[0].bfloat16() for each in units.split(16)]
    elif supports_hopper_product(units, weight, 16, TILE_SHAPE, chip(units)):
        out = [linear_quantised_partial_sums.triton(each, weight, None, PLAN) for each in units.split(16)]
    else:
        pytest.skip("not a Hopper GPU")
    assert torch.equal(torch.cat(out), dequantise(weight, torch.bfloat16).T)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tile", [1, 8, 16])
def test_experts_have_the_bits_of_tritons_kernels(kernel_device, monkeypatch, kind, tile):
    rows, top_k, hidden, inner = 1 if tile == 1 else 13, 2, 288, 160
    generator = torch.Generator().manual_seed(tile)
    x = (torch.randn(rows, hidden, generator=generator) / hidden**0.5).bfloat16().to(kernel_device)
    gate_up, down = (matrix(kind, *shape, kernel_device, (5,)) for shape in ((2 * inner, hidden), (hidden, inner)))
    ids = torch.rand(rows, 5, generator=generator).topk(top_k).indices.sort(-1).values.to(kernel_device)
    weights, live = torch.rand(rows, top_k, generator=generator).to(kernel_device), torch.arange(rows) != 3
    biases = [torch.randn(5, n, generator=generator).bfloat16().to(kernel_device) for n in (2 * inner, hidden)]
    plan = ExpertsPlan(tile, ProductPlan(32, 256, 4, 3), ProductPlan(64, 256, 4, 3))
    if not supports_hopper_product(x, gate_up, tile, TILE_SHAPE, chip(x)):
        pytest.skip("not a Hopper GPU")
    args = x, gate_up, down, ids, weights, live.to(kernel_device), ExpertBiases(*biases)
    activation = Activation(alpha=1.702, up_offset=1.0, limit=7.0)
    ours = grouped_experts.triton(*args, activation, plan=plan)
    monkeypatch.setattr(experts, "supports_hopper_product", lambda *args: False)
    assert torch.equal(grouped_experts.triton(*args, activation, plan=plan), ours)
