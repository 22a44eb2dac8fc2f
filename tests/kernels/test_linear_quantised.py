"""The linear layer of quantised weights: close to float64, deterministic, and no row's bits depend on the others."""

from dataclasses import replace

import pytest
import torch

from espalier.errors import EspalierError
from espalier.kernels.layers import quantise_rows as quantise_rows_launcher
from espalier.kernels.layers import quantised_plans
from espalier.kernels.layers.linear_plans import DENSE, TritonPlan, TuningSchema
from espalier.kernels.layers.linear_quantised import _launch, num_prefetched_lines
from espalier.kernels.layers.quantised import (
    FP8,
    InputScales,
    QuantisedMatrix,
    RoundedRows,
    deinterleave_nibbles,
    dequantise,
    interleave_nibbles,
    make_nibble_matrix,
    pack_nibbles,
    quantise_inputs,
)
from espalier.kernels.layers.quantised_plans import (
    candidate_plans,
    max_block_in,
    plan_by_rule,
    quantised_plan_for,
    require_supported_weight,
    tuning_format_name,
)
from espalier.kernels.ops.activation import gated_activation
from espalier.kernels.ops.linear import add_partial_sums, linear_quantised, linear_quantised_gated, quantise_rows
from espalier.kernels.runtime.launch import Chip, chip
from espalier.models.weight_formats.quantised import QuantisedWeight
from tests.kernels.quantised_inputs import DTYPE, KINDS, drawn, inputs_of
from tests.pairwise import in_turn_params

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
    sums = 2.0**-10 if matrix.input_scales is not None and x.is_cuda else x.shape[1] * 2.0**-23
    bound = torch.finfo(out.dtype).eps / 2 * exact.abs() * 1.01 + sums * magnitude
    assert ((out.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize(("kind", "splits", "shape"), in_turn_params(KINDS, [1, 3], SHAPES))
def test_any_shape(kernel_device, kind, splits, shape):
    rows, num_out, num_in = shape
    matrix, x = drawn(kind, (), num_out, num_in, kernel_device), x_of(rows, num_in, kernel_device)
    bias = x_of(1, num_out, kernel_device)[0] if rows % 2 else None
    out = linear_quantised.triton(x, matrix, bias, plan_for(matrix, splits))
    assert_is_the_product(out, x, matrix, bias)
    assert_is_the_product(linear_quantised.reference(x, matrix, bias), x, matrix, bias)


@pytest.mark.parametrize(("kind", "block_in"), in_turn_params(["mxfp4", "int4-zeros", "int4-channel"], [256, 128, 32]))
def test_steps_of_several_groups_that_the_columns_do_not_fill(kernel_device, kind, block_in):
    matrix, x = drawn(kind, (), 80, 1056, kernel_device), x_of(5, 1056, kernel_device)
    out = linear_quantised.triton(x, matrix, None, TritonPlan(64, block_in, 3, 4, 2))
    assert_is_the_product(out, x, matrix, None)


@pytest.mark.parametrize("kind", ["fp8-channel-inputs", "fp8-block-inputs"])
@pytest.mark.parametrize("num_in", [320, 640])
def test_a_step_of_two_sums_has_the_bits_of_two_steps(kernel_device, kind, num_in):
    """Also where the second sum of the last step is past the columns."""
    matrix, x = drawn(kind, (), 80, num_in, kernel_device), x_of(5, num_in, kernel_device)
    if matrix.group_size < num_in:
        matrix = replace(
            matrix, group_size=128, scales=matrix.scales[:, ::2].contiguous(), input_scales=InputScales(128)
        )
    short, long = (TritonPlan(64, block_in, 1, 4, 2) for block_in in (128, 256))
    out = linear_quantised.triton(x, matrix, None, long)
    assert torch.equal(out, linear_quantised.triton(x, matrix, None, short))
    assert_is_the_product(out, x, matrix, None)


@pytest.mark.parametrize("kind", KINDS)
def test_gated_is_the_activation_of_the_product(kernel_device, kind):
    matrix, x = drawn(kind, (), 2 * 40, 128, kernel_device), x_of(5, 128, kernel_device)
    if matrix.rows_per_scale > 1:
        matrix = replace(matrix, rows_per_scale=40)
    plan = plan_for(matrix)
    product = linear_quantised.triton(x, matrix, None, plan)
    assert torch.equal(linear_quantised_gated.triton(x, matrix, None, plan), gated_activation.triton(product))
    # The launch that adds the parts rounds for the next product.
    plan, rounding = plan_for(matrix, 2), InputScales()
    rounded = linear_quantised_gated.triton(x, matrix, None, plan, rounding=rounding)
    whole = gated_activation.triton(linear_quantised.triton(x, matrix, None, plan))
    for got, expected in zip((rounded.values, rounded.scales), quantise_rows.triton(whole, rounding), strict=True):
        assert torch.equal(got.float(), expected.float())


@pytest.mark.parametrize("kind", KINDS)
def test_parts_add_up(kernel_device, kind):
    matrix, x = drawn(kind, (), 48, 192, kernel_device), x_of(2, 192, kernel_device)
    plan = plan_for(matrix, 3)
    parts = _launch(x, matrix, None, plan, is_gated=False)
    assert parts.shape == (3, 2, 48)
    assert torch.equal(add_partial_sums.reference(parts, DTYPE), linear_quantised.triton(x, matrix, None, plan))


@pytest.mark.parametrize("kind", KINDS)
def test_a_rows_bits_do_not_depend_on_other_rows(kernel_device, kind):
    matrix, x = drawn(kind, (), 64, 128, kernel_device), x_of(16, 128, kernel_device)
    plan = plan_for(matrix)
    alone = linear_quantised.triton(x[3:4], matrix, None, plan)
    x[5], x[6] = torch.nan, 1e4
    assert torch.equal(linear_quantised.triton(x, matrix, None, plan)[3:4], alone)


@pytest.mark.parametrize("kind", ["fp8-channel-inputs", "fp8-block-inputs"])
def test_rows_that_are_rounded_already_give_the_same_bits(kernel_device, kind):
    matrix, x = drawn(kind, (), 2 * 64, 192, kernel_device), x_of(5, 192, kernel_device)
    rounded = RoundedRows(*quantise_rows.triton(x, matrix.input_scales), x.dtype)
    for product, plan in product_of_each(linear_quantised_gated.triton, linear_quantised.triton, matrix):
        assert torch.equal(product(rounded, matrix, None, plan), product(x, matrix, None, plan))
    weight = QuantisedWeight(matrix, "fp8")
    assert weight.rounding == matrix.input_scales
    assert_is_the_product(weight.apply(rounded, None), x, matrix, None)
    assert torch.equal(weight.activated_product(rounded, None), gated_activation(weight.apply(rounded, None)))


def product_of_each(of_gated, whole, matrix):
    return [(of_gated, plan_for(matrix)), (whole, plan_for(matrix)), (whole, plan_for(matrix, 3))]


def test_inputs_are_taken_in_the_order_of_the_columns(kernel_device):
    matrix, x = drawn("int4-zeros", (), 48, 64, kernel_device), x_of(3, 64, kernel_device)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(2)).to(kernel_device)
    ordered = linear_quantised.triton(x, replace(matrix, column_order=order), None, plan_for(matrix))
    assert torch.equal(ordered, linear_quantised.triton(x[:, order], matrix, None, plan_for(matrix)))
    assert_is_the_product(ordered, x, replace(matrix, column_order=order), None)


def test_every_nibble_and_exponent(kernel_device):
    """All 16 values of E2M1 with small and large scales: the product with unit vectors is the matrix."""
    codes = torch.arange(256, dtype=torch.uint8, device=kernel_device).view(4, 64)
    scales = torch.tensor([[115, 120, 127, 130]] * 4, dtype=torch.uint8, device=kernel_device)
    matrix = make_nibble_matrix("mxfp4", codes, scales, 32)
    unit = torch.eye(128, dtype=DTYPE, device=kernel_device)
    out = linear_quantised.triton(unit, matrix, None, TritonPlan(16, 128, 1, 4, 1))
    assert torch.equal(out, dequantise(matrix, DTYPE).T)


def test_every_nibble_and_scale_of_nvfp4(kernel_device):
    """All 16 values of E2M1 with all 127 scales that E4M3 has from 0 on, in left and right groups."""
    scales = torch.arange(127, dtype=torch.uint8).repeat_interleave(2)[:, None].repeat(1, 4)
    scales[1::2, ::2], scales[::2, 1::2] = 0, 0
    codes = pack_nibbles(torch.arange(16, dtype=torch.uint8).repeat(len(scales), 4))
    factors = torch.full((len(scales),), 0.25, dtype=torch.float64)
    parts = (part.to(kernel_device) for part in (codes, scales.view(FP8)))
    matrix = make_nibble_matrix("nvfp4", *parts, 16, row_scales=factors.to(kernel_device))
    unit = torch.eye(64, dtype=DTYPE, device=kernel_device)
    out = linear_quantised.triton(unit, matrix, None, TritonPlan(16, 64, 1, 4, 1))
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    table = torch.cat([table, -table]).repeat(4)
    meant = table * scales.view(FP8).double().repeat_interleave(16, 1) / 4
    assert torch.equal(dequantise(matrix, torch.float64).cpu(), meant)
    assert torch.equal(out.cpu().double(), meant.to(DTYPE).double().T)


def test_every_nibble_and_zero_point(kernel_device):
    """All 256 differences: each row has its zero point, and all nibbles."""
    codes = pack_nibbles(torch.arange(16, dtype=torch.uint8, device=kernel_device).repeat(16, 4))
    zeros = torch.arange(16, dtype=torch.uint8, device=kernel_device)[:, None].repeat(1, 2)
    scales = torch.tensor([[0.5, 3.0]] * 16, dtype=torch.float32, device=kernel_device)
    matrix = make_nibble_matrix("int4", codes, scales, 32, zeros)
    unit = torch.eye(64, dtype=DTYPE, device=kernel_device)
    out = linear_quantised.triton(unit, matrix, None, TritonPlan(16, 64, 1, 4, 1))
    expected = (torch.arange(16)[None, :] - torch.arange(16)[:, None]).repeat(1, 4).double()
    expected *= torch.tensor([0.5, 3.0]).repeat_interleave(32)
    assert torch.equal(out.cpu().double(), expected.T)


def test_the_place_of_each_nibble():
    """As interleave_nibbles says, in int32; columns past the last 32 stay where they are."""
    nibbles = torch.randint(0, 16, (3, 2, 76), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    codes = interleave_nibbles(pack_nibbles(nibbles))
    words = codes[..., :32].contiguous().view(torch.int32)
    for column in range(64):
        block, p, t, h = column // 32, column % 32 // 8, column % 8 // 2, column % 2
        found = (words[..., 4 * block + t] >> 4 * (p + 4 * h)) & 15
        assert torch.equal(found, nibbles[..., column].int()), column
    assert torch.equal(codes[..., 32:], pack_nibbles(nibbles[..., 64:]))
    assert torch.equal(deinterleave_nibbles(codes), pack_nibbles(nibbles))


def test_the_place_of_each_bit_of_e2m1():
    """As interleave_nibbles says: shifts bring the bits of a pair to the places of bfloat16's."""
    nibbles = torch.randint(0, 16, (5, 64), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    codes = interleave_nibbles(pack_nibbles(nibbles), is_e2m1=True)
    words = codes.view(torch.int32).long() & 0xFFFFFFFF
    pairs = [words, words << 4, words << 10 | words >> 22, words >> 2 ^ words << 6]
    for column in range(64):
        block, p, t, h = column // 32, column % 32 // 8, column % 8 // 2, column % 2
        sign, high, low, mantissa = (pairs[p][:, 4 * block + t] >> bit + 16 * h & 1 for bit in (15, 8, 7, 6))
        assert torch.equal(sign << 3 | high << 2 | low << 1 | mantissa, nibbles[:, column].long()), column
    assert torch.equal(deinterleave_nibbles(codes, is_e2m1=True), pack_nibbles(nibbles))


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize(
    ("num_in", "group", "static"), [(64, None, None), (200, None, 0.02), (200, 128, None), (96, 32, None)]
)
def test_rounded_inputs_are_the_references(kernel_device, rows, num_in, group, static):
    x = x_of(rows, num_in, kernel_device) * 3
    x[:1, :32] = 0
    scale = None if static is None else torch.tensor([static], device=kernel_device)
    values, scales = quantise_rows.triton(x, InputScales(group, scale))
    expected, expected_scales = quantise_inputs(x, InputScales(group, scale))
    assert torch.equal(scales, expected_scales)
    assert torch.equal(values.view(torch.uint8), expected.view(torch.uint8))


def test_quotients_are_exact_from_the_smallest_to_the_largest_groups(kernel_device):
    """bfloat16 has float32's exponents, each in a group with smaller ones.  Beside an infinity everything is 0."""
    # Triton's interpreter takes bfloat16 numbers without an exponent for others.
    exponents = torch.arange(1, 255, dtype=torch.int32)[:, None]
    bits = torch.randint(0, 2**31 - 1, (254, 128), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    bits = bits & 0x807F | (exponents - (bits >> 16) % 12).clamp(min=1) << 7
    x = bits.to(torch.int16).view(torch.bfloat16).to(kernel_device)
    x[:, 0] = -0.0
    values, scales = quantise_rows.triton(x, InputScales(128))
    expected, expected_scales = quantise_inputs(x, InputScales(128))
    assert torch.equal(scales, expected_scales)
    assert torch.equal(values.view(torch.uint8), expected.view(torch.uint8))
    x[126, 3] = torch.inf
    values, scales = quantise_rows.triton(x[126:127], InputScales(128))
    assert scales.isinf().all() and values.float().nonzero().tolist() == [[0, 3]] and values[0, 3].float().isnan()


@pytest.mark.parametrize("num_in", [96, 104])
@pytest.mark.parametrize("for_library", [False, True])
def test_groups_of_many_rows_share_a_program(kernel_device, monkeypatch, num_in, for_library):
    """To the bits of a program each; the last program of a row has groups that do not exist."""
    x, inputs = x_of(40, num_in, kernel_device), InputScales(16)
    values, scales = quantise_rows.triton(x, inputs)
    monkeypatch.setattr(quantise_rows_launcher, "GROUPS_PER_PROGRAM", 4)
    monkeypatch.setattr(quantise_rows_launcher, "is_oversubscribed", lambda *_: True)
    together, scales_together = quantise_rows.triton(x, inputs, for_library)
    assert torch.equal(together[:40].view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(scales_together[:40], scales)
    if for_library:
        assert together.shape == (48, num_in) and scales_together.stride() == (1, 48)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("group", [None, 48])
def test_parts_of_a_row_are_rounded_by_programs_of_their_own(kernel_device, monkeypatch, rows, group):
    """To the bits of one program, also where the last part is ragged."""
    x = x_of(rows, 104, kernel_device)
    monkeypatch.setattr(quantise_rows_launcher, "MAX_PARTS", 1)
    values, scales = quantise_rows.triton(x, InputScales(group))
    monkeypatch.setattr(quantise_rows_launcher, "MAX_PARTS", 8)
    monkeypatch.setattr(quantise_rows_launcher, "VALUES_PER_PART", 16)
    many = replace(chip(x), processors=132)
    monkeypatch.setattr(quantise_rows_launcher, "chip", lambda _: many)
    in_parts, scales_in_parts = quantise_rows.triton(x, InputScales(group))
    assert torch.equal(in_parts.view(torch.uint8), values.view(torch.uint8)) and torch.equal(scales_in_parts, scales)


@pytest.mark.parametrize("code", ["fp8", "int4", "mxfp4"])
@pytest.mark.parametrize("rows", [1, 16, 64, 65, 4096])
@pytest.mark.parametrize(("group", "grouped"), [(32, True), (128, True), (256, True), (256, False)])
def test_the_rule_fits_the_chip_and_the_groups(code, rows, group, grouped):
    for on in (H200, Chip(99 * 1024, 84, (8, 9))):
        for shape in ((4096, 4096), (1024, 512), (28672, 4096), (16, 32)):
            for input_bytes in (1, 2) if code == "fp8" else (2,):
                plan = plan_by_rule(rows, *shape, code, group, grouped, on, input_bytes)
                assert (code != "fp8" or group % plan.block_in == 0) and plan.splits >= 1
                tile = min(max(rows, 16), 128)
                weights = plan.block_out * plan.block_in // (1 if code == "fp8" else 2)
                used = plan.stages * (weights + tile * plan.block_in * input_bytes)
                assert plan.stages == 1 or used <= on.shared_memory


def test_few_rounded_rows_have_long_steps_and_fill_the_chip():
    """qkv of 8 billion parameters has 96 blocks: two programs a multiprocessor would leave a quarter of them idle."""
    for shape, splits, stages in (((6144, 4096), 4, 3), ((4096, 14336), 4, 5), ((28672, 4096), 1, 2)):
        assert plan_by_rule(16, *shape, "fp8", 256, False, H200, 1) == TritonPlan(64, 256, splits, 4, stages)
        # More rows, scales of groups, inputs that are not rounded.
        for rows, grouped, input_bytes in ((17, False, 1), (16, True, 1), (16, False, 2)):
            assert plan_by_rule(rows, *shape, "fp8", 256, grouped, H200, input_bytes).block_in == 128


@pytest.mark.parametrize(("code", "grouped"), [("fp8", False), ("fp8", True), ("int4", True), ("mxfp4", True)])
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)])
def test_few_tiles_of_rows_leave_no_half_of_the_chip_idle(code, grouped, shape):
    """A verify pass of 8 trees has 128 rows, one tile: 32 programs without split-K."""
    for first, last in ((65, 128), (129, 256)):
        plan = plan_by_rule(last, *shape, code, 128, grouped, H200)
        tiles = last // 128
        assert tiles * -(-shape[0] // plan.block_out) * plan.splits >= H200.processors / 2
        # The rows of one bucket have one plan, and so one order of summation.
        assert plan_by_rule(first, *shape, code, 128, grouped, H200) == plan
    assert plan_by_rule(257, *shape, code, 128, grouped, H200).splits == 1


@pytest.mark.parametrize(
    ("kind", "rows"), in_turn_params(["fp8-channel-inputs", "fp8-block", "int4", "mxfp4"], [16, 40, 200])
)
def test_candidates_fit_the_chip_and_one_gives_the_product(kernel_device, kind, rows):
    matrix = drawn(kind, (), 96, 1024, kernel_device)
    found = candidate_plans(rows, matrix, H200)
    assert found and all(max_block_in(matrix) % plan.block_in == 0 for plan in found)
    assert all(plan.splits * 96 // plan.block_out <= 4 * H200.processors for plan in found)
    x = x_of(3, 1024, kernel_device)
    assert_is_the_product(linear_quantised.triton(x, matrix, None, found[0]), x, matrix, None)


def test_the_first_candidates_keep_memory_busy_with_every_tile():
    """Gate and up of 8 billion parameters in FP8: 448 programs of 64 rows are at once where four share a processor."""
    codes = torch.empty(28672, 4096, dtype=FP8, device="meta")
    matrix = QuantisedMatrix("fp8", codes, torch.empty(28672, 1, device="meta"), 4096, input_scales=InputScales())
    found = candidate_plans(16, matrix, H200)
    assert len({(plan.block_out, plan.block_in, plan.warps) for plan in found[:10]}) == 10
    of_one = [plan for plan in found if (plan.block_out, plan.block_in, plan.splits) == (64, 128, 1)]
    assert of_one[0].stages in (4, 5) and of_one[-1].stages in (2, 8)


def test_blocks_of_fewer_columns_than_a_table_takes_are_no_candidates():
    matrix = drawn("fp8-block", (), 64, 128, torch.device("cpu"))
    assert candidate_plans(16, replace(matrix, group_size=32, scales=matrix.scales.repeat(1, 2)), H200) == []


@pytest.mark.parametrize(
    "code, block_in, rows, is_rounded, lines",
    [
        ("fp8", 256, 16, False, 1),
        ("fp8", 128, 64, True, 1),
        ("fp8", 128, 17, False, 4),
        ("int4", 256, 16, False, 4),
        ("int4", 128, 64, False, 2),
        ("int4", 32, 17, False, 1),
    ],
)
def test_few_rows_and_rows_behind_a_norm_prefetch_one_line(code, block_in, rows, is_rounded, lines):
    x = torch.zeros(rows, 256, dtype=torch.bfloat16)
    x = RoundedRows(x, torch.ones(rows, 1), x.dtype) if is_rounded else x
    assert num_prefetched_lines(x, code, TritonPlan(64, block_in, 1, 4, 4)) == lines


def test_a_plan_comes_from_the_table_of_its_format_and_else_from_the_rule(monkeypatch):
    matrix, x = drawn("int4", (), 4096, 4096, torch.device("cpu")), x_of(3, 4096, torch.device("cpu"))
    mine, others = TritonPlan(32, 64, 1, 4, 3), TritonPlan(128, 64, 1, 4, 3)
    tables = {"int4-1x64": {(4096, 4096): (mine, *[None] * 4)}, DENSE: {(4096, 4096): others}}
    monkeypatch.setattr(quantised_plans, "chip", lambda tensor: H200)
    monkeypatch.setattr(TuningSchema, "measured_plans", lambda kind, gpu, dtype, format: tables.get(format, {}))
    by_rule = plan_by_rule(17, 4096, 4096, "int4", 256, True, H200)
    assert quantised_plan_for(matrix, x) == mine and mine != plan_by_rule(3, 4096, 4096, "int4", 256, True, H200)
    # A bucket that was measured slower than the rule, rows above all buckets, another shape, another format.
    assert quantised_plan_for(matrix, x_of(17, 4096, x.device)) == by_rule
    assert quantised_plan_for(matrix, x_of(300, 4096, x.device)) == plan_by_rule(
        300, 4096, 4096, "int4", 256, True, H200
    )
    assert quantised_plan_for(matrix.rows_from(64), x) == plan_by_rule(3, 4032, 4096, "int4", 256, True, H200)
    fp8 = drawn("fp8-block", (), 4096, 64, torch.device("cpu"))
    assert quantised_plan_for(replace(fp8, group_size=32, scales=fp8.scales.repeat(1, 2)), x[:, :64]).block_in == 32


def test_names_of_tuning_tables():
    names = {tuning_format_name(drawn(kind, (), 64, 128, torch.device("cpu"))) for kind in KINDS}
    assert names == {
        "fp8",
        "fp8-inputs",
        "fp8-64x64",
        "fp8-64x64-inputs64",
        "int4-1x64",
        "int4-1x32",
        "int4",
        "nvfp4-1x16",
        "mxfp4-1x32",
    }


def test_blocks_that_span_two_groups_are_refused(kernel_device):
    matrix, x = drawn("fp8-block", (), 64, 128, kernel_device), x_of(3, 128, kernel_device)
    with pytest.raises(EspalierError, match="blocks that divide 64 columns"):
        linear_quantised.triton(x, matrix, None, TritonPlan(64, 128, 1, 4, 2))


@pytest.mark.parametrize(("num_in", "group"), [(64, 16), (80, 80)])
def test_words_of_two_groups_and_words_that_are_not_whole_are_refused(kernel_device, num_in, group):
    codes = torch.zeros(8, num_in // 2, dtype=torch.uint8, device=kernel_device)
    scales = torch.ones(8, num_in // group, device=kernel_device)
    matrix, x = make_nibble_matrix("int4", codes, scales, group), x_of(3, num_in, kernel_device)
    with pytest.raises(EspalierError, match="groups of whole words"):
        linear_quantised.triton(x, matrix, None, TritonPlan(64, 64, 1, 4, 2))
    assert_is_the_product(linear_quantised.reference(x, matrix, None), x, matrix, None)


def test_weights_on_a_cpu_need_no_chip():
    require_supported_weight(drawn("fp8-channel", (), 16, 16, torch.device("cpu")), torch.float64)


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
    monkeypatch.setattr(quantised_plans, "chip", lambda tensor: replace(H200, capability=capability))
    on_gpu = replace(matrix, codes=OnGPU(matrix.codes))
    if says is None:
        require_supported_weight(on_gpu, dtype)
        return
    with pytest.raises(EspalierError, match=says):
        require_supported_weight(on_gpu, dtype)


@pytest.mark.parametrize(("num_in", "group"), [(80, 80), (64, 16)])
def test_words_of_two_groups_are_refused_at_start(num_in, group):
    codes, scales = torch.zeros(8, num_in // 2, dtype=torch.uint8), torch.ones(8, num_in // group)
    matrix = make_nibble_matrix("int4", codes, scales, group)
    require_supported_weight(matrix, torch.bfloat16)
    with pytest.raises(EspalierError, match=f"this matrix has {num_in} in groups of {group}"):
        require_supported_weight(replace(matrix, codes=OnGPU(matrix.codes)), torch.bfloat16)


def test_scales_that_the_kernels_cannot_hold_are_refused_at_start():
    matrix = drawn("mxfp4", (), 16, 32, torch.device("cpu"))
    matrix.scales[3, 0] = 127 + 66
    with pytest.raises(EspalierError, match=r"a scale is 2\^66, but on a GPU those of MXFP4 may be at most 2\^65"):
        require_supported_weight(replace(matrix, codes=OnGPU(matrix.codes)), torch.bfloat16)


class OnGPU:
    """A tensor that says that it is on a GPU."""

    is_cuda = True

    def __init__(self, tensor):
        self.shape = tensor.shape
