"""DeepSeek-V3.2: DeepSeek-V3 whose layers attend to the rows that an indexer chooses (DeepSeek-AI 2025)."""

from dataclasses import replace

from espalier.models.families.deepseek import V3
from espalier.models.families.glm4_moe import experts_by_type
from espalier.models.index_config import INDEX_FIELDS

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
