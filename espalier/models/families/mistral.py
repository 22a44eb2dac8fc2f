"""Mistral: no biases; if the config sets a sliding window, every layer has it."""

from espalier.errors import EspalierError
from espalier.models.config import Family, Raw, Windows


def windows(full: Raw) -> Windows:
    """The same window for every layer.

    Transformers ignores `layer_types` for Mistral.  Raises EspalierError for a list that contradicts that.
    """
    window = full["sliding_window"]
    if window is not None and "full_attention" in (full.get("layer_types") or ()):
        raise EspalierError(
            "layer_types with 'full_attention' and a sliding_window are both set, but MistralForCausalLM uses the "
            "window in every layer; remove one of them with model_overrides"
        )
    return (window,) * int(full["num_hidden_layers"])


FAMILY = Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    defaults={
        "num_key_value_heads": 8,
        "head_dim": None,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "sliding_window": 4096,
    },
    qkv_bias=lambda full: False,
    out_bias=lambda full: False,
    windows=windows,
)
