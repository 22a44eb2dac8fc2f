"""The library's FP8 product: close to float64 for each kind of scales, and taken for the matrices that it can read."""

from dataclasses import replace

import pytest
import torch

from espalier.kernels.layers import scaled_product as of_library
from espalier.kernels.layers.quantised import (
    FP8,
    InputScales,
    QuantisedMatrix,
    RoundedRows,
    fake_quantise_inputs,
    quantise_inputs,
)
from espalier.kernels.layers.scaled_product import MAX_KERNEL_ROWS, library_supports_product, scaled_product
from espalier.kernels.ops.activation import gated_activation
from espalier.kernels.ops.linear import linear_quantised, linear_quantised_gated, quantise_rows
from espalier.kernels.runtime.launch import Chip

ROWS = MAX_KERNEL_ROWS + 3
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def drawn(num_out: int, num_in: int, device: str, block: int | None = None, one_scale: bool = False) -> QuantisedMatrix:
    """block: rows and columns that share a scale; None: all columns do."""
    generator = torch.Generator().manual_seed(num_out + num_in)
    group = block or num_in
    rows_per_scale = num_out if one_scale else block or 1
    codes = torch.randn(num_out, num_in, generator=generator).to(FP8)
    scales = torch.rand(-(-num_out // rows_per_scale), -(-num_in // group), generator=generator) + 0.5
    inputs = InputScales(block, torch.tensor([0.02], device=device) if one_scale else None)
    return QuantisedMatrix("fp8", codes.to(device), scales.to(device), group, rows_per_scale, input_scales=inputs)


def inputs_for(num_in: int, device: str, rows: int = ROWS) -> torch.Tensor:
    scale_of_row = torch.logspace(-3, 3, rows)[:, None]
    x = torch.randn(rows, num_in, generator=torch.Generator().manual_seed(7)) * scale_of_row
    return x.to(device, torch.bfloat16)


def assert_is_the_product(out, x, matrix, bias):
    """The tolerance of linear_quantised.py for rounded inputs on a GPU."""
    row_scales = matrix.scales.double().repeat_interleave(matrix.rows_per_scale, 0)[: matrix.shape[0]]
    weight = matrix.codes.double() * row_scales.repeat_interleave(matrix.group_size, 1)[:, : matrix.shape[1]]
    inputs, bias = fake_quantise_inputs(x, matrix.input_scales).double(), bias.double()
    exact = inputs @ weight.T + bias
    magnitude = inputs.abs() @ weight.abs().T + bias.abs()
    bound = torch.finfo(out.dtype).eps / 2 * exact.abs() * 1.01 + 2.0**-10 * magnitude
    assert ((out.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("one_scale", [False, True])
def test_one_scale_for_a_row(device, one_scale):
    matrix, x = drawn(48, 80, device, one_scale=one_scale), inputs_for(80, device)
    bias = x[5, :48].contiguous()
    assert library_supports_product(x, matrix)
    assert_is_the_product(scaled_product(x, matrix, bias), x, matrix, bias)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "num_out", "num_in"), [(ROWS, 384, 512), (512, 384, 512), (1000, 1536, 4096)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_one_scale_for_a_block(rows, num_out, num_in, has_bias):
    matrix, x = drawn(num_out, num_in, "cuda", block=128), inputs_for(num_in, "cuda", rows)
    bias = x[5, :num_out].contiguous() if has_bias else None
    assert library_supports_product(x, matrix)
    product = scaled_product(x, matrix, bias)
    assert_is_the_product(product, x, matrix, torch.zeros(num_out, device="cuda") if bias is None else bias)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dimension", [0, 1])
def test_the_scale_of_the_block_beside_is_noticed(device, dimension):
    matrix, x = drawn(384, 512, device, block=128), inputs_for(512, device)
    product = linear_quantised(x, replace(matrix, scales=matrix.scales.roll(1, dimension)), None)
    with pytest.raises(AssertionError):
        assert_is_the_product(product, x, matrix, torch.zeros(384, device=device))


@pytest.mark.gpu
def test_a_linear_layer_takes_it():
    matrix, x = drawn(64, 128, "cuda"), inputs_for(128, "cuda")
    product = scaled_product(x, matrix, None)
    assert torch.equal(linear_quantised(x, matrix, None), product)
    assert torch.equal(linear_quantised_gated(x, matrix, None), gated_activation(product))


def test_other_matrices_stay_with_our_kernel():
    matrix, x = drawn(48, 80, "cpu"), inputs_for(80, "cpu")
    others = {
        "few rows": (x[:MAX_KERNEL_ROWS], matrix),
        "float16": (x.half(), matrix),
        "inputs as they are": (x, replace(matrix, input_scales=None)),
        "rows of no multiple of 16": (x, drawn(40, 80, "cpu")),
        "columns of no multiple of 16": (inputs_for(72, "cpu"), drawn(48, 72, "cpu")),
        "groups of inputs": (x, replace(matrix, input_scales=InputScales(16))),
        "blocks of 64": (inputs_for(512, "cpu"), drawn(128, 512, "cpu", block=64)),
        "five blocks of columns": (inputs_for(640, "cpu"), drawn(128, 640, "cpu", block=128)),
        "part of a block of rows": (inputs_for(512, "cpu"), drawn(192, 512, "cpu", block=128)),
    }
    assert [name for name, case in others.items() if library_supports_product(*case)] == []


def test_fewer_rows_where_one_tile_of_them_fills_the_chip(monkeypatch):
    """And fewer still where blocks have scales.  Those rows must not be rounded yet: the library orders scales anew."""
    monkeypatch.setattr(of_library, "chip", lambda tensor: Chip(232448, 132, (9, 0)))

    def takes(rows, num_out, block=None, is_rounded=False):
        matrix, x = drawn(128, 512, "cpu", block), inputs_for(512, "cpu")[:rows]
        repeats = num_out // 128
        scales = matrix.scales.repeat(repeats if len(matrix.scales) > 1 else 1, 1)
        matrix = replace(matrix, codes=matrix.codes.repeat(repeats, 1), scales=scales)
        return library_supports_product(
            RoundedRows(*quantise_inputs(x, matrix.input_scales), x.dtype) if is_rounded else x, matrix
        )

    wide, narrow = 132 * 128, 131 * 128
    assert takes(129, wide) and takes(129, wide, is_rounded=True) and takes(257, narrow, is_rounded=True)
    assert not takes(128, wide) and not takes(129, narrow) and not takes(256, narrow)
    assert takes(65, 128, block=128) and not takes(64, 128, block=128)
    assert not takes(259, 128, block=128, is_rounded=True)


@pytest.mark.gpu
def test_rows_that_a_norm_has_rounded_give_the_same_bits():
    matrix, x = drawn(64, 128, "cuda"), inputs_for(128, "cuda")
    rounded = RoundedRows(*quantise_rows(x, matrix.input_scales), x.dtype)
    assert torch.equal(linear_quantised(rounded, matrix, None), linear_quantised(x, matrix, None))
