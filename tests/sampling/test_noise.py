"""The noise: the very integers its docstring specifies, uniform, and of no relation to its neighbours'."""

import math
from functools import cache

import numpy as np
import pytest
import torch

from espalier.sampling import pick
from espalier.sampling.pick import gumbel, random_bits
from tests.pairwise import fewer
from tests.sampling.batch import chi_square_z

MASK = 2**32 - 1
SEEDS = [0, 1, 2**31 - 1, 2**31, 2**32, 0x0123456789ABCDEF, 2**63 - 1]
POSITIONS = [0, 1, 2, 4095, 2**20, 2**31 - 1]


def plain_mix(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D & MASK
    x ^= x >> 15
    x = x * 0x846CA68B & MASK
    return x ^ (x >> 16)


def plain_bits(seed: int, position: int, token: int) -> int:
    low, high = seed & MASK, seed >> 32
    k0 = plain_mix(low ^ plain_mix(high ^ plain_mix((position + 0x9E3779B9) & MASK)))
    k1 = plain_mix(high ^ plain_mix(low ^ plain_mix((position + 0x85EBCA6B) & MASK)))
    return plain_mix((plain_mix(token ^ k0) + k1) & MASK)


def unsigned(bits: torch.Tensor) -> torch.Tensor:
    return bits.long() & MASK


def test_the_bits_are_those_specified():
    bits = unsigned(random_bits(torch.tensor(SEEDS), torch.tensor([POSITIONS] * len(SEEDS)), 50))
    assert bits.tolist() == [[[plain_bits(s, p, t) for t in range(50)] for p in POSITIONS] for s in SEEDS]


def test_gumbel_is_of_the_specified_uniforms():
    drawn = gumbel(torch.tensor(SEEDS), torch.tensor([POSITIONS] * len(SEEDS)), 20, torch.float64)
    uniforms = [((plain_bits(s, p, t) >> 9) + 0.5) * 2.0**-23 for s in SEEDS for p in POSITIONS for t in range(20)]
    assert drawn.flatten().tolist() == pytest.approx([-math.log(-math.log(u)) for u in uniforms], rel=1e-12)
    narrow = gumbel(torch.tensor(SEEDS), torch.tensor([POSITIONS] * len(SEEDS)), 20, torch.float32)
    assert torch.allclose(narrow.double(), drawn, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_outermost_uniforms_are_neither_zero_nor_one(dtype, monkeypatch):
    monkeypatch.setattr(pick, "random_bits", lambda *_: torch.tensor([[[0, 0x1FF, -1]]], dtype=torch.int32))
    lowest, same, highest = gumbel(torch.tensor([0]), torch.tensor([[0]]), 3, dtype)[0, 0].tolist()
    assert lowest == same == pytest.approx(-math.log(-math.log(2.0**-24)), rel=1e-6)
    assert highest == pytest.approx(-math.log(-math.log(1 - 2.0**-24)), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_depends_on_seed_position_and_id_alone(dtype):
    seeds, positions = torch.tensor(SEEDS), torch.tensor([POSITIONS] * len(SEEDS))
    together = gumbel(seeds, positions, 333, dtype)
    for b in range(len(SEEDS)):
        for p in range(len(POSITIONS)):
            alone = gumbel(seeds[b : b + 1], positions[b : b + 1, p : p + 1], 37 + b + p, dtype)
            assert torch.equal(alone[0, 0], together[b, p, : 37 + b + p])


@cache
def block() -> torch.Tensor:
    """[8 seeds, 64 positions, 4096 ids], all adjacent."""
    return unsigned(random_bits(torch.arange(8), torch.arange(64).expand(8, 64), 4096))


@pytest.mark.parametrize("shift", [9, 16, 24])
def test_the_bits_are_uniform(shift):
    counts = torch.bincount(((block() >> shift) & 255).flatten(), minlength=256)
    assert abs(chi_square_z(counts, counts.sum() / 256)) < 4


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["seeds", "positions", "ids"])
@pytest.mark.parametrize("distance", fewer([1, 2, 4], lambda distance: distance == 1))
def test_neighbours_are_unrelated(axis, distance):
    bits = block()
    left, right = (bits.narrow(axis, start, bits.shape[axis] - distance) for start in (0, distance))
    cells = torch.bincount(((left >> 28) * 16 + (right >> 28)).flatten(), minlength=256)
    assert abs(chi_square_z(cells, cells.sum() / 256)) < 4
    words = (left ^ right).flatten().to(torch.uint32).numpy()
    flipped = np.unpackbits(words.view(np.uint8)).reshape(-1, 32).sum(0) / left.numel()
    assert (abs(flipped - 0.5) * 2 * left.numel() ** 0.5).max() < 4.5


def test_no_two_places_share_their_noise():
    """Of a million places, two 32-bit keys apiece: 32 bits in all would let a hundred pairs of them draw alike."""
    bits = unsigned(random_bits(torch.arange(500), torch.arange(2000).expand(500, 2000), 2))
    assert (bits[..., 0] << 31 ^ bits[..., 1]).unique().numel() == 1_000_000
