"""Finds out what a class of transformers does, by tests on tiny random models and without a checkpoint's weights.

A class can be a target if it passes this test: the nodes of a tree, run in one pass after a prefix, get the same logits
as the plain model returns for each path.  The tests are all that is known about a class.
"""

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from espalier.cache.layer_spec import KVHeads, LayerSpec
from espalier.errors import EspalierError, one_line
from espalier.kernels.ops.attention import apply_sink, masked_attention
from espalier.models.from_transformers.shrink import shrunk_config
from espalier.models.from_transformers.target import (
    ATTENTION_NAME,
    AttentionCall,
    AttentionRun,
    MakeModule,
    TransformersModel,
    attention_by,
    find_replacements,
    fix_ropes,
    register,
)

# The largest difference of logits, relative to the largest logit, in float32.
TOLERANCE = 1e-4
# The parent row of each row, for two requests: a prefix, then the nodes of a tree.
TREE_PARENTS = ((*range(-1, 13), 13, 13, 14, 14, 15), (*range(-1, 9), 9, 9, 10, 10, 11, 13, 14, 9, 17))
MOST_WEIGHTS = 50_000_000


@contextmanager
def refusal_reason(reason: str, *, with_kind: bool = False) -> Iterator[None]:
    """Turn any error into an EspalierError: the reason, then the error's text in brackets.

    with_kind: whether the error's type precedes its text.  A class is not Espalier's code and may raise anything.
    """
    try:
        yield
    except EspalierError:
        raise
    except Exception as error:
        kind = f"{type(error).__name__}: " if with_kind else ""
        raise EspalierError(f"{reason} ({kind}{one_line(error)})") from None


@dataclass(frozen=True)
class ProbeResult:
    """What was measured of a class with a config.

    layers: the name of the list of the model's layers.  attention: the name of the module that attends, in each layer.
    replacements: the classes whose modules are replaced by Espalier's.  replaced: how many modules of each, in words.
    can_capture: whether a layer's input is one row [H] for each token.
    num_weights: the number of values in all matrices; expert_weights: the number in experts' matrices.
    num_experts, top_k: 1 without experts.
    """

    model_class: Any
    config: Any
    specs: tuple[LayerSpec, ...]
    layers: str
    attention: tuple[str, ...]
    replacements: Mapping[type, MakeModule]
    replaced: str
    can_capture: bool
    vocab_size: int
    num_weights: int
    expert_weights: int
    num_experts: int
    top_k: int


@dataclass
class TrialRun(AttentionRun):
    """A pass in which rows attend as `seen` says.  It records the attention calls.

    positions: [B, Q].  seen: [B, Q, Q] bool, the rows to which each row attends.  calls: in order.
    """

    positions: Tensor
    seen: Tensor
    calls: list[AttentionCall] = field(default_factory=list)

    def __call__(self, call: AttentionCall) -> Tensor:
        self.calls.append(call)
        q, k, v = (rows.transpose(1, 2) for rows in (call.q, call.k, call.v))
        if q.is_meta or k.shape[1] != self.seen.shape[2]:
            # There is nothing to compute.  A class that attends over other rows is refused by its calls or its logits.
            return q.new_zeros(*q.shape[:3], v.shape[3])
        seen, at = self.seen, self.positions
        if call.window is not None:
            seen = seen & (at[:, :, None] - at[:, None] < call.window)
        scale = q.shape[3] ** -0.5 if call.scale is None else call.scale
        out, lse = masked_attention(q, k, v, seen, scale, softcap=call.softcap)
        return (out if call.sink is None else apply_sink(out, lse, call.sink)).contiguous()


def layers_of(model: nn.Module, modules: Sequence[nn.Module]) -> str:
    """Returns the name of the list of layers that contain these attention modules, one per layer, in order.

    Raises EspalierError, with the reason, if there is no such list.
    """
    lists = ((name, each) for name, each in model.named_modules() if isinstance(each, nn.ModuleList))
    name, layers = next(((name, each) for name, each in lists if modules[0] in set(each.modules())), ("", ()))
    read_layer_config = {module: i for i, layer in enumerate(layers) for module in layer.modules()}
    at = [read_layer_config.get(module, -1) for module in modules]
    if without := [i for i in range(len(layers)) if i not in at]:
        kind = type(layers[without[0]]).__name__
        raise EspalierError(f"its layer {without[0]} ({kind}) keeps no K and V: it has recurrent state or no attention")
    if at != list(range(len(layers))):
        raise EspalierError("its layers do not attend once each, in the order of one list")
    return name


def layer_spec_of(calls: Sequence[AttentionCall], layer: int) -> LayerSpec:
    """Returns the spec of a layer, from its attention call.

    A layer whose K and V are the same tensors as an earlier layer's shares that layer's rows.
    Raises EspalierError, with the reason, for attention that no backend computes.
    """
    call = calls[layer]
    if call.scale is not None and not isinstance(call.scale, int | float):
        raise EspalierError("the factor of its attention scores is no number")
    first = next(i for i, other in enumerate(calls) if other.k is call.k and other.v is call.v)
    keeps = KVHeads(call.k.shape[1], call.k.shape[3], call.v.shape[3])
    shares = None if first == layer else first
    return LayerSpec(call.q.shape[1], keeps, call.window, call.scale, call.softcap, shares)


@torch.no_grad()
def trace(model: nn.Module, tokens: Tensor) -> list[AttentionCall]:
    """Returns the attention calls of a model over tokens [B, Q], a chain.  Model and tokens may be on the meta device.

    Raises EspalierError, with the reason, for attention that Espalier cannot compute.
    """
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    trial = TrialRun(positions, positions[:, None] <= positions[:, :, None])
    with attention_by(trial):
        model(input_ids=tokens, position_ids=positions, use_cache=False)
    if not trial.calls:
        raise EspalierError("its attention does not go through transformers' AttentionInterface")
    if any(call.masked for call in trial.calls):
        raise EspalierError("its attention has a mask of its own, which may be not causal")
    return trial.calls


def probe(model_class: Any, config: Any) -> ProbeResult:
    """Probes a class.  Raises EspalierError, with the reason, for a class that cannot be a target."""
    register()
    layers, equal, can_capture = try_tree(tiny_model(model_class, tiny_config(config)))
    full = on_meta_device(model_class, config)
    with refusal_reason("it reads values on the host while it runs, which no captured pass can", with_kind=True):
        calls = trace(full, torch.ones(1, 3, dtype=torch.int64, device="meta"))
    names = {module: name for name, module in full.named_modules()}
    kinds = Counter(type(module) for module in full.modules())
    experts = [each for each in full.parameters() if each.ndim == 3]
    return ProbeResult(
        model_class=model_class,
        config=config,
        specs=tuple(layer_spec_of(calls, layer) for layer in range(len(calls))),
        layers=layers,
        attention=tuple(names[call.module] for call in calls),
        replacements=equal,
        replaced=", ".join(f"{kinds[kind]} {kind.__name__}" for kind in equal) or "none of its modules",
        can_capture=can_capture,
        vocab_size=full.get_output_embeddings().weight.shape[0],
        num_weights=sum(each.numel() for each in full.parameters() if each.ndim > 1),
        expert_weights=sum(each.numel() for each in experts),
        num_experts=experts[0].shape[0] if experts else 1,
        top_k=getattr(config, "num_experts_per_tok", None) or 1,
    )


@refusal_reason("its class refuses its config")
def on_meta_device(model_class: Any, config: Any) -> Any:
    """Returns the model on the meta device: without data."""
    config = copy.deepcopy(config)
    config._attn_implementation = ATTENTION_NAME
    # This is the only implementation of experts that never reads on the host.
    config._experts_implementation = "batched_mm"
    with torch.device("meta"):
        model = model_class(config).eval()
        fix_ropes(model)
        return model


@refusal_reason("a small model of it cannot be made")
def tiny_config(config: Any) -> Any:
    """Returns a config of the same class with tiny sizes.  Raises EspalierError if the class refuses them."""
    fields = {name: value for name, value in config.to_dict().items() if not name.startswith("_")}
    for name, own in config.attribute_map.items():
        if own in fields:
            fields[name] = fields.pop(own)
    heads, hidden = (
        fields.get(config.attribute_map.get(name, name)) for name in ("num_attention_heads", "hidden_size")
    )
    tiny = type(config).from_dict(shrunk_config(fields, config.num_hidden_layers, heads, hidden))
    tiny._experts_implementation = "eager"
    return tiny


@refusal_reason("a small model of it cannot be made")
def tiny_model(model_class: Any, config: Any, seed: int = 0) -> Any:
    """Returns a random float32 model whose logits depend on every earlier token.
    Raises EspalierError if the class has no such model."""
    with torch.device("meta"):
        num_weights = sum(each.numel() for each in model_class(copy.deepcopy(config)).parameters())
    if num_weights > MOST_WEIGHTS:
        raise EspalierError(f"a small model of it has {num_weights} weights still, too many to try")
    model = model_class(config).float().eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(drawn * parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else parameter + 0.2 * drawn)
    return model


@torch.no_grad()
@refusal_reason("a small model of it does not run", with_kind=True)
def try_tree(model: Any) -> tuple[str, Mapping[type, MakeModule], bool]:
    """Returns `layers`, `replacements` and `can_capture` of ProbeResult.

    Raises EspalierError, with the reason, unless a tree's nodes get the logits of the plain model.
    """
    size = (len(TREE_PARENTS), len(TREE_PARENTS[0]))
    vocab = model.get_input_embeddings().weight.shape[0]
    tokens = torch.randint(0, vocab, size, generator=torch.Generator().manual_seed(1))
    # The rows run in reverse order, to find a class that treats the first rows of a pass differently: it is no target.
    rows = range(size[1] - 1, -1, -1)
    paths = [[_path_to_root(parents, row) for row in rows] for parents in TREE_PARENTS]
    wanted = torch.stack([_plain_logits(model, *of_request) for of_request in zip(tokens, paths, strict=True)])
    model.set_attn_implementation(ATTENTION_NAME)
    layers = layers_of(model, [call.module for call in trace(model, tokens)])
    equal = find_replacements(model)
    seen = torch.tensor([[[row in path for row in rows] for path in of_rows] for of_rows in paths])
    capture = tuple(range(len(model.get_submodule(layers)) + 1))
    for replaced in (equal, {}):
        trial, body = (
            TrialRun(seen.sum(2) - 1, seen),
            TransformersModel(copy.deepcopy(model), layers, replaced, capture),
        )
        logits = body.logits(body(tokens.flip(1), trial.positions, trial))
        difference = float((logits - wanted).abs().max() / wanted.abs().max())
        if difference <= TOLERANCE:
            shape = (*size, model.config.hidden_size)
            return layers, replaced, all(i in trial.inputs and trial.inputs[i].shape == shape for i in capture)
    raise EspalierError(
        "its rows do not see just the rows before them, at the positions that they are given: a tree's logits differ "
        f"from the plain model's by {difference:.1e} of the largest"
    )


def _path_to_root(parents: Sequence[int], row: int) -> list[int]:
    return [] if row < 0 else [*_path_to_root(parents, parents[row]), row]


def _plain_logits(model: Any, tokens: Tensor, paths: Sequence[list[int]]) -> Tensor:
    """Returns [Q, V]: for each row of tokens [Q], the logits that the plain model returns for the row's path."""
    model.set_attn_implementation("eager")
    return torch.stack([model(input_ids=tokens[None, path], use_cache=False).logits[0, -1] for path in paths])
