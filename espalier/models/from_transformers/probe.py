"""Tries what a class of transformers does, on tiny random models and without weights.

A class can be a target if the nodes of a tree, run at once behind a prefix, get the logits that the plain model gives
to each path.  Nothing is known of a class but what it does here.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from espalier.cache.layer_spec import KVHeads, LayerSpec
from espalier.errors import EspalierError
from espalier.kernels.ops.attention import masked_attention, with_sink
from espalier.models.from_transformers.attention import NAME, Call, attending, refusing, register
from espalier.models.from_transformers.shrink import shrunk
from espalier.models.from_transformers.target import Body, Make, find_equal, fix_ropes

# Relative to the largest logit, in float32.
TOLERANCE = 1e-4
# Committed tokens of the two requests that are tried together, and their trees: the path to each node.
PREFIXES = (13, 9)
PATHS = (
    ((0,), (0, 1), (0, 2), (0, 1, 3), (0, 1, 4), (0, 2, 5)),
    ((0,), (0, 1), (0, 1, 2), (0, 1, 2, 3), (0, 4), (0, 4, 5)),
)
MOST_WEIGHTS = 50_000_000


@dataclass(frozen=True)
class Probed:
    """What a class does with a config.

    layers: the name of the list of its layers; attention: of the module that attends in each.  equal: the classes whose
    modules are replaced by ours; replaced: how many modules of each, by name.
    can_capture: whether a layer's input is one row [H] for each token.
    num_weights: of all its matrices; expert_weights: those of experts; num_experts, top_k: 1 without.
    """

    model_class: Any
    config: Any
    specs: tuple[LayerSpec, ...]
    layers: str
    attention: tuple[str, ...]
    equal: Mapping[type, Make]
    replaced: Mapping[str, int]
    can_capture: bool
    vocab_size: int
    num_weights: int
    expert_weights: int
    num_experts: int
    top_k: int

    @property
    def in_words(self) -> str:
        """The modules that are replaced by ours."""
        return ", ".join(f"{count} {name}" for name, count in self.replaced.items()) or "none of its modules"


@dataclass
class Trial:
    """A pass over rows that see what they are told to see, and its attention calls in order.

    positions: [B, Q].  seen: [B, Q, P + Q] bool, of the P rows of `past`, the pass before, and of its own rows.
    """

    positions: Tensor
    seen: Tensor
    past: "Trial | None" = None
    calls: list[Call] = field(default_factory=list)
    inputs: dict[int, Tensor] = field(default_factory=dict)
    live: Tensor | None = None

    def __call__(self, call: Call) -> Tensor:
        q, k, v, at, seen = call.q, call.k, call.v, self.positions, self.seen
        if self.past is not None:
            before = self.past.calls[len(self.calls)]
            k, v = torch.cat((before.k, k), 2), torch.cat((before.v, v), 2)
            at = torch.cat((self.past.positions, at), 1)
        self.calls.append(call)
        if q.is_meta or k.shape[2] != seen.shape[2]:
            # Nothing to compute.  A class that attends over other rows is refused by its calls or its logits.
            return q.new_zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[3])
        if call.window is not None:
            seen = seen & (self.positions[:, :, None] - at[:, None] < call.window)
        q, k, v = (rows.transpose(1, 2) for rows in (q, k, v))
        scale = q.shape[3] ** -0.5 if call.scale is None else call.scale
        out, lse = masked_attention(q, k, v, seen, scale, softcap=call.softcap)
        return (out if call.sink is None else with_sink(out, lse, call.sink)).contiguous()


def layers_of(model: nn.Module, modules: Sequence[nn.Module]) -> str:
    """The name of the list of layers in which these modules attend, one in each, in order.

    Raises EspalierError, with the reason, if they are in no such list.
    """
    lists = ((name, each) for name, each in model.named_modules() if isinstance(each, nn.ModuleList))
    name, layers = next(((name, each) for name, each in lists if modules[0] in set(each.modules())), ("", None))
    if layers is None:
        raise EspalierError("its layers are in no list")
    layer_of = {module: i for i, layer in enumerate(layers) for module in layer.modules()}
    at = [layer_of.get(module, -1) for module in modules]
    if len(set(at)) < len(at):
        raise EspalierError("it has several attention calls in a layer")
    if without := [i for i in range(len(layers)) if i not in at]:
        kind = type(layers[without[0]]).__name__
        raise EspalierError(f"its layer {without[0]} ({kind}) keeps no K and V: it has recurrent state or no attention")
    if at != list(range(len(layers))):
        raise EspalierError("its layers do not run in order, or attend in several lists")
    return name


def spec_of(calls: Sequence[Call], layer: int) -> LayerSpec:
    """The spec of a layer that attends so.  Raises EspalierError, with the reason, for what no backend computes.

    A layer that is given the very K and V of an earlier one shares its rows.
    """
    call = calls[layer]
    if call.scale is not None and not isinstance(call.scale, int | float):
        raise EspalierError("the factor of its attention scores is no number")
    first = next(i for i, other in enumerate(calls) if other.k is call.k and other.v is call.v)
    shares = None if first == layer else first
    keeps = KVHeads(call.k.shape[1], call.k.shape[3], call.v.shape[3])
    return LayerSpec(call.q.shape[1], keeps, call.window, call.scale, call.softcap, shares)


def trace(model: nn.Module, tokens: Tensor) -> Trial:
    """A model's pass over tokens [B, Q], which follow each other.  Both may be on the meta device.

    Raises EspalierError, with the reason, for attention that is not ours to compute.
    """
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    trial = Trial(positions, positions[:, None] <= positions[:, :, None])
    with torch.no_grad(), attending(trial):
        model(input_ids=tokens, position_ids=positions, use_cache=False)
    if not trial.calls:
        raise EspalierError("its attention does not go through transformers' AttentionInterface")
    if any(call.masked for call in trial.calls):
        raise EspalierError("its attention has a mask of its own, which may be not causal")
    return trial


def probe(model_class: Any, config: Any) -> Probed:
    """Raises EspalierError, with the reason, for a class that cannot be a target."""
    register()
    layers, equal, can_capture = try_tree(tiny_model(model_class, tiny_config(config)))
    full = on_meta(model_class, config)
    with refusing("it reads values on the host while it runs, which no captured pass can", with_kind=True):
        calls = trace(full, torch.ones(1, 3, dtype=torch.int64, device="meta")).calls
    names = {module: name for name, module in full.named_modules()}
    specs = tuple(spec_of(calls, layer) for layer in range(len(calls)))
    kinds = [type(module) for module in full.modules() if type(module) in equal]
    experts = [each for each in full.parameters() if each.ndim == 3]
    return Probed(
        model_class=model_class,
        config=config,
        specs=specs,
        layers=layers,
        attention=tuple(names[call.module] for call in calls),
        equal=equal,
        replaced={kind.__name__: kinds.count(kind) for kind in equal},
        can_capture=can_capture,
        vocab_size=full.get_output_embeddings().weight.shape[0],
        num_weights=sum(each.numel() for each in full.parameters() if each.ndim > 1),
        expert_weights=sum(each.numel() for each in experts),
        num_experts=experts[0].shape[0] if experts else 1,
        top_k=getattr(config, "num_experts_per_tok", None) or 1,
    )


@refusing("its class refuses its config")
def on_meta(model_class: Any, config: Any) -> Any:
    """The model without weights."""
    config = copy.deepcopy(config)
    config._attn_implementation = NAME
    # Of all implementations of experts it alone reads nothing on the host for any input.
    config._experts_implementation = "batched_mm"
    with torch.device("meta"):
        model = model_class(config).eval()
        fix_ropes(model)
        return model


@refusing("a small model of it cannot be made")
def tiny_config(config: Any) -> Any:
    """A config of the same kind, with tiny sizes.  Raises EspalierError if its class refuses it."""
    fields = {name: value for name, value in config.to_dict().items() if not name.startswith("_")}
    for name, own in config.attribute_map.items():
        if own in fields:
            fields[name] = fields.pop(own)
    tiny = type(config).from_dict(shrunk(fields, config.num_hidden_layers))
    tiny._experts_implementation = "eager"
    return tiny


@refusing("a small model of it cannot be made")
def tiny_model(model_class: Any, config: Any, seed: int = 0) -> Any:
    """A random float32 model whose logits depend on every token before.  Raises EspalierError if there is none."""
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


@refusing("a small model of it does not run", with_kind=True)
def try_tree(model: Any) -> tuple[str, Mapping[type, Make], bool]:
    """The name of the list of layers, the classes whose modules may be ours, whether layers' inputs can be captured.

    Raises EspalierError, with the reason, unless a tree's nodes get the logits of the plain model.
    """
    prefixes, trees = _random_tokens(model)
    model.set_attn_implementation(NAME)
    past = trace(model, prefixes)
    layers = layers_of(model, [call.module for call in past.calls])
    wanted, equal = _plain(model, prefixes, trees), find_equal(model)
    for replaced in (equal, {}) if equal else ({},):
        capture = tuple(range(len(model.get_submodule(layers)) + 1))
        got, inputs = _as_tree(Body(copy.deepcopy(model), layers, replaced, capture), trees, past)
        difference = float((got - wanted).abs().max() / wanted.abs().max())
        if difference <= TOLERANCE:
            shape = (*got.shape[:2], model.config.hidden_size)
            return layers, replaced, all(i in inputs and inputs[i].shape == shape for i in capture)
    raise EspalierError(
        "its rows do not see just the rows before them, at the positions that they are given: a tree's logits differ "
        f"from the plain model's by {difference:.1e} of the largest"
    )


def _random_tokens(model: Any) -> tuple[Tensor, Tensor]:
    """The prefixes, padded to the longest, and the trees' nodes [2, Q]."""
    vocab = model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(1)
    prefixes = [torch.randint(0, vocab, (n,), generator=generator) for n in PREFIXES]
    trees = torch.randint(0, vocab, (len(PATHS), len(PATHS[0])), generator=generator)
    return pad_sequence(prefixes, batch_first=True), trees


@torch.no_grad()
def _plain(model: Any, prefixes: Tensor, trees: Tensor) -> Tensor:
    """[2, Q, V]: the logits of each node of the trees, as the plain model gives them to its path."""
    model.set_attn_implementation("eager")
    logits = [
        model(input_ids=torch.cat((prefix[:n], tree[list(path)]))[None], use_cache=False).logits[0, -1]
        for prefix, n, tree, paths in zip(prefixes, PREFIXES, trees, PATHS, strict=True)
        for path in paths
    ]
    model.set_attn_implementation(NAME)
    return torch.stack(logits).unflatten(0, trees.shape)


@torch.no_grad()
def _as_tree(body: Body, trees: Tensor, past: Trial) -> tuple[Tensor, dict[int, Tensor]]:
    """The logits of both trees' nodes, run at once, and what they captured."""
    lengths = torch.tensor(PREFIXES)[:, None]
    committed = (past.positions < lengths)[:, None].expand(-1, trees.shape[1], -1)
    nodes = torch.tensor([[[node in path for node in range(len(paths))] for path in paths] for paths in PATHS])
    trial = Trial(lengths + nodes.sum(2) - 1, torch.cat((committed, nodes), 2), past)
    return body.logits(body(trees, trial.positions, trial)), trial.inputs
