"""Qwen3.5, 3.6 and 3.8, dense and with experts: Qwen3-Next's layers, with their projections apart."""

from dataclasses import replace

from espalier.models.families.qwen3_next import FAMILY as QWEN3_NEXT

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
    multimodal=("Qwen3_5ForConditionalGeneration",),
)
MOE = replace(
    QWEN3_NEXT,
    architecture="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    defaults={**QWEN3_NEXT.defaults, "num_experts": 256, "num_experts_per_tok": 8},
    multimodal=("Qwen3_5MoeForConditionalGeneration",),
)
