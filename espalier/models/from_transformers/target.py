"""A model of transformers as a target: its layers write to the pass, and attend through the pass.

For speed, Espalier's layers run in place of transformers' layers if both compute the same.  Linear layers are
recognised by their class.  Norms and experts are compared with Espalier's on random rows of a tiny model.
"""

from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property, partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from espalier.attention import Pass
from espalier.cache.layer_spec import LayerSpec, RotatedHeads
from espalier.kernels.ops.activation import GELU_TANH, SILU, Activation
from espalier.kernels.ops.experts import grouped_experts
from espalier.kernels.ops.linear import add_partial_sums
from espalier.kernels.state.kv_scales import KVScales
from espalier.models.base import ModelOutput
from espalier.models.config import ModelConfig
from espalier.models.layers.linear import Embedding, Linear
from espalier.models.layers.norm import RMSNorm
from espalier.models.weight_formats import dense_weight

# The name of Espalier's attention in transformers' AttentionInterface.
ATTENTION_NAME = "espalier"
# A function from a module of transformers to what runs in place of its forward.
MakeForward = Callable[[Any], Callable[..., Tensor]]
# Computes a layer's attention call, (module, q, k, v, mask, **options) -> [B, Q, heads, v_size].
# q: [B, heads, Q, k_size].  k, v: [B, kv_heads, Q, size], those of the new rows.  mask: the model's own.
# options: as transformers names them; scaling: the factor of q·k; sliding_window: LayerSpec.window; softcap:
# LayerSpec.softcap; s_aux: [heads], the sinks.
Attend = Callable[..., Tensor]
TOLERANCE = 1e-5


@dataclass
class ForwardRun:
    """A forward pass that runs.

    tokens: [B, Q]; rows with negative ones go to no expert.  inputs: the captured inputs by layer, added by the layers.
    """

    attend: Attend
    tokens: Tensor
    inputs: dict[int, Tensor] = field(default_factory=dict)

    @cached_property
    def live(self) -> Tensor:
        """[B · Q] bool, the rows that go to experts."""
        return (self.tokens >= 0).flatten()


# A context variable, because transformers' layers cannot take the ForwardRun as an argument.
CURRENT_RUN: ContextVar[ForwardRun] = ContextVar("the forward pass that runs")


def attend(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None = None, **options: Any
) -> tuple[Tensor, None]:
    """The attention function that is registered with transformers."""
    return CURRENT_RUN.get().attend(module, q, k, v, attention_mask, **options), None


def linear_of(module: Any) -> Linear:
    return Linear(dense_weight(module.weight.data), None if module.bias is None else module.bias.data)


def norm_of(module: Any, offset: float = 0.0) -> Callable[[Tensor], Tensor]:
    """Returns an RMS norm over the last dimension.  offset: a number that is added to the weight."""
    weight = module.weight.data
    eps = next(value for value in vars(module).values() if isinstance(value, float))
    exact = torch.promote_types(weight.dtype, torch.float32)
    norm = RMSNorm(weight.to(exact) + offset if offset else weight, eps)
    return lambda x: norm(x.contiguous())


def experts_of(module: Any, activation: Activation) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Returns gated experts in two stacked matrices, gate over up."""
    gate_up, down = module.gate_up_proj.data, module.down_proj.data

    def run_experts(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        run, weights = CURRENT_RUN.get(None), top_k_weights.to(torch.promote_types(hidden_states.dtype, torch.float32))
        live = None if run is None else run.live
        parts = grouped_experts(
            hidden_states, gate_up, down, top_k_index, weights, live_rows=live, activation=activation
        )
        return add_partial_sums(parts, hidden_states.dtype)

    return run_experts


# What may compute the same as a module.
MAKERS: tuple[MakeForward, ...] = (
    *(norm_of, partial(norm_of, offset=1.0)),
    *(partial(experts_of, activation=activation) for activation in (SILU, GELU_TANH)),
)


def find_replacements(model: nn.Module) -> dict[type, MakeForward]:
    """Returns, by class of transformers, the MakeForward of what computes the same.  model: a tiny random model."""
    found: dict[type, MakeForward] = {nn.Linear: linear_of}
    for module in model.modules():
        if type(module) not in found and (equal := [make for make in MAKERS if _are_equal(module, make)]):
            found[type(module)] = equal[0]
    return found


def _are_equal(module: Any, make: MakeForward) -> bool:
    """Whether `make` returns what computes the same as a norm or experts of transformers.
    Both are compared on large rows, and on small rows, for which the norm's eps matters."""
    try:
        ours = make(module)
        if hasattr(module, "weight"):
            given: tuple[Tensor, ...] = (torch.randn(7, module.weight.numel()),)
        else:
            ids = torch.rand(9, len(module.down_proj)).topk(min(2, len(module.down_proj))).indices
            given = (torch.randn(9, module.down_proj.shape[1]), ids, torch.rand(ids.shape))
        pairs = [[run(given[0] * scale, *given[1:]) for run in (ours, module)] for scale in (1.0, 1e-3)]
    except Exception:  # any: the module is not Espalier's code, and may be neither
        return False
    return all(one.shape == other.shape and torch.allclose(one, other, TOLERANCE, TOLERANCE) for one, other in pairs)


def layers_of(model: nn.Module) -> nn.ModuleList:
    """Returns the model's layers: its first list of modules."""
    return next(module for module in model.modules() if isinstance(module, nn.ModuleList))


class TransformersModel:
    """A causal model of transformers in two parts: tokens to hidden states, and hidden states to logits.

    replacements: by class of transformers, what runs in place of a module's forward.
    captured_layers: the layers whose inputs a pass keeps; the number of layers means the output of the last layer.
    """

    def __init__(
        self, model: Any, replacements: Mapping[type, MakeForward], captured_layers: tuple[int, ...] = ()
    ) -> None:
        self.model = model
        head = model.get_output_embeddings()
        self.head = linear_of(head)
        for module in model.modules():
            # A norm without parameters is not replaced: some classes of norms have weights in some places only.
            if type(module) in replacements and any(True for _ in module.parameters()):
                module.forward = self.head if module is head else replacements[type(module)](module)
            if isinstance(module.forward, Linear):
                # Its weight may be a copy, and other code reads only the dtype and device of the original.
                module.weight = nn.Parameter(module.weight.new_empty(0), requires_grad=False)
            if (kind := getattr(module, "rope_type", None)) is not None:
                # A RoPE that changes with the longest position would read positions on the host.  max_position limits
                # the model to short texts: in longer ones, every new token would change all cached keys.
                module.rope_type = dict.fromkeys(kind, "default") if isinstance(kind, dict) else "default"
        layers = layers_of(model)
        _capture(layers, captured_layers)
        decoder = next(child for child in model.children() if layers in child.modules()).get_decoder()
        self._decode = decoder.forward
        # So the whole model computes logits from the hidden states that it is given.
        decoder.forward = lambda *args, inputs_embeds, **options: HiddenOutput((inputs_embeds,))

    def run(self, tokens: Tensor, positions: Tensor, attend: Attend) -> tuple[Tensor, dict[int, Tensor]]:
        """Returns the hidden states [B, Q, H] after the last norm, and the captured inputs by layer.
        tokens, positions: [B, Q]."""
        run = ForwardRun(attend, tokens)
        # A void row runs with the first token of its request, as in the embedding of Espalier's own families.
        filled = torch.where(tokens < 0, tokens[:, :1].clamp(min=0), tokens)
        token = CURRENT_RUN.set(run)
        try:
            out = self._decode(input_ids=filled, position_ids=positions, use_cache=False)
        finally:
            CURRENT_RUN.reset(token)
        return out.last_hidden_state, run.inputs

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., H] -> logits [..., V], with the scales and bounds that the class applies to them."""
        rows = self.model(inputs_embeds=hidden.reshape(1, -1, hidden.shape[-1]), use_cache=False).logits
        return rows.to(hidden.dtype).view(*hidden.shape[:-1], -1)


class HiddenOutput(tuple[Tensor]):
    """The output of a decoder that holds only the hidden states."""

    last_hidden_state = property(itemgetter(0))

    def __getattr__(self, name: str) -> None:
        return None


def _capture(layers: nn.ModuleList, captured_layers: tuple[int, ...]) -> None:
    """Copy the inputs of layers when they run, because a class may write to the residual that it gets."""

    def before(index: int, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        CURRENT_RUN.get().inputs[index] = (args[0] if args else options["hidden_states"]).clone()

    def behind(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        CURRENT_RUN.get().inputs[len(layers)] = out[0] if isinstance(out, tuple) else out

    for index in captured_layers:
        if index == len(layers):
            layers[-1].register_forward_hook(behind)
        else:
            layers[index].register_forward_pre_hook(partial(before, index), with_kwargs=True)


class TransformersTarget(TransformersModel):
    """A CausalLM (espalier/models/base.py), whose config is `probed`."""

    def __init__(self, config: ModelConfig, model: Any, captured_layers: tuple[int, ...]) -> None:
        assert config.probe_result is not None
        super().__init__(model, config.probe_result.replacements, captured_layers)
        self.config, self.captured_layers, self.layer_specs = config, captured_layers, config.probe_result.specs
        self.kv_scales: tuple[KVScales | None, ...] = (None,) * len(self.layer_specs)
        # Some embeddings have more rows than the vocabulary, for audio or an unknown token.
        self.embed = Embedding(model.get_input_embeddings().weight[: config.vocab_size])

    def __call__(self, p: Pass) -> ModelOutput:
        # Nodes past the end of a context may have positions that the model does not have.  They are never accepted.
        positions = p.positions.clamp(max=self.config.max_position - 1)
        hidden, inputs = self.run(p.tokens, positions, partial(self._attend, p, iter(enumerate(self.layer_specs))))
        last = len(self.layer_specs)
        kept = p.kept_rows(last - 1)
        if kept is not None:
            hidden = hidden.flatten(0, 1)[kept][:, None]
            inputs |= {i: x.flatten(0, 1)[kept][:, None] for i, x in inputs.items() if i == last}
        return ModelOutput(hidden=hidden, captured_inputs=tuple(inputs[i] for i in self.captured_layers))

    def _attend(
        self, p: Pass, layers: Iterator[tuple[int, LayerSpec]], module: nn.Module, *given: Tensor, **options: Any
    ) -> Tensor:
        """Computes an attention call through the pass.  layers: those that have not attended yet."""
        (layer, spec), (q, k, v, _), sink = next(layers), given, options.get("s_aux")
        if spec.shares_with is not None:
            # A layer that shares rows writes no heads.
            k, v = k[:, :0], v[:, :0]
        ready = RotatedHeads(*(rows.transpose(1, 2).flatten(0, 1).contiguous() for rows in (q, k, v)))
        sink = None if sink is None else sink.to(torch.promote_types(q.dtype, torch.float32))
        attended = p.attend(layer, p.write(layer, ready), sink)
        kept = p.kept_rows(layer)
        if kept is None:
            return attended
        # The class computes all rows of the last layer, but only the kept rows are read.
        rows = attended.new_zeros(p.tokens.numel(), *attended.shape[2:])
        return rows.index_copy(0, kept, attended[:, 0]).unflatten(0, p.tokens.shape)
