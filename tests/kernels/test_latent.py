"""rotate_and_store_latent equals scalar arithmetic: it norms the latent part, rotates the RoPE part, stores one row."""

import math

import pytest
import torch

from espalier.errors import EspalierError
from espalier.kernels.layers.latent import LatentRopeAndNorm, rotate_and_store_latent

SIZE, ROTARY, HEADS, ROWS = 10, 4, 3, 5


def random_normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("normed", [False, True])
def test_equals_scalar_arithmetic(normed):
    q, latent, angle = (
        random_normal(ROWS, HEADS, SIZE, seed=1),
        random_normal(ROWS, 1, SIZE, seed=2),
        random_normal(ROWS, ROTARY // 2, seed=3),
    )
    norm = random_normal(SIZE - ROTARY, seed=4) if normed else None
    cos, sin = torch.cat((angle.cos(),) * 2, 1), torch.cat((-angle.sin(), angle.sin()), 1)
    plane, rows = torch.full((9, 1, SIZE), torch.nan, dtype=torch.float64), torch.tensor([4, 0, 8, 2, 1])
    out = rotate_and_store_latent(q, latent, LatentRopeAndNorm(cos, sin, norm, 1e-6), rows, plane)

    def rotated(x: list[float], n: int) -> list[float]:
        out, first, half = list(x), SIZE - ROTARY, ROTARY // 2
        for i in range(half):
            a, b = x[first + i], x[first + half + i]
            c, s = math.cos(angle[n, i]), math.sin(angle[n, i])
            out[first + i], out[first + half + i] = a * c - b * s, b * c + a * s
        return out

    for n in range(ROWS):
        row = latent[n, 0].tolist()
        if norm is not None:
            latent_part = row[: SIZE - ROTARY]
            scale = 1 / math.sqrt(sum(x * x for x in latent_part) / len(latent_part) + 1e-6)
            row[: SIZE - ROTARY] = [x * scale * float(w) for x, w in zip(latent_part, norm, strict=True)]
        assert plane[rows[n], 0].tolist() == pytest.approx(rotated(row, n), abs=1e-12)
        for head in range(HEADS):
            assert out[n, head].tolist() == pytest.approx(rotated(q[n, head].tolist(), n), abs=1e-12)
    assert plane[[3, 5, 6, 7]].isnan().all(), "other rows must not be written"


def test_wrong_sizes_are_refused():
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
