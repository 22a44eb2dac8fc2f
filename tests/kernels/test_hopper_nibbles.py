"""Products of few rows with weights in 4 bits on Hopper: which are taken, and the same bits as Triton's kernel."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from espalier.kernels.hopper.plans import TILE, is_hopper_product, splits_of, stages
from espalier.kernels.layers import experts, linear_quantised, quantised_plans
from espalier.kernels.layers.experts_plan import ExpertsPlan, ProductPlan
from espalier.kernels.layers.linear_plans import TritonPlan
from espalier.kernels.layers.quantised import QuantisedMatrix, nibble_matrix
from espalier.kernels.layers.quantised_plans import plan_by_rule_for
from espalier.kernels.ops.activation import Activation
from espalier.kernels.ops.experts import ExpertBiases, grouped_experts
from espalier.kernels.ops.linear import linear_quantised_gated, linear_quantised_parts
from espalier.kernels.runtime.launch import HOPPER, Chip, chip
from tests.kernels.quantised_inputs import drawn

H200 = Chip(shared_memory=232448, processors=132, capability=HOPPER)
PLAN = TritonPlan(64, 256, 1, 4, 3)


def matrix(kind: str, num_out: int, num_in: int, device="cpu", lead: tuple[int, ...] = ()) -> QuantisedMatrix:
    """int4 in groups of 128 columns."""
    if kind == "mxfp4":
        return drawn(kind, lead, num_out, num_in, device, seed=num_out)
    generator = torch.Generator().manual_seed(num_out)
    groups = -(-num_in // 128)
    packed = torch.randint(0, 256, (*lead, num_out, num_in // 2), generator=generator).to(torch.uint8)
    scales = torch.rand(*lead, num_out, groups, generator=generator).to(torch.bfloat16)
    zeros = torch.randint(0, 16, (*lead, num_out, groups), generator=generator).to(torch.uint8).to(device)
    return nibble_matrix("int4", packed.to(device), scales.to(device), 128, zeros if kind == "int4-zeros" else None)


@pytest.mark.parametrize("kind", ["int4", "int4-zeros", "mxfp4"])
def test_which_products_it_takes(kind):
    weight, x = matrix(kind, 64, 512), torch.zeros(16, 528, dtype=torch.bfloat16)
    assert is_hopper_product(x[:, :512], weight, 16, TILE, H200)
    assert not is_hopper_product(x[:, :512], weight, 17, TILE, H200)
    assert not is_hopper_product(x[:, :512], weight, 16, (64, 128, 4), H200)
    assert not is_hopper_product(x[:, :512], weight, 16, TILE, replace(H200, capability=(10, 0)))
    assert not is_hopper_product(x[:, :512].half(), weight, 16, TILE, H200)
    # A copy takes 16 bytes.
    assert not is_hopper_product(x[:, 1:513], weight, 16, TILE, H200)
    assert not is_hopper_product(torch.zeros(16, 520, dtype=x.dtype)[:, :512], weight, 16, TILE, H200)


@pytest.mark.parametrize("kind", ["int4", "int4-zeros", "int4-channel", "fp8-channel"])
def test_it_takes_no_other_groups_and_formats(kind):
    x = torch.zeros(1, 512, dtype=torch.bfloat16)
    assert not is_hopper_product(x, drawn(kind, (), 64, 512, "cpu"), 16, TILE, H200)


def test_all_programs_that_share_a_multiprocessor_fit_it():
    for tile, programs in product((8, 16), (1, 132, 264, 448, 5000)):
        stage = 64 * 128 + 64 * 8 + tile * 512
        sharing, count = min(-(-programs // H200.processors), 4), stages(tile, programs, H200)
        assert count >= 3 and sharing * (count * stage + 1024) <= H200.shared_memory + 1024


def test_columns_are_split_until_four_programs_share_a_multiprocessor(monkeypatch):
    monkeypatch.setattr(quantised_plans, "chip", lambda tensor: H200)
    assert [splits_of(*shape, H200) for shape in ((4096, 14336), (6144, 4096), (64, 1024))] == [8, 5, 2]
    for kind, rows, splits in (("mxfp4", 1, 8), ("int4", 16, 8), ("mxfp4", 17, 4)):
        x = torch.empty(rows, 4096, dtype=torch.bfloat16)
        assert plan_by_rule_for(matrix(kind, 4096, 4096), x).splits == splits
        # Where nothing was split nothing is: gate and up are multiplied in one launch then.
        assert plan_by_rule_for(matrix(kind, 2 * 8192, 512), x[:, :512]).splits == 1


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["int4", "int4-zeros", "mxfp4"])
@pytest.mark.parametrize(("num_out", "num_in", "splits"), [(70, 288, 1), (192, 1056, 2), (64, 2048, 3)])
@pytest.mark.parametrize("rows", [1, 3, 8, 11, 16])
def test_it_has_the_bits_of_tritons_kernel(kernel_device, monkeypatch, kind, num_out, num_in, splits, rows):
    weight, plan = matrix(kind, num_out, num_in, kernel_device), replace(PLAN, splits=splits)
    x = torch.randn(rows, num_in, generator=torch.Generator().manual_seed(rows)).bfloat16().to(kernel_device)
    bias = torch.randn(num_out, generator=torch.Generator().manual_seed(1)).bfloat16().to(kernel_device)
    if not is_hopper_product(x, weight, rows, TILE, chip(x)):
        pytest.skip("not a Hopper GPU")
    functions = linear_quantised_parts.triton, linear_quantised_gated.triton
    ours = [function(x, weight, bias, plan) for function in functions]
    monkeypatch.setattr(linear_quantised, "is_hopper_product", lambda *args: False)
    for function, result in zip(functions, ours, strict=True):
        assert torch.equal(function(x, weight, bias, plan), result)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["int4", "int4-zeros", "mxfp4"])
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
    if not is_hopper_product(x, gate_up, tile, TILE, chip(x)):
        pytest.skip("not a Hopper GPU")
    args = x, gate_up, down, ids, weights, live.to(kernel_device), ExpertBiases(*biases)
    activation = Activation(alpha=1.702, up_offset=1.0, limit=7.0)
    ours = grouped_experts.triton(*args, activation, plan=plan)
    monkeypatch.setattr(experts, "is_hopper_experts", lambda *args: False)
    assert torch.equal(grouped_experts.triton(*args, activation, plan=plan), ours)
