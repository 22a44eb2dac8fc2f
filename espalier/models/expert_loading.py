"""Loads the mixture-of-experts block of a layer from the tensors of its checkpoint."""

import torch

from espalier.models.config import Experts
from espalier.models.layers.experts import MixtureMLP
from espalier.models.weights import Weights


def load_experts(weights: Weights, experts: Experts, prefix: str, hidden: int) -> MixtureMLP:
    """The mixture-of-experts block under `prefix`, whose checkpoint has the matrices of each expert apart."""
    routing, size = experts.routing, experts.size
    names = [f"{prefix}experts.{expert}." for expert in range(routing.num_experts)]
    gate_up = weights.stack([f"{name}{half}_proj" for name in names for half in ("gate", "up")], size, hidden)
    bias = shared = shared_gate = None
    if routing.correction_bias:
        exact = torch.promote_types(weights.dtype, torch.float32)
        stored = weights.take_raw(f"{prefix}gate.e_score_correction_bias", routing.num_experts)
        bias = stored.to(weights.device, exact)
    if experts.shared_size:
        shared = weights.mlp(f"{prefix}{experts.shared_name}.", hidden, experts.shared_size, experts.shared_bias)
    if experts.shared_gate is not None:
        shared_gate = weights.linear(prefix, (experts.shared_gate,), (1,), hidden, bias=False)
    return MixtureMLP(
        routing,
        weights.take(f"{prefix}gate.weight", routing.num_experts, hidden),
        bias,
        gate_up.view(routing.num_experts, 2 * size, hidden),
        weights.stack([f"{name}down_proj" for name in names], hidden, size),
        shared,
        shared_gate,
    )
