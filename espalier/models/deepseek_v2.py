"""DeepSeek-V2 and V2-Lite: latent attention with interleaved RoPE; queries with or without a latent of their own."""

from espalier.errors import EspalierError
from espalier.models.config import Family, Raw, full_attention

EXPERT_FIELDS = (
    "n_routed_experts",
    "n_shared_experts",
    "first_k_dense_replace",
    "scoring_func",
    "topk_method",
    "routed_scaling_factor",
)


def refuse_experts(full: Raw) -> None:
    """Raises EspalierError if a layer has routed experts."""
    dense, layers = int(full["first_k_dense_replace"] or 0), int(full["num_hidden_layers"])
    if full["n_routed_experts"] and dense < layers:
        raise EspalierError(
            f"n_routed_experts = {full['n_routed_experts']!r} from layer {dense} on is not supported; mixture "
            "of experts of this family comes next: use a checkpoint whose layers are all dense"
        )


FAMILY = Family(
    architecture="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    defaults={
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rope_interleave": True,
        "first_k_dense_replace": 0,
        "n_routed_experts": 64,
    },
    qkv_bias=lambda full: bool(full["attention_bias"]),
    out_bias=lambda full: bool(full["attention_bias"]),
    windows=full_attention,
    latent=True,
    honours=EXPERT_FIELDS,
    experts=refuse_experts,
)
