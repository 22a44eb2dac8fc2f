"""Attention to one distance: a query and a key that meet where their positions differ by a given lag, and only there.

With key u and query R(-lag)·u, both turned by their own positions, the score is gain · sum_i cos(w_i (p - j - lag))
over the pairs used.  Its peak stands at j = p - lag; the gain makes every other position's weight at most e^-CLEARANCE.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.models.layers.rope import RopeConfig

CLEARANCE = 12.0
# Positions over which the peak is checked to be alone.
MOST_DISTANCE = 131072


@dataclass(frozen=True)
class LagCode:
    """dim: of a head; frequencies: [pairs] float64, those used, the fastest; gain: score of a pair that agrees."""

    dim: int
    frequencies: Tensor
    gain: float

    @property
    def pairs(self) -> int:
        return len(self.frequencies)

    @property
    def amplitude(self) -> float:
        """Length of a pair in query and key, for a score of `gain` after the softmax's 1/sqrt(dim)."""
        return (self.gain * self.dim**0.5) ** 0.5

    @property
    def norm_weight(self) -> float:
        """What q_norm and k_norm must hold where a head normalises query and key itself."""
        return (self.gain * self.pairs / self.dim**0.5) ** 0.5

    def key(self) -> Tensor:
        """[dim] float32, pairs of unit length; the halves of a pair stand dim / 2 apart."""
        return self.query(0)

    def query(self, lag: int) -> Tensor:
        turn = self.frequencies * lag
        code = torch.zeros(2, self.dim // 2, dtype=torch.float64)
        code[0, : self.pairs], code[1, : self.pairs] = turn.cos(), -turn.sin()
        return code.flatten().float()


def lag_code(rope: RopeConfig, max_position: int) -> LagCode:
    """The pairs, and the gain, with which the peak is alone up to `max_position` at the smallest score."""
    frequencies = rope.inverse_frequencies().double()
    distance = torch.arange(1, min(max_position, MOST_DISTANCE), dtype=torch.float64)
    drop = torch.zeros_like(distance)
    best: tuple[float, int, float] | None = None
    for count, frequency in enumerate(frequencies.tolist(), 1):
        drop += 1 - (distance * frequency).cos()
        gain = CLEARANCE / max(float(drop.min()), 1e-9)
        if best is None or gain * count < best[0]:
            best = (gain * count, count, gain)
    assert best is not None
    return LagCode(rope.dim, frequencies[: best[1]], best[2])
