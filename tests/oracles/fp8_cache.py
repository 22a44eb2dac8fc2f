"""What an FP8 cache makes of a row, in the plainest words: the nearest of E4M3's values, times a scale."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

# E4M3 (OCP 8-bit floating point, 1.0): 4 exponent bits with a bias of 7, 3 mantissa bits; the last code is NaN.
POSITIVE = [m / 8 * 2.0**-6 for m in range(8)] + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
VALUES = torch.tensor(POSITIVE[:-1], dtype=torch.float64)


def nearest(x: Tensor) -> Tensor:
    """The nearest E4M3 value, in x's dtype, ties to even mantissas; past the largest it is the largest.

    From float64 by way of float32, as PyTorch converts: what is a hair above a middle is a tie there.
    """
    middles = (VALUES[1:] + VALUES[:-1]) / 2
    magnitude = x.float().double().abs()
    low = torch.searchsorted(middles, magnitude)
    # At a middle: the code below is `low`, and the even one wins.
    tie = (low < len(middles)) & (middles[low.clamp(max=len(middles) - 1)] == magnitude) & (low % 2 == 1)
    return (VALUES[low + tie.long()] * x.double().sign()).to(x.dtype)


@dataclass(frozen=True)
class LayerScales:
    """Of the planes of a layer, in their order: [kv_heads] each."""

    planes: tuple[Tensor, ...]

    def stored(self, kept: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What the planes hold of rows [.., kv_heads, size]."""
        return tuple(nearest(row / scale[:, None]) for row, scale in zip(kept, self.planes, strict=True))

    def meant(self, stored: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(row * scale[:, None] for row, scale in zip(stored, self.planes, strict=True))


def ones(heads: int, planes: int) -> LayerScales:
    return LayerScales((torch.ones(heads, dtype=torch.float64),) * planes)


def scales_in(path: Path, layer: int, heads: int, planes: int) -> LayerScales:
    """Those that a checkpoint stores for a layer; a latent row has K's."""
    stored = load_file(path / "model.safetensors")
    both = (stored[f"model.layers.{layer}.self_attn.{name}_scale"].double().flatten() for name in "kv")
    return LayerScales(tuple(scale[:heads].expand(heads) for scale in both)[:planes])
