"""Chains of the products of a pass on a GPU, to be timed.

A chain does not find its weights in the L2 cache, because each layer of a pass has its own weights.  A single shape is
measured over more copies than the cache holds.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from espalier.bench.linears import Run, Shape
from espalier.kernels.layers.linear_plans import DENSE, LINEARS, plans_for
from espalier.kernels.layers.quantised import InputScales, QuantisedMatrix, RoundedRows, Rows
from espalier.kernels.layers.scaled_product import kernel_rows
from espalier.kernels.ops.linear import linear, linear_quantised, quantise_rows
from espalier.kernels.runtime.launch import chip
from espalier.models.layers.mlp import rounding_in_norm
from espalier.models.quantisers import QUANTISERS

# The ends of the names of layers that read a norm, which rounds for them in its own launch up to `kernel_rows`.  The
# qkv of an EAGLE head reads two norms in one launch, which does not round.  The floor leaves out the rounding there.
BEHIND_A_NORM = ("qkv", "q and kv", "gate_up")

# The least copies of a weight (one name and shape), and the least bytes of all its copies.
MIN_COPIES, MIN_BYTES = 4, 2**30

Matrix = Tensor | QuantisedMatrix
Multiply = Callable[[Rows, Matrix], Tensor]
Product = Callable[[], object]
# (heads, rows, columns) -> random inputs.
Inputs = dict[tuple[int, int, int], Tensor]


class Weights:
    """Random weights on a GPU: for each name and shape, a weight for each layer.  Passes share them.

    Layers share as well where that leaves MIN_COPIES weights and MIN_BYTES of them, which no cache holds: a model and
    its floor fit the memory together.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._made: dict[tuple[str, Shape], list[Matrix]] = {}

    def of(self, run: Run) -> list[Matrix]:
        made = self._made.setdefault((run.name, run.shape), [])
        copies = max(MIN_COPIES, math.ceil(MIN_BYTES * run.count / run.weight_bytes))
        while len(made) < min(run.first + run.count, copies):
            made.append(self.drawn(run.shape if run.heads == 1 else (run.heads, *run.shape), run.weights))
        return [made[at % copies] for at in range(run.first, run.first + run.count)]

    def drawn(self, shape: tuple[int, ...], weights: str = DENSE) -> Matrix:
        """A random weight as large as a trained one.  Zeros would be multiplied faster, with less power."""
        dense = torch.empty(shape, dtype=self.dtype, device=self.device).normal_(std=shape[-1] ** -0.5)
        return dense if weights == DENSE else QUANTISERS[weights].matrix(dense)

    def chain(self, runs: Sequence[Run], multiply: Multiply) -> Callable[[], None]:
        """A function that runs all products of a pass: layer by layer, then the rest."""
        inputs: Inputs = {}
        steps = [(run, layer) for group in by_layer(runs) for layer in range(group[0].count) for run in group]
        return in_turn([self.product(run, layer, inputs, multiply) for run, layer in steps])

    def product(self, run: Run, layer: int, inputs: Inputs, multiply: Multiply) -> Product:
        """The product with weight `layer` of a run.  inputs: those of the chain, which runs of one size share."""
        key = run.heads, run.rows, run.shape[1]
        if key not in inputs:
            # [rows, in], or [heads, rows, in] for a batched product.
            inputs[key] = torch.randn(key[run.heads == 1 :], dtype=self.dtype, device=self.device)
        return _product(run, inputs[key], self.of(run)[layer], multiply)


def in_turn(products: Sequence[Product]) -> Callable[[], None]:
    def body() -> None:
        for product in products:
            product()

    return body


def _product(run: Run, x: Tensor, weight: Matrix, multiply: Multiply) -> Product:
    if isinstance(weight, Tensor):
        return partial(torch.bmm, x, weight.transpose(1, 2)) if weight.ndim == 3 else partial(multiply, x, weight)
    rounding = rounding_in_norm(weight, x)
    if rounding is not None and run.name.endswith(BEHIND_A_NORM) and len(x) <= kernel_rows(rounding, chip(x)):
        return partial(multiply, RoundedRows(*quantise_rows(x, rounding), x.dtype), weight)
    return partial(multiply, x, weight)


def by_layer(runs: Sequence[Run]) -> list[list[Run]]:
    """Neighbouring runs with the same count, grouped."""
    groups: list[list[Run]] = []
    for run in runs:
        if groups and groups[-1][0].count == run.count:
            groups[-1].append(run)
        else:
            groups.append([run])
    return groups


def plain(x: Rows, weight: Matrix) -> Tensor:
    """By the library, as far as it takes the weight: dense, and FP8 whose scales are of whole rows.

    Other quantised weights are multiplied by our kernels.
    """
    if isinstance(weight, Tensor):
        assert isinstance(x, Tensor)
        return F.linear(x, weight)
    by_row = InputScales()
    if weight.code == "fp8" and weight.row_block == 1 and weight.group >= weight.shape[1] and weight.inputs == by_row:
        values, scales = (x.values, x.scales) if isinstance(x, RoundedRows) else quantise_rows(x, by_row)
        return torch._scaled_mm(values, weight.codes.T, scales, weight.scales.T.contiguous(), out_dtype=x.dtype)
    return linear_quantised(x, weight, None)


def as_engine(x: Rows, weight: Matrix) -> Tensor:
    """Multiply as the engine does on this GPU."""
    if not isinstance(weight, Tensor):
        return linear_quantised(x, weight, None)
    assert isinstance(x, Tensor)
    plans = plans_for((weight.shape[0], weight.shape[1]), DENSE, weight.dtype, weight)
    return plain(x, weight) if plans is None else linear(x, weight, None, LINEARS.at(plans, len(x)))
