"""The linear layer of GGUF's blocks: its values are those of the package `gguf`, its product close to float64."""

import os

import pytest
import torch

from espalier.errors import EspalierError
from espalier.kernels.layers.blocks import BLOCK_TYPES, BlockMatrix, dequantise_blocks
from espalier.kernels.layers.linear_blocks import _launch_kernel, num_splits_for
from espalier.kernels.ops.linear import linear_blocks
from espalier.kernels.runtime.launch import Chip
from tests.gguf import blocks_of
from tests.pairwise import in_turn_params

DTYPE = torch.float16 if os.environ.get("TRITON_INTERPRET") == "1" else torch.bfloat16
H200 = Chip(shared_memory=232448, processors=132, capability=(9, 0))
# (rows, out, blocks of 256 columns): full and ragged tiles, and two tiles of rows.
SHAPES = [(1, 64, 1), (5, 70, 3), (130, 33, 1)]


def drawn(name, num_out, num_in, device="cpu"):
    return BlockMatrix(BLOCK_TYPES[name], blocks_of(name, num_out, num_in).to(device))


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_values_have_the_bits_of_the_library(name):
    """All bytes, in blocks whose scales are numbers."""
    gguf = pytest.importorskip("gguf")
    matrix = drawn(name, 64, 1024)
    theirs = gguf.dequantize(matrix.blocks.numpy(), gguf.GGMLQuantizationType[name])
    kind = BLOCK_TYPES[name]
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind.gguf_type)] == (kind.block_values, kind.block_bytes)
    assert torch.equal(dequantise_blocks(matrix).view(torch.int32), torch.from_numpy(theirs).view(torch.int32))
    assert torch.equal(dequantise_blocks(matrix, 7, 40), dequantise_blocks(matrix)[7:40])


@pytest.mark.parametrize(("name", "splits", "shape"), in_turn_params(list(BLOCK_TYPES), [1, 3], SHAPES))
def test_any_shape(kernel_device, name, splits, shape):
    rows, num_out, blocks = shape
    matrix = drawn(name, num_out, 256 * blocks, kernel_device)
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 256 * blocks, generator=generator).to(kernel_device, DTYPE)
    bias = torch.randn(num_out, generator=generator).to(kernel_device, DTYPE) if rows % 2 else None
    weight = dequantise_blocks(matrix).double()
    exact = x.double() @ weight.T + (0 if bias is None else bias.double())
    integers, scales, minima = matrix.block_type.decode(matrix.blocks.reshape(-1, matrix.block_type.block_bytes))
    sizes = integers.abs() * scales.abs() + (0 if minima is None else minima.abs())
    magnitude = x.double().abs() @ sizes.double().reshape(num_out, -1).T + (0 if bias is None else bias.double().abs())
    bound = torch.finfo(DTYPE).eps / 2 * exact.abs() * 1.01 + x.shape[1] * 2.0**-23 * magnitude
    for out in (_launch_kernel(x, matrix, bias, splits), linear_blocks.reference(x, matrix, bias)):
        assert out.dtype == DTYPE
        assert ((out.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q8_0"])
def test_a_rows_bits_do_not_depend_on_other_rows(kernel_device, name):
    matrix, x = drawn(name, 64, 512, kernel_device), torch.randn(16, 512).to(kernel_device, DTYPE)
    alone = _launch_kernel(x[3:4], matrix, None, 2)
    x[5], x[6] = torch.nan, 1e3
    assert torch.equal(_launch_kernel(x, matrix, None, 2)[3:4], alone)


def test_columns_are_split_where_programs_are_few():
    def splits(rows, num_out, num_in, name="Q4_K"):
        kind = BLOCK_TYPES[name]
        row = torch.empty(num_out, kind.row_bytes(num_in), dtype=torch.uint8, device="meta")
        return num_splits_for(rows, BlockMatrix(kind, row), H200)

    assert splits(1, 4096, 4096) == 4
    assert splits(1, 128256, 4096) == 1
    assert splits(65, 4096, 4096) == 1
    assert splits(1, 512, 1024) == 2
    assert splits(1, 64, 32, "Q8_0") == 1


def test_other_dtypes_are_refused(kernel_device):
    with pytest.raises(EspalierError, match="takes bfloat16 or float16"):
        linear_blocks.triton(torch.zeros(1, 256, device=kernel_device), drawn("Q6_K", 8, 256, kernel_device), None)
