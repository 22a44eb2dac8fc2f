"""A model of transformers as a target: its layers write to the pass, and attend through the pass.

For speed, Espalier's layers replace transformers' layers if both compute the same.  Linear layers are recognised by
their class.  Norms and experts are compared with Espalier's on random rows of a tiny model.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property, partial
from operator import itemgetter
from typing import Any, NamedTuple

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
from espalier.models.layers.linear import Embedding, Linear
from espalier.models.layers.norm import RMSNorm
from espalier.models.weight_formats import dense_weight

# The name of Espalier's attention in transformers' AttentionInterface.
ATTENTION_NAME = "espalier"
# A function from a module of transformers to the module of Espalier that replaces it.
MakeModule = Callable[[Any], nn.Module]
TOLERANCE = 1e-5


class AttentionCall(NamedTuple):
    """A layer's call of the attention function.

    q: [B, heads, Q, k_size].  k, v: [B, kv_heads, Q, size], those of the new rows.
    masked: whether the model passes its own mask.  scale: the factor of q·k.  window: see LayerSpec.window.
    softcap: a tanh bounds scores to ±softcap.  sink: [heads], see Attention.attend.
    """

    module: nn.Module
    q: Tensor
    k: Tensor
    v: Tensor
    masked: bool
    scale: float | None
    window: int | None
    softcap: float | None
    sink: Tensor | None


@dataclass(kw_only=True)
class AttentionRun:
    """Computes the attention calls of a forward pass.

    inputs: the captured inputs by layer, which the forward pass adds.
    """

    inputs: dict[int, Tensor] = field(default_factory=dict)

    @property
    def live(self) -> Tensor | None:
        """[B · Q] bool, the rows that go to experts; None: all rows."""
        return None

    def __call__(self, call: AttentionCall) -> Tensor:
        """Returns the result of an attention call, [B, Q, heads, v_size]."""
        raise NotImplementedError


# A context variable, because transformers' layers cannot take the AttentionRun as an argument.
CURRENT_RUN: ContextVar[AttentionRun] = ContextVar("the attention of the forward pass that runs")


@contextmanager
def attention_by(run: AttentionRun) -> Iterator[None]:
    """Let `run` compute the attention calls of this thread."""
    token = CURRENT_RUN.set(run)
    try:
        yield
    finally:
        CURRENT_RUN.reset(token)


def register() -> None:
    """Register ATTENTION_NAME as an attention function of transformers.

    ATTENTION_NAME is not registered as a mask function.  So transformers makes no mask, and does not search the
    positions for packed sequences, which it would do on the host.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, _attend)


def _attend(
    module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any = None, **given: Any
) -> tuple[Tensor, None]:
    window, softcap = given.get("sliding_window") or None, given.get("softcap") or None
    call = AttentionCall(
        module, q, k, v, attention_mask is not None, given.get("scaling"), window, softcap, given.get("s_aux")
    )
    return CURRENT_RUN.get()(call), None


class OurLinear(nn.Module):
    """A linear layer.  Other code reads the dtype and device of `weight`, which is empty, and whether it has a bias."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        weight = module.weight.data
        self.bias = None if module.bias is None else module.bias.data
        self.linear = Linear(dense_weight(weight), self.bias)
        self.weight = weight.new_empty(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class OurNorm(nn.Module):
    """An RMS norm over the last dimension.  offset: a number that is added to the weight."""

    def __init__(self, module: Any, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = module.weight.data
        exact = torch.promote_types(self.weight.dtype, torch.float32)
        eps = next(value for value in vars(module).values() if isinstance(value, float))
        self.norm = RMSNorm(self.weight.to(exact) + offset if offset else self.weight, eps)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.contiguous())


class OurExperts(nn.Module):
    """Gated experts in two stacked matrices, gate over up."""

    def __init__(self, module: Any, activation: Activation) -> None:
        super().__init__()
        self.gate_up, self.down, self.activation = module.gate_up_proj.data, module.down_proj.data, activation

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        run, weights = CURRENT_RUN.get(None), top_k_weights.to(torch.promote_types(hidden_states.dtype, torch.float32))
        parts = grouped_experts(
            *(hidden_states, self.gate_up, self.down, top_k_index, weights),
            live=None if run is None else run.live,
            activation=self.activation,
        )
        return sum_parts(parts, hidden_states.dtype)


# By a module's parameters, the modules of Espalier that may compute the same.
MAKERS_BY_PARAMETERS: Mapping[tuple[str, ...], tuple[MakeModule, ...]] = {
    ("weight",): (OurNorm, partial(OurNorm, offset=1.0)),
    ("down_proj", "gate_up_proj"): tuple(partial(OurExperts, activation=each) for each in (SILU, GELU_TANH)),
}


def find_replacements(model: nn.Module) -> dict[type, MakeModule]:
    """Returns, by class of transformers, the MakeModule of an Espalier module that computes the same.
    model: a tiny random model."""
    found: dict[type, MakeModule] = {nn.Linear: OurLinear}
    for module in model.modules():
        makes = MAKERS_BY_PARAMETERS.get(tuple(sorted(name for name, _ in module.named_parameters())), ())
        if type(module) not in found and (equal := [make for make in makes if _have_equal_values(module, make)]):
            found[type(module)] = equal[0]
    return found


def _have_equal_values(module: Any, make: MakeModule) -> bool:
    """Whether Espalier's module returns the same as a norm or experts of transformers.
    Both are compared on large rows, and on small rows, for which the norm's eps matters."""
    try:
        ours = make(module)
        if hasattr(module, "weight"):
            given: tuple[Tensor, ...] = (torch.randn(7, module.weight.numel()),)
        else:
            ids = torch.rand(9, len(module.down_proj)).topk(min(2, len(module.down_proj))).indices
            given = (torch.randn(9, module.down_proj.shape[1]), ids, torch.rand(ids.shape))
        pairs = [[run(given[0] * scale, *given[1:]) for run in (ours, module)] for scale in (1.0, 1e-3)]
    except Exception:  # any: the module is not Espalier's code, and may take other shapes than assumed
        return False
    return all(one.shape == other.shape and torch.allclose(one, other, TOLERANCE, TOLERANCE) for one, other in pairs)


class TransformersModel:
    """A causal model of transformers in two parts: tokens to hidden states, and hidden states to logits.

    layers: the name of the list of the model's layers.  replacements: by class, what replaces a module of transformers.
    capture: the layers whose inputs a pass keeps; the number of layers means the output of the last layer.
    """

    def __init__(
        self, model: Any, layers: str, replacements: Mapping[type, MakeModule], capture: tuple[int, ...] = ()
    ) -> None:
        name = layers.partition(".")[0]
        self.model, self.decoder = model, model.get_submodule(name)
        for parent in list(model.modules()):
            for child, module in parent.named_children():
                # A norm without parameters is not replaced: some classes of norms have weights in some places only.
                if type(module) in replacements and any(True for _ in module.parameters()):
                    setattr(parent, child, replacements[type(module)](module))
        fix_ropes(model)
        _capture(model.get_submodule(layers), capture)
        head = model.get_output_embeddings()
        self.head: Linear = (head if isinstance(head, OurLinear) else OurLinear(head)).linear
        self._given = copy.copy(model)
        self._given._modules = {**model._modules, name: HiddenPassthrough()}

    def __call__(self, tokens: Tensor, positions: Tensor, run: AttentionRun) -> Tensor:
        """Returns the hidden states [B, Q, H] after the last norm.  tokens, positions: [B, Q]."""
        with attention_by(run):
            out = self.decoder(input_ids=tokens, position_ids=positions, use_cache=False)
        return out.last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., H] -> logits [..., V], with the scales and bounds that the class applies to them."""
        rows = self._given(inputs_embeds=hidden.reshape(1, -1, hidden.shape[-1]), use_cache=False).logits
        return rows.to(hidden.dtype).view(*hidden.shape[:-1], -1)


class HiddenPassthrough(nn.Module):
    """Takes the place of a model's body.  It returns the hidden states that it is given."""

    def forward(self, *args: Any, inputs_embeds: Tensor, **options: Any) -> "HiddenOutput":
        return HiddenOutput((inputs_embeds,))

    @property
    def decoder(self) -> "HiddenPassthrough":
        """Returns itself, for heads that read the decoder of the body."""
        return self


class HiddenOutput(tuple[Tensor]):
    """The output of a body that holds only the hidden states."""

    last_hidden_state = property(itemgetter(0))

    def __getattr__(self, name: str) -> None:
        return None


def fix_ropes(model: nn.Module) -> None:
    """Fix every RoPE that changes with the longest position to its form for short texts.

    Such a RoPE would read the positions on the host.  `ModelConfig.max_position` limits the model to short texts: in
    longer ones, every new token would change all cached keys.
    """
    module: Any
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if kind is not None:
            module.rope_type = dict.fromkeys(kind, "default") if isinstance(kind, dict) else "default"


def _capture(layers: nn.ModuleList, capture: tuple[int, ...]) -> None:
    """Copy the inputs of layers when they run, because a class may write to the residual that it gets."""

    def before(index: int, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        CURRENT_RUN.get().inputs[index] = (args[0] if args else options["hidden_states"]).clone()

    def behind(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        CURRENT_RUN.get().inputs[len(layers)] = out[0] if isinstance(out, tuple) else out

    for index in capture:
        if index == len(layers):
            layers[-1].register_forward_hook(behind)
        else:
            layers[index].register_forward_pre_hook(partial(before, index), with_kwargs=True)


@dataclass
class PassRun(AttentionRun):
    """Computes a model's attention calls through a pass.

    layers: the layer number of each attention module.  sharing: the layers that share rows and write none.
    """

    p: Pass
    layers: Mapping[nn.Module, int]
    sharing: frozenset[int]

    @cached_property
    def live(self) -> Tensor | None:
        return (self.p.tokens >= 0).flatten()

    def __call__(self, call: AttentionCall) -> Tensor:
        p, layer, k, v = self.p, self.layers[call.module], call.k, call.v
        if layer in self.sharing:
            k, v = k[:, :0], v[:, :0]
        ready = ReadyHeads(*(rows.transpose(1, 2).flatten(0, 1).contiguous() for rows in (call.q, k, v)))
        sink = None if call.sink is None else call.sink.to(torch.promote_types(call.q.dtype, torch.float32))
        attended = p.attend(layer, p.write(layer, ready), sink)
        kept = p.kept_rows(layer)
        if kept is None:
            return attended
        # The class computes all rows of the last layer, but only the kept rows are read.
        rows = attended.new_zeros(p.tokens.numel(), *attended.shape[2:])
        return rows.index_copy(0, kept, attended[:, 0]).unflatten(0, p.tokens.shape)


class TransformersTarget:
    """A CausalLM (espalier/models/base.py), whose config is `probe_result`."""

    def __init__(self, config: ModelConfig, body: TransformersModel, capture: tuple[int, ...]) -> None:
        assert config.probe_result is not None
        self.config, self.body, self.capture, self.head = config, body, capture, body.head
        self.layer_specs = config.probe_result.specs
        self.kv_scales: tuple[KVScales | None, ...] = (None,) * len(self.layer_specs)
        # Some embeddings have more rows than the vocabulary, for audio or an unknown token.
        self.embed = Embedding(body.model.get_input_embeddings().weight[: config.vocab_size])
        self._sharing = frozenset(i for i, spec in enumerate(self.layer_specs) if spec.shares_with is not None)
        self._layers = {body.model.get_submodule(name): i for i, name in enumerate(config.probe_result.attention)}

    def __call__(self, p: Pass) -> ModelOutput:
        run = PassRun(p, self._layers, self._sharing)
        # A void row runs with the first token of its request, as in the embedding of Espalier's own families.
        tokens = torch.where(p.tokens < 0, p.tokens[:, :1].clamp(min=0), p.tokens)
        # Nodes past the end of a context may have positions that the model does not have.  They are never accepted.
        hidden = self.body(tokens, p.positions.clamp(max=self.config.max_position - 1), run)
        if p.needed is not None:
            hidden, last = _rows(hidden, p.needed), len(self.layer_specs)
            run.inputs |= {i: _rows(x, p.needed) for i, x in run.inputs.items() if i == last}
        return ModelOutput(hidden=hidden, inputs=tuple(run.inputs[i] for i in self.capture))

    def logits(self, hidden: Tensor) -> Tensor:
        return self.body.logits(hidden)


def _rows(x: Tensor, needed: Tensor) -> Tensor:
    """x [B, Q, H] -> [B, 1, H]: the row needed [B] of each request."""
    return x[torch.arange(len(x), device=x.device), needed][:, None]
