"""Makes a tiny random model of a class, on which the class can be probed in a moment."""

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from espalier.errors import EspalierError, one_line

HEADS, HEAD_SIZE, MOST_LAYERS, MOST_WEIGHTS = 4, 16, 12, 50_000_000
# Sizes that classes derive from each other.  They are the tiny values even where the config has smaller ones.
DERIVED = r"head_dim|head_size|kv_channels|attention_heads|n_heads?$|hidden_size|d_model|n_embd"
# The tiny values, by patterns of the names in config classes.  The first pattern that matches counts.
SIZES: tuple[tuple[str, int], ...] = (
    (r"window|chunk_size", 5),
    (r"experts_per_tok|top_?k|moe_k$|num_selected|n_group|^num_layers$|kv_shared|(key_value|kv)_heads", 2),
    (r"shared_experts$|first_k_dense|num_dense", 1),
    (r"experts$|num_expert|expert_num|heads|n_head$", HEADS),
    (r"qk_head_dim", 2 * HEAD_SIZE),
    (r"head_dim|head_size|kv_channels|rotary_dim|_lora_rank|lora_dim|low_rank", HEAD_SIZE),
    (r"vocab_size|intermediate|inner|ffn|mlp_(dim|size)|d_ff|ff_", 2 * HEADS * HEAD_SIZE),
    (r"(?<!layers)$", HEADS * HEAD_SIZE),
)


@contextmanager
def refusal_reason(reason: str) -> Iterator[None]:
    """Turn any error into an EspalierError: the reason, then the error in brackets.
    A class is not Espalier's code and may raise anything."""
    try:
        yield
    except EspalierError:
        raise
    except Exception as error:
        raise EspalierError(f"{reason} ({type(error).__name__}: {one_line(error)})") from None


@refusal_reason("a small model of it cannot be made")
def tiny_config(config: Any) -> Any:
    """Returns a config of the same class with tiny sizes.  Raises EspalierError if the class refuses them.

    It keeps the first layers, as many as it takes to have a layer of each type.
    """
    fields = {name: value for name, value in config.to_dict().items() if not name.startswith("_")}
    num_layers = config.num_hidden_layers
    heads = fields.get(config.attribute_map.get("num_attention_heads", "num_attention_heads"))
    lists = [value for value in fields.values() if isinstance(value, list | tuple) and len(value) == num_layers]
    kinds = list(zip(*(map(repr, each) for each in lists), strict=True))
    layers = min(max([3, *map(kinds.index, kinds)]) + 1, MOST_LAYERS, num_layers)

    def shrunk(name: str, value: Any) -> Any:
        if isinstance(value, list | tuple) and len(value) == num_layers:
            return [shrunk(name, each) for each in value[:layers]]
        if name == "per_layer_config" and value:
            return {layer: each for layer, each in value.items() if int(layer) < layers}
        if name == "head_dim" and value is None:
            return HEAD_SIZE
        if not isinstance(value, int) or isinstance(value, bool):
            return value
        if value == num_layers and re.search(r"layers?$", name):
            return layers
        if value == heads and name.endswith("heads"):
            return HEADS  # of K and V too, because some classes do not group queries
        size = next((size for pattern, size in SIZES if re.search(pattern, name)), value)
        return size if value and re.search(DERIVED, name) else min(value, size)

    # The config's RoPE is left out, so the class uses its default: factors may fit the config's true sizes alone.
    kept = {name: value for name, value in fields.items() if name not in ("rope_parameters", "rope_scaling")}
    tiny = type(config).from_dict({name: shrunk(name, value) for name, value in kept.items()})
    tiny._experts_implementation = "eager"
    return tiny


@torch.no_grad()
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
