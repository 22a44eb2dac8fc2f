"""The gated linear layer of many rows on Hopper: which layers it takes, and the bits of the product and silu apart."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from espalier.errors import EspalierError
from espalier.kernels.hopper.gated import fills_chip, hopper_gated, supports_hopper_gated
from espalier.kernels.ops.activation import gated_activation
from espalier.kernels.ops.linear import linear_gated
from espalier.kernels.runtime.launch import HOPPER, Chip
from tests.kernels.test_linear import drawn_exact, random_inputs

H200 = Chip(shared_memory=232448, processors=132, capability=HOPPER)


def test_which_layers_it_takes():
    x, weight = torch.zeros(2048, 128, dtype=torch.bfloat16), torch.zeros(2 * 1024, 128, dtype=torch.bfloat16)
    assert supports_hopper_gated(x, weight, None, H200)
    assert not supports_hopper_gated(x, weight, weight[:, 0], H200)
    assert not supports_hopper_gated(x, weight, None, replace(H200, capability=(10, 0)))
    assert not supports_hopper_gated(x.half(), weight.half(), None, H200)
    # TMA copies 16 bytes at a time.
    assert not supports_hopper_gated(x[:, 1:113], weight[:, 1:113], None, H200)
    assert not supports_hopper_gated(x[:, ::2], weight[:, ::2], None, H200)
    assert not supports_hopper_gated(x, weight[: 2 * 1020], None, H200)


def test_what_fills_the_chip():
    """128 tiles for 132 multiprocessors; 136 would need a second wave."""
    for rows, num_out, filled in ((257, 5632, True), (512, 4096, True), (512, 4352, False), (2048, 14336, True)):
        assert fills_chip(rows, num_out, H200) == filled, (rows, num_out)
    assert not supports_hopper_gated(*(torch.zeros(256, 128, dtype=torch.bfloat16),) * 2, None, H200)


@pytest.mark.parametrize(
    ("x", "weight", "said"),
    [
        (torch.zeros(300, 64), torch.zeros(64, 64).bfloat16(), "x"),
        (torch.zeros(300, 64).bfloat16(), torch.zeros(64, 64), "weight"),
        (torch.zeros(300, 128).bfloat16()[:, ::2], torch.zeros(64, 64).bfloat16(), "contiguous"),
        (torch.zeros(300, 64).bfloat16(), torch.zeros(24, 64).bfloat16(), "multiples of 16 bytes"),
    ],
)
def test_what_the_launcher_refuses(x, weight, said):
    with pytest.raises(EspalierError, match=f"gated linear: .*{said}"):
        hopper_gated(x, weight)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 129, 1024, 2047])
@pytest.mark.parametrize(("size", "num_in"), [(128, 64), (144, 144), (640, 4096)])
def test_the_bits_of_product_and_silu(rows, size, num_in):
    """All sums are exact.  Rows, outputs and columns may end inside a block."""
    x, weight, _ = drawn_exact(rows, 2 * size, num_in, "cuda")
    assert torch.equal(hopper_gated(x, weight), gated_activation.triton(F.linear(x, weight)))


@pytest.mark.gpu
def test_bits_do_not_depend_on_the_number_of_rows():
    x, weight, _ = random_inputs(2048, 2 * 1024, 1024, "cuda")
    whole = linear_gated(x, weight, None, None)
    for rows in (1, 300, 1500):
        assert torch.equal(hopper_gated(x[:rows], weight), whole[:rows])
    # A NaN stays in its row.
    x[7] = torch.nan
    again = linear_gated(x, weight, None, None)
    assert again[7].isnan().all() and torch.equal(again[8:], whole[8:])
