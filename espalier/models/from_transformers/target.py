"""A decoder of the transformers library as a target.  Its attention layers write to a Pass and attend through the Pass.

Modules of transformers are replaced by Espalier's if both compute the same.  Transformers loads the weights.  Code that
comes with a checkpoint never runs.
"""

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from espalier.attention import Pass
from espalier.cache.layer_spec import LayerSpec, RotatedHeads
from espalier.errors import EspalierError, one_line
from espalier.kernels.ops.activation import GELU_TANH, RELU2, SILU, Activation
from espalier.kernels.ops.experts import grouped_experts
from espalier.kernels.ops.linear import add_partial_sums
from espalier.kernels.state.kv_scales import KVScales
from espalier.models.base import ModelOutput
from espalier.models.config import ModelConfig
from espalier.models.layers.linear import Embedding, Linear
from espalier.models.layers.norm import RMSNorm
from espalier.models.weight_files import count_weights_in
from espalier.models.weight_formats import dense_weight
from espalier.models.weights import IGNORABLE_NAMES, Weights

# The name of Espalier's attention in transformers' AttentionInterface.
ATTENTION_NAME = "espalier"
# A function from a module of transformers to the function that runs instead of the module's forward.
MakeForward = Callable[[Any], Callable[..., Tensor]]
log = logging.getLogger(__name__)


@contextmanager
def refusal_reason(reason: str) -> Iterator[None]:
    """Turns any error of transformers' code into an EspalierError: the reason, then the error in brackets."""
    try:
        yield
    except EspalierError:
        raise
    except Exception as error:
        raise EspalierError(f"{reason} ({type(error).__name__}: {one_line(error)})") from None


@dataclass
class ForwardContext:
    """The data that the layers need during a forward pass.

    attend: computes a layer's attention call, (module, q, k, v, mask, **options) -> [B, Q, heads, v_size], with
    q [B, heads, Q, k_size] and k, v [B, kv_heads, Q, size] of the new rows.  mask, options: from transformers.
    live: [B · Q] bool, the rows that experts compute.  inputs: the captured inputs by layer; layers add entries."""

    attend: Callable[..., Tensor]
    live: Tensor
    inputs: dict[int, Tensor] = field(default_factory=dict)


# This is a context variable, because transformers' layers cannot take the ForwardContext as an argument.
FORWARD_CONTEXT: ContextVar[ForwardContext] = ContextVar("forward context")


def attend(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None = None, **options: Any
) -> tuple[Tensor, None]:
    """The attention function that is registered with transformers.  q, k, v: [B, heads, rows, size]."""
    return FORWARD_CONTEXT.get().attend(module, q, k, v, attention_mask, **options), None


def run_layer_and_capture(forward: Any, layer: int, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
    """Runs a layer and captures its input.  Also captures its output, as the input of layer `layer + 1`."""
    inputs = FORWARD_CONTEXT.get().inputs
    # The input is copied, because a class may write to the residual.
    inputs[layer] = hidden_states.clone()
    out = forward(hidden_states, *args, **options)
    inputs[layer + 1] = out[0] if isinstance(out, tuple) else out
    return out


def linear_of(*modules: Any) -> Linear:
    """Returns one linear layer that stacks the modules' weights.  A single module's weight is used without a copy."""
    weights, biases = [module.weight.data for module in modules], [module.bias for module in modules]
    if len(modules) == 1:
        return Linear(dense_weight(weights[0]), None if biases[0] is None else biases[0].data)
    if all(bias is None for bias in biases):
        return Linear(dense_weight(torch.cat(weights)))
    rows = [w.new_zeros(len(w)) if bias is None else bias.data for w, bias in zip(weights, biases, strict=True)]
    return Linear(dense_weight(torch.cat(weights)), torch.cat(rows))


class StackedLinears:
    """Linear layers that are called one after another with the same input, as one product."""

    def __init__(self, modules: Sequence[Any]) -> None:
        self.product = linear_of(*modules)
        self.sizes = [module.out_features for module in modules]
        self.x: Tensor | None = None
        self.outputs: tuple[Tensor, ...] = ()

    def output(self, index: int, x: Tensor) -> Tensor:
        """Returns the output of the layer with this index.  x: the layer's input."""
        if x is not self.x:
            self.x, self.outputs = x, self.product(x).split(self.sizes, -1)
        out = self.outputs[index]
        if index == len(self.sizes) - 1:
            self.x, self.outputs = None, ()
        return out


def norm_of(module: Any, offset: float) -> Callable[[Tensor], Tensor]:
    """Returns a function that computes the RMS norm `module`.  offset: a number that is added to its weight."""
    weight = module.weight.data
    eps = next(value for value in vars(module).values() if isinstance(value, float))
    exact_dtype = torch.promote_types(weight.dtype, torch.float32)
    norm = RMSNorm(weight.to(exact_dtype) + offset if offset else weight, eps)
    return lambda x: norm(x.contiguous())


def mlp_of(module: Any, activation: Activation) -> Callable[[Tensor], Tensor]:
    """Returns a function that computes the MLP `module`.  The linear layer that the module defines last is `down`."""
    *inputs, down = (child for child in module.children() if isinstance(child, nn.Linear))
    gate_up, outer = linear_of(*inputs), linear_of(down)
    return lambda x: outer(gate_up.activated_product(x.reshape(-1, x.shape[-1]), activation)).view(x.shape)


def experts_of(module: Any, activation: Activation) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Returns a function that runs the experts `module`.  In gate_up, the rows of gate come before the rows of up."""
    gate_up, down = module.gate_up_proj.data, module.down_proj.data

    def run_experts(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Returns [N, H].  hidden_states: [N, H].  top_k_index, top_k_weights: [N, k], the experts of each row."""
        context, exact_dtype = FORWARD_CONTEXT.get(None), torch.promote_types(hidden_states.dtype, torch.float32)
        live, weights = None if context is None else context.live, top_k_weights.to(exact_dtype)
        parts = grouped_experts(
            hidden_states, gate_up, down, top_k_index, weights, live_rows=live, activation=activation
        )
        return add_partial_sums(parts, hidden_states.dtype)

    return run_experts


# Makers of possible replacements for norms, MLPs and experts.  probe.py tests which of them compute the same as their
# module.
REPLACEMENT_MAKERS: tuple[MakeForward, ...] = (
    *(partial(norm_of, offset=offset) for offset in (0.0, 1.0)),
    *(partial(mlp_of, activation=activation) for activation in (SILU, GELU_TANH, RELU2)),
    *(partial(experts_of, activation=activation) for activation in (SILU, GELU_TANH)),
)


class TransformersTarget:
    """A CausalLM (espalier/models/base.py) whose layers are those of `model`, a model of transformers.

    replacements: for a module's class, the function that makes the replacement of the module's forward.
    stacked: for a module's class, the names of its linear layers that become one StackedLinears.
    captured_layers: the layers whose inputs a pass returns; the number of layers means the last layer's output.
    config, layer_specs: set by the loader."""

    config: ModelConfig
    layer_specs: tuple[LayerSpec, ...]

    def __init__(
        self,
        model: Any,
        replacements: Mapping[type, MakeForward],
        stacked: Mapping[type, tuple[str, ...]],
        captured_layers: tuple[int, ...] = (),
    ) -> None:
        self.model, self.captured_layers = model, captured_layers
        head = model.get_output_embeddings()
        self.head = linear_of(head)
        # Some embeddings have more rows than the vocabulary, for audio or an unknown token.
        self.embed = Embedding(model.get_input_embeddings().weight[: self.head.shape[0]])
        # Linear layers whose weights are in a replacement.  In `modules`, such a layer comes after its parent module.
        copied: set[nn.Module] = set()
        for module in model.modules():
            # A norm without parameters is not replaced: in some norm classes, only some modules have a weight.
            if type(module) in replacements and module not in copied and any(True for _ in module.parameters()):
                module.forward = self.head if module is head else replacements[type(module)](module)
                copied.update(child for child in module.modules() if isinstance(child, nn.Linear))
            elif type(module) in stacked:
                children = dict(module.named_children())
                linears = [children[name] for name in stacked[type(module)] if type(children.get(name)) is nn.Linear]
                product = StackedLinears(linears)
                for index, linear in enumerate(linears):
                    linear.forward = partial(product.output, index)
                copied.update(linears)
            if module in copied:
                # The original weight is freed, because its replacement may hold a copy.  Other code reads only dtype
                # and device of the original.
                module.weight = nn.Parameter(module.weight.new_empty(0), requires_grad=False)
            if (kind := getattr(module, "rope_type", None)) is not None:
                # A RoPE that changes with the longest position would read positions on the host.  So the RoPE stays as
                # it is for short texts, and max_position excludes longer texts, in which every new token would change
                # all cached keys.
                module.rope_type = dict.fromkeys(kind, "default") if isinstance(kind, dict) else "default"
        self.layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
        self.kv_scales: tuple[KVScales | None, ...] = (None,) * len(self.layers)
        for layer in {min(index, len(self.layers) - 1) for index in captured_layers}:
            self.layers[layer].forward = partial(run_layer_and_capture, self.layers[layer].forward, layer)
        decoder = next(child for child in model.children() if self.layers in child.modules()).get_decoder()
        self._decoder, self._decoder_forward = decoder, decoder.forward
        # With this forward, the whole model takes hidden states as `inputs_embeds` and computes logits.  The class of
        # the decoder's outputs is an attribute of the decoder, because shallow copies of this object share the decoder.
        decoder.forward = lambda *args, inputs_embeds, **options: decoder.output_class(last_hidden_state=inputs_embeds)

    def run(self, tokens: Tensor, positions: Tensor, attend: Callable[..., Tensor]) -> tuple[Tensor, dict[int, Tensor]]:
        """Returns the hidden states [B, Q, H] after the last norm, and the captured inputs by layer.
        tokens, positions: [B, Q].  attend: see ForwardContext."""
        live = tokens >= 0
        # A row with a negative token (padding) runs with the first token of its request, as in Espalier's families.
        input_ids = torch.where(live, tokens, tokens[:, :1].clamp(min=0))
        context = ForwardContext(attend, live.flatten())
        previous_context = FORWARD_CONTEXT.set(context)
        try:
            out = self._decoder_forward(input_ids=input_ids, position_ids=positions, use_cache=False)
        finally:
            FORWARD_CONTEXT.reset(previous_context)
        self._decoder.output_class = type(out)
        return out.last_hidden_state, context.inputs

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., H] -> logits [..., V], with the scales and soft caps of the class."""
        rows = self.model(inputs_embeds=hidden.reshape(1, -1, hidden.shape[-1]), use_cache=False).logits
        return rows.to(hidden.dtype).view(*hidden.shape[:-1], -1)

    def __call__(self, p: Pass) -> ModelOutput:
        """Returns the hidden states of a pass, and the inputs of the captured layers."""
        # Nodes of a tree may have positions after the longest context.  These nodes are never accepted.
        positions = p.positions.clamp(max=self.config.max_position - 1)
        hidden, inputs = self.run(p.tokens, positions, partial(self._attend, p, iter(enumerate(self.layer_specs))))
        last = len(self.layer_specs)
        kept = p.kept_rows(last - 1)
        if kept is not None:
            hidden = hidden.flatten(0, 1)[kept][:, None]
            inputs |= {i: rows.flatten(0, 1)[kept][:, None] for i, rows in inputs.items() if i == last}
        return ModelOutput(hidden=hidden, captured_inputs=tuple(inputs[i] for i in self.captured_layers))

    def _attend(
        self, p: Pass, pending: Iterator[tuple[int, LayerSpec]], module: nn.Module, *inputs: Tensor, **options: Any
    ) -> Tensor:
        """Computes an attention call through the pass.  pending: the layers that have not attended yet."""
        (layer, spec), (q, k, v, _), sink = next(pending), inputs, options.get("s_aux")
        if spec.shares_with is not None:
            # A layer that reads the K and V of another layer writes none.
            k, v = k[:, :0], v[:, :0]
        heads = RotatedHeads(*(rows.transpose(1, 2).flatten(0, 1).contiguous() for rows in (q, k, v)))
        sink = None if sink is None else sink.to(torch.promote_types(q.dtype, torch.float32))
        attended = p.attend(layer, p.write(layer, heads), sink)
        kept = p.kept_rows(layer)
        if kept is None:
            return attended
        # The class of transformers computes all rows of the last layer, but only the kept rows are read.
        rows = attended.new_zeros(p.tokens.numel(), *attended.shape[2:])
        return rows.index_copy(0, kept, attended[:, 0]).unflatten(0, p.tokens.shape)


def load_by_transformers(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    captured_layers: tuple[int, ...],
    weights_by_name: Mapping[str, Tensor] | None = None,
) -> TransformersTarget:
    """Loads a target whose config read_by_transformers returned.
    weights_by_name: None if transformers reads the weights from the config's directory.

    Raises EspalierError for files or weights that are missing, cut short, misshapen or not used, and for layers that
    cannot be captured."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.utils import logging as bars

    probed, path = config.probe_result, config.path
    assert probed is not None
    if captured_layers and not probed.can_capture:
        raise EspalierError(
            f"{path}: the layers of {config.architecture} do not pass on one row for each token, so the draft cannot "
            "read them; use speculation algorithm 'ngram'"
        )
    if weights_by_name is None:
        Weights(path, dtype, "cpu")  # only for its errors, which name the file and a remedy
        num_stored = count_weights_in(path, config.formats).num_cast_values
        # from_pretrained allocates memory for missing weights before it reports them.
        if probed.num_weights > 2 * num_stored:
            raise EspalierError(
                f"{path}: config.json describes {probed.num_weights} weights, and the files hold {num_stored}; they do "
                "not belong together: download both again"
            )
    reason = f"{path}: transformers cannot load the model; download the checkpoint again"
    with refusal_reason(reason), ExitStack() as stack:
        if bars.is_progress_bar_enabled():
            bars.disable_progress_bar()
            stack.callback(bars.enable_progress_bar)
        model, report = MODEL_FOR_CAUSAL_LM_MAPPING[type(probed.config)].from_pretrained(
            None if weights_by_name else path,
            config=copy.deepcopy(probed.config),
            state_dict=weights_by_name,
            dtype=dtype,
            # If accelerate is not installed, a model is loaded into host memory first and then moved to the GPU.
            device_map={"": device} if device.type != "cpu" and find_spec("accelerate") else None,
            attn_implementation=ATTENTION_NAME,
            # "eager" loops over experts and reads their rows on the host.  A pass in a CUDA graph cannot do that.
            experts_implementation="eager" if device.type == "cpu" else None,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            trust_remote_code=False,
        )
    unused = [name for name in report["unexpected_keys"] if not IGNORABLE_NAMES.search(name)]
    for names, problem in ((report["missing_keys"], "is missing from it"), (unused, "belongs to no parameter")):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise EspalierError(
                f"{path}: weight {min(names)!r}{more} {problem} of {config.architecture}; config.json and weights "
                "do not belong together: download both again"
            )
    log.info("%s runs by transformers; replaced by ours: %s", config.architecture, probed.replaced_modules)
    model = model.to(device).eval().requires_grad_(False)
    target = TransformersTarget(model, probed.replacements, probed.stacked, captured_layers)
    target.config, target.layer_specs = config, probed.specs
    return target
