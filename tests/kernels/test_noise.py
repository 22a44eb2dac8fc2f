"""The noise on the device is the reference's: the same bits, the same floats within their logarithms' rounding."""

import pytest
import torch
import triton.language as tl

from espalier.kernels.runtime.jit import kernel
from espalier.kernels.sampling.noise import gumbel_noise, noise_keys, random_bits_of_ids
from espalier.sampling.pick import gumbel, random_bits

SEEDS = [0, 1, 2**31 - 1, 2**31, 2**32, 0x0123456789ABCDEF, 2**63 - 1]
POSITIONS = [0, 1, 2, 4095, 2**20, 2**31 - 1, 2**31, 2**33 + 5]
# The outer logarithm turns one relative ulp of the inner into an absolute one; see espalier/kernels/sampling/noise.py.
TOLERANCE = {torch.float32: 2.0**-22, torch.float64: 2.0**-51}


@kernel
def _noise_kernel(ancestor_bits_ptr, gumbel_ptr, seeds_ptr, positions_ptr, num_positions, vocab, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    k0, k1 = noise_keys(tl.load(seeds_ptr + place // num_positions), tl.load(positions_ptr + place))
    at = place * vocab + ids
    tl.store(ancestor_bits_ptr + at, random_bits_of_ids(ids, k0, k1).to(tl.int32, bitcast=True), mask=ids < vocab)
    tl.store(gumbel_ptr + at, gumbel_noise(ids, k0, k1, gumbel_ptr.dtype.element_ty), mask=ids < vocab)


def drawn_on(device, seeds, positions, vocab, dtype):
    """(bits int32, Gumbel noise) [B, P, vocab]."""
    shape = (*positions.shape, vocab)
    bits = torch.empty(shape, dtype=torch.int32, device=device)
    drawn = torch.empty(shape, dtype=dtype, device=device)
    block = min(1024, 1 << (vocab - 1).bit_length())
    grid = (positions.numel(), -(-vocab // block))
    _noise_kernel[grid](bits, drawn, seeds.to(device), positions.to(device), positions.shape[1], vocab, BLOCK=block)
    return bits, drawn


def compare(device, vocab, dtype, seeds=SEEDS, positions=POSITIONS):
    seeds, positions = torch.tensor(seeds), torch.tensor([positions] * len(seeds))
    bits, drawn = drawn_on(device, seeds, positions, vocab, dtype)
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
