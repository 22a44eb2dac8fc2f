"""The routing of a few rows inside the expert product.

Where each pair (row, choice) is a tile (experts_tiles.py), a program of experts.py chooses its expert from the row's
logits itself.  All programs of a row repeat that, in place of a launch that nothing else runs beside.  Logits are
complete when the launches begin: neither writes them.

The experts and weights are those of `route` to the bit.
"""

import torch
from torch import Tensor

from espalier.kernels.layers.activation import SILU, Activation
from espalier.kernels.layers.experts import (
    ExpertBiases,
    ExpertMatrix,
    down_triton,
    gated_triton,
    grouped_experts,
    require_experts,
)
from espalier.kernels.layers.experts_plan import ExpertsPlan, ExpertsShape
from espalier.kernels.layers.experts_shared import SharedExperts, require_shared
from espalier.kernels.layers.experts_tiles import Tiles
from espalier.kernels.layers.experts_tuning import plan_for
from espalier.kernels.layers.routing import Routing, route
from espalier.kernels.runtime.launch import chip, require

# Of more experts, comparing all pairs takes longer than the launch that it saves.
MAX_ROUTED_EXPERTS = 128


def routed_experts(
    x: Tensor,
    gate_up: ExpertMatrix,
    down: ExpertMatrix,
    logits: Tensor,
    bias: Tensor | None,
    routing: Routing,
    live: Tensor | None = None,
    biases: ExpertBiases | None = None,
    activation: Activation = SILU,
    extra: int = 0,
    shared: SharedExperts | None = None,
) -> Tensor:
    """grouped_experts of the experts and weights that `route` gives for these logits and this bias."""
    if x.is_cuda and logits.ndim == 2 and routing.num_experts <= MAX_ROUTED_EXPERTS and len(x):
        plan = _plan(x, down, routing)
        if plan.rows == 1:
            given = (x, gate_up, down, logits, bias, routing, live, biases, activation, extra, shared)
            return routed_experts_triton(*given, plan=plan)
    ids, weights = route(logits, bias, routing)
    return grouped_experts(x, gate_up, down, ids, weights, live, biases, activation, extra, shared)


def routed_experts_triton(
    x: Tensor,
    gate_up: ExpertMatrix,
    down: ExpertMatrix,
    logits: Tensor,
    bias: Tensor | None,
    routing: Routing,
    live: Tensor | None = None,
    biases: ExpertBiases | None = None,
    activation: Activation = SILU,
    extra: int = 0,
    shared: SharedExperts | None = None,
    *,
    plan: ExpertsPlan | None = None,
) -> Tensor:
    """logits: [N, E], contiguous, in float32 (float64 for float64); N > 0.  plan: its tiles have one row.

    Raises EspalierError as grouped_experts_triton.
    """
    num_rows, inner, top_k = len(x), down.shape[2], routing.top_k
    require_experts(x, gate_up, down, biases)
    exact = torch.promote_types(x.dtype, torch.float32)
    require("routed_experts: logits", logits, (num_rows, gate_up.shape[0]), exact, x)
    if bias is not None:
        require("routed_experts: bias", bias, (gate_up.shape[0],), None, x)
    if live is not None:
        require("routed_experts: live", live, (num_rows,), torch.bool, x)
        live = live.contiguous()
    if shared is not None:
        require_shared(shared, x, inner, is_plain=isinstance(gate_up, Tensor) and biases is None and activation == SILU)
    plan = plan or _plan(x, down, routing)
    logits = logits.contiguous()
    begins = logits if bias is None else bias.contiguous()
    tiles = Tiles(1, logits, begins, logits, logits, live, routing, bias is not None)
    gate_up_bias, down_bias = (None, None) if biases is None else (biases.gate_up, biases.down)
    gated = gated_triton(x, gate_up, tiles, top_k, plan.gated, gate_up_bias, activation, shared)
    return down_triton(gated, down, logits, tiles, top_k, plan.down, down_bias, extra, shared)


def _plan(x: Tensor, down: ExpertMatrix, routing: Routing) -> ExpertsPlan:
    shape = ExpertsShape(routing.num_experts, routing.top_k, x.shape[1], down.shape[2])
    return plan_for(shape, len(x), x.dtype, chip(x))
