"""Qwen2 and 2.5: q, k and v always have a bias, the output projection never; upper layers may have a sliding window.

MiMo-7B is Qwen2 with multi-token prediction layers, which put the hidden state before the embedding.
"""

from dataclasses import replace

from espalier.models.config import Family, Raw, Windows, windows_if_used
from espalier.models.mtp_family import SPECULATORS

QWEN_WINDOW_DEFAULTS = {
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}


def qwen_windows(full: Raw) -> Windows:
    """With `use_sliding_window`, the window holds from layer `max_window_layers` on, or as `layer_types` says."""
    return windows_if_used(full, lambda layer: layer >= full["max_window_layers"])


FAMILY = Family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    defaults={
        "num_key_value_heads": 32,
        "head_dim": None,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        **QWEN_WINDOW_DEFAULTS,
    },
    qkv_bias=lambda full: True,
    out_bias=lambda full: False,
    windows=qwen_windows,
    in_drafts=True,
)


MIMO = replace(
    FAMILY,
    architecture="MiMoForCausalLM",
    model_type="mimo",
    honours=("num_nextn_predict_layers",),
    mtp=replace(SPECULATORS, prefix="model.mtp_layers.{}.", hidden_first=True),
)
