"""Qwen2, 2.5 and 3, dense; MiMo-7B.

Qwen2's q, k and v always have a bias, the output projection never; upper layers may have a sliding window.  Qwen3 norms
each head of q and k before RoPE, and its head_dim is independent of hidden_size.  MiMo-7B is Qwen2 with multi-token
prediction layers, which put the hidden state before the embedding.
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


QWEN2 = Family(
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
    QWEN2,
    architecture="MiMoForCausalLM",
    model_type="mimo",
    honours=("num_nextn_predict_layers",),
    mtp=replace(SPECULATORS, prefix="model.mtp_layers.{}.", hidden_first=True),
)


QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    defaults={
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        **QWEN_WINDOW_DEFAULTS,
    },
    windows=qwen_windows,
    qk_norm=True,
    in_drafts=True,
)
