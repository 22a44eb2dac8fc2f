"""Qwen3 (dense): each head of q and k is normed before RoPE; head_dim is independent of hidden_size."""

from espalier.models.config import Family
from espalier.models.families.qwen2 import QWEN_WINDOW_DEFAULTS, qwen_windows

FAMILY = Family(
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
