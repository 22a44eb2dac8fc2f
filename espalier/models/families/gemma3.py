"""Gemma 2 and 3 (text): norms before and after each block, each with the stored weight plus 1; windows by layer.

Gemma 3 has one RoPE for each layer type.  Gemma 2 has the same RoPE in all layers, and soft caps on attention scores.
"""

from dataclasses import replace

from espalier.models.config import FULL_ATTENTION, SLIDING_ATTENTION, Family, Json, windows_in_even_layers
from espalier.models.config_values import positive_number, require_counts
from espalier.models.families.by_type import RopeBases, layer_types_of, ropes_by_type, windows_by_type
from espalier.models.stored_names import NORMS_AROUND_BLOCKS

ROPE_BASES: RopeBases = {
    FULL_ATTENTION: ("rope_theta", 1_000_000.0),
    SLIDING_ATTENTION: ("rope_local_base_freq", 10_000.0),
}


def _layer_types(config_fields: Json) -> list[str]:
    """Returns the type of each layer, from `layer_types`; by default, every sliding_window_pattern-th layer is full."""
    if config_fields.get("layer_types") is None:
        require_counts(config_fields, ("sliding_window_pattern",))
    return layer_types_of(config_fields, lambda layer: layer % config_fields["sliding_window_pattern"] == 0)


FAMILY = Family(
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    defaults={
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "rope_local_base_freq": None,
    },
    windows=lambda fields: windows_by_type(fields, _layer_types(fields)),
    qk_norm=True,
    layer_norms=NORMS_AROUND_BLOCKS,
    norm_offset=1.0,
    embedding_scale=lambda fields: float(fields["hidden_size"] ** 0.5),
    softmax_scale=lambda fields: positive_number(fields, "query_pre_attn_scalar") ** -0.5,
    layer_ropes=lambda fields: ropes_by_type(fields, _layer_types(fields), ROPE_BASES),
    supported_fields=("query_pre_attn_scalar",),
    activation_field="hidden_activation",
    multimodal_architectures=("Gemma3ForConditionalGeneration",),
)


GEMMA2 = replace(
    FAMILY,
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    defaults={
        **FAMILY.defaults,
        "max_position_embeddings": 8192,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    windows=windows_in_even_layers,
    qk_norm=False,
    layer_ropes=None,
    supported_fields=("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
    multimodal_architectures=(),
)
