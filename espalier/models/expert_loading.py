"""Loads the mixture-of-experts block of a layer.

A checkpoint stores the experts in one of three ways (`Experts.stored`).

apart: `experts.3.gate_proj.weight` [I, H], `up_proj` [I, H] and `down_proj` [H, I], for each expert (or as
`Experts.names` says).
stacked: `experts.gate_up_proj` [E, H, 2·I], whose columns are gate, up, gate, up, ..., and `experts.down_proj`
[E, I, H]; with biases `experts.gate_up_proj_bias` [E, 2·I], in the same order, and `experts.down_proj_bias` [E, H].
Quantised experts that are stacked keep rows of gate, up, gate, up, ... (weight_formats/mxfp4.py).
joined: `experts.gate_up_proj` [E, 2·I, H], gate over up, and `experts.down_proj` [E, H, I] (or as
`Experts.joined_names` says); in FP8 with scales for blocks, `experts.gate_up_proj_scale_inv` and
`experts.down_proj_scale_inv` [E, blocks of rows, blocks of columns].  Where the stacks are missing, the experts are
apart, as those who quantise a model store them.

All become gate_up [E, 2·I, H], gate over up, and down [E, H, I].
"""

import torch
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.layers.quantised import QuantisedMatrix
from espalier.kernels.layers.tuning_table import DENSE
from espalier.kernels.ops.activation import SILU, Activation
from espalier.kernels.ops.experts import ExpertBiases, ExpertMatrix
from espalier.models.config import Experts
from espalier.models.layer_declaration import as_stored
from espalier.models.layers.mlp import MixtureMLP
from espalier.models.weights import Weights
from espalier.shards import Part, on_every_rank, part_of

# (gate_up, down, biases)
Matrices = tuple[ExpertMatrix, ExpertMatrix, ExpertBiases | None]


def load_experts(
    weights: Weights, experts: Experts, prefix: str, hidden: int, of_shared: Activation = SILU
) -> MixtureMLP:
    """The mixture-of-experts block under `prefix`.  of_shared: the activation of shared experts."""
    routing = experts.routing
    # First: it refuses a wrong number of experts before they are read.
    router = weights.take(f"{prefix}{experts.router_name}.weight", routing.num_experts, hidden)
    read = {"apart": _apart, "stacked": _stacked, "joined": _joined}[experts.stored]
    gate_up, down, biases = read(weights, experts, prefix, hidden)
    scale = bias = shared = shared_gate = None
    if routing.correction_bias or routing.logit_bias:
        name = f"{experts.router_name}.bias" if routing.logit_bias else experts.correction_name
        bias = weights.take_exact(f"{prefix}{name}", routing.num_experts)
    if experts.scale_name is not None:
        scale = weights.take_exact(f"{prefix}{experts.scale_name}", routing.num_experts)
    if experts.shared_size:
        under = prefix if experts.shared_under is None else prefix.removesuffix(experts.under) + experts.shared_under
        sizes, name = (hidden, experts.shared_size), f"{under}{experts.shared_name}."
        # The mixture sums it with the routed experts.
        shared = weights.mlp(name, *sizes, experts.shared_bias, of_shared, False, experts.shared_names)
    if experts.shared_gate is not None:
        shared_gate = weights.linear(prefix, (experts.shared_gate,), (on_every_rank(1),), hidden, bias=False)
    return MixtureMLP(
        routing,
        router,
        bias,
        gate_up,
        down,
        shared,
        shared_gate,
        biases,
        experts.activation,
        scale,
        weights.shards,
    )


def _joined(weights: Weights, experts: Experts, prefix: str, hidden: int) -> Matrices:
    gate_up, down = (f"{prefix}{name}" for name in experts.joined_names)
    count, size = experts.routing.num_experts, experts.size
    if gate_up not in weights:
        return _apart(weights, experts, prefix, hidden)
    own = _own_size(weights, experts)
    _, halves = as_stored([gate_up], (own, own))
    if weights.formats(gate_up).name != DENSE and not weights.is_plain(gate_up):
        return (
            weights.stacked_matrix(gate_up, "", count, halves, hidden),
            weights.stacked_matrix(down, "", count, [hidden], own),
            None,
        )
    return (
        weights.take_parts(gate_up, (count, 2 * size, hidden), 1, [part_of(half) for half in halves]),
        weights.take_parts(down, (count, hidden, size), 2, [own]),
        None,
    )


def _apart(weights: Weights, experts: Experts, prefix: str, hidden: int) -> Matrices:
    if experts.biases:
        raise EspalierError("experts that are stored apart are supported only without biases; use another model")
    count, size = experts.routing.num_experts, _own_size(weights, experts)
    names = [f"{prefix}experts.{expert}." for expert in range(count)]
    halves = [f"{name}{half}" for name in names for half in experts.names.gate_up]
    gate_up = weights.matrix(halves, [size] * len(halves), hidden)
    down = weights.matrix([f"{name}{experts.names.down}" for name in names], [hidden] * count, size)
    return _of_experts(gate_up, count), _of_experts(down, count), None


def _of_experts(matrix: ExpertMatrix, count: int) -> ExpertMatrix:
    """[count · out, in] -> [count, out, in]"""
    return matrix.unflatten(0, (count, -1)) if isinstance(matrix, Tensor) else matrix.experts(count)


def _stacked(weights: Weights, experts: Experts, prefix: str, hidden: int) -> Matrices:
    count, own, name = experts.routing.num_experts, _own_size(weights, experts), f"{prefix}experts."
    size = own.size
    if weights.formats(f"{prefix}experts").name != DENSE:
        quantised = _stacked_quantised(weights, experts, f"{prefix}experts", hidden)
        return *quantised, _stacked_biases(weights, experts, name, hidden)
    weights.require_shape(f"{name}gate_up_proj", (count, hidden, 2 * size))
    weights.require_shape(f"{name}down_proj", (count, size, hidden))
    gate_up, down = weights.empty(count, 2 * len(own), hidden), weights.empty(count, hidden, len(own))
    for expert, stored in enumerate(weights.take_each(f"{name}gate_up_proj", count, hidden, 2 * size)):
        gate_up[expert].view(2, len(own), hidden).copy_(_halves(stored[:, own.times(2).slice]).permute(1, 2, 0))
    for expert, stored in enumerate(weights.take_each(f"{name}down_proj", count, size, hidden)):
        down[expert].copy_(stored[own.slice].T)
    return gate_up, down, _stacked_biases(weights, experts, name, hidden)


def _stacked_biases(weights: Weights, experts: Experts, name: str, hidden: int) -> ExpertBiases | None:
    if not experts.biases:
        return None
    count, own = experts.routing.num_experts, _own_size(weights, experts)
    stored = weights.take(f"{name}gate_up_proj_bias", count, 2 * own.size)
    gate_up_bias = _halves(stored[:, own.times(2).slice]).flatten(1)
    down_bias = weights.once(weights.take(f"{name}down_proj_bias", count, hidden))
    assert down_bias is not None
    return ExpertBiases(gate_up_bias, down_bias)


def _stacked_quantised(
    weights: Weights, experts: Experts, name: str, hidden: int
) -> tuple[QuantisedMatrix, QuantisedMatrix]:
    """Rows of gate and up are in turn, as the columns of dense experts are."""
    count, own = experts.routing.num_experts, _own_size(weights, experts)
    gate_up = weights.stacked_matrix(name, ".gate_up_proj", count, [own.times(2)], hidden)
    down = weights.stacked_matrix(name, ".down_proj", count, [hidden], own)
    return gate_up.rows_taken(torch.arange(2 * len(own)).view(-1, 2).T.flatten()), down


def _own_size(weights: Weights, experts: Experts) -> Part:
    """This rank's part of each expert's intermediate size."""
    return weights.shards.part(experts.size, "intermediate size of experts")


def _halves(interleaved: Tensor) -> Tensor:
    """[N, 2·I], whose columns are gate, up, gate, up, ... -> [N, 2, I]."""
    return interleaved.unflatten(1, (-1, 2)).transpose(1, 2)
