"""Makes a config of the same class with tiny sizes, on which a class can be probed in a moment."""

import re
from collections.abc import Mapping
from typing import Any

HEADS, HEAD_SIZE, HIDDEN, VOCAB, POSITIONS, WINDOW, MOST_LAYERS = 4, 16, 64, 96, 128, 5, 12
KV_HEADS = r"(key_value|kv)_heads"
HEAD_SIZES = r"head_dim|head_size|kv_channels"
HIDDEN_SIZES = r"hidden_size|d_model|n_embd|embed(ding)?_(dim|size)|proj_dim|model_dim|hidden_dim"
# Tiny sizes, by patterns of the names in config classes.  The first pattern that matches counts.  These sizes are never
# raised.
SIZES: tuple[tuple[str, int], ...] = (
    (r"vocab_size", VOCAB),
    (r"token_id$", VOCAB - 1),
    (r"^num_layers$|kv_shared", 2),
    (r"window|chunk_size", WINDOW),
    (r"position|max_seq|n_ctx|seq_len", POSITIONS),
    (r"experts_per_tok|top_?k|moe_k$|num_selected", 2),
    (r"n_group", 2),
    (r"shared_experts$", 1),
    (r"experts$|num_expert|expert_num", HEADS),
    (r"qk_head_dim", 2 * HEAD_SIZE),
    (rf"{HEAD_SIZES}|rotary_dim|_lora_rank|lora_dim|low_rank", HEAD_SIZE),
    (KV_HEADS, 2),
    (r"heads|n_head$", HEADS),
    (r"intermediate|inner|ffn|mlp_(dim|size)|d_ff|ff_", 2 * HIDDEN),
    (HIDDEN_SIZES, HIDDEN),
    (r"first_k_dense|num_dense", 1),
)


Bound = tuple[str, int, int]


def shrunk_config(fields: Mapping[str, Any], num_layers: int, heads: Any, hidden: Any) -> dict[str, Any]:
    """Returns the fields of a config with tiny sizes.

    It keeps the first layers, as many as it takes to have a layer of each type.  num_layers: the number of layers that
    `fields` describe.  heads: query heads.  hidden: values of a row.  A config may lack both, or have a list of heads.
    """
    lists = [value for value in fields.values() if isinstance(value, list | tuple) and len(value) == num_layers]
    kinds = list(zip(*(map(repr, each) for each in lists), strict=True))
    firsts = [kinds.index(kind) for kind in set(kinds)]
    firsts += [min(map(int, value)) for value in fields.values() if _is_by_layer(value)]
    layers = min(max(*firsts, 3, 3) + 1, MOST_LAYERS, num_layers)
    # The config's RoPE is left out, so the class uses its default: factors may fit the config's true sizes alone.
    kept = {name: value for name, value in fields.items() if name not in ("rope_parameters", "rope_scaling")}
    bound = _bound(heads, hidden)
    return {name: _shrunk_value(name, value, num_layers, layers, bound) for name, value in kept.items()}


def _bound(heads: Any, hidden: Any) -> list[Bound]:
    """Sizes that a class derives from each other: (pattern of the name, the config's value, the tiny value).

    Half of a head may be rotated, so a head has HEAD_SIZE values, also where the config's has fewer.
    """
    if not isinstance(heads, int) or heads < 1:
        return []
    tiny = min(HEADS, heads)
    bound = [(KV_HEADS, heads, tiny)]
    if isinstance(hidden, int) and hidden % heads == 0:
        bound += [(HEAD_SIZES, hidden // heads, HEAD_SIZE), (HIDDEN_SIZES, hidden, tiny * HEAD_SIZE)]
    return bound


def _is_by_layer(value: Any) -> bool:
    """Whether a value is an object whose keys are layer numbers."""
    return isinstance(value, Mapping) and bool(value) and all(str(key).isdecimal() for key in value)


def _shrunk_value(name: str, value: Any, num_layers: int, layers: int, bound: list[Bound]) -> Any:
    if isinstance(value, list | tuple) and len(value) == num_layers:
        return [_shrunk_value(name, each, 0, 0, bound) for each in value[:layers]]
    if _is_by_layer(value):
        return {layer: each for layer, each in value.items() if int(layer) < layers}
    if name == "head_dim" and value is None:
        return HEAD_SIZE
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if value == num_layers and re.search(r"layers?$", name):
        return layers
    for pattern, given, tiny in bound:
        if value == given and re.search(pattern, name):
            return tiny
    size = next((size for pattern, size in SIZES if re.search(pattern, name)), value)
    return min(size, value)
