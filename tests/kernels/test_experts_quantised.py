"""The expert product with quantised experts: that of the dequantised experts, for every format."""

from dataclasses import replace

import pytest
import torch

from espalier.kernels.layers.experts_plan import (
    ExpertsPlan,
    ExpertsShape,
    ProductPlan,
    choose_experts_plan,
    quantised_launch_options,
)
from espalier.kernels.layers.linear_plans import RESERVED_SHARED_MEMORY
from espalier.kernels.layers.quantised import RoundedRows, dequantise
from espalier.kernels.ops.activation import Activation
from espalier.kernels.ops.experts import ExpertBiases, grouped_experts
from espalier.kernels.ops.linear import quantise_rows
from espalier.kernels.runtime.launch import Chip, next_power_of_2
from tests.kernels.quantised_inputs import DTYPE, KINDS, drawn
from tests.pairwise import fewer, in_turn_params

# (rows, experts, choices, hidden size, intermediate size); a single row is not sorted.
SHAPES = [(1, 4, 2, 64, 64), (9, 5, 2, 128, 64)]
TOLERANCE = {torch.float16: 8e-3, torch.bfloat16: 6e-2}
# Blocks of 64 columns divide the groups of KINDS, or are made to.
PRODUCT = ProductPlan(32, 64, 4, 2)
HOPPER = Chip(232448, 132, (9, 0))


def inputs(kind, rows, experts, top_k, hidden, inner, device):
    """x, gate_up, down, ids, weights."""
    generator = torch.Generator().manual_seed(rows)
    x = (torch.randn(rows, hidden, generator=generator) / hidden**0.5).to(DTYPE).to(device)
    gate_up = drawn(kind, (experts,), 2 * inner, hidden, device)
    down = drawn(kind, (experts,), hidden, inner, device, seed=1)
    ids = torch.rand(rows, experts, generator=generator).topk(top_k).indices.sort(-1).values.to(device)
    return x, gate_up, down, ids, torch.rand(rows, top_k, generator=generator).to(device)


def assert_close(ours, theirs):
    scale = theirs.abs().max()
    torch.testing.assert_close(ours / scale, theirs / scale, rtol=0, atol=TOLERANCE[DTYPE])


@pytest.mark.parametrize(("kind", "shape"), in_turn_params(KINDS, SHAPES))
def test_it_is_the_reference(kernel_device, kind, shape):
    args = inputs(kind, *shape, kernel_device)
    live = torch.arange(shape[0], device=kernel_device) != 3
    plan = ExpertsPlan(1 if shape[0] == 1 else 16, PRODUCT, PRODUCT)
    ours = grouped_experts.triton(*args, live_rows=live, plan=plan)
    assert_close(ours, grouped_experts.reference(*args, live_rows=live))
    assert (ours[:, ~live] == 0).all()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "inputs" not in kind])
def test_the_reference_is_the_product_with_the_dequantised_experts(kind):
    x, gate_up, down, ids, weights = inputs(kind, *SHAPES[1], torch.device("cpu"))
    dense = [torch.stack([dequantise(m[e], torch.float64) for e in range(len(m))]) for m in (gate_up, down)]
    ours = grouped_experts.reference(x.double(), gate_up, down, ids, weights.double())
    theirs = grouped_experts.reference(x.double(), *dense, ids, weights.double())
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_biases_and_another_activation(kernel_device):
    """GPT-OSS: MXFP4 with biases."""
    args = inputs("mxfp4", *SHAPES[1], kernel_device)
    biases = ExpertBiases(*(torch.randn(5, n).to(DTYPE).to(kernel_device) for n in (128, 128)))
    activation = Activation(alpha=1.702, up_offset=1.0, limit=7.0)
    plan = ExpertsPlan(16, PRODUCT, PRODUCT)
    ours = grouped_experts.triton(*args, biases=biases, activation=activation, plan=plan)
    assert_close(ours, grouped_experts.reference(*args, biases=biases, activation=activation))


@pytest.mark.parametrize("kind", fewer(KINDS, lambda kind: kind in ("mxfp4", "fp8-channel-inputs")))
def test_a_rows_bits_do_not_depend_on_the_batch(kernel_device, kind):
    x, gate_up, down, ids, weights = inputs(kind, *SHAPES[1], kernel_device)
    plan = ExpertsPlan(16, PRODUCT, PRODUCT)
    whole = grouped_experts.triton(x, gate_up, down, ids, weights, plan=plan)
    part = grouped_experts.triton(x[4:7], gate_up, down, ids[4:7], weights[4:7], plan=plan)
    assert torch.equal(whole[:, 4:7], part)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "inputs" in kind])
def test_inputs_that_are_rounded_already_give_the_same_bits(kernel_device, kind):
    x, gate_up, down, ids, weights = inputs(kind, *SHAPES[1], kernel_device)
    plan = ExpertsPlan(16, PRODUCT, PRODUCT)
    rounded = RoundedRows(*quantise_rows.triton(x, gate_up.input_scales), x.dtype)
    ours = grouped_experts.triton(rounded, gate_up, down, ids, weights, plan=plan)
    assert torch.equal(ours, grouped_experts.triton(x, gate_up, down, ids, weights, plan=plan))


@pytest.mark.parametrize("kind", KINDS)
def test_a_padded_batch_takes_the_plan_of_its_rows_alone(kind):
    shape, chip = ExpertsShape(64, 2, 256, 256), replace(HOPPER, processors=10)
    matrices = drawn(kind, (1,), 512, 256, "cpu"), drawn(kind, (1,), 256, 256, "cpu", seed=1)
    plans = [choose_experts_plan(shape, rows, torch.bfloat16, chip, matrices) for rows in range(1, 129)]
    assert all(plan == plans[next_power_of_2(rows) - 1] for rows, plan in enumerate(plans, 1))
    assert [plan.tile_rows == 1 for plan in plans[:3]] == [True, False, False] and len(set(plans)) > 1


@pytest.mark.parametrize("kind", KINDS)
def test_stages_fit_the_chip(kind):
    for matrices, tile in ((2, 16), (1, 128)):
        matrix = drawn(kind, (2,), 512, 512, "cpu")
        options = quantised_launch_options(ProductPlan(64, 256, 4, 99), matrix, matrices, tile, HOPPER)
        weights = matrices * 64 * (1 if matrix.code == "fp8" else 0.5)
        inputs = tile * (2 if matrix.input_scales is None else 1)
        of_stage = (weights + inputs) * options["BLOCK_IN"]
        stages = options["num_stages"]
        assert stages * of_stage <= HOPPER.shared_memory - RESERVED_SHARED_MEMORY < (stages + 1) * of_stage * 1.1


def test_registers_let_as_many_programs_run_as_shared_memory_does():
    """4 of 128 threads in MXFP4 up to 16 rows: with more registers, fewer bytes would be on their way."""
    down = drawn("mxfp4", (2,), 2048, 2048, "cpu")
    for stages, registers in ((3, 128), (4, 168), (6, None)):
        assert quantised_launch_options(ProductPlan(64, 256, 4, stages), down, 1, 16, HOPPER)["maxnreg"] == registers


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("fp8")])
def test_a_thread_holds_its_part_of_an_fp8_tiles_sums_twice(kind):
    """With fewer registers they would be spilled: tiles of 128 pairs took 1.7 ms in the place of 0.4 (docs/log.md)."""
    shape = ExpertsShape(256, 8, 2048, 512)
    # A plan follows from the shape and the format: one expert will do.
    matrices = drawn(kind, (1,), 1024, 2048, "cpu"), drawn(kind, (1,), 2048, 512, "cpu", seed=1)
    for rows in (16, 256, 1024, 4096):
        plan = choose_experts_plan(shape, rows, torch.bfloat16, HOPPER, matrices)
        for product, matrix, halves in ((plan.gated, matrices[0], 2), (plan.down, matrices[1], 1)):
            registers = quantised_launch_options(product, matrix, halves, plan.tile_rows, HOPPER)["maxnreg"] or 255
            sums = halves * product.block_out * plan.tile_rows // (32 * product.warps)
            assert 2 * sums + 64 <= registers


@pytest.mark.parametrize(("kind", "rows"), [("mxfp4", 8), ("int4", 16), ("fp8-channel", 16)])
def test_tiles_are_small_where_a_kernel_has_such_and_experts_have_few_pairs(kind, rows):
    shape = ExpertsShape(32, 4, 1024, 1024)
    # A plan follows from the shape and the format: one expert will do.
    matrices = drawn(kind, (1,), 2048, 1024, "cpu"), drawn(kind, (1,), 1024, 1024, "cpu", seed=1)
    found = [
        choose_experts_plan(shape, pairs // 4, torch.bfloat16, HOPPER, matrices).tile_rows for pairs in (64, 128, 256)
    ]
    assert found[:2] == [rows, rows] and found[2] >= 16


def test_tiles_are_small_only_where_both_products_have_that_kernel():
    """In the other kernel, a tile of 8 pairs would compute those of the next tile too."""
    for inner, rows in ((768, 8), (704, 16)):
        matrices = drawn("mxfp4", (1,), 2 * inner, 1024, "cpu"), drawn("mxfp4", (1,), 1024, inner, "cpu", seed=1)
        plan = choose_experts_plan(ExpertsShape(32, 4, 1024, inner), 16, torch.bfloat16, HOPPER, matrices)
        assert plan.tile_rows == rows, inner
