"""Llama 2 and 3.x (full attention in every layer, biases only if the config has them), and similar families.

SmolLM3 has layers without RoPE, which may have a sliding window.  OLMo 2 and 3 norm only the outputs of blocks, and
have one norm over all heads of q and one over all heads of k; OLMo 3 has windows and RoPE by layer type.  EXAONE 4
(text) norms only the outputs of blocks; in its models with a window, only sliding layers have RoPE.
"""

from dataclasses import replace

from espalier.errors import EspalierError, shown
from espalier.models.config import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    Family,
    Json,
    LayerWindows,
    windows_by_layer_type,
    windows_if_enabled,
)
from espalier.models.config_values import require_counts
from espalier.models.families.by_type import RopeBases, layer_types_of, ropes_by_type, windows_by_type
from espalier.models.stored_names import LayerNorms

LLAMA = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    defaults={
        "num_key_value_heads": None,
        "head_dim": None,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "mlp_bias": False,
    },
    usable_in_drafts=True,
)
ROPE_BASES: RopeBases = {FULL_ATTENTION: ("rope_theta", 5e5), SLIDING_ATTENTION: ("rope_theta", 5e5)}


def _layers_with_rope(config_fields: Json) -> list[bool]:
    """Returns for each layer whether it has RoPE.  In `no_rope_layers`, 1 means that a layer has RoPE."""
    layers, flags = config_fields["num_hidden_layers"], config_fields["no_rope_layers"]
    if flags is None:
        require_counts(config_fields, ("no_rope_layer_interval",))
        return [layer % config_fields["no_rope_layer_interval"] != 0 for layer in range(1, layers + 1)]
    if not isinstance(flags, list) or len(flags) < layers or not set(map(repr, flags)) <= {"0", "1"}:
        raise EspalierError(
            f"no_rope_layers = {shown(flags)}; 0 or 1 is needed for each of {layers} layers; correct it"
        )
    return [bool(flag) for flag in flags[:layers]]


SMOLLM3 = replace(
    LLAMA,
    architecture="SmolLM3ForCausalLM",
    model_type="smollm3",
    defaults={
        **LLAMA.defaults,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
        "rope_theta": 2e6,
    },
    windows=lambda fields: windows_if_enabled(fields, lambda layer: not _layers_with_rope(fields)[layer]),
    layer_ropes=lambda fields: [{} if rope else None for rope in _layers_with_rope(fields)],
    supported_fields=("no_rope_layers",),
    usable_in_drafts=False,
)


def _layer_types(config_fields: Json) -> list[str]:
    """Returns the type of each layer, from `layer_types`; by default, every fourth layer has full attention."""
    return layer_types_of(config_fields, lambda layer: layer % 4 == 0)


OLMO2 = replace(
    LLAMA,
    architecture="Olmo2ForCausalLM",
    model_type="olmo2",
    defaults={**LLAMA.defaults, "rms_norm_eps": 1e-5},
    qk_norm=True,
    qk_norm_over_all_heads=True,
    layer_norms=LayerNorms(None, None, "post_attention_layernorm", "post_feedforward_layernorm"),
    usable_in_drafts=False,
)
OLMO3 = replace(
    OLMO2,
    architecture="Olmo3ForCausalLM",
    model_type="olmo3",
    defaults={**OLMO2.defaults, "sliding_window": 4096},
    windows=lambda fields: windows_by_type(fields, _layer_types(fields)),
    layer_ropes=lambda fields: ropes_by_type(fields, _layer_types(fields), ROPE_BASES),
)


def _exaone4_windows(config_fields: Json) -> LayerWindows:
    """Returns the window of each layer.  By default, every sliding_window_pattern-th layer has full attention."""
    pattern = config_fields["sliding_window_pattern"]
    is_number = isinstance(pattern, int) and not isinstance(pattern, bool) and pattern > 0
    if config_fields["sliding_window"] is not None and config_fields.get("layer_types") is None and not is_number:
        raise EspalierError(
            f"sliding_window_pattern = {shown(pattern)}; without layer_types a positive integer is needed; add "
            "layer_types with model_overrides"
        )
    return windows_by_layer_type(config_fields, lambda layer: (layer + 1) % pattern != 0)


EXAONE4 = Family(
    architecture="Exaone4ForCausalLM",
    model_type="exaone4",
    defaults={
        "num_key_value_heads": 32,
        "head_dim": None,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    qkv_bias=lambda fields: False,
    out_bias=lambda fields: False,
    windows=_exaone4_windows,
    qk_norm=True,
    layer_norms=LayerNorms(None, None, "post_attention_layernorm", "post_feedforward_layernorm"),
    # A model without a window has RoPE in every layer.
    layer_ropes=lambda fields: [
        {} if fields["sliding_window"] is None or window else None for window in _exaone4_windows(fields)
    ],
)
