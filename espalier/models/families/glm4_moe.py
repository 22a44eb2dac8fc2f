"""Families with DeepSeek-V3's experts and another attention: GLM-4.5 to 4.7, 4.7-Flash and 5, dots.llm1, DeepSeek-V3.2.

GLM-4.5, 4.6 and 4.7 have K and V heads, and rotate half of the values of a head.  GLM-4.7-Flash has latent attention.
dots.llm1 has the attention of Qwen3.  The layers of DeepSeek-V3.2 and GLM-5 attend to the rows that an indexer chooses
(DeepSeek-AI 2025).  In GLM-5 and later, some layers attend to the rows that an earlier layer's indexer chose.
"""

from dataclasses import replace

from espalier.errors import EspalierError
from espalier.models.config import Experts, Family, Json, windows_by_layer_type
from espalier.models.families.deepseek import V3, routed_experts
from espalier.models.families.qwen import QWEN3 as QWEN3
from espalier.models.latent_config import INDEXER_DEFAULTS
from espalier.models.stored_names import NEXTN_LAYERS

# Field values that turn off the choice of experts by groups.
UNGROUPED_ROUTING = {"n_group": 1, "topk_group": 1}


def sparse_layers(config_fields: Json) -> frozenset[int] | None:
    """Returns the indices of the layers whose `mlp_layer_types` is sparse; None if the field is missing."""
    types = config_fields.get("mlp_layer_types")
    if types is None:
        return None
    if len(types) != config_fields["num_hidden_layers"] or {*types} - {"dense", "sparse"}:
        raise EspalierError(
            f"mlp_layer_types = {types!r}; 'dense' or 'sparse' is needed for each of "
            f"{config_fields['num_hidden_layers']} layers; correct the config"
        )
    return frozenset(layer for layer, kind in enumerate(types) if kind == "sparse")


def experts_by_type(config_fields: Json) -> Experts | None:
    """Returns the experts of the sparse layers.  If `mlp_layer_types` is missing, DeepSeek-V3's fields decide which
    layers have experts."""
    layers = sparse_layers(config_fields)
    return V3.experts(config_fields) if layers is None else routed_experts(config_fields, ("noaux_tc",), layers)


GLM = Family(
    architecture="Glm4MoeForCausalLM",
    model_type="glm4_moe",
    defaults={
        **UNGROUPED_ROUTING,
        "num_key_value_heads": 8,
        "head_dim": None,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "partial_rotary_factor": 0.5,
        "use_qk_norm": False,
        "first_k_dense_replace": 1,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "moe_intermediate_size": 1408,
        "routed_scaling_factor": 1.0,
    },
    out_bias=lambda fields: False,
    qk_norm="use_qk_norm",
    usable_in_drafts=True,
    supported_fields=(*V3.supported_fields, "partial_rotary_factor"),
    experts=V3.experts,
    mtp=NEXTN_LAYERS,
)
GLM_LITE = replace(
    V3,
    architecture="Glm4MoeLiteForCausalLM",
    model_type="glm4_moe_lite",
    defaults={
        **V3.defaults,
        **UNGROUPED_ROUTING,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "first_k_dense_replace": 1,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536,
        "routed_scaling_factor": 1.8,
    },
    experts=experts_by_type,
)
DOTS = replace(
    QWEN3,
    architecture="Dots1ForCausalLM",
    model_type="dots1",
    defaults={
        **QWEN3.defaults,
        **UNGROUPED_ROUTING,
        "head_dim": None,
        "max_position_embeddings": 2048,
        "sliding_window": 4096,
        "max_window_layers": 62,
        "first_k_dense_replace": 0,
        "n_shared_experts": None,
        "n_routed_experts": None,
        "num_experts_per_tok": None,
        "moe_intermediate_size": 1408,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    },
    windows=lambda fields: windows_by_layer_type(fields, lambda layer: layer >= fields["max_window_layers"]),
    experts=V3.experts,
    supported_fields=V3.supported_fields,
)


DEEPSEEK_V32 = replace(
    V3,
    architecture="DeepseekV32ForCausalLM",
    model_type="deepseek_v32",
    defaults={**V3.defaults, **INDEXER_DEFAULTS, "max_position_embeddings": 163840, "indexer_rope_interleave": False},
    supported_fields=(*V3.supported_fields, "index_topk"),
    experts=experts_by_type,
    has_indexer=True,
    usable_in_drafts=False,
    # Two releases of transformers have different names for the same layer type.
    extra_layer_types=("indexed_attention", "deepseek_sparse_attention"),
)


GLM_SPARSE = replace(
    DEEPSEEK_V32,
    architecture="GlmMoeDsaForCausalLM",
    model_type="glm_moe_dsa",
    defaults={
        **DEEPSEEK_V32.defaults,
        **UNGROUPED_ROUTING,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "index_n_heads": 32,
        "indexer_rope_interleave": True,
    },
)
