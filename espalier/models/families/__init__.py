"""The model families.  Each file declares one: what of it differs, in names and sizes."""

from espalier.models.config import Family
from espalier.models.families import (
    deepseek,
    gemma2,
    gemma3,
    gemma4,
    glm4_moe,
    gpt_oss,
    llama,
    mimo,
    mistral,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
)

# To add a family from outside this package: FAMILIES[FAMILY.architecture] = FAMILY.
FAMILIES: dict[str, Family] = {
    family.architecture: family
    for family in (
        *(
            module.FAMILY
            for module in (llama, qwen2, qwen3, mistral, gemma2, gemma3, mimo, qwen2_moe, qwen3_moe, gpt_oss)
        ),
        *(gemma4.FAMILY, gemma4.UNIFIED),
        *(deepseek.V2, deepseek.V3, glm4_moe.GLM, glm4_moe.GLM_LITE, glm4_moe.DOTS),
    )
}
