"""OLMo 2 and OLMo 3: norms only behind each block, and of all of q and of k; OLMo 3 has windows and RoPE by type."""

from dataclasses import replace

from espalier.models.config import LayerNorms, Raw
from espalier.models.families.by_type import FULL, SLIDING, Bases, kinds_of, ropes_of, windows_of
from espalier.models.families.llama import FAMILY as LLAMA

BASES: Bases = {FULL: ("rope_theta", 5e5), SLIDING: ("rope_theta", 5e5)}


def _layer_types(full: Raw) -> list[str]:
    """The type of each layer; without `layer_types`, every fourth has full attention."""
    return kinds_of(full, lambda layer: layer % 4 == 0)


OLMO2 = replace(
    LLAMA,
    architecture="Olmo2ForCausalLM",
    model_type="olmo2",
    defaults={**LLAMA.defaults, "rms_norm_eps": 1e-5},
    qk_norm=True,
    wide_qk_norm=True,
    layer_norms=LayerNorms(None, None, "post_attention_layernorm", "post_feedforward_layernorm"),
    in_drafts=False,
)
OLMO3 = replace(
    OLMO2,
    architecture="Olmo3ForCausalLM",
    model_type="olmo3",
    defaults={**OLMO2.defaults, "sliding_window": 4096},
    windows=lambda full: windows_of(full, _layer_types(full)),
    ropes=lambda full: ropes_of(full, _layer_types(full), BASES),
)
