"""The linear layer of 4-bit weights for many rows: the reference's values to the bit, and the products of them."""

from dataclasses import replace
from random import Random

import pytest
import torch

from espalier.kernels.layers import linear_dequantised
from espalier.kernels.layers.linear_dequantised import (
    BLOCK_ROW_MULTIPLE,
    MAX_FUSED_ROWS,
    MAX_SCRATCH_BYTES,
    blocks_of,
    dequantised_gated,
    dequantised_product,
    uses_dequantised_product,
    write_dequantised_rows,
)
from espalier.kernels.layers.quantised import FP8, dequantise, make_nibble_matrix
from espalier.kernels.ops.activation import SILU, gated_activation
from espalier.kernels.ops.linear import linear_quantised, linear_quantised_gated
from tests.kernels.quantised_inputs import DTYPE, KINDS, drawn
from tests.pairwise import in_turn_params

FOUR_BITS = [kind for kind in KINDS if not kind.startswith("fp8")]
MANY = MAX_FUSED_ROWS + 1
# (rows, out, in): tiles of the weight that are full, and ragged in both directions.
SHAPES = [(1, 64, 256), (3, 70, 192), (18, 132, 1056)]


def x_of(rows, num_in, device, seed=1):
    return torch.randn(rows, num_in, generator=torch.Generator().manual_seed(seed)).to(DTYPE).to(device)


def assert_is_the_product(out, x, matrix, bias):
    """The tolerance of linear_dequantised.py."""
    inputs, weight = x.double(), dequantise(matrix, torch.float64)
    exact = inputs @ weight.T + (0 if bias is None else bias.double())
    magnitude = inputs.abs() @ weight.abs().T + (0 if bias is None else bias.double().abs())
    eps = torch.finfo(out.dtype).eps
    assert ((out.double() - exact).abs() <= eps / 2 * exact.abs() + (eps + x.shape[1] * 2.0**-23) * magnitude).all()


def drawn_matrix(code, draw, device):
    """Groups of whole words that may be longer than a row, with and without zero points."""
    num_out, num_in = draw.randint(1, 40), 32 * draw.randint(1, 18)
    random = torch.Generator().manual_seed(num_out * num_in)

    def integers(most, *shape):
        return torch.randint(0, most, shape, generator=random).to(torch.uint8)

    def numbers(least, most, *shape):
        return torch.rand(shape, generator=random, dtype=torch.float64) * (most - least) + least

    group = {"mxfp4": 32, "nvfp4": 16, "int4": 32 * draw.choice([1, 2, 3, 4, 18])}[code]
    size, zeros, factors = (num_out, -(-num_in // group)), None, None
    if code == "mxfp4":
        scales = integers(12, *size) + 118
    elif code == "nvfp4":
        scales, factors = numbers(0, 20, *size).to(FP8), numbers(0.01, 0.02, num_out).to(device)
    else:
        scales = numbers(0.01, 0.1, *size).to(draw.choice([torch.float32, torch.float16, torch.bfloat16]))
        zeros = integers(16, *size).to(device) if draw.random() < 0.5 else None
    codes = integers(256, num_out, num_in // 2).to(device)
    return make_nibble_matrix(code, codes, scales.to(device), group, zeros, row_scales=factors)


@pytest.mark.parametrize("code", ["int4", "mxfp4", "nvfp4"])
def test_values_have_the_bits_of_the_reference(kernel_device, code):
    """Of any rows, rounded to the dtype once.  Memory behind these rows stays as it is."""
    draw = Random(code)
    for _ in range(15):
        matrix = drawn_matrix(code, draw, kernel_device)
        begin = draw.randrange(len(matrix))
        rows = range(begin, draw.randint(begin, len(matrix) - 1) + 1)
        out = torch.full((len(rows) + 1, matrix.shape[1]), 7.0, dtype=DTYPE, device=kernel_device)
        write_dequantised_rows(matrix, rows, out[:-1])
        assert torch.equal(out[:-1], dequantise(matrix, DTYPE, rows.start, rows.stop))
        assert (out[-1] == 7).all()


@pytest.mark.parametrize(("kind", "in_blocks", "shape"), in_turn_params(FOUR_BITS, [False, True], SHAPES))
def test_any_shape(kernel_device, monkeypatch, kind, in_blocks, shape):
    rows, num_out, num_in = shape
    matrix, x = drawn(kind, (), num_out, num_in, kernel_device), x_of(rows, num_in, kernel_device)
    bias = x_of(1, num_out, kernel_device)[0] if rows % 2 else None
    if in_blocks:
        monkeypatch.setattr(linear_dequantised, "BLOCK_ROW_MULTIPLE", 16)
        monkeypatch.setattr(linear_dequantised, "MAX_SCRATCH_BYTES", 32 * num_in * x.itemsize)
        assert len(blocks_of(num_out, num_in * x.itemsize)) > 1
    product = dequantised_product(x, matrix, bias)
    assert_is_the_product(product, x, matrix, bias)
    assert torch.equal(dequantised_gated(x, matrix, bias, SILU), gated_activation.triton(product))


def test_the_kernel_of_gate_and_up_gets_both_of_the_same_outputs(kernel_device, monkeypatch):
    """Block by block, and what it writes is the activation of the product."""
    shapes = []

    def of_block(x, values, out):
        shapes.append(tuple(values.shape))
        out.copy_(gated_activation.triton(x @ values.T))

    monkeypatch.setattr(linear_dequantised, "BLOCK_ROW_MULTIPLE", 16)
    monkeypatch.setattr(linear_dequantised, "MAX_SCRATCH_BYTES", 64 * 256 * 2)
    for name, stand_in in (("hopper_gated", of_block), ("supports_hopper_gated", all_true), ("fills_chip", all_true)):
        monkeypatch.setattr(linear_dequantised, name, stand_in)
    matrix, x = drawn("int4", (), 2 * 72, 256, kernel_device), x_of(3, 256, kernel_device)
    expected = gated_activation.triton(x @ dequantise(matrix, DTYPE).T)
    torch.testing.assert_close(dequantised_gated(x, matrix, None, SILU), expected, rtol=2e-2, atol=2e-2)
    assert shapes == [(64, 256), (64, 256), (16, 256)]


def all_true(*args):
    return True


@pytest.mark.parametrize(
    ("num_out", "num_in", "num_blocks"),
    [(6144, 4096, 1), (28672, 4096, 2), (4096, 14336, 1), (57344, 8192, 7), (128256, 8192, 16), (100, 64, 1)],
)
def test_blocks_fit_the_scratch_memory_and_are_of_about_equal_size(num_out, num_in, num_blocks):
    blocks = blocks_of(num_out, 2 * num_in)
    assert [row for block in blocks for row in (block.start, block.stop)][1:-1:2] == [b.start for b in blocks[1:]]
    assert blocks[0].start == 0 and blocks[-1].stop == num_out and len(blocks) == num_blocks
    assert all(len(block) * 2 * num_in <= MAX_SCRATCH_BYTES for block in blocks)
    assert len(blocks[0]) - len(blocks[-1]) < BLOCK_ROW_MULTIPLE * num_blocks


def test_a_row_too_long_for_the_scratch_memory_still_has_a_block():
    assert [len(block) for block in blocks_of(600, MAX_SCRATCH_BYTES)] == [256, 256, 88]


@pytest.mark.parametrize("kind", KINDS)
def test_from_one_number_of_rows_on_it_takes_4_bits(kind):
    """Always: so the largest launch, which measures the memory, takes it if any launch does."""
    matrix = drawn(kind, (), 64, 128, torch.device("cpu"))
    taken = [
        uses_dequantised_product(torch.empty(rows, 128, dtype=DTYPE), matrix) for rows in (1, MANY - 1, MANY, 9000)
    ]
    assert taken == [False, False, *([kind in FOUR_BITS] * 2)]
    assert not uses_dequantised_product(torch.empty(MANY, 128), matrix)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", FOUR_BITS)
@pytest.mark.parametrize("inner", [256, 132 * 128, 2 * 132 * 128])
def test_a_linear_layer_takes_it(monkeypatch, kind, inner):
    """Eager and in a graph, with inputs in another order, and gated by the kernel of many rows in 1 and 2 blocks."""
    monkeypatch.setattr(linear_dequantised, "MAX_SCRATCH_BYTES", 2 * 132 * 128 * 512 * 2)
    matrix, x = drawn(kind, (), 2 * inner, 512, torch.device("cuda")), x_of(MANY, 512, "cuda")
    order = torch.randperm(512, generator=torch.Generator().manual_seed(2)).cuda()
    ordered, inputs = replace(matrix, column_order=order), x.index_select(1, order)
    product = dequantised_product(inputs, matrix, None)
    assert_is_the_product(product, inputs, matrix, None)
    assert torch.equal(linear_quantised(x, ordered, None), product)
    # hopper/gated.py adds in another order than the library.
    expected, result = gated_activation.triton(product).double(), linear_quantised_gated(x, ordered, None)
    assert ((result.double() - expected).abs() <= 2**-6 * expected.abs() + 2**-7 * product.abs().max()).all()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        in_graph = linear_quantised(x, ordered, None), linear_quantised_gated(x, ordered, None)
    captured.replay()
    assert torch.equal(in_graph[0], product) and torch.equal(in_graph[1], result)


@pytest.mark.gpu
@pytest.mark.parametrize(("product", "results"), [(linear_quantised, 1), (linear_quantised_gated, 1.5)])
def test_memory_beside_the_results_is_the_scratch(monkeypatch, product, results):
    """In several blocks, none of which fills the chip."""
    monkeypatch.setattr(linear_dequantised, "MAX_SCRATCH_BYTES", 8 * 2**20)
    matrix, x = drawn("int4", (), 2 * 132 * 128, 1024, torch.device("cuda")), x_of(MANY, 1024, "cuda")
    product(x, matrix, None)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    product(x, matrix, None)
    least = results * MANY * len(matrix) * x.itemsize
    # A gated product's scratch is free again before its activation.
    assert least <= torch.cuda.max_memory_allocated() - before <= least + 8 * 2**20 + 2**20
