"""Measure, for each shape and bucket of rows, F.linear and our kernel's candidates, and keep the fastest.

What is measured is a chain of one shape over enough weights that none is still in the L2, replayed as a CUDA graph.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.bench.linears import Shape, Stopwatch, Weights, require_gpu
from espalier.kernels.choices import ROWS_BUCKETS, Choices
from espalier.kernels.launch import chip
from espalier.kernels.linear import Choice, candidates, linear

# Bytes of weights in a chain: what is read again was evicted long ago, and a kernel's time is well above the clock's.
CHAIN_BYTES = 600 * 10**6
COPIES_BYTES = 300 * 10**6
FINALISTS = 6
# Of the first bucket both ends are measured: it spans most.
FEWEST_ROWS = 1


@dataclass(frozen=True)
class Measured:
    """One shape and bucket: µs of F.linear and of the fastest of ours; choice is None where none fits the chip."""

    shape: Shape
    rows: int
    cublas_us: float
    ours_us: float
    choice: Choice | None

    @property
    def chosen(self) -> Choice | None:
        return self.choice if self.ours_us < self.cublas_us else None


class Tuner:
    """Measures on the GPU of this machine, in one dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.device = require_gpu("--tune")
        self.weights = Weights(dtype, self.device)
        self.watch = Stopwatch()
        self.chip = chip(torch.empty(0, device=self.device))

    def measure(self, shape: Shape) -> list[Measured]:
        size = 2 * shape[0] * shape[1]
        weights = [self.weights.drawn(shape) for _ in range(max(2, -(-COPIES_BYTES // size)))]
        return [self._bucket(shape, rows, weights) for rows in ROWS_BUCKETS]

    def _bucket(self, shape: Shape, rows: int, weights: Sequence[Tensor]) -> Measured:
        x = torch.randn(rows, shape[1], dtype=weights[0].dtype, device=self.device)
        ends = (x[:FEWEST_ROWS], x) if rows == ROWS_BUCKETS[0] else (x,)
        first = {choice: self._us(x, weights, [choice], 3)[0] for choice in candidates(rows, *shape, self.chip)}
        finalists = [None, *sorted(first, key=lambda choice: first[choice])[:FINALISTS]]
        times = [self._us(end, weights, finalists, 12) for end in ends]
        cublas, *ours = (sum(each) / len(ends) for each in zip(*times, strict=True))
        best = min(range(len(ours)), key=lambda at: ours[at], default=None)
        if best is None:
            return Measured(shape, rows, cublas, torch.inf, None)
        return Measured(shape, rows, cublas, ours[best], finalists[1 + best])

    def _us(self, x: Tensor, weights: Sequence[Tensor], contenders: Sequence[Choice | None], turns: int) -> list[float]:
        """µs a call of each contender, taking turns."""
        calls = max(2, -(-CHAIN_BYTES // (2 * weights[0].numel())))
        bodies = [_chain(x, weights, choice, calls) for choice in contenders]
        return [1e3 * ms / calls for ms in self.watch.ms(bodies, turns)]


def _chain(x: Tensor, weights: Sequence[Tensor], choice: Choice | None, calls: int) -> Callable[[], None]:
    def body() -> None:
        for call in range(calls):
            linear(x, weights[call % len(weights)], None, choice)

    return body


def as_choices(measured: Sequence[Measured]) -> Choices:
    """Of one shape, in the order of ROWS_BUCKETS."""
    return Choices(tuple(bucket.chosen for bucket in measured))
