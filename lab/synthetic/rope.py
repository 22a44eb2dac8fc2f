"""Attention to one distance: a query and a key that agree only where their positions differ by a given lag.

With key u and query R(-lag)·u, each rotated by its position, the score is gain · sum_i cos(w_i (p - j - lag)) over the
pairs used.  Its peak is at j = p - lag.  The gain gives every other position a weight of at most e^-MIN_SCORE_DROP.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.models.rope import RopeConfig

MIN_SCORE_DROP = 12.0
# The distances over which the peak is checked.
MAX_DISTANCE = 131072


@dataclass(frozen=True)
class LagCode:
    """dim: head size; frequencies: [pairs] float64, RoPE's fastest; gain: the score of one pair that agrees."""

    dim: int
    frequencies: Tensor
    gain: float

    @property
    def pairs(self) -> int:
        return len(self.frequencies)

    @property
    def amplitude(self) -> float:
        """Length of a pair in query and key that gives a score of `gain` after attention's 1/sqrt(dim)."""
        return (self.gain * self.dim**0.5) ** 0.5

    @property
    def norm_weight(self) -> float:
        """The weight of q_norm and k_norm in a model that normalises queries and keys."""
        return (self.gain * self.pairs / self.dim**0.5) ** 0.5

    def key(self) -> Tensor:
        """[dim] float32, pairs of unit length.  The two halves of a pair are dim / 2 apart."""
        return self.query(0)

    def query(self, lag: int) -> Tensor:
        turn = self.frequencies * lag
        code = torch.zeros(2, self.dim // 2, dtype=torch.float64)
        code[0, : self.pairs], code[1, : self.pairs] = turn.cos(), -turn.sin()
        return code.flatten().float()


def make_lag_code(rope: RopeConfig, max_position: int) -> LagCode:
    """The number of pairs and the gain that make the peak unique up to `max_position`, with the smallest score."""
    frequencies = rope.inverse_frequencies().double()
    distance = torch.arange(1, min(max_position, MAX_DISTANCE), dtype=torch.float64)
    drop = torch.zeros_like(distance)
    best: tuple[float, int, float] | None = None
    for count, frequency in enumerate(frequencies.tolist(), 1):
        drop += 1 - (distance * frequency).cos()
        gain = MIN_SCORE_DROP / max(float(drop.min()), 1e-9)
        if best is None or gain * count < best[0]:
            best = (gain * count, count, gain)
    assert best is not None
    return LagCode(rope.dim, frequencies[: best[1]], best[2])
