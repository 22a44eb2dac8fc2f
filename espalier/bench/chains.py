"""Chains of the products of a pass on a GPU, to be timed.

A chain does not find its weights in the L2 cache, because each layer of a pass has its own weights.  Experts are large:
layers take a few copies of them in turn.  A single shape is measured over more copies than the cache holds.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from espalier.bench.expert_product import ChainInputs, LayerExperts
from espalier.bench.linears import RoutedExperts, Run, Shape
from espalier.kernels.layers.linear_tuning import plans_for
from espalier.kernels.layers.quantised import InputScales, QuantisedMatrix, RoundedRows, Rows
from espalier.kernels.layers.scaled_product import kernel_rows
from espalier.kernels.layers.tuning_table import DENSE
from espalier.kernels.ops.experts import SharedExperts, grouped_experts
from espalier.kernels.ops.linear import linear, linear_quantised, quantise_rows
from espalier.kernels.runtime.launch import chip
from espalier.models.layers.experts import rounding_in_norm
from espalier.models.quantisers import QUANTISERS

# The size of the largest L2 cache that we measure on.
L2_BYTES = 60 * 10**6

# The ends of the names of layers that read a norm, which rounds for them in its own launch up to `kernel_rows`.  The
# qkv of an EAGLE head reads two norms in one launch, which does not round: the floor leaves out its rounding.
BEHIND_A_NORM = ("qkv", "q and kv", "gate_up")

Matrix = Tensor | QuantisedMatrix
Multiply = Callable[[Rows, Matrix], Tensor]
Product = Callable[[], object]


@dataclass(frozen=True)
class Step:
    """A product of a chain: with weight `layer` of the run.

    is_experts: instead with the experts of that layer, behind the router that `run` is.
    shared: the two layers of the shared expert, if it is part of the product.
    """

    run: Run
    layer: int
    is_experts: bool = False
    shared: tuple[Run, ...] = ()


def steps_of(runs: Sequence[Run], experts: bool) -> list[Step]:
    """The products in the order of a pass: layer by layer, then the rest.

    experts: with those behind routers, at the place where the engine launches them.
    """
    steps = []
    for group in _by_layer(runs):
        for layer in range(group[0].count):
            of_layer = iter(group)
            for run in of_layer:
                steps.append(Step(run, layer))
                if experts and run.experts is not None:
                    # The next two runs are then the shared expert's.
                    joins = run.experts.takes_shared(run.rows)
                    shared = (next(of_layer), next(of_layer)) if joins else ()
                    steps.append(Step(run, layer, True, shared))
    return steps


def num_copies(experts: RoutedExperts) -> int:
    """The number of copies of a layer's experts, which layers take in turn.

    With so many, more than an L2 cache is read between two uses of an expert, whatever the ids are.  What is
    read at least: a call to each of the other copies, and a third of the expert's own call, the bytes of down, because
    down comes after all of gate and up.
    """
    of_call = experts.sizes.shape.top_k * experts.expert_bytes
    return min(experts.sizes.layers, 1 + max(0, math.ceil(L2_BYTES / of_call - 1 / 3)))


class ExpertCalls:
    """The products with the experts behind a router, one for each layer, as MixtureMLP runs them."""

    def __init__(self, router: Run, copies: Sequence[LayerExperts]) -> None:
        experts, rows, down = router.experts, router.rows, copies[0].down
        assert experts is not None
        self.copies, dtype = copies, copies[0].dtype
        touched = experts.touched_to_draw(rows)
        self.inputs = ChainInputs(experts.sizes.shape, rows, dtype, down.device, router.count, touched)
        x = self.inputs.x
        rounding = rounding_in_norm(copies[0].gate_up, x)
        # The norm before rounds them, so that is no part of the product.
        self.rows: Rows = x if rounding is None else RoundedRows(*quantise_rows(x, rounding), dtype)
        # Decoder passes which rows are live, and here all are.
        self.live = torch.ones(rows, dtype=torch.bool, device=down.device)

    def product(self, layer: int, shared: Sequence[Matrix]) -> Product:
        """shared: gate_up and down of the shared expert, if it is part of the product; else none."""
        own, joined = self.copies[layer % len(self.copies)], None
        if shared:
            gate_up, down = shared
            assert isinstance(gate_up, Tensor) and isinstance(down, Tensor)
            joined = SharedExperts(gate_up, down)
        arguments = (self.rows, own.gate_up, own.down, self.inputs.ids[layer], self.inputs.weights, self.live)
        return partial(grouped_experts, *arguments, own.biases, own.activation, shared=joined)


class Weights:
    """Random weights on a GPU, one for each layer.  Passes whose runs have the same name and shape share them."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._made: dict[tuple[str, Shape], list[Matrix]] = {}
        self._experts: dict[str, list[LayerExperts]] = {}

    def of(self, run: Run) -> list[Matrix]:
        made = self._made.setdefault((run.name, run.shape), [])
        while len(made) < run.first + run.count:
            made.append(self.drawn(run.shape if run.heads == 1 else (run.heads, *run.shape), run.weights))
        return made[run.first : run.first + run.count]

    def drawn(self, shape: tuple[int, ...], weights: str = DENSE) -> Matrix:
        """A random weight as large as a trained one.  Zeros would be multiplied faster, with less power."""
        dense = torch.empty(shape, dtype=self.dtype, device=self.device).normal_(std=shape[-1] ** -0.5)
        return dense if weights == DENSE else QUANTISERS[weights].matrix(dense)

    def experts_of(self, router: Run) -> list[LayerExperts]:
        """The copies of the experts behind a router."""
        experts = router.experts
        assert experts is not None
        if router.name not in self._experts:
            count = num_copies(experts)
            self._experts[router.name] = [LayerExperts.drawn(experts, self.dtype, self.device) for _ in range(count)]
        return self._experts[router.name]

    def chain(self, runs: Sequence[Run], multiply: Multiply, experts: bool = False) -> Callable[[], None]:
        """A function that runs all products of `steps_of`.  Experts are multiplied as the engine does."""
        inputs = {_input_key(run): self._input(run) for run in runs}
        calls = {run: ExpertCalls(run, self.experts_of(run)) for run in runs if experts and run.experts is not None}
        products = []
        for step in steps_of(runs, experts):
            if step.is_experts:
                shared = [self.of(run)[step.layer] for run in step.shared]
                products.append(calls[step.run].product(step.layer, shared))
            else:
                weight = self.of(step.run)[step.layer]
                products.append(_product(step.run, inputs[_input_key(step.run)], weight, multiply))

        def body() -> None:
            for product in products:
                product()

        return body

    def _input(self, run: Run) -> Tensor:
        """[rows, in], or [heads, rows, in] for a batched product."""
        size = (run.rows, run.shape[1]) if run.heads == 1 else (run.heads, run.rows, run.shape[1])
        return torch.randn(size, dtype=self.dtype, device=self.device)


def _product(run: Run, x: Tensor, weight: Matrix, multiply: Multiply) -> Product:
    if isinstance(weight, Tensor):
        return partial(torch.bmm, x, weight.transpose(1, 2)) if weight.ndim == 3 else partial(multiply, x, weight)
    rounding = rounding_in_norm(weight, x)
    if rounding is not None and run.name.endswith(BEHIND_A_NORM) and len(x) <= kernel_rows(rounding, chip(x)):
        return partial(multiply, RoundedRows(*quantise_rows(x, rounding), x.dtype), weight)
    return partial(multiply, x, weight)


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
    return plain(x, weight) if plans is None else linear(x, weight, None, plans.at(len(x)))
