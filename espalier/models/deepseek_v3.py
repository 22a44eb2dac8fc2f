"""DeepSeek-V3: the attention of DeepSeek-V2, its RoPE interleaved or in halves."""

from espalier.models.config import Family, full_attention
from espalier.models.deepseek_v2 import EXPERT_FIELDS, refuse_experts

FAMILY = Family(
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    defaults={
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "hidden_act": "silu",
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rope_interleave": True,
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
    },
    qkv_bias=lambda full: bool(full["attention_bias"]),
    out_bias=lambda full: bool(full["attention_bias"]),
    windows=full_attention,
    latent=True,
    honours=(*EXPERT_FIELDS, "num_nextn_predict_layers"),
    experts=refuse_experts,
)
