"""The noise on the device is the reference's: the same bits, the same floats within their logarithms' rounding."""

import pytest
import torch

from espalier.errors import EspalierError
from espalier.kernels.sampling.noise import noise_triton
from espalier.sampling.noise import gumbel, random_bits

SEEDS = [0, 1, 2**31 - 1, 2**31, 2**32, 0x0123456789ABCDEF, 2**63 - 1]
POSITIONS = [0, 1, 2, 4095, 2**20, 2**31 - 1, 2**31, 2**33 + 5]
# The outer logarithm turns one relative ulp of the inner into an absolute one; see espalier/kernels/sampling/noise.py.
TOLERANCE = {torch.float32: 2.0**-22, torch.float64: 2.0**-51}


def compare(device, vocab, dtype, seeds=SEEDS, positions=POSITIONS):
    seeds, positions = torch.tensor(seeds), torch.tensor([positions] * len(seeds))
    bits, drawn = noise_triton(seeds.to(device), positions.to(device), vocab, dtype)
    assert torch.equal(bits.cpu(), random_bits(seeds, positions, vocab))
    expected = gumbel(seeds, positions, vocab, dtype)
    error = (drawn.cpu() - expected).abs()
    assert (error <= TOLERANCE[dtype] * expected.abs().clamp(min=1)).all(), error.max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab", [1, 16, 300, 1025])
def test_bits_are_equal_and_floats_are_within_rounding(kernel_device, dtype, vocab):
    compare(kernel_device, vocab, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_whole_vocabulary(kernel_device, dtype):
    compare(kernel_device, 262144, dtype, SEEDS[2:5], POSITIONS[3:6])


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_nothing_is_drawn_for_nobody(kernel_device, shape):
    positions = torch.zeros(shape, dtype=torch.int64, device=kernel_device)
    bits, drawn = noise_triton(positions.new_zeros(shape[0]), positions, 5, torch.float32)
    assert bits.shape == drawn.shape == (*shape, 5)


def test_seeds_that_are_not_the_batchs_are_refused(kernel_device):
    positions = torch.zeros(2, 1, dtype=torch.int64, device=kernel_device)
    with pytest.raises(EspalierError, match="seeds needs shape"):
        noise_triton(positions.new_zeros(3), positions, 5, torch.float32)
