"""Tiny synthetic shapes with experts, latent attention and matrices in one, of the families that exist."""

from typing import Any

from espalier.bench.shapes import (
    DEEPSEEK_V2_FIELDS,
    DEEPSEEK_V3_FIELDS,
    GEMMA4_FIELDS,
    GPT_OSS_FIELDS,
    PHI3_FIELDS,
    QWEN3_MOE_FIELDS,
    Shape,
)
from espalier.errors import EspalierError
from tests.lab.synthetic.test_checkpoint import tiny

LATENT = {
    "num_key_value_heads": 8,
    "head_dim": 32,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 48,
}
DENSE = {"n_routed_experts": 16, "first_k_dense_replace": 4}
ROUTED = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
}
GROUPS = {"n_group": 4, "topk_group": 2, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 64, "norm_topk_prob": True}
QWEN2_MOE = {"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe"}
GEMMA4_TINY = {
    **GEMMA4_FIELDS,
    "global_head_dim": 128,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "sliding_window": 64,
    "final_logit_softcapping": 30.0,
    "hidden_size_per_layer_input": 0,
}
FIELDS: dict[str, dict[str, Any]] = {
    "qwen3-moe": {**QWEN3_MOE_FIELDS, **EXPERTS},
    "qwen2-moe": {**QWEN2_MOE, **EXPERTS, "shared_expert_intermediate_size": 96},
    "v2-dense": {**DEEPSEEK_V2_FIELDS, **LATENT, **DENSE, "q_lora_rank": None},
    "v3-dense": {**DEEPSEEK_V3_FIELDS, **LATENT, **DENSE, "q_lora_rank": 96},
    "v2": {**DEEPSEEK_V2_FIELDS, **LATENT, **ROUTED, "q_lora_rank": None, "norm_topk_prob": False},
    "v3": {**DEEPSEEK_V3_FIELDS, **LATENT, **ROUTED, **GROUPS, "q_lora_rank": 96, "routed_scaling_factor": 2.5},
    "v3.2": {
        **DEEPSEEK_V3_FIELDS,
        **LATENT,
        **ROUTED,
        **GROUPS,
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "q_lora_rank": 96,
        "routed_scaling_factor": 2.5,
        "index_topk": 24,
        "index_head_dim": 48,
        # So many that no score is 0, as in a tie.
        "index_n_heads": 24,
    },
    "gpt-oss": {
        **GPT_OSS_FIELDS,
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "intermediate_size": 64,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
    },
    "phi3": {**PHI3_FIELDS, "pad_token_id": 0, "original_max_position_embeddings": 2048},
    "gemma4": GEMMA4_TINY,
    "gemma4-moe": {
        **GEMMA4_TINY,
        "enable_moe_block": True,
        "num_experts": 16,
        "top_k_experts": 4,
        "moe_intermediate_size": 64,
    },
}
# Their layers keep states, which no block draft is planted for.
STATES = {"full_attention_interval": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
SIZES = {
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "mtp_num_hidden_layers": 0,
}
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3.6": {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", **STATES, **SIZES},
    "qwen3.6-moe": {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        **STATES,
        **SIZES,
        **EXPERTS,
        "shared_expert_intermediate_size": 64,
    },
    "nemotron": {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "ME*-",
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 32,
        "conv_kernel": 4,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 64,
        "moe_shared_expert_intermediate_size": 96,
        "routed_scaling_factor": 2.5,
        "hidden_act": "silu",
    },
}


def mixture(name: str, hot: int = 256) -> Shape:
    """Tiny, with the sizes of FIELDS."""
    plain = tiny(hot=hot)
    fields = {**plain.config_fields, "attention_bias": False, **(FIELDS | HYBRIDS)[name]}
    if name.startswith("gemma4"):  # its RoPE differs by layer
        fields = {field: value for field, value in fields.items() if not field.startswith("rope_")}
    return Shape(name, plain.hugging_face_id, plain.end_emitted_id, hot, fields)


def is_supported(shape: Shape) -> bool:
    """Whether the family exists, with experts if the shape has them."""
    try:
        return shape.target is not None
    except EspalierError:
        return False


SUPPORTED = [name for name in FIELDS if is_supported(mixture(name))]
WITH_EXPERTS = [name for name in SUPPORTED if mixture(name).target.experts is not None]
