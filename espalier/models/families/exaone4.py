"""EXAONE 4 (text): norms only behind each block; with a window, only the layers that have it have RoPE."""

from espalier.errors import EspalierError, shown
from espalier.models.config import Family, Raw, Windows, windows_by_layer_type
from espalier.models.layer_declaration import LayerNorms


def _windows(full: Raw) -> Windows:
    """Without `layer_types`, every sliding_window_pattern-th layer has full attention."""
    every = full["sliding_window_pattern"]
    is_number = isinstance(every, int) and not isinstance(every, bool) and every > 0
    if full["sliding_window"] is not None and full.get("layer_types") is None and not is_number:
        raise EspalierError(
            f"sliding_window_pattern = {shown(every)}; without layer_types a positive integer is needed; add "
            "layer_types with model_overrides"
        )
    return windows_by_layer_type(full, lambda layer: (layer + 1) % every != 0)


FAMILY = Family(
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
    qkv_bias=lambda full: False,
    out_bias=lambda full: False,
    windows=_windows,
    qk_norm=True,
    layer_norms=LayerNorms(None, None, "post_attention_layernorm", "post_feedforward_layernorm"),
    # A model without a window has RoPE in every layer.
    ropes=lambda full: [{} if full["sliding_window"] is None or window else None for window in _windows(full)],
)
