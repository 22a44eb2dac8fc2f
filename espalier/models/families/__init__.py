"""The model families.  Each file declares one: what of it differs, in names and sizes."""

from espalier.models.config import Family
from espalier.models.families import (
    deepseek,
    gemma2,
    gemma3,
    gemma4,
    glm4_moe,
    gpt_oss,
    granite,
    laguna,
    llama,
    mimo,
    mistral,
    mixtral,
    muse_glimmer,
    olmo,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    smollm3,
)

# To add a family from outside this package: FAMILIES[FAMILY.architecture] = FAMILY.
FAMILIES: dict[str, Family] = {
    family.architecture: family
    for family in (
        *(module.FAMILY for module in (llama, qwen2, qwen3, mistral, mimo, qwen2_moe, qwen3_moe, gpt_oss)),
        *(gemma2.FAMILY, gemma3.FAMILY, gemma4.FAMILY, gemma4.UNIFIED),
        *(mistral.MINISTRAL, mistral.MINISTRAL3, mixtral.FAMILY, phi3.FAMILY, smollm3.FAMILY),
        *(granite.FAMILY, granite.MOE, granite.SHARED, granite.HYBRID, olmo.OLMO2, olmo.OLMO3, laguna.FAMILY),
        muse_glimmer.FAMILY,
        *(deepseek.V2, deepseek.V3, glm4_moe.GLM, glm4_moe.GLM_LITE, glm4_moe.DOTS),
    )
}
