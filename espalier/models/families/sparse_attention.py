"""DeepSeek-V3.2 and GLM-5: DeepSeek-V3 whose layers attend to the rows that an indexer chooses (DeepSeek-AI 2025).

In GLM-5 and its successors, some layers share the rows that an earlier layer chose.
"""

from dataclasses import replace

from espalier.models.families.deepseek import V3
from espalier.models.families.glm4_moe import UNGROUPED, experts_by_type
from espalier.models.latent_config import INDEX_FIELDS

FAMILY = replace(
    V3,
    architecture="DeepseekV32ForCausalLM",
    model_type="deepseek_v32",
    defaults={**V3.defaults, **INDEX_FIELDS, "max_position_embeddings": 163840, "indexer_rope_interleave": False},
    honours=(*V3.honours, "index_topk"),
    experts=experts_by_type,
    indexed=True,
    in_drafts=False,
    # Releases of transformers call the same layers by either name.
    layer_kinds=("indexed_attention", "deepseek_sparse_attention"),
)


GLM = replace(
    FAMILY,
    architecture="GlmMoeDsaForCausalLM",
    model_type="glm_moe_dsa",
    defaults={
        **FAMILY.defaults,
        **UNGROUPED,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "index_n_heads": 32,
        "indexer_rope_interleave": True,
    },
)
