"""Measure, for each shape and bucket of rows, F.linear and our kernel's candidates, and keep the fastest.

First each shape alone: a chain of it over enough weights that none is still in the L2, replayed as a CUDA graph.  Then
the best of each among its neighbours, in the passes of a model: a kernel that is launched early gains by what runs
before it, and one that F.linear takes stands in the way of the next (docs/log.md).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from espalier.bench.linears import ModelShape, Multiply, Run, Shape, Weights
from espalier.bench.machine import require_gpu
from espalier.bench.timing import Stopwatch
from espalier.kernels.layers.linear import (
    LibraryPlan,
    LinearPlan,
    TritonPlan,
    candidates,
    linear,
    linear_gated,
    linear_parts,
)
from espalier.kernels.layers.linear_tuning import ROWS_BUCKETS, LinearPlans
from espalier.kernels.layers.norm import add_rms_norm
from espalier.kernels.runtime.launch import chip

# Bytes of weights in a chain: what is read again was evicted long ago, and a kernel's time is well above the clock's.
CHAIN_BYTES = 600 * 10**6
COPIES_BYTES = 300 * 10**6
# Who is measured a second time alone, and who of them among neighbours.
FINALISTS = 6
CONTENDERS = 3
LAYERS = 8
SWEEPS = 2
# A change that gains less is noise.
LEAST_GAIN = 0.002
# Of the first bucket both ends are measured: it spans most.
FEWEST_ROWS = 1

# Layers that hand on their parts, if they have any, to whoever reads them, and those that are followed by a gate.
IN_PARTS, GATED = ("qkv", "o", "down"), ("gate_up",)

Table = dict[tuple[Shape, int], LinearPlan]


@dataclass(frozen=True)
class Measured:
    """One shape and bucket, alone: µs of F.linear, and the other ways that fit the chip, the fastest first."""

    shape: Shape
    rows: int
    cublas_us: float
    ours_us: float
    ours: tuple[TritonPlan | LibraryPlan, ...]

    @property
    def fastest(self) -> LinearPlan:
        return self.ours[0] if self.ours_us < self.cublas_us else None


class Tuner:
    """Measures on the GPU of this machine, in one dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.device = require_gpu("--tune")
        self.weights = Weights(dtype, self.device)
        self.watch = Stopwatch()
        self.chip = chip(torch.empty(0, device=self.device))

    def alone(self, shape: Shape) -> list[Measured]:
        """A shape in every bucket."""
        size = 2 * shape[0] * shape[1]
        weights = [self.weights.drawn(shape) for _ in range(max(2, -(-COPIES_BYTES // size)))]
        return [self._bucket(shape, rows, weights) for rows in ROWS_BUCKETS]

    def _bucket(self, shape: Shape, rows: int, weights: Sequence[Tensor]) -> Measured:
        x = torch.randn(rows, shape[1], dtype=weights[0].dtype, device=self.device)
        ends = (x[:FEWEST_ROWS], x) if rows == ROWS_BUCKETS[0] else (x,)
        first = {choice: self._us(x, weights, [choice], 3)[0] for choice in candidates(rows, *shape, self.chip)}
        finalists = sorted(first, key=lambda choice: first[choice])[:FINALISTS]
        times = [self._us(end, weights, [None, *finalists], 12) for end in ends]
        cublas, *ours = (sum(each) / len(ends) for each in zip(*times, strict=True))
        order = sorted(range(len(ours)), key=lambda at: ours[at])
        return Measured(shape, rows, cublas, min(ours, default=torch.inf), tuple(finalists[at] for at in order))

    def _us(self, x: Tensor, weights: Sequence[Tensor], contenders: Sequence[LinearPlan], turns: int) -> list[float]:
        """µs a call of each contender, taking turns."""
        calls = max(2, -(-CHAIN_BYTES // (2 * weights[0].numel())))
        bodies = [_chain(x, weights, choice, calls) for choice in contenders]
        return [1e3 * ms / calls for ms in self.watch.ms(bodies, turns)]

    def among_neighbours(self, model: ModelShape, alone: Mapping[Shape, Sequence[Measured]], table: Table) -> None:
        """Settle in `table`, shape by shape, what makes the model's passes fastest.  What stands there stays."""
        model = replace(model, layers=min(model.layers, LAYERS))
        weights = Weights(self.weights.dtype, self.device)
        for bucket, rows in enumerate(ROWS_BUCKETS):
            for runs in (model.target_pass(rows), model.draft_pass(rows, fused_rows=rows)):
                open_ = {run.shape: alone[run.shape][bucket] for run in runs if (run.shape, rows) not in table}
                table |= {(shape, rows): measured.fastest for shape, measured in open_.items()}
                for _ in range(SWEEPS):
                    for measured in open_.values():
                        table[measured.shape, rows] = self._fastest_among(runs, weights, measured, table)

    def _fastest_among(self, runs: Sequence[Run], weights: Weights, measured: Measured, table: Table) -> LinearPlan:
        place = (measured.shape, measured.rows)
        others = [choice for choice in (None, *measured.ours[:CONTENDERS]) if choice != table[place]]
        contenders = [table[place], *others]
        bodies = [weights.chain(runs, _by_table(runs, {**table, place: way}, measured.rows)) for way in contenders]
        times = self.watch.ms(bodies, 12)
        best = min(range(len(times)), key=lambda at: times[at])
        return contenders[best if times[best] < times[0] * (1 - LEAST_GAIN) else 0]


def _chain(x: Tensor, weights: Sequence[Tensor], way: LinearPlan, calls: int) -> Callable[[], None]:
    def body() -> None:
        for call in range(calls):
            linear(x, weights[call % len(weights)], None, way)

    return body


def _by_table(runs: Sequence[Run], table: Table, rows: int) -> Multiply:
    """As a model runs its layers: what comes in parts is read by an add and norm, which stands for the rotation too; a
    gate, which some ways take in, follows where one does."""
    in_parts, gated = ({run.shape for run in runs if run.name.split()[-1] in names} for names in (IN_PARTS, GATED))
    read: dict[Shape, tuple[Tensor, Tensor]] = {}

    def multiply(x: Tensor, weight: Tensor) -> Tensor:
        shape = (weight.shape[0], weight.shape[1])
        if shape in gated:
            return linear_gated(x, weight, None, table[shape, rows])
        if shape not in in_parts:
            return linear(x, weight, None, table[shape, rows])
        if shape not in read:
            read[shape] = x.new_zeros(len(x), shape[0]), x.new_ones(shape[0])
        residual, norm = read[shape]
        return add_rms_norm(linear_parts(x, weight, None, table[shape, rows]), residual, norm, 1.0)[1]

    return multiply


def as_choices(table: Table) -> dict[Shape, LinearPlans]:
    shapes = dict.fromkeys(shape for shape, _ in table)
    return {shape: LinearPlans(tuple(table[shape, rows] for rows in ROWS_BUCKETS)) for shape in shapes}
