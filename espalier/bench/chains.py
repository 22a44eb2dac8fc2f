"""Chains of the products of a pass on a GPU, to be timed.

A chain does not find its weights in the L2 cache, because each layer of a pass has its own weights.  A single shape is
measured over more copies than the cache holds.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from espalier.bench.linears import Run, Shape
from espalier.kernels.layers.linear_quantised import linear_quantised
from espalier.kernels.layers.linear_tuning import DENSE
from espalier.kernels.layers.quantise_rows import quantise_rows
from espalier.kernels.layers.quantised import InputScales, QuantisedMatrix
from espalier.models.quantisers import QUANTISERS

Matrix = Tensor | QuantisedMatrix
Multiply = Callable[[Tensor, Matrix], Tensor]


class Weights:
    """Random weights on a GPU, one for each layer.  Passes whose runs have the same name and shape share them."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._made: dict[tuple[str, Shape], list[Matrix]] = {}

    def of(self, run: Run) -> list[Matrix]:
        made = self._made.setdefault((run.name, run.shape), [])
        while len(made) < run.count:
            made.append(self.drawn(run.shape if run.heads == 1 else (run.heads, *run.shape), run.weights))
        return made[: run.count]

    def drawn(self, shape: tuple[int, ...], weights: str = DENSE) -> Matrix:
        """A random weight as large as a trained one.  Zeros would be multiplied faster, with less power."""
        dense = torch.empty(shape, dtype=self.dtype, device=self.device).normal_(std=shape[-1] ** -0.5)
        return dense if weights == DENSE else QUANTISERS[weights].matrix(dense)

    def chain(self, runs: Sequence[Run], multiply: Multiply) -> Callable[[], None]:
        """A function that runs all layers in the order of a pass: layer by layer, then the rest."""
        inputs = {_input_key(run): self._input(run) for run in runs}
        order: list[tuple[Tensor, Matrix]] = []
        for group in _by_layer(runs):
            for layer in range(group[0].count):
                order += [(inputs[_input_key(run)], self.of(run)[layer]) for run in group]

        def body() -> None:
            for x, weight in order:
                if isinstance(weight, Tensor) and weight.ndim == 3:
                    torch.bmm(x, weight.transpose(1, 2))
                else:
                    multiply(x, weight)

        return body

    def _input(self, run: Run) -> Tensor:
        """[rows, in], or [heads, rows, in] for a batched product."""
        size = (run.rows, run.shape[1]) if run.heads == 1 else (run.heads, run.rows, run.shape[1])
        return torch.randn(size, dtype=self.dtype, device=self.device)


def _input_key(run: Run) -> tuple[int, int, int]:
    return run.heads, run.rows, run.shape[1]


def _by_layer(runs: Sequence[Run]) -> list[list[Run]]:
    """Neighbouring runs with the same count, grouped."""
    groups: list[list[Run]] = []
    for run in runs:
        if groups and groups[-1][0].count == run.count:
            groups[-1].append(run)
        else:
            groups.append([run])
    return groups


def plain(x: Tensor, weight: Matrix) -> Tensor:
    """By the library, as far as it takes the weight: dense, and FP8 whose scales are of whole rows.

    Other quantised weights are multiplied by our kernels.
    """
    if isinstance(weight, Tensor):
        return F.linear(x, weight)
    by_row = InputScales()
    if weight.code == "fp8" and weight.row_block == 1 and weight.group >= weight.shape[1] and weight.inputs == by_row:
        values, scales = quantise_rows(x, by_row)
        return torch._scaled_mm(values, weight.codes.T, scales, weight.scales.T.contiguous(), out_dtype=x.dtype)
    return linear_quantised(x, weight, None)
