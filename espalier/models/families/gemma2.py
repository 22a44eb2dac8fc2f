"""Gemma 2: Gemma 3's norms and scales; caps of attention logits, a window in every second layer, one RoPE."""

from dataclasses import replace

from espalier.models.config import windows_in_every_second
from espalier.models.families.gemma3 import FAMILY as GEMMA3

FAMILY = replace(
    GEMMA3,
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    defaults={
        **GEMMA3.defaults,
        "max_position_embeddings": 8192,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    windows=windows_in_every_second,
    qk_norm=False,
    ropes=None,
    honours=("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
    multimodal=(),
)
