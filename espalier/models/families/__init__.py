"""The model families.  Each file declares one: what of it differs, in names and sizes."""

from dataclasses import replace

from espalier.models.config import Family
from espalier.models.families import (
    deepseek,
    deepseek_v32,
    exaone4,
    gemma2,
    gemma3,
    gemma4,
    glm4_moe,
    glm_moe_dsa,
    gpt_oss,
    granite,
    granite_hybrid,
    laguna,
    lfm2,
    llama,
    mimo,
    mistral,
    mixtral,
    muse_glimmer,
    nemotron_h,
    olmo,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_next,
    smollm3,
)

GRANITE_HYBRID = replace(granite.HYBRID, variant=granite_hybrid.with_states)
# To add a family from outside this package: FAMILIES[FAMILY.architecture] = FAMILY.
FAMILIES: dict[str, Family] = {
    family.architecture: family
    for family in (
        *(module.FAMILY for module in (llama, qwen2, qwen3, mistral, mimo, qwen2_moe, qwen3_moe, gpt_oss)),
        *(gemma2.FAMILY, gemma3.FAMILY, gemma4.FAMILY, gemma4.UNIFIED),
        *(mistral.MINISTRAL, mistral.MINISTRAL3, mixtral.FAMILY, phi3.FAMILY, smollm3.FAMILY),
        *(granite.FAMILY, granite.MOE, granite.SHARED, GRANITE_HYBRID, olmo.OLMO2, olmo.OLMO3, laguna.FAMILY),
        *(muse_glimmer.FAMILY, exaone4.FAMILY),
        *(qwen3_next.FAMILY, qwen3_5.DENSE, qwen3_5.MOE, lfm2.FAMILY, lfm2.MOE, nemotron_h.FAMILY),
        *(deepseek.V2, deepseek.V3, glm4_moe.GLM, glm4_moe.GLM_LITE, glm4_moe.DOTS),
        *(deepseek_v32.FAMILY, glm_moe_dsa.FAMILY),
    )
}
