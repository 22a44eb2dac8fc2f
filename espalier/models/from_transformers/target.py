"""A model of transformers as a target: its layers write to the pass, and attend through it.

Our layers stand in the place of transformers' where both compute the same: there speed and quantised formats come from.
Linear layers are known by their class.  Norms and experts are compared with ours on random rows of a tiny model.
"""

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from espalier.attention import Pass
from espalier.cache.layer_spec import ReadyHeads
from espalier.kernels.ops.activation import GELU_TANH, SILU, Activation
from espalier.kernels.ops.experts import grouped_experts
from espalier.kernels.ops.linear import sum_parts
from espalier.kernels.state.kv_scales import KVScales
from espalier.models.base import ModelOutput
from espalier.models.config import ModelConfig
from espalier.models.from_transformers.attention import RUNNING, Attends, Call, attending
from espalier.models.layers.linear import Embedding, Linear
from espalier.models.layers.norm import RMSNorm
from espalier.models.weight_formats import dense_weight

# Makes our module of one of transformers'.
Make = Callable[[Any], nn.Module]
# The names that norms give their epsilon.
EPSILONS = ("variance_epsilon", "eps", "epsilon", "norm_eps")
TOLERANCE = 1e-5
EXPERT_INPUTS = ("hidden_states", "top_k_index", "top_k_weights")


class OurLinear(nn.Module):
    """A linear layer.  weight: empty; for code that asks for its dtype or device, or whether there is a bias."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        weight = module.weight.data
        self.bias = None if module.bias is None else module.bias.data
        self.linear = Linear(dense_weight(weight), self.bias)
        self.weight = weight.new_empty(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class OurNorm(nn.Module):
    """An RMS norm of the last dimension.  offset: what is added to its weight."""

    def __init__(self, module: Any, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = module.weight.data
        exact = torch.promote_types(self.weight.dtype, torch.float32)
        eps = next(getattr(module, name) for name in EPSILONS if hasattr(module, name))
        self.norm = RMSNorm(self.weight.to(exact) + offset if offset else self.weight, float(eps))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.contiguous())


class OurExperts(nn.Module):
    """Gated experts in two stacked matrices, gate over up."""

    def __init__(self, module: Any, activation: Activation) -> None:
        super().__init__()
        self.gate_up, self.down, self.activation = module.gate_up_proj.data, module.down_proj.data, activation

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        run, weights = RUNNING.get(None), top_k_weights.to(torch.promote_types(hidden_states.dtype, torch.float32))
        parts = grouped_experts(
            *(hidden_states, self.gate_up, self.down, top_k_index, weights),
            live=None if run is None else run.live,
            activation=self.activation,
        )
        return sum_parts(parts, hidden_states.dtype)


# What may compute the same as a norm, and as experts.
NORMS: tuple[Make, ...] = (OurNorm, partial(OurNorm, offset=1.0))
EXPERTS: tuple[Make, ...] = (partial(OurExperts, activation=SILU), partial(OurExperts, activation=GELU_TANH))


def find_equal(model: nn.Module) -> dict[type, Make]:
    """What makes our modules of those of a model's classes that compute the same.  model: a tiny random one."""
    found: dict[type, Make] = {}
    for module in model.modules():
        kind = type(module)
        if kind not in found and (make := _equal_to(module)) is not None:
            found[kind] = make
    return found


def _equal_to(module: nn.Module) -> Make | None:
    if type(module) is nn.Linear:
        return OurLinear
    names = sorted(name for name, _ in module.named_parameters())
    if names == ["weight"] and type(module).__name__.endswith("Norm") and any(hasattr(module, n) for n in EPSILONS):
        return next((make for make in NORMS if _are_equal(module, make, _rows_of_norm(module))), None)
    if names == ["down_proj", "gate_up_proj"] and _inputs_of(module) == EXPERT_INPUTS:
        return next((make for make in EXPERTS if _are_equal(module, make, _rows_of_experts(module))), None)
    return None


def _inputs_of(module: nn.Module) -> tuple[str, ...]:
    return tuple(inspect.signature(type(module).forward).parameters)[1:]


def _rows_of_norm(module: Any) -> list[tuple[Tensor, ...]]:
    """Large rows, and small ones, in which the epsilon counts."""
    x = torch.randn(7, module.weight.numel())
    return [(x,), (x * 1e-3,)]


def _rows_of_experts(module: Any) -> list[tuple[Tensor, ...]]:
    (count, _, hidden), rows = module.gate_up_proj.shape, 9
    ids = torch.rand(rows, count).topk(min(2, count)).indices
    return [(torch.randn(rows, hidden), ids, torch.rand(ids.shape))]


def _are_equal(module: nn.Module, make: Make, inputs: list[tuple[Tensor, ...]]) -> bool:
    try:
        ours = make(module)
        pairs = [(ours(*each), module(*each)) for each in inputs]
    except Exception:  # any: it is another's code, of other shapes than it seemed
        return False
    return all(one.shape == other.shape and torch.allclose(one, other, TOLERANCE, TOLERANCE) for one, other in pairs)


def replace(model: nn.Module, equal: Mapping[type, Make]) -> None:
    """Put our modules in the place of those of the classes in `equal`."""
    for parent in list(model.modules()):
        for name, module in parent.named_children():
            # Some classes of norms have weights or not, as their place asks.
            if type(module) in equal and any(True for _ in module.parameters()):
                setattr(parent, name, equal[type(module)](module))


class Body:
    """A causal model of transformers, in two parts: rows to hidden states, and these to logits.

    layers: the name of the list of its layers.  equal: the classes whose modules are replaced by ours.
    capture: layers whose inputs a pass keeps; the number of layers means the output of the last.
    """

    def __init__(self, model: Any, layers: str, equal: Mapping[type, Make], capture: tuple[int, ...] = ()) -> None:
        self.model = model
        self.decoder = model.get_submodule(layers.partition(".")[0])
        replace(model, equal)
        fix_ropes(model)
        _capture(model.get_submodule(layers), capture)
        head = model.get_output_embeddings()
        self.head: Linear = (head if isinstance(head, OurLinear) else OurLinear(head)).linear
        self._given = copy.copy(model)
        self._given._modules = {**model._modules, layers.partition(".")[0]: GivenHidden()}

    def __call__(self, tokens: Tensor, positions: Tensor, run: Attends) -> Tensor:
        """[B, Q, H] behind the last norm.  tokens, positions: [B, Q]."""
        with attending(run):
            out = self.decoder(input_ids=tokens, position_ids=positions, use_cache=False)
        return out.last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., V], with the scales and bounds that the class puts behind its head."""
        rows = self._given(inputs_embeds=hidden.reshape(1, -1, hidden.shape[-1]), use_cache=False).logits
        return rows.to(hidden.dtype).view(*hidden.shape[:-1], -1)


class GivenHidden(nn.Module):
    """In the place of a model's body: its hidden states are those that it is given."""

    def forward(self, *args: Any, inputs_embeds: Tensor, **options: Any) -> "OnlyHidden":
        return OnlyHidden(inputs_embeds)

    @property
    def decoder(self) -> "GivenHidden":
        """Some heads read the body's decoder."""
        return self


class OnlyHidden:
    """A body's output, of which nothing but the hidden states is there."""

    def __init__(self, last_hidden_state: Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]


def fix_ropes(model: nn.Module) -> None:
    """A RoPE that changes with the longest position, which it reads on the host, keeps the form of short ones.

    `ModelConfig.max_position` limits it to these: beyond them, every new token would change all cached keys.
    """
    module: Any
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if kind is not None:
            module.rope_type = dict.fromkeys(kind, "default") if isinstance(kind, dict) else "default"


def _capture(layers: nn.ModuleList, capture: tuple[int, ...]) -> None:
    """Copy the inputs of layers as they come: a class may write to the residual that it gets."""

    def before(index: int, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        RUNNING.get().inputs[index] = (args[0] if args else options["hidden_states"]).clone()

    def behind(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        RUNNING.get().inputs[len(layers)] = out[0] if isinstance(out, tuple) else out

    for index in capture:
        if index == len(layers):
            layers[-1].register_forward_hook(behind)
        else:
            layers[index].register_forward_pre_hook(partial(before, index), with_kwargs=True)


@dataclass
class PassRun:
    """A pass that answers a model's attention calls.

    layers: the number of each attention module's layer; sharing: the layers that share rows and write none.
    """

    p: Pass
    layers: Mapping[nn.Module, int]
    sharing: frozenset[int]
    inputs: dict[int, Tensor] = field(default_factory=dict)

    @cached_property
    def live(self) -> Tensor | None:
        return (self.p.tokens >= 0).flatten()

    def __call__(self, call: Call) -> Tensor:
        p, layer, k, v = self.p, self.layers[call.module], call.k, call.v
        if layer in self.sharing:
            k, v = k[:, :0], v[:, :0]
        ready = ReadyHeads(*(rows.transpose(1, 2).flatten(0, 1).contiguous() for rows in (call.q, k, v)))
        sink = None if call.sink is None else call.sink.to(torch.promote_types(call.q.dtype, torch.float32))
        attended = p.attend(layer, p.write(layer, ready), sink)
        kept = p.kept(layer)
        if kept is None:
            return attended
        # The class computes all rows of the last layer; only these are read.
        rows = attended.new_zeros(p.tokens.numel(), *attended.shape[2:])
        return rows.index_copy(0, kept, attended[:, 0]).unflatten(0, p.tokens.shape)


class TransformersTarget:
    """A CausalLM (espalier/models/base.py), whose config is `probed`."""

    def __init__(self, config: ModelConfig, body: Body, capture: tuple[int, ...]) -> None:
        assert config.probed is not None
        self.config = config
        self.layer_specs = config.probed.specs
        self.capture = capture
        self.kv_scales: tuple[KVScales | None, ...] = (None,) * len(self.layer_specs)
        # Some have a row more, for audio or an unknown token.
        self.embed = Embedding(body.model.get_input_embeddings().weight[: config.vocab_size])
        self.head = body.head
        self.body = body
        self._sharing = frozenset(i for i, spec in enumerate(self.layer_specs) if spec.shares is not None)
        self._layers = {body.model.get_submodule(name): i for i, name in enumerate(config.probed.attention)}

    def __call__(self, p: Pass) -> ModelOutput:
        run = PassRun(p, self._layers, self._sharing)
        # As the embedding of our own families does it: a void row runs as the first of its request.
        tokens = torch.where(p.tokens < 0, p.tokens[:, :1].clamp(min=0), p.tokens)
        # Nodes behind the end of a context, which are never accepted, may have positions that the model does not.
        hidden = self.body(tokens, p.positions.clamp(max=self.config.max_position - 1), run)
        if p.needed is not None:
            hidden, last = _rows(hidden, p.needed), len(self.layer_specs)
            run.inputs |= {i: _rows(x, p.needed) for i, x in run.inputs.items() if i == last}
        return ModelOutput(hidden=hidden, inputs=tuple(run.inputs[i] for i in self.capture))

    def logits(self, hidden: Tensor) -> Tensor:
        return self.body.logits(hidden)


def _rows(x: Tensor, needed: Tensor) -> Tensor:
    """[B, Q, H] -> [B, 1, H]"""
    return x[torch.arange(len(x), device=x.device), needed][:, None]
