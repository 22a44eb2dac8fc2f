"""Gemma 2: Gemma 3's norms and scales; caps of attention logits, a window in every second layer, one RoPE."""

from dataclasses import replace

from espalier.models.config import Raw, Windows, windows_by_layer_type
from espalier.models.families.gemma3 import FAMILY as GEMMA3


def _windows(full: Raw) -> Windows:
    """In the layers that `layer_types` names; without that field, in every second layer, from the first on."""
    return windows_by_layer_type(full, default=lambda layer: layer % 2 == 0)


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
    windows=_windows,
    qk_norm=False,
    ropes=None,
    honours=("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
    multimodal=(),
)
