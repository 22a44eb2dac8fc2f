"""Makes a config of the same class with tiny sizes, on which a class can be probed in a moment."""

import re
from collections.abc import Mapping
from typing import Any

HEADS, HEAD_SIZE, HIDDEN, VOCAB, POSITIONS, WINDOW, MOST_LAYERS = 4, 16, 64, 96, 128, 5, 12
# Tiny sizes, by patterns of the names in config classes.  The first pattern that matches counts.  Sizes are never
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
    (r"head_dim|head_size|kv_channels|rotary_dim|_lora_rank|lora_dim|low_rank", HEAD_SIZE),
    (r"(key_value|kv)_heads", 2),
    (r"heads|n_head$", HEADS),
    (r"intermediate|inner|ffn|mlp_(dim|size)|d_ff|ff_", 2 * HIDDEN),
    (r"hidden_size|d_model|n_embd|embed(ding)?_(dim|size)|proj_dim|model_dim|hidden_dim", HIDDEN),
    (r"first_k_dense|num_dense", 1),
)


def shrunk_config(fields: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Returns the fields of a config with tiny sizes.  num_layers: the number of layers that `fields` describe.

    It keeps the first layers, as many as it takes to have a layer of each type.
    """
    lists = [value for value in fields.values() if isinstance(value, list | tuple) and len(value) == num_layers]
    kinds = list(zip(*(map(repr, each) for each in lists), strict=True))
    firsts = [kinds.index(kind) for kind in set(kinds)]
    firsts += [min(map(int, value)) for value in fields.values() if _is_by_layer(value)]
    layers = min(max(*firsts, 3, 3) + 1, MOST_LAYERS, num_layers)
    # The config's RoPE is left out, so the class uses its default: factors may fit the config's true sizes alone.
    kept = {name: value for name, value in fields.items() if name not in ("rope_parameters", "rope_scaling")}
    return {name: _shrunk_value(name, value, num_layers, layers, fields) for name, value in kept.items()}


def _is_by_layer(value: Any) -> bool:
    """Whether a value is an object whose keys are layer numbers."""
    return isinstance(value, Mapping) and bool(value) and all(str(key).isdecimal() for key in value)


def _shrunk_value(name: str, value: Any, num_layers: int, layers: int, fields: Mapping[str, Any]) -> Any:
    if isinstance(value, list | tuple) and len(value) == num_layers:
        return [_shrunk_value(name, each, 0, 0, fields) for each in value[:layers]]
    if _is_by_layer(value):
        return {layer: each for layer, each in value.items() if int(layer) < layers}
    if name == "head_dim" and value is None:
        return HEAD_SIZE
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if value == num_layers and re.search(r"layers?$", name):
        return layers
    if re.search(r"(key_value|kv)_heads", name) and value == fields.get("num_attention_heads"):
        return HEADS
    size = next((size for pattern, size in SIZES if re.search(pattern, name)), value)
    return min(size, value)
