"""The MLP of a layer, down(activation(gate(x)) * up(x)) or down(activation(up(x))), and the mixture-of-experts MLP."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from espalier.kernels.layers.linear_plans import TritonPlan
from espalier.kernels.layers.quantised import InputRows, InputScales
from espalier.kernels.ops.activation import SILU, Activation
from espalier.kernels.ops.experts import (
    MAX_SHARED_ROWS,
    ExpertBiases,
    ExpertMatrix,
    Routing,
    SharedExperts,
    grouped_experts,
    route,
    scale_by_gate,
)
from espalier.kernels.ops.linear import linear_partial_sums
from espalier.kernels.ops.norm import can_round_norm, norm_router, supports_norm_router
from espalier.models.layers.linear import Linear
from espalier.models.layers.norm import AnyNorm, BlockOutput, NormedOutputs, is_rounded_in_launch, sum_if_unsummed
from espalier.models.weight_formats.sharded import UnsummedOutput
from espalier.shards import SINGLE_RANK, Shards


@dataclass(eq=False, slots=True)
class GatedMLP:
    """A dense MLP.
    gate_up: the stacked weights of gate and up, [2·intermediate, hidden]; only up if the activation has no gate."""

    gate_up: Linear
    down: Linear
    activation: Activation = SILU

    def norm_input(self, norm: AnyNorm, delta: BlockOutput, residual: Tensor) -> tuple[Tensor, InputRows]:
        """Returns (residual + delta, the norm of that sum as gate_up's input).  delta: the previous block's output."""
        return self.gate_up.norm_input(norm, delta, residual)

    def __call__(self, x: InputRows, live: Tensor | None = None) -> Tensor | UnsummedOutput:
        """Returns the output [B·Q, hidden] for rows x [B·Q, hidden], or partial sums of the output,
        which the next norm adds.

        live: ignored, because a dense MLP computes every row.  MixtureMLP uses this argument."""
        return self.down.residual_delta(self._activated_rows(x))

    def partial_sums(self, x: InputRows) -> Tensor:
        """Returns this rank's part of the output for rows x, [B·Q, hidden], or partial sums of that part.  The parts of
        all ranks add up to the output."""
        return self.down.partial_sums(self._activated_rows(x))

    def num_partial_sums(self, num_rows: int) -> int:
        """Returns the number of partial sums that `write_partial_sums` writes."""
        return self.down.weight.num_partial_sums(num_rows)

    def write_partial_sums(self, x: Tensor, out: Tensor) -> None:
        """Writes partial sums of the output for rows x to out [num_partial_sums, B·Q, hidden], float32 or float64."""
        self.down.write_partial_sums(self._activated_rows(x), out)

    def summed_output(self, x: Tensor) -> Tensor:
        """Returns the output [B·Q, hidden] for rows x as one tensor, never as partial sums."""
        return self.down(self._activated_rows(x))

    def _activated_rows(self, x: InputRows) -> InputRows:
        """Returns the activations [B·Q, intermediate] for rows x, in the form that `down` takes."""
        return self.gate_up.activated_product(x, self.activation, self.down.rounding)


# A router has few outputs.  So for few rows, the product is split along the inputs, and `route` adds the partial sums.
# For more than ROUTER_MAX_ROWS rows, PyTorch's product is faster.
ROUTER_PLAN, ROUTER_MAX_ROWS = TritonPlan(block_out=32, block_in=128, splits=8, warps=4, stages=2), 64


class RoutedRows(NamedTuple):
    """The input of a MixtureMLP.
    x: [N, hidden], the normed rows.  expert_rows: the same rows in the form that the routed experts take.
    logits: the router's logits [N, E], or partial sums of them, which `route` adds."""

    x: Tensor
    expert_rows: InputRows
    logits: Tensor


@dataclass(eq=False, slots=True)
class MixtureMLP:
    """The mixture-of-experts MLP: the weighted sum of each row's experts, plus the output of the shared experts.

    router: [E, H].  router_bias: [E] (see Routing), or None.  gate_up: [E, 2·I, H], or [E, I, H] if the activation has
    no gate.  down: [E, H, I].  gate_up and down are dense or quantised.
    shared_expert: the MLP of the shared experts, which computes every row.  shared_expert_gate: [1, H]; the output of
    shared_expert is multiplied by the sigmoid of shared_expert_gate · row.
    biases, activation: the biases and the activation of the routed experts.  expert_scales: [E], the factors of routing
    weights, or None.
    shards: the ranks that divide the experts.  Each rank has a part of the intermediate size of every expert.
    shared_expert_tiles: the weights of shared_expert, in the form that the kernels of the routed experts take.  For few
    rows, these kernels also compute the shared MLP.  None if the shared MLP always has its own kernel launches."""

    routing: Routing
    router: Tensor
    router_bias: Tensor | None
    gate_up: ExpertMatrix
    down: ExpertMatrix
    shared_expert: GatedMLP | None = None
    shared_expert_gate: Linear | None = None
    biases: ExpertBiases | None = None
    activation: Activation = SILU
    expert_scales: Tensor | None = None
    shards: Shards = SINGLE_RANK
    shared_expert_tiles: SharedExperts | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        shared = self.shared_expert
        are_silu = self.activation.is_silu and (shared is None or shared.activation.is_silu)
        if shared is not None and self.shared_expert_gate is None and self.biases is None and are_silu:
            self.shared_expert_tiles = _shared_expert_tiles(shared, self.gate_up, self.down)

    def norm_input(self, norm: AnyNorm, delta: BlockOutput, residual: Tensor) -> tuple[Tensor, RoutedRows]:
        """Returns (residual + delta, the norm of that sum and its router logits).  See residual.py:NormReader.
        For a few rows, one kernel computes the norm and the router's logits.  If the experts take quantised inputs, the
        kernel of the norm also quantises the normed rows."""
        rounding = rounding_in_norm(self.gate_up, residual)
        has_kernel = supports_norm_router(residual)
        summed = sum_if_unsummed(delta) if has_kernel and not isinstance(delta, NormedOutputs) else None
        if summed is not None and norm.weight is not None:
            arguments = summed, residual, norm.weight, norm.eps, self.router, rounding
            total, normed, rounded, logits = norm_router.triton(*arguments)
            return total, RoutedRows(normed, rounded, logits)
        total, normed, rounded = norm.add_norm_and_round(delta if summed is None else summed, residual, rounding)
        return total, RoutedRows(normed, rounded, router_logits(normed, self.router))

    def route_rows(self, x: Tensor) -> RoutedRows:
        """Returns RoutedRows for rows x [N, hidden], which are normed already."""
        return RoutedRows(x, x, router_logits(x, self.router))

    def __call__(self, routed: RoutedRows, live: Tensor | None = None) -> Tensor | UnsummedOutput:
        """Returns the output [N, hidden] of N rows, or partial sums of the output, which the next norm adds.
        live: [N] bool, the rows that experts compute; None for all rows."""
        partial_sums = self._sum_of_experts(*routed, live)
        return partial_sums if self.shards.count == 1 else UnsummedOutput(partial_sums, self.shards, routed.x.dtype)

    def _sum_of_experts(self, x: Tensor, expert_rows: InputRows, logits: Tensor, live: Tensor | None) -> Tensor:
        """Returns the output or its partial sums.  expert_rows: x, perhaps quantised.  logits: [N, E], the router's."""
        ids, weights = route(logits, self.router_bias, self.routing, self.expert_scales)
        if self.shared_expert_tiles is not None and len(x) <= MAX_SHARED_ROWS:
            return grouped_experts(
                expert_rows,
                self.gate_up,
                self.down,
                ids,
                weights,
                live_rows=live,
                shared_experts=self.shared_expert_tiles,
            )
        shared, gate = self.shared_expert, self.shared_expert_gate
        num_shared_parts = 0 if shared is None else 1 if gate is not None else shared.num_partial_sums(len(x))
        experts = (expert_rows, self.gate_up, self.down, ids, weights)
        parts = grouped_experts(
            *experts, live_rows=live, biases=self.biases, activation=self.activation, num_extra_parts=num_shared_parts
        )
        if shared is not None and gate is not None:
            rows = _shared_mlp_rows(shared, self.gate_up, x, expert_rows)
            _write_gated_shared_mlp(shared, gate, x, rows, parts[-1])
        elif shared is not None:
            shared.write_partial_sums(x, parts[-num_shared_parts:])
        return parts


def _write_gated_shared_mlp(shared: GatedMLP, gate: Linear, x: Tensor, rows: InputRows, out: Tensor) -> None:
    """Writes the shared MLP's output, multiplied by its gate, to out [N, H].  rows: x in the form the MLP takes."""
    weight = gate.weight.dense_tensor()
    if weight is None:
        torch.mul(shared.summed_output(x), gate(x).to(out.dtype).sigmoid(), out=out)
    else:
        scale_by_gate(shared.partial_sums(rows), x, weight, out)


def _shared_mlp_rows(shared: GatedMLP, gate_up: ExpertMatrix, x: Tensor, expert_rows: InputRows) -> InputRows:
    """Returns the rows in the form that the shared MLP takes.
    The result is `expert_rows` if the shared MLP quantises rows in the same way as the experts, else x."""
    rounding = shared.gate_up.rounding
    if rounding is None or isinstance(gate_up, Tensor) or gate_up.input_scales is None:
        return x
    is_same = (
        rounding.static_scale is gate_up.input_scales.static_scale
        and rounding.group_size == gate_up.input_scales.group_size
    )
    return expert_rows if is_same and is_rounded_in_launch(x, x.shape[1], rounding) else x


def rounding_in_norm(gate_up: ExpertMatrix, x: Tensor) -> InputScales | None:
    """Returns how the norm kernel quantises rows x for the routed experts; None if it does not quantise them."""
    if isinstance(gate_up, Tensor) or gate_up.input_scales is None or gate_up.column_order is not None or not x.is_cuda:
        return None
    return gate_up.input_scales if can_round_norm(x.shape[1], gate_up.input_scales) else None


def _shared_expert_tiles(shared: GatedMLP, gate_up: ExpertMatrix, down: ExpertMatrix) -> SharedExperts | None:
    """Returns the weights of the shared MLP as SharedExperts.  gate_up, down: the matrices of the experts.
    Returns None if the shared MLP or the experts are quantised, if the shared MLP has a bias, or if the intermediate
    size of the shared MLP is not a multiple of an expert's."""
    layers = (shared.gate_up, shared.down)
    gate_up_weight, down_weight = (layer.weight.dense_tensor() for layer in layers)
    if gate_up_weight is None or down_weight is None or not isinstance(gate_up, Tensor) or not isinstance(down, Tensor):
        return None
    is_plain = all(layer.bias is None for layer in layers)
    if not is_plain or gate_up_weight.dtype != gate_up.dtype or down_weight.shape[1] % down.shape[2]:
        return None
    are_contiguous = gate_up_weight.is_contiguous() and down_weight.is_contiguous()
    return SharedExperts(gate_up_weight, down_weight) if are_contiguous else None


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Returns the router's logits [N, E] = x [N, H] · weightᵀ, or partial sums of the logits, which `route` adds.
    weight: [E, H].  The product and the result are in float32 (float64 if x is float64)."""
    exact = torch.promote_types(x.dtype, torch.float32)
    if x.is_cuda and x.dtype != exact:
        if 0 < len(x) <= ROUTER_MAX_ROWS:
            return linear_partial_sums.triton(x, weight, None, ROUTER_PLAN)
        return torch.mm(x, weight.T, out_dtype=exact)
    return F.linear(x.to(exact), weight.to(exact))
