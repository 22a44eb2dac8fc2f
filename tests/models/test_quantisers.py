"""Each quantiser loses what its format cannot hold, and nothing more."""

import pytest
import torch

from espalier.kernels.layers.quantised import E2M1_VALUES, FP8, QuantisedMatrix, dequantise, make_nibble_matrix
from espalier.models.quantisers import QUANTISERS, to_fp8_block, to_mxfp4

CPU = torch.device("cpu")
# Of normal values, the norm of what is lost over their own, a little more than found.
LOSS = {"fp8": 0.028, "fp8-block": 0.028, "int4": 0.11, "nvfp4": 0.1}


@pytest.mark.parametrize(("weights", "most"), LOSS.items())
def test_a_matrix_comes_back_near_itself(weights, most):
    dense = torch.randn(256, 384, generator=torch.Generator().manual_seed(0))
    # Rows and blocks of other sizes, so that a scale in another place shows.
    dense *= torch.logspace(-2, 2, 256)[:, None]
    matrix = QUANTISERS[weights].quantise_matrix(dense)
    lost = (dequantise(matrix, torch.float64) - dense).norm(dim=1) / dense.norm(dim=1)
    assert 0 < lost.max() < 1.2 * most


def test_blocks_at_the_edges_are_smaller():
    dense = torch.randn(200, 300, generator=torch.Generator().manual_seed(1))
    dense[128:, 256:] *= 1000
    made = to_fp8_block(dense, CPU)
    assert made[".weight"].shape == dense.shape and made[".weight_scale_inv"].shape == (2, 3)
    matrix = QuantisedMatrix("fp8", made[".weight"], made[".weight_scale_inv"], 128, 128)
    assert made[".weight"].dtype == FP8 and (dequantise(matrix, torch.float64) - dense).norm() / dense.norm() < 0.03


def test_mxfp4_holds_its_own_values_exactly():
    """Every value of E2M1 by blocks of different powers of two: nothing is lost."""
    values = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)]).repeat(2, 2, 2)
    powers = torch.tensor([[-10.0, 3.0], [0.0, 100.0]]).exp2()[:, :, None]
    experts = (values.view(2, 2, 32) * powers).contiguous()
    made = to_mxfp4(experts, CPU)
    matrix = make_nibble_matrix("mxfp4", made["_blocks"].flatten(2), made["_scales"], 32)
    assert all(torch.equal(dequantise(matrix[i], torch.float32), experts[i]) for i in range(2))


def test_nvfp4_holds_its_own_values_exactly():
    """Every value of E2M1 by groups of different scales; also groups of zeros, and a matrix of them."""
    values = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)])
    scales = torch.tensor([[448.0, 0.0625, 0.0], [13.0, 2.0**-9, 1.75]])
    dense = (values * scales[:, :, None]).flatten(1) / 64
    assert torch.equal(dequantise(QUANTISERS["nvfp4"].quantise_matrix(dense), torch.float32), dense)
    assert not dequantise(QUANTISERS["nvfp4"].quantise_matrix(torch.zeros(4, 32)), torch.float32).any()


def test_mxfp4_takes_the_nearest_value():
    experts = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(2))
    made = to_mxfp4(experts, CPU)
    matrix = make_nibble_matrix("mxfp4", made["_blocks"].flatten(2), made["_scales"], 32)
    for i in range(2):
        scale = (made["_scales"][i].float() - 127).exp2().repeat_interleave(32, 1)
        choices = scale[..., None] * torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)])
        nearest = (choices - experts[i][..., None]).abs().amin(2)
        assert torch.equal((dequantise(matrix[i], torch.float32) - experts[i]).abs(), nearest)
