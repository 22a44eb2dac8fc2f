"""The gated linear layer of many rows on Hopper: which layers it takes, and the bits of the product and silu apart."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from espalier.kernels.layers.hopper_gated import linear_gated_many, takes_many
from espalier.kernels.layers.linear import linear_gated
from espalier.kernels.layers.silu import silu_mul_triton
from espalier.kernels.runtime.launch import Chip
from espalier.kernels.runtime.pdl import HOPPER
from tests.kernels.test_linear import drawn_exact, random_inputs

H200 = Chip(shared_memory=232448, processors=132, capability=HOPPER)


def test_which_layers_it_takes():
    x, weight = torch.zeros(2048, 128, dtype=torch.bfloat16), torch.zeros(2 * 1024, 128, dtype=torch.bfloat16)
    assert takes_many(x, weight, None, H200)
    assert not takes_many(x, weight, weight[:, 0], H200)
    assert not takes_many(x, weight, None, replace(H200, capability=(10, 0)))
    assert not takes_many(x.half(), weight.half(), None, H200)
    # TMA copies 16 bytes at a time.
    assert not takes_many(x[:, 1:113], weight[:, 1:113], None, H200)
    assert not takes_many(x[:, ::2], weight[:, ::2], None, H200)
    assert not takes_many(x, weight[: 2 * 1020], None, H200)


def test_it_takes_what_fills_the_chip():
    """128 tiles for 132 multiprocessors; 136 would need a second wave."""
    weight = torch.zeros(2 * 16384, 128, dtype=torch.bfloat16, device="meta")
    for rows, size, taken in ((256, 8192, False), (257, 5632, True), (512, 4096, True), (512, 4352, False)):
        x = torch.zeros(rows, 128, dtype=torch.bfloat16, device="meta")
        assert takes_many(x, weight[: 2 * size], None, H200) == taken, (rows, size)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 129, 1024, 2047])
@pytest.mark.parametrize(("size", "num_in"), [(128, 64), (136, 136), (640, 4096)])
def test_the_bits_of_product_and_silu(rows, size, num_in):
    """All sums are exact.  Rows, outputs and columns may end inside a block."""
    x, weight, _ = drawn_exact(rows, 2 * size, num_in, "cuda")
    assert torch.equal(linear_gated_many(x, weight), silu_mul_triton(F.linear(x, weight)))


@pytest.mark.gpu
def test_bits_do_not_depend_on_the_number_of_rows():
    x, weight, _ = random_inputs(2048, 2 * 1024, 1024, "cuda")
    whole = linear_gated(x, weight, None, None)
    for rows in (1, 300, 1500):
        assert torch.equal(linear_gated_many(x[:rows], weight), whole[:rows])
    # A NaN stays in its row.
    x[7] = torch.nan
    again = linear_gated(x, weight, None, None)
    assert again[7].isnan().all() and torch.equal(again[8:], whole[8:])
