"""GLM-5 and its successors: DeepSeek-V3.2's layers, some of which share the rows that an earlier layer chose."""

from dataclasses import replace

from espalier.models.families.deepseek_v32 import FAMILY as V32
from espalier.models.families.glm4_moe import UNGROUPED

FAMILY = replace(
    V32,
    architecture="GlmMoeDsaForCausalLM",
    model_type="glm_moe_dsa",
    defaults={
        **V32.defaults,
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
