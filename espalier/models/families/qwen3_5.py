"""Qwen3.5, 3.6 and 3.8, dense and with experts: Qwen3-Next's layers, with their projections apart.

Checkpoints may hold a vision tower beside the text model, whose fields are then in `text_config`.  It is not read.
"""

from dataclasses import replace

from espalier.errors import EspalierError
from espalier.models.config import Raw
from espalier.models.families.qwen3_next import FAMILY as QWEN3_NEXT
from espalier.models.families.qwen3_next import text_fields


def nested_text_fields(raw: Raw) -> Raw:
    """The fields of the text model of a config.json with a vision tower."""
    text = raw.get("text_config", {})
    if not isinstance(text, dict):
        raise EspalierError(f"text_config = {text!r}; an object is needed; correct the config")
    beside = {name: value for name, value in raw.items() if name not in ("text_config", "vision_config")}
    return text_fields({**text, **beside})


DENSE = replace(
    QWEN3_NEXT,
    architecture="Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    defaults={
        **{name: value for name, value in QWEN3_NEXT.defaults.items() if "expert" not in name},
        "num_key_value_heads": 4,
        "intermediate_size": 12288,
    },
    experts=lambda full: None,
    honours=("partial_rotary_factor", "num_nextn_predict_layers", "attn_output_gate"),
)
MOE = replace(
    QWEN3_NEXT,
    architecture="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    defaults={**QWEN3_NEXT.defaults, "num_experts": 256, "num_experts_per_tok": 8},
)
DENSE_WITH_VISION, MOE_WITH_VISION = (
    replace(
        family,
        architecture=f"{name}ForConditionalGeneration",
        model_type=model_type,
        text_fields=nested_text_fields,
        stored_prefix="model.language_model.",
        unread={"model.visual.": "a vision tower"},
    )
    for family, name, model_type in ((DENSE, "Qwen3_5", "qwen3_5"), (MOE, "Qwen3_5Moe", "qwen3_5_moe"))
)
