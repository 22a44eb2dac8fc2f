"""Products with routed experts on a GPU: in a chain with the other products of a pass, and alone.

Experts are large, so layers use a few copies of them in turn.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from espalier.bench.linears import ProductGroup, RoutedExperts
from espalier.bench.timing import InputsBySize, Matrix, Multiply, Product, Weights, group_by_count, run_in_order
from espalier.bench.tune_experts import ChainInputs, activation_of, random_experts
from espalier.kernels.layers.experts_plan import ExpertsShape
from espalier.kernels.layers.linear_plans import DENSE
from espalier.kernels.layers.quantised import InputRows, RoundedRows
from espalier.kernels.ops.activation import SILU, Activation
from espalier.kernels.ops.experts import MAX_SHARED_ROWS, ExpertBiases, ExpertMatrix, SharedExperts, grouped_experts
from espalier.kernels.ops.linear import quantise_rows
from espalier.models.layers.mlp import rounding_in_norm
from espalier.models.quantisers import QUANTISERS
from lab.bench.cases import KernelCase

# The size of the largest L2 cache that we measure on.
L2_BYTES = 60 * 10**6


def stored_experts(
    shape: ExpertsShape, weights: str, dtype: torch.dtype, device: torch.device
) -> tuple[ExpertMatrix, ExpertMatrix]:
    """Returns random experts in the engine's format.  weights: "dense", or a name of QUANTISERS."""
    gate_up, down = random_experts(shape, dtype, device)
    if weights == DENSE:
        return gate_up, down
    return QUANTISERS[weights].quantise_experts(gate_up), QUANTISERS[weights].quantise_experts(down)


@dataclass(frozen=True)
class LayerExperts:
    """The routed experts of one layer, as grouped_experts takes them.  dtype: the dtype of the rows."""

    gate_up: ExpertMatrix
    down: ExpertMatrix
    dtype: torch.dtype
    biases: ExpertBiases | None = None
    activation: Activation = SILU

    @classmethod
    def drawn(cls, experts: RoutedExperts, dtype: torch.dtype, device: torch.device) -> "LayerExperts":
        sizes, biases = experts.sizes, None
        gate_up, down = stored_experts(sizes.shape, experts.weight_format, dtype, device)
        if sizes.has_biases:
            of_each = [torch.randn(*matrix.shape[:2], dtype=dtype, device=device) for matrix in (gate_up, down)]
            biases = ExpertBiases(*of_each)
        return cls(gate_up, down, dtype, biases, sizes.activation)


@dataclass(frozen=True)
class ProductStep:
    """A product of a chain: rows times the weight of one layer of `run`.

    is_experts: the product is with that layer's experts, and `run` is their router.
    shared: the two linear layers of the shared expert, if they are part of the product.
    """

    run: ProductGroup
    layer: int
    is_experts: bool = False
    shared: tuple[ProductGroup, ...] = ()


def product_steps(runs: Sequence[ProductGroup], with_experts: bool) -> list[ProductStep]:
    """The products in the order of a pass: layer by layer, then the rest.

    with_experts: with the products of routed experts, where the engine launches them.
    """
    steps = []
    for group in group_by_count(runs):
        for layer in range(group[0].num_weights):
            of_layer = iter(group)
            for run in of_layer:
                steps.append(ProductStep(run, layer))
                if with_experts and run.experts is not None:
                    # The next two runs are then the shared expert's.
                    joins = joins_shared_expert(run.experts, run.num_rows)
                    shared = (next(of_layer), next(of_layer)) if joins else ()
                    steps.append(ProductStep(run, layer, True, shared))
    return steps


def num_touched_experts(experts: RoutedExperts, rows: int) -> int | None:
    """Returns the measured number of touched experts, limited to what `rows` rows can touch; None: uniform routing."""
    if experts.mean_active_experts is None:
        return None
    shape = experts.sizes.shape
    return min(max(round(experts.mean_active_experts), shape.top_k), shape.num_experts, rows * shape.top_k)


def joins_shared_expert(experts: RoutedExperts, rows: int) -> bool:
    """Whether `rows` rows run the shared expert in the launches of the routed experts."""
    return experts.sizes.fuses_shared and experts.weight_format == DENSE and rows <= MAX_SHARED_ROWS


def num_expert_copies(experts: RoutedExperts) -> int:
    """Returns the number of copies of a layer's experts, which layers use in turn.

    Between two uses of an expert, more than an L2 cache must be read, whatever the expert ids.  At least one call to
    each other copy is read in between, and a third of the expert's own call: `down`, read after gate and up."""
    of_call = experts.sizes.shape.top_k * experts.expert_bytes
    return min(experts.sizes.num_layers, 1 + max(0, math.ceil(L2_BYTES / of_call - 1 / 3)))


class ExpertCalls:
    """The products with the experts of a router, one product for each layer, as MixtureMLP runs them."""

    def __init__(self, router: ProductGroup, copies: Sequence[LayerExperts]) -> None:
        experts, rows, down = router.experts, router.num_rows, copies[0].down
        assert experts is not None
        self.copies, dtype = copies, copies[0].dtype
        touched = num_touched_experts(experts, rows)
        self.inputs = ChainInputs(experts.sizes.shape, rows, dtype, down.device, router.num_weights, touched)
        x = self.inputs.x
        rounding = rounding_in_norm(copies[0].gate_up, x)
        # In the engine the norm before the product rounds the rows, so rounding is not timed.
        self.rows: InputRows = x if rounding is None else RoundedRows(*quantise_rows(x, rounding), dtype)
        # Here all rows are live, that is, none is padding.
        self.live = torch.ones(rows, dtype=torch.bool, device=down.device)

    def product(self, layer: int, shared: Sequence[Matrix]) -> Product:
        """shared: gate_up and down of the shared expert, if it is part of the product; else none."""
        own, joined = self.copies[layer % len(self.copies)], None
        if shared:
            gate_up, down = shared
            assert isinstance(gate_up, Tensor) and isinstance(down, Tensor)
            joined = SharedExperts(gate_up, down)
        arguments = (
            self.rows,
            own.gate_up,
            own.down,
            self.inputs.expert_ids[layer],
            self.inputs.router_weights,
            self.live,
        )
        return partial(grouped_experts, *arguments, own.biases, own.activation, shared_experts=joined)


class ExpertWeights(Weights):
    """The weights of a pass, with those of routed experts."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, device)
        self._experts: dict[str, list[LayerExperts]] = {}

    def experts_of(self, router: ProductGroup) -> list[LayerExperts]:
        experts = router.experts
        assert experts is not None
        if router.name not in self._experts:
            count = num_expert_copies(experts)
            self._experts[router.name] = [LayerExperts.drawn(experts, self.dtype, self.device) for _ in range(count)]
        return self._experts[router.name]

    def make_pass(self, runs: Sequence[ProductGroup], multiply: Multiply, experts: bool = False) -> Callable[[], None]:
        """Returns a function that runs all products of `product_steps`.  The engine's kernels multiply experts."""
        calls = {run: ExpertCalls(run, self.experts_of(run)) for run in runs if experts and run.experts is not None}
        inputs: InputsBySize = {}
        products = []
        for step in product_steps(runs, experts):
            if step.is_experts:
                shared = [self.weights_of(run)[step.layer] for run in step.shared]
                products.append(calls[step.run].product(step.layer, shared))
            else:
                products.append(self.make_product(step.run, step.layer, inputs, multiply))
        return run_in_order(products)


def expert_case(
    names: tuple[str, ...],
    shape: ExpertsShape,
    gate_up: ExpertMatrix,
    down: ExpertMatrix,
    dtype: torch.dtype,
    rows: int,
) -> KernelCase:
    """A case: the product of one layer's experts with `rows` rows.  Only the bytes of experts that have rows count.

    gate_up, down: as in grouped_experts.  dtype: the dtype of the rows."""
    inputs = ChainInputs(shape, rows, dtype, down.device)
    product = partial(grouped_experts.triton, inputs.x, gate_up, down, activation=activation_of(shape))
    calls = [partial(product, expert_ids, inputs.router_weights) for expert_ids in inputs.expert_ids]
    num_bytes = inputs.mean_active_experts * (gate_up.nbytes + down.nbytes) / shape.num_experts
    note = f"{inputs.mean_active_experts:.1f} of them touched"
    return KernelCase(names, num_bytes, shape.flops(rows), run_in_order(calls), inputs.num_calls, note=note)
