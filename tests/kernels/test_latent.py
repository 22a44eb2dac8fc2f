"""A latent row, value by value: its first part normed, its last rotated, one row written; queries rotated alike."""

import math

import pytest
import torch

from espalier.errors import EspalierError
from espalier.kernels.layers.latent import LatentRopeAndNorm, rotate_and_store_latent

SIZE, ROTARY, HEADS, ROWS = 10, 4, 3, 5


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("normed", [False, True])
def test_by_hand(normed):
    q, latent, angle = drawn(ROWS, HEADS, SIZE, seed=1), drawn(ROWS, 1, SIZE, seed=2), drawn(ROWS, ROTARY // 2, seed=3)
    norm = drawn(SIZE - ROTARY, seed=4) if normed else None
    cos, sin = torch.cat((angle.cos(),) * 2, 1), torch.cat((-angle.sin(), angle.sin()), 1)
    plane, rows = torch.full((9, 1, SIZE), torch.nan, dtype=torch.float64), torch.tensor([4, 0, 8, 2, 1])
    out = rotate_and_store_latent(q, latent, LatentRopeAndNorm(cos, sin, norm, 1e-6), rows, plane)

    def rotated(x: list[float], n: int) -> list[float]:
        turned, first, half = list(x), SIZE - ROTARY, ROTARY // 2
        for i in range(half):
            a, b = x[first + i], x[first + half + i]
            c, s = math.cos(angle[n, i]), math.sin(angle[n, i])
            turned[first + i], turned[first + half + i] = a * c - b * s, b * c + a * s
        return turned

    for n in range(ROWS):
        row = latent[n, 0].tolist()
        if norm is not None:
            content = row[: SIZE - ROTARY]
            scale = 1 / math.sqrt(sum(x * x for x in content) / len(content) + 1e-6)
            row[: SIZE - ROTARY] = [x * scale * float(w) for x, w in zip(content, norm, strict=True)]
        assert plane[rows[n], 0].tolist() == pytest.approx(rotated(row, n), abs=1e-12)
        for head in range(HEADS):
            assert out[n, head].tolist() == pytest.approx(rotated(q[n, head].tolist(), n), abs=1e-12)
    assert plane[[3, 5, 6, 7]].isnan().all(), "nothing else is written"


def test_sizes_that_disagree_are_refused():
    rope_and_norm = LatentRopeAndNorm(torch.ones(2, 4), torch.ones(2, 4))
    rows, plane = torch.arange(2), torch.zeros(5, 1, SIZE)
    q, latent = torch.zeros(2, HEADS, SIZE), torch.zeros(2, 1, SIZE)
    for wrong in (
        (q[..., 1:], latent, rope_and_norm),
        (q, latent[..., 1:], rope_and_norm),
        (q, latent, LatentRopeAndNorm(*torch.ones(2, 2, 12))),
    ):
        with pytest.raises(EspalierError, match="a latent layer needs queries and one latent of 10 values"):
            rotate_and_store_latent(*wrong, rows, plane)
