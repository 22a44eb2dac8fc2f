"""Llama 2 and 3.x: full attention in every layer; biases only if the config sets them."""

from espalier.models.config import Family

FAMILY = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    defaults={
        "num_key_value_heads": None,
        "head_dim": None,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "mlp_bias": False,
    },
    in_drafts=True,
)
