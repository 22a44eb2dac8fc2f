"""The linear layer of quantised weights: close to float64, deterministic, and no row's bits depend on the others."""

from dataclasses import replace

import pytest
import torch

from espalier.errors import EspalierError
from espalier.kernels.layers import linear_quantised
from espalier.kernels.layers.linear import TritonPlan, sum_parts_reference
from espalier.kernels.layers.linear_quantised import (
    _launch,
    candidates,
    linear_quantised_gated_triton,
    linear_quantised_triton,
    max_block_in,
    plan_of,
    require_supported,
    rule,
    tuning_name,
)
from espalier.kernels.layers.linear_tuning import DENSE, LinearPlans
from espalier.kernels.layers.quantise_rows import quantise_rows_triton
from espalier.kernels.layers.quantised import (
    InputScales,
    QuantisedMatrix,
    dequantise,
    linear_quantised_reference,
    quantise_inputs,
)
from espalier.kernels.layers.silu import silu_mul_triton
from espalier.kernels.runtime.launch import Chip
from tests.kernels.quantised_inputs import DTYPE, KINDS, drawn, inputs_of

H200 = Chip(shared_memory=232448, processors=132, capability=(9, 0))
# (rows, out, in): tiles that are full, ragged in every direction, and of two tiles of rows.
SHAPES = [(1, 64, 192), (3, 70, 160), (17, 130, 128), (130, 33, 64)]


def plan_for(matrix: QuantisedMatrix, splits: int = 1) -> TritonPlan:
    return TritonPlan(64, min(max_block_in(matrix), 64), splits, 4, 2)


def x_of(rows, num_in, device, seed=1):
    return torch.randn(rows, num_in, generator=torch.Generator().manual_seed(seed)).to(DTYPE).to(device)


def assert_is_the_product(out, x, matrix, bias):
    """The tolerance of linear_quantised.py."""
    inputs, weight = inputs_of(matrix, x), dequantise(matrix, torch.float64)
    exact = inputs @ weight.T + (0 if bias is None else bias.double())
    magnitude = inputs.abs() @ weight.abs().T + (0 if bias is None else bias.double().abs())
    sums = 2.0**-10 if matrix.inputs is not None and x.is_cuda else x.shape[1] * 2.0**-23
    bound = torch.finfo(out.dtype).eps / 2 * exact.abs() * 1.01 + sums * magnitude
    assert ((out.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("rows", "num_out", "num_in"), SHAPES)
def test_any_shape(kernel_device, kind, splits, rows, num_out, num_in):
    matrix, x = drawn(kind, (), num_out, num_in, kernel_device), x_of(rows, num_in, kernel_device)
    bias = x_of(1, num_out, kernel_device)[0] if rows % 2 else None
    out = linear_quantised_triton(x, matrix, bias, plan_for(matrix, splits))
    assert_is_the_product(out, x, matrix, bias)
    assert_is_the_product(linear_quantised_reference(x, matrix, bias), x, matrix, bias)


@pytest.mark.parametrize("kind", KINDS)
def test_gated_is_silu_mul_of_the_product(kernel_device, kind):
    matrix, x = drawn(kind, (), 2 * 40, 128, kernel_device), x_of(5, 128, kernel_device)
    if matrix.row_block > 1:
        matrix = replace(matrix, row_block=40)
    plan = plan_for(matrix)
    product = linear_quantised_triton(x, matrix, None, plan)
    assert torch.equal(linear_quantised_gated_triton(x, matrix, None, plan), silu_mul_triton(product))


@pytest.mark.parametrize("kind", KINDS)
def test_parts_add_up(kernel_device, kind):
    matrix, x = drawn(kind, (), 48, 192, kernel_device), x_of(2, 192, kernel_device)
    plan = plan_for(matrix, 3)
    parts = _launch(x, matrix, None, plan, gated=False)
    assert parts.shape == (3, 2, 48)
    assert torch.equal(sum_parts_reference(parts, DTYPE), linear_quantised_triton(x, matrix, None, plan))


@pytest.mark.parametrize("kind", KINDS)
def test_a_rows_bits_do_not_depend_on_other_rows(kernel_device, kind):
    matrix, x = drawn(kind, (), 64, 128, kernel_device), x_of(16, 128, kernel_device)
    plan = plan_for(matrix)
    alone = linear_quantised_triton(x[3:4], matrix, None, plan)
    x[5], x[6] = torch.nan, 1e4
    assert torch.equal(linear_quantised_triton(x, matrix, None, plan)[3:4], alone)


def test_inputs_are_taken_in_the_order_of_the_columns(kernel_device):
    matrix, x = drawn("int4-zeros", (), 48, 64, kernel_device), x_of(3, 64, kernel_device)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(2)).to(kernel_device)
    ordered = linear_quantised_triton(x, replace(matrix, order=order), None, plan_for(matrix))
    assert torch.equal(ordered, linear_quantised_triton(x[:, order], matrix, None, plan_for(matrix)))
    assert_is_the_product(ordered, x, replace(matrix, order=order), None)


def test_every_nibble_and_exponent(kernel_device):
    """All 16 values of E2M1 with small and large scales: the product with unit vectors is the matrix."""
    codes = torch.arange(256, dtype=torch.uint8, device=kernel_device).view(4, 64)
    scales = torch.tensor([[115, 120, 127, 130]] * 4, dtype=torch.uint8, device=kernel_device)
    matrix = QuantisedMatrix("mxfp4", codes, scales, 32)
    unit = torch.eye(128, dtype=DTYPE, device=kernel_device)
    out = linear_quantised_triton(unit, matrix, None, TritonPlan(16, 128, 1, 4, 1))
    assert torch.equal(out, dequantise(matrix, DTYPE).T)


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize(
    ("num_in", "group", "static"), [(64, None, None), (200, None, 0.02), (200, 128, None), (96, 32, None)]
)
def test_rounded_inputs_are_the_references(kernel_device, rows, num_in, group, static):
    x = x_of(rows, num_in, kernel_device) * 3
    x[:1, :32] = 0
    scale = None if static is None else torch.tensor([static], device=kernel_device)
    values, scales = quantise_rows_triton(x, InputScales(group, scale))
    expected, expected_scales = quantise_inputs(x, InputScales(group, scale))
    assert torch.equal(scales, expected_scales)
    is_right = values.view(torch.uint8) == expected.view(torch.uint8)
    if kernel_device.type == "cpu":
        # Triton's interpreter loses the carry where rounding up makes a power of two, and rounds ties away from zero.
        quotient = x.float() / expected_scales.repeat_interleave(min(group or num_in, num_in), 1)[:, :num_in]
        is_tie = (values.float() - quotient).abs() == (expected.float() - quotient).abs()
        is_right |= is_tie | (expected.view(torch.uint8) & 7 == 0)
    assert is_right.all()


@pytest.mark.parametrize("code", ["fp8", "int4", "mxfp4"])
@pytest.mark.parametrize("rows", [1, 16, 64, 65, 4096])
@pytest.mark.parametrize("group", [32, 128])
def test_the_rule_fits_the_chip_and_the_groups(code, rows, group):
    for chip in (H200, Chip(99 * 1024, 84, (8, 9))):
        for shape in ((4096, 4096), (1024, 512), (28672, 4096), (16, 32)):
            plan = rule(rows, *shape, code, group, chip)
            assert group % plan.block_in == 0 and plan.splits >= 1
            tile = min(max(rows, 16), 128)
            used = plan.stages * (
                plan.block_out * plan.block_in // (1 if code == "fp8" else 2) + tile * plan.block_in * 2
            )
            assert plan.stages == 1 or used <= chip.shared_memory


@pytest.mark.parametrize("kind", ["fp8-channel-inputs", "fp8-block", "int4", "mxfp4"])
@pytest.mark.parametrize("rows", [16, 40, 200])
def test_candidates_fit_the_chip_and_one_gives_the_product(kernel_device, kind, rows):
    matrix = drawn(kind, (), 96, 1024, kernel_device)
    found = candidates(rows, matrix, H200)
    assert found and all(max_block_in(matrix) % plan.block_in == 0 for plan in found)
    assert all(plan.splits * 96 // plan.block_out <= 4 * H200.processors for plan in found)
    x = x_of(3, 1024, kernel_device)
    assert_is_the_product(linear_quantised_triton(x, matrix, None, found[0]), x, matrix, None)


def test_groups_of_fewer_columns_than_a_table_takes_have_no_candidates():
    assert candidates(16, drawn("int4-zeros", (), 64, 128, torch.device("cpu")), H200) == []


def test_a_plan_comes_from_the_table_of_its_format_and_else_from_the_rule(monkeypatch):
    matrix, x = drawn("int4", (), 4096, 4096, torch.device("cpu")), x_of(3, 4096, torch.device("cpu"))
    mine, others = TritonPlan(32, 64, 1, 4, 3), TritonPlan(128, 64, 1, 4, 3)
    tables = {"int4-1x64": {(4096, 4096): LinearPlans((mine, *[None] * 4))}, DENSE: {(4096, 4096): others}}
    monkeypatch.setattr(linear_quantised, "chip", lambda tensor: H200)
    monkeypatch.setattr(linear_quantised, "measured_plans", lambda gpu, format, dtype: tables.get(format, {}))
    by_rule = rule(17, 4096, 4096, "int4", 64, H200)
    assert plan_of(matrix, x) == mine and mine != rule(3, 4096, 4096, "int4", 64, H200)
    # A bucket that was measured slower than the rule, rows above all buckets, another shape, another format.
    assert plan_of(matrix, x_of(17, 4096, x.device)) == by_rule
    assert plan_of(matrix, x_of(300, 4096, x.device)) == rule(300, 4096, 4096, "int4", 64, H200)
    assert plan_of(matrix.rows_from(64), x) == rule(3, 4032, 4096, "int4", 64, H200)
    assert plan_of(replace(matrix, group=32, scales=matrix.scales.repeat(1, 2)), x).block_in == 32


def test_names_of_tuning_tables():
    names = {tuning_name(drawn(kind, (), 64, 128, torch.device("cpu"))) for kind in KINDS}
    assert names == {
        "fp8",
        "fp8-inputs",
        "fp8-64x64",
        "fp8-64x64-inputs64",
        "int4-1x64",
        "int4-1x32",
        "int4",
        "mxfp4-1x32",
    }


def test_blocks_that_span_two_groups_are_refused(kernel_device):
    matrix, x = drawn("int4-zeros", (), 48, 64, kernel_device), x_of(3, 64, kernel_device)
    with pytest.raises(EspalierError, match="blocks that divide 32 columns"):
        linear_quantised_triton(x, matrix, None, TritonPlan(64, 64, 1, 4, 2))


def test_weights_on_a_cpu_need_no_chip():
    require_supported(drawn("fp8-channel", (), 16, 16, torch.device("cpu")), torch.float64)


@pytest.mark.parametrize(
    ("kind", "capability", "dtype", "says"),
    [
        ("fp8-channel", (8, 6), torch.bfloat16, "FP8 weights need a GPU of compute capability 8.9"),
        ("mxfp4", (9, 0), torch.float16, "mxfp4 weights need dtype=bfloat16 on a GPU, not torch.float16"),
        ("int4", (9, 0), torch.float32, "int4 weights need dtype=bfloat16 on a GPU"),
        ("int4", (8, 0), torch.float16, None),
    ],
)
def test_what_no_kernel_takes_is_refused_at_start(monkeypatch, kind, capability, dtype, says):
    matrix = drawn(kind, (), 16, 32, torch.device("cpu"))
    monkeypatch.setattr(linear_quantised, "chip", lambda tensor: replace(H200, capability=capability))
    on_gpu = replace(matrix, codes=OnGPU(matrix.codes))
    if says is None:
        require_supported(on_gpu, dtype)
        return
    with pytest.raises(EspalierError, match=says):
        require_supported(on_gpu, dtype)


class OnGPU:
    """A tensor that says that it is on a GPU."""

    is_cuda = True

    def __init__(self, tensor):
        self.shape = tensor.shape
