"""Tests on tiny random models, without a checkpoint's weights, whether a class of transformers can be a target.

A class can be a target if a pass over the nodes of a tree, after a prefix, computes the same logits as the plain model
computes for each path.  There is no list of supported classes.
"""

import copy
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from espalier.cache.layer_spec import KVHeads, LayerSpec
from espalier.errors import EspalierError
from espalier.kernels.ops.attention import apply_sink, masked_attention
from espalier.model_files import MAX_LAYERS
from espalier.models.config import IGNORED_FIELDS, Family, Json, ModelConfig, architecture_of, parse_config
from espalier.models.config_values import with_overrides
from espalier.models.from_transformers.target import (
    ATTENTION_NAME,
    REPLACEMENT_MAKERS,
    MakeForward,
    TransformersTarget,
    attend,
    linear_of,
    refusal_reason,
)
from espalier.models.weight_formats import QUANTISATION_FIELDS

# An attention call: the module, K and V [B, kv_heads, Q, size], and the spec of the layer.
AttentionCall = tuple[nn.Module, Tensor, Tensor, LayerSpec]
# The largest allowed difference of logits in float32, as a share of the largest logit.
LOGITS_TOLERANCE = 1e-4
# The sizes of a tiny model, and its largest number of layers and of weights.
TINY_HEADS, TINY_HEAD_SIZE, MAX_TINY_LAYERS, MAX_TINY_WEIGHTS = 4, 16, 12, 50_000_000
# A pattern for the names of sizes that must fit together, because classes compute some from others.  These sizes get
# the tiny values even if the config has smaller values.
DERIVED_SIZES = r"head_dim|head_size|kv_channels|attention_heads|n_heads?$|hidden_size|d_model|n_embd"
# The tiny values, by patterns of the names in config classes.  The first pattern that matches counts.
TINY_SIZES: tuple[tuple[str, int], ...] = (
    (r"window|chunk_size", 5),
    (r"experts_per_tok|top_?k|moe_k$|num_selected|n_group|^num_layers$|kv_shared|(key_value|kv)_heads", 2),
    (r"shared_experts$|first_k_dense|num_dense", 1),
    (r"experts$|num_expert|expert_num|heads|n_head$", TINY_HEADS),
    (r"qk_head_dim", 2 * TINY_HEAD_SIZE),
    (r"head_dim|head_size|kv_channels|rotary_dim|_lora_rank|lora_dim|low_rank", TINY_HEAD_SIZE),
    (r"vocab_size|intermediate|inner|ffn|mlp_(dim|size)|d_ff|ff_", 2 * TINY_HEADS * TINY_HEAD_SIZE),
    (r"(?<!layers)$", TINY_HEADS * TINY_HEAD_SIZE),
)
# is_replacement compares a replacement with its module on input rows that are multiplied by these factors.
TRIED_SCALES = (1.0, 1e-3, 1e3)
# The parents of rows 1 to 18 of two requests.  The first rows are a prefix; the rows after them are a tree's nodes.
TREE_PARENTS = ((*range(13), 13, 13, 14, 14, 15), (*range(9), 9, 9, 10, 10, 11, 13, 14, 9, 17))


@refusal_reason("a small model of it cannot be made")
def tiny_config(config: Any) -> Any:
    """Returns a config of the same class with tiny sizes and at most MAX_TINY_LAYERS layers.
    The config keeps the first layers, at least four, until every layer type has occurred.  If these layers are too
    many, it keeps the first four layers and the first layer of each other type.  If these layers are too many too, it
    keeps the first MAX_TINY_LAYERS layers.  Raises EspalierError if the class refuses the tiny config."""
    # The config's RoPE is left out, because its factors may only fit the true sizes.  So the class uses a default RoPE.
    ignored_prefixes = ("_", "rope_parameters", "rope_scaling")
    fields = {name: value for name, value in config.to_dict().items() if not name.startswith(ignored_prefixes)}
    num_layers = config.num_hidden_layers
    heads = fields.get(config.attribute_map.get("num_attention_heads", "num_attention_heads"))
    lists = [value for value in fields.values() if isinstance(value, list | tuple) and len(value) == num_layers]
    layer_types = [repr(values) for values in zip(*lists, strict=True)]
    first_layers = {*range(min(4, num_layers)), *map(layer_types.index, layer_types)}
    num_prefix = max(first_layers) + 1
    takes_prefix = num_prefix <= MAX_TINY_LAYERS or len(first_layers) > MAX_TINY_LAYERS
    kept_layers = list(range(min(num_prefix, MAX_TINY_LAYERS))) if takes_prefix else sorted(first_layers)
    layers = len(kept_layers)

    def tiny_value(name: str, value: Any) -> Any:
        """Returns the value of the config's field `name` for the tiny model, from its value for the whole model."""
        if isinstance(value, list | tuple) and len(value) == num_layers:
            return [tiny_value(name, value[layer]) for layer in kept_layers]
        if name == "per_layer_config" and value:
            places = {layer: place for place, layer in enumerate(kept_layers)}
            return {type(k)(places[int(k)]): fields for k, fields in value.items() if int(k) in places}
        if name == "head_dim" and value is None:
            return TINY_HEAD_SIZE
        if not isinstance(value, int) or isinstance(value, bool):
            return value
        if value == num_layers and re.search(r"layers?$", name):
            return layers
        if value == heads and name.endswith("heads"):
            return TINY_HEADS  # also the number of K and V heads, which may have to be equal
        size = next((size for pattern, size in TINY_SIZES if re.search(pattern, name)), value)
        return size if value and re.search(DERIVED_SIZES, name) else min(value, size)

    tiny = type(config).from_dict({name: tiny_value(name, value) for name, value in fields.items()})
    tiny._experts_implementation = "eager"
    return tiny


@torch.no_grad()
@refusal_reason("a small model of it cannot be made")
def tiny_model(model_class: Any, config: Any, seed: int = 0) -> Any:
    """Returns a random float32 model of `config` whose logits depend on every earlier token.
    Raises EspalierError if the class has no such model."""
    with torch.device("meta"):
        num_weights = sum(parameter.numel() for parameter in model_class(copy.deepcopy(config)).parameters())
    if num_weights > MAX_TINY_WEIGHTS:
        raise EspalierError(f"a small model of it has {num_weights} weights still, too many to try")
    model = model_class(config).float().eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(noise * parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else parameter + 0.2 * noise)
    return model


def is_replacement(make: MakeForward, module: Any, args: tuple[Any, ...]) -> bool:
    """Whether the forward that `make` returns computes the same as the module's own forward.
    args: the arguments of a call.  Both forwards run on these rows, and on the rows scaled down and up, because an eps
    or a limit has no effect on some rows."""
    try:
        pairs = [[run(args[0] * scale, *args[1:]) for run in (make(module), module.forward)] for scale in TRIED_SCALES]
        return all(a.shape == b.shape and bool((a - b).abs().max() <= 1e-5 * b.abs().max()) for a, b in pairs)
    except Exception:  # any exception: the module is not Espalier's code, and `make` may not fit the module
        return False


def run_with_mask(
    target: TransformersTarget, tokens: Tensor, seen: Tensor
) -> tuple[Tensor, dict[int, Tensor], list[AttentionCall]]:
    """Runs a pass of tokens [B, Q].  seen: [B, Q, Q] bool; seen[b, i, j]: whether row i attends to row j.

    Returns the results of TransformersTarget.run, and the attention calls.
    Raises EspalierError, with the reason, for attention that no backend computes."""
    calls: list[AttentionCall] = []
    positions = seen.sum(2) - 1

    def attend_as_seen(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any
    ) -> Tensor:
        """Records an attention call, and computes it with the mask `seen`.  q, k, v: [B, heads, rows, size]."""
        scale, sink = options.get("scaling"), options.get("s_aux")
        if mask is not None:
            raise EspalierError("its attention has a mask of its own, which may be not causal")
        if scale is not None and not isinstance(scale, int | float):
            raise EspalierError("the factor of its attention scores is no number")
        # A layer whose K and V are the same tensors as an earlier layer's shares that layer's rows.
        source_layer = next((i for i, (_, *rows, _) in enumerate(calls) if rows[0] is k and rows[1] is v), None)
        window, softcap = options.get("sliding_window") or None, options.get("softcap") or None
        cache_spec = KVHeads(k.shape[1], k.shape[3], v.shape[3])
        spec = LayerSpec(q.shape[1], cache_spec, window, scale, softcap, source_layer)
        calls.append((module, k, v, spec))
        q, k, v = (rows.transpose(1, 2) for rows in (q, k, v))
        if k.shape[1] != seen.shape[2]:
            # The class attends to other rows than the pass has.  Later checks of its calls or logits refuse the class.
            return q.new_zeros(*q.shape[:3], v.shape[3])
        distances = positions[:, :, None] - positions[:, None]
        visible = seen if window is None else seen & (distances < window)
        out, lse = masked_attention(q, k, v, visible, spec.softmax_scale, softcap=softcap)
        return (out if sink is None else apply_sink(out, lse, sink)).contiguous()

    return *target.run(tokens, positions, attend_as_seen), calls


def require_one_call_each(layers: nn.ModuleList, calls: Sequence[AttentionCall]) -> None:
    """Checks that each layer attended once, in order.  Raises EspalierError with the reason."""
    if not calls:
        raise EspalierError("its attention does not go through transformers' AttentionInterface")
    layer_of = {module: i for i, layer in enumerate(layers) for module in layer.modules()}
    attended = [layer_of.get(module) for module, *_ in calls]
    for i, layer in enumerate(layers):
        if i not in attended:
            kind = type(layer).__name__
            raise EspalierError(f"its layer {i} ({kind}) keeps no K and V: it has recurrent state or no attention")
    if attended != list(range(len(layers))):
        raise EspalierError("its layers do not attend once each, in the order of one list")


def find_stacked(model: nn.Module, calls: Sequence[tuple[nn.Module, Tensor]]) -> dict[type, tuple[str, ...]]:
    """Returns, for each class of modules, the names of its linear layers that are called in sequence with one input.
    calls: each linear layer and its input, in the order of the calls."""
    parents = {child: (parent, name) for parent in model.modules() for name, child in parent.named_children()}
    stacked: dict[type, tuple[str, ...]] = {}
    for (parent, _), group in groupby(calls, lambda call: (parents[call[0]][0], id(call[1]))):
        names = [parents[module][1] for module, _ in group]
        if len(names) > 1 and not isinstance(parent, nn.ModuleList):
            stacked.setdefault(type(parent), tuple(names))
    return stacked


def module_settings(model: nn.Module, kind: type) -> set[str]:
    """Returns the settings of the modules of class `kind`: the values of all attributes that are bool, float or str."""
    return {
        repr(sorted((n, v) for n, v in vars(m).items() if not n.startswith("_") and isinstance(v, bool | float | str)))
        for m in model.modules()
        if type(m) is kind
    }


@torch.no_grad()
@refusal_reason("a small model of it does not run")
def probe_tiny_model(model: Any) -> tuple[dict[type, MakeForward], dict[type, tuple[str, ...]], bool]:
    """Returns `replacements`, `stacked` and `can_capture` of ProbeResult.  model: see tiny_model.

    Raises EspalierError, with the reason, unless a tree's nodes get the logits of the plain model."""
    from transformers import AttentionInterface

    # The name is registered as an attention function, not as a mask function.  So transformers makes no mask.  To make
    # a mask, transformers would search the positions for packed sequences, on the host.
    AttentionInterface.register(ATTENTION_NAME, attend)
    seen = torch.eye(1 + len(TREE_PARENTS[0]), dtype=torch.bool).repeat(len(TREE_PARENTS), 1, 1)
    for request_rows, parents in zip(seen, TREE_PARENTS, strict=True):
        for row, parent in enumerate(parents, 1):
            request_rows[row] |= request_rows[parent]
    vocab = model.get_input_embeddings().weight.shape[0]
    tokens = torch.randint(0, vocab, seen.shape[:2], generator=torch.Generator().manual_seed(1))
    # Class -> the makers whose replacements computed the same as every called module of the class with parameters.
    makers: dict[type, list[MakeForward]] = {}
    linear_calls: list[tuple[nn.Module, Tensor]] = []

    def record_call(module: Any, args: tuple[Any, ...], out: Any) -> None:
        """A forward hook.  args: the positional arguments of the module's call.  out: its result."""
        if type(module) is nn.Linear:
            linear_calls.append((module, args[0]))
        elif next(module.parameters(), None) is not None:
            candidates = makers.get(type(module), REPLACEMENT_MAKERS)
            makers[type(module)] = [make for make in candidates if is_replacement(make, module, args)]

    model.set_attn_implementation("eager")
    with ExitStack() as hooks:
        for module in model.modules():
            hooks.enter_context(module.register_forward_hook(record_call))
        model(input_ids=tokens, use_cache=False)
    replacements = {nn.Linear: linear_of} | {kind: fitting[0] for kind, fitting in makers.items() if fitting}
    stacked = find_stacked(model, linear_calls)
    logits = [
        model(input_ids=request_rows[path][None], use_cache=False).logits[0, -1]
        for request_rows, paths in zip(tokens, seen, strict=True)
        for path in paths
    ]
    expected_logits = torch.stack(logits).view(*tokens.shape, -1)
    model.set_attn_implementation(ATTENTION_NAME)
    captured_layers = tuple(range(model.config.num_hidden_layers + 1))
    # The rows run in reverse order.  So the test fails for a class that treats the first rows of a pass differently.
    for replaced in (({}, {}), (replacements, stacked)):
        target = TransformersTarget(copy.deepcopy(model), *replaced, captured_layers)
        hidden, inputs, calls = run_with_mask(target, tokens.flip(1), seen.flip(1, 2))
        require_one_call_each(target.layers, calls)
        difference = float((target.logits(hidden).flip(1) - expected_logits).abs().max() / expected_logits.abs().max())
        if difference > LOGITS_TOLERANCE:
            raise EspalierError(
                "its rows do not see just the rows before them, at the positions that they are given: a tree's logits "
                f"differ from the plain model's by {difference:.1e} of the largest"
            )
    shape = (*tokens.shape, model.config.hidden_size)
    return replacements, stacked, all(i in inputs and inputs[i].shape == shape for i in captured_layers)


@dataclass(frozen=True)
class ProbeResult:
    """What the probe found about a model class of transformers with a config.
    replacements: module class -> the function that makes the replacement of a module's forward.
    stacked: module class -> the names of linear layers that become one product.
    replaced_modules: a text for the log, with the number of replaced modules of each class.
    can_capture: whether the input of every layer is one row [H] for each token.
    num_weights: the number of values in all matrices.  num_expert_weights: the values in the experts' matrices.
    num_experts: the number of experts.  top_k: the number of experts that a token uses.  Both are 1 without experts."""

    config: Any
    specs: tuple[LayerSpec, ...]
    replacements: Mapping[type, MakeForward]
    stacked: Mapping[type, tuple[str, ...]]
    replaced_modules: str
    can_capture: bool
    vocab_size: int
    num_weights: int
    num_expert_weights: int
    num_experts: int
    top_k: int


@lru_cache(maxsize=16)
@torch.no_grad()
def probe(model_type: str, fields: str) -> ProbeResult:
    """Probes the class of a model type with a config.  fields: the config.json as JSON.
    Raises EspalierError, with the reason, for a class that cannot be a target."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    if getattr(model_class, "_is_stateful", False):
        raise EspalierError("it keeps recurrent state")
    with refusal_reason("its config is refused"):
        config = config_class.from_dict({**json.loads(fields), "output_router_logits": False})
    if getattr(config, "is_encoder_decoder", False):
        raise EspalierError("it is half of an encoder-decoder")
    if not hasattr(config, "num_hidden_layers"):
        raise EspalierError("its config describes several models (text and images or sound), not one of text")
    if not 1 <= config.num_hidden_layers <= MAX_LAYERS:
        raise EspalierError(f"it has {config.num_hidden_layers} layers; 1 to {MAX_LAYERS} are supported")
    tiny = tiny_model(model_class, tiny_config(config))
    replacements, stacked, can_capture = probe_tiny_model(tiny)
    meta_config = copy.deepcopy(config)
    meta_config._attn_implementation = ATTENTION_NAME
    # This is the only implementation of experts that never reads a tensor's values on the host.
    meta_config._experts_implementation = "batched_mm"
    with refusal_reason("its class refuses its config"), torch.device("meta"):
        meta_model = model_class(meta_config).eval()
    # A layer that the tiny model does not have may have modules with other settings.  Their class is not replaced.
    kept_kinds = [kind for kind in replacements if module_settings(meta_model, kind) <= module_settings(tiny, kind)]
    replacements = {kind: replacements[kind] for kind in kept_kinds}
    classes = [type(module) for module in meta_model.modules()]
    matrices = [parameter for parameter in meta_model.parameters() if parameter.ndim > 1]
    experts = [matrix for matrix in matrices if matrix.ndim == 3]
    tokens = torch.zeros(1, 3, dtype=torch.int64, device="meta")
    with refusal_reason("with this config it does not run, or it reads values on the host, which no captured pass can"):
        target = TransformersTarget(meta_model, {}, {})
        hidden, _, calls = run_with_mask(target, tokens, torch.ones(1, 3, 3, dtype=torch.bool, device="meta"))
        target.logits(hidden)
    return ProbeResult(
        config=config,
        specs=tuple(spec for *_, spec in calls),
        replacements=replacements,
        stacked=stacked,
        replaced_modules=", ".join(f"{classes.count(kind)} {kind.__name__}" for kind in replacements),
        can_capture=can_capture,
        vocab_size=target.head.shape[0],
        num_weights=sum(matrix.numel() for matrix in matrices),
        num_expert_weights=sum(matrix.numel() for matrix in experts),
        num_experts=experts[0].shape[0] if experts else 1,
        top_k=getattr(config, "num_experts_per_tok", None) or 1,
    )


def causal_class_name(config_json: Json) -> str | None:
    """Returns the name of transformers' causal class for a config.json; None if the config has another architecture.
    Code that comes with a checkpoint is ignored."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(config_json.get("model_type")))
    return name if config_json.get("architectures") in (None, [], [name]) else None


def read_by_transformers(
    config_json: Json, path: Path, overrides: Mapping[str, Any] | None = None, generation_config: Json | None = None
) -> ModelConfig:
    """Returns the config of a model that a class of transformers runs.  The arguments are those of parse_config.
    Raises EspalierError, with the reason, if no class can run it."""
    from transformers import CONFIG_MAPPING

    name = causal_class_name(config_json)
    if name is None:
        raise EspalierError(
            f"{path}: {architecture_of(config_json)!r} is not transformers' causal model of model_type "
            f"{config_json.get('model_type')!r}; update transformers, or use a text generation model that it has"
        )
    config_class = CONFIG_MAPPING[config_json["model_type"]]
    class_fields = {*config_class().to_dict(), *config_class.attribute_map}
    allowed_fields = {*class_fields, *config_json, *IGNORED_FIELDS, *QUANTISATION_FIELDS}
    full = with_overrides(config_json, overrides or {}, allowed_fields)
    if any(full.get(field_name) is not None for field_name in QUANTISATION_FIELDS):
        raise EspalierError(
            f"{path}: {name} runs by transformers, for which quantised weights are not supported; use "
            "an unquantised copy of the model (bfloat16)"
        )
    # Fields that begin with "_" may name code of the checkpoint, which must not run.
    fields = {field_name: value for field_name, value in full.items() if not field_name.startswith("_")}
    try:
        probed = probe(config_json["model_type"], json.dumps(fields, sort_keys=True))
    except EspalierError as error:
        raise EspalierError(f"{path}: {name} cannot run by transformers: {error}; use another model") from None
    config, first_spec = probed.config, probed.specs[0]
    # The fields of a plain model with these sizes.  Fields that only Espalier's own layers read have neutral values.
    plain_fields = {
        "vocab_size": probed.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": 4 * config.hidden_size,
        "num_hidden_layers": len(probed.specs),
        "num_attention_heads": first_spec.heads,
        "num_key_value_heads": first_spec.row_spec.kv_heads,
        "head_dim": first_spec.row_spec.k_size,
        "max_position_embeddings": longest_context(config),
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "tie_word_embeddings": bool(getattr(config, "tie_word_embeddings", False)),
        "eos_token_id": full.get("eos_token_id"),
    }
    family = Family(name, config_json["model_type"], {}, layer_specs=lambda config: probed.specs)
    eos_source = None if "eos_token_id" in (overrides or {}) else generation_config
    return replace(parse_config(plain_fields, family, path, None, eos_source), raw=full, probe_result=probed)


def longest_context(config: Any) -> Any:
    """Returns the longest context, in tokens: max_position_embeddings, or what LongRoPE's short factors allow."""
    ropes = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [rope for rope in ropes.values() if isinstance(rope, Mapping)] or [ropes]
    limits = [rope["original_max_position_embeddings"] for rope in by_layer_type if rope.get("rope_type") == "longrope"]
    return min([getattr(config, "max_position_embeddings", None), *limits])
