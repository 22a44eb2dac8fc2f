"""The feed-forward block, down(activation(gate(x)) * up(x)) or down(activation(up(x))), and the mixture of experts in
its place."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from espalier.kernels.layers.linear_plans import TritonPlan
from espalier.kernels.layers.quantised import InputScales, Rows
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
from espalier.kernels.ops.linear import linear_parts
from espalier.kernels.ops.norm import norm_router, rounds_norm, takes_router
from espalier.models.layers.linear import Linear
from espalier.models.layers.norm import AnyNorm, Delta, Normed, is_rounded_before, summed
from espalier.models.weight_formats.sharded import Unsummed
from espalier.shards import WHOLE, Shards


@dataclass(eq=False, slots=True)
class GatedMLP:
    """gate_up: stacked weights of gate and up, [2·intermediate, hidden], or up alone if the activation has no gate."""

    gate_up: Linear
    down: Linear
    activation: Activation = SILU

    def read(self, norm: AnyNorm, delta: Delta, x: Tensor) -> tuple[Tensor, Rows]:
        """As espalier/models/layers/stream.py:Reader."""
        return self.gate_up.read(norm, delta, x)

    def __call__(self, x: Rows, live: Tensor | None = None) -> Tensor | Unsummed:
        """[B·Q, hidden] -> [B·Q, hidden], or parts of it as RMSNorm.after takes them.

        live: [B·Q] bool, as MixtureMLP takes it.  Here every row is computed.
        """
        return self.down.for_stream(self.gate_up.gated(x, self.activation))

    def in_parts(self, x: Rows) -> Tensor:
        """[B·Q, hidden] -> [B·Q, hidden], or parts of it that sum to it: on each rank its own."""
        return self.down.in_parts(self.gate_up.gated(x, self.activation))

    def num_parts(self, rows: int) -> int:
        """The number of parts that `write_parts` writes."""
        return self.down.weight.num_parts(rows)

    def write_parts(self, x: Tensor, out: Tensor) -> None:
        """[B·Q, hidden] -> out [num_parts, B·Q, hidden], float32 at least; they sum to the result."""
        self.down.write_parts(self.gate_up.gated(x, self.activation), out)

    def summed(self, x: Tensor) -> Tensor:
        """[B·Q, hidden] -> [B·Q, hidden], summed: never in parts."""
        return self.down(self.gate_up.gated(x, self.activation))


# For few rows: a router has few outputs, so it is split along its inputs, and `route` adds the parts.  A single part
# would be rounded to x's dtype.  Above, PyTorch's product is faster.
ROUTER_PLAN, ROUTER_MAX_ROWS = TritonPlan(block_out=32, block_in=128, splits=8, warps=4, stages=2), 64


class RoutedRows(NamedTuple):
    """x: [N, hidden], the rows; of_experts: as the routed experts take them; logits: as `route` takes them."""

    x: Tensor
    of_experts: Rows
    logits: Tensor


@dataclass(eq=False, slots=True)
class MixtureMLP:
    """The weighted sum of each row's experts, and of the shared experts if there are any.

    router: [E, H].  bias: [E], added as `routing` says, or None.  gate_up: [E, 2·I, H], or [E, I, H] if the activation
    has no gate.  down: [E, H, I].
    Both are dense or quantised.
    shared: an MLP that every row goes through.  shared_gate: [1, H]; the sigmoid of its product scales `shared`.
    biases, activation: of the routed experts.  scale: [E], a factor of each expert's weight, or None.
    shards: over which the experts, shared ones too, are divided: each rank has a part of every expert's I.
    shared_tiles: `shared` in the form in which few rows take it in the launches of the routed experts; None: it runs
    apart for any number of rows.  It has the memory of `shared`.
    """

    routing: Routing
    router: Tensor
    bias: Tensor | None
    gate_up: ExpertMatrix
    down: ExpertMatrix
    shared: GatedMLP | None = None
    shared_gate: Linear | None = None
    biases: ExpertBiases | None = None
    activation: Activation = SILU
    scale: Tensor | None = None
    shards: Shards = WHOLE
    shared_tiles: SharedExperts | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        shared = self.shared
        are_silu = self.activation.is_silu and (shared is None or shared.activation.is_silu)
        if shared is not None and self.shared_gate is None and self.biases is None and are_silu:
            self.shared_tiles = _as_tiles(shared, self.gate_up, self.down)

    def read(self, norm: AnyNorm, delta: Delta, x: Tensor) -> tuple[Tensor, RoutedRows]:
        """As espalier/models/layers/stream.py:Reader.

        For a few rows the norm and the router are one launch.  The launch that norms also rounds what experts take
        rounded.
        """
        rounding = rounding_in_norm(self.gate_up, x)
        own = summed(delta) if takes_router(x) and not isinstance(delta, Normed) else None
        if own is not None and norm.weight is not None:
            total, normed, rounded, logits = norm_router.triton(own, x, norm.weight, norm.eps, self.router, rounding)
            return total, RoutedRows(normed, rounded, logits)
        total, normed, rounded = norm.both_after(delta if own is None else own, x, rounding)
        return total, RoutedRows(normed, rounded, router_logits(normed, self.router))

    def routed(self, x: Tensor) -> RoutedRows:
        """Rows [N, hidden] that are normed already, with their router's logits."""
        return RoutedRows(x, x, router_logits(x, self.router))

    def __call__(self, routed: RoutedRows, live: Tensor | None = None) -> Tensor | Unsummed:
        """[N, hidden] -> [parts, N, hidden], float32 at least, or [N, hidden], as RMSNorm.after takes them.

        live: [N] bool; other rows go to no expert.  None: all rows are live.
        """
        parts = self._mixed(*routed, live)
        return parts if self.shards.count == 1 else Unsummed(parts, self.shards, routed.x.dtype)

    def _mixed(self, x: Tensor, of_experts: Rows, logits: Tensor, live: Tensor | None) -> Tensor:
        ids, weights = route(logits, self.bias, self.routing, self.scale)
        if self.shared_tiles is not None and len(x) <= MAX_SHARED_ROWS:
            return grouped_experts(
                of_experts, self.gate_up, self.down, ids, weights, live=live, shared=self.shared_tiles
            )
        extra = 0 if self.shared is None else 1 if self.shared_gate is not None else self.shared.num_parts(len(x))
        experts = (of_experts, self.gate_up, self.down, ids, weights)
        parts = grouped_experts(*experts, live=live, biases=self.biases, activation=self.activation, extra=extra)
        if self.shared is not None and self.shared_gate is not None:
            rows = _rows_of_shared(self.shared, self.gate_up, x, of_experts)
            _write_gated(self.shared, self.shared_gate, x, rows, parts[-1])
        elif self.shared is not None:
            self.shared.write_parts(x, parts[-extra:])
        return parts


def _write_gated(shared: GatedMLP, gate: Linear, x: Tensor, rows: Rows, out: Tensor) -> None:
    """Write the shared MLP's result, scaled by its gate, to out [N, H].  rows: x as the MLP takes it."""
    weight = gate.weight.dense_tensor()
    if weight is None:
        torch.mul(shared.summed(x), gate(x).to(out.dtype).sigmoid(), out=out)
    else:
        scale_by_gate(shared.in_parts(rows), x, weight, out)


def _rows_of_shared(shared: GatedMLP, gate_up: ExpertMatrix, x: Tensor, of_experts: Rows) -> Rows:
    """The rows as the shared MLP takes them: those of the routed experts, if these are rounded as it rounds few."""
    rounding = shared.gate_up.rounding
    if rounding is None or isinstance(gate_up, Tensor) or gate_up.inputs is None:
        return x
    is_same = rounding.static is gate_up.inputs.static and rounding.group == gate_up.inputs.group
    return of_experts if is_same and is_rounded_before(x, x.shape[1], rounding) else x


def rounding_in_norm(gate_up: ExpertMatrix, x: Tensor) -> InputScales | None:
    """How the norm of x is rounded in its own launch for the routed experts; None: it is not."""
    if isinstance(gate_up, Tensor) or gate_up.inputs is None or gate_up.order is not None or not x.is_cuda:
        return None
    return gate_up.inputs if rounds_norm(x.shape[1], gate_up.inputs) else None


def _as_tiles(shared: GatedMLP, gate_up: ExpertMatrix, down: ExpertMatrix) -> SharedExperts | None:
    """None if the two are not dense and without biases, or the shared MLP is no whole number of experts wide."""
    layers = (shared.gate_up, shared.down)
    wide, narrow = (layer.weight.dense_tensor() for layer in layers)
    if wide is None or narrow is None or not isinstance(gate_up, Tensor) or not isinstance(down, Tensor):
        return None
    is_plain = all(layer.bias is None for layer in layers)
    if not is_plain or wide.dtype != gate_up.dtype or narrow.shape[1] % down.shape[2]:
        return None
    return SharedExperts(wide, narrow) if wide.is_contiguous() and narrow.is_contiguous() else None


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """x [N, H] · weightᵀ [E, H] -> [N, E], or parts of it as `route` takes them.

    Computed and returned in float32 (float64 for float64).
    """
    exact = torch.promote_types(x.dtype, torch.float32)
    if x.is_cuda and x.dtype != exact:
        if 0 < len(x) <= ROUTER_MAX_ROWS:
            return linear_parts.triton(x, weight, None, ROUTER_PLAN)
        return torch.mm(x, weight.T, out_dtype=exact)
    return F.linear(x.to(exact), weight.to(exact))
