"""The model families.  Each file declares one family or several similar families."""

from espalier.models.config import Family
from espalier.models.families import (
    deepseek,
    gemma3,
    gemma4,
    glm4_moe,
    gpt_oss,
    granite,
    laguna,
    lfm2,
    llama,
    minimax,
    mistral,
    muse_glimmer,
    nemotron_h,
    qwen,
    qwen3_next,
)

# To add a family from outside this package: FAMILIES[FAMILY.architecture] = FAMILY.
FAMILIES: dict[str, Family] = {
    family.architecture: family
    for family in (
        *(llama.LLAMA, qwen.QWEN2, qwen.QWEN3, mistral.MISTRAL, qwen.MIMO),
        *(qwen.QWEN2_MOE, qwen.QWEN3_MOE, gpt_oss.FAMILY),
        *(gemma3.GEMMA2, gemma3.FAMILY, gemma4.FAMILY, gemma4.GEMMA4_UNIFIED),
        *(mistral.MINISTRAL, mistral.MINISTRAL3, mistral.MIXTRAL, mistral.PHI3, llama.SMOLLM3),
        *(granite.FAMILY, granite.MOE, granite.MOE_SHARED, granite.HYBRID, llama.OLMO2, llama.OLMO3, laguna.FAMILY),
        *(muse_glimmer.FAMILY, llama.EXAONE4),
        *(qwen3_next.FAMILY, qwen3_next.QWEN3_5, qwen3_next.QWEN3_5_MOE, lfm2.FAMILY, lfm2.LFM2_MOE, nemotron_h.FAMILY),
        *(deepseek.V2, deepseek.V3, glm4_moe.GLM, glm4_moe.GLM_LITE, glm4_moe.DOTS, minimax.FAMILY),
        *(glm4_moe.DEEPSEEK_V32, glm4_moe.GLM_SPARSE),
    )
}
