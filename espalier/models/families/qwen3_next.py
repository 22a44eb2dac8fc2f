"""Qwen3-Next: every fourth layer has gated attention, other layers the gated delta rule; all may have experts.

RoPE rotates a quarter of a head's values, and checkpoints store weight - 1 for norms.  Checkpoints may contain an MTP
layer with gated attention.  Qwen3.5, 3.6 and 3.8 have the same layers, but store projections separately.
"""

from dataclasses import replace

from espalier.cache.layer_spec import LayerSpec, RecurrentState
from espalier.errors import EspalierError, shown
from espalier.kernels.ops.recurrence import ShortConv
from espalier.model_files import MAX_HEAD_SIZE
from espalier.models.config import (
    FULL_ATTENTION,
    LINEAR_LAYER,
    Experts,
    Json,
    LayerWindows,
    ModelConfig,
    hybrid_windows,
)
from espalier.models.config_values import require_counts, require_multiple
from espalier.models.families.qwen import QWEN3_MOE, experts_with_shared
from espalier.models.layer_loading import load_head_norms, specs_by_type
from espalier.models.layers.attention import GatedAttention
from espalier.models.layers.decoder import Mixer
from espalier.models.layers.linear import Linear
from espalier.models.layers.recurrent import DeltaNet
from espalier.models.rope import RopeTables
from espalier.models.stored_names import MTPFamily
from espalier.models.weights import Weights

HEAD_SIZE_FIELDS = ("linear_key_head_dim", "linear_value_head_dim")
COUNT_FIELDS = ("linear_num_key_heads", "linear_num_value_heads", "linear_conv_kernel_dim")
# Fields for image tokens, which have three position ids.  They are removed, because a text token's three ids are equal.
IMAGE_ROPE_FIELDS = ("mrope_section", "mrope_interleaved")
QWEN_MTP = MTPFamily(
    prefix="mtp.layers.{}.",
    outer_prefix="mtp.",
    embed_norm="pre_fc_norm_embedding",
    hidden_norm="pre_fc_norm_hidden",
    project="fc",
    norm="norm",
    embed="mtp.embed_tokens",
    head="mtp.lm_head",
    layer_type=FULL_ATTENTION,
)


def normalise_fields(config_json: Json) -> Json:
    """Returns the fields, with `layer_types`, the number of MTP layers, and a RoPE without image fields."""
    count, interval = config_json.get("num_hidden_layers"), config_json.get("full_attention_interval") or 4
    types = config_json.get("layer_types")
    if types is None and type(count) is int and type(interval) is int and interval > 0:
        types = [FULL_ATTENTION if (layer + 1) % interval == 0 else LINEAR_LAYER for layer in range(count)]
    mtp_fields = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
    mtp = next((config_json[name] for name in mtp_fields if name in config_json), 1)
    ropes = {
        name: {key: value for key, value in config_json[name].items() if key not in IMAGE_ROPE_FIELDS}
        for name in ("rope_parameters", "rope_scaling")
        if isinstance(config_json.get(name), dict)
    }
    return {**config_json, "layer_types": types, "num_nextn_predict_layers": mtp, **ropes}


def checked_windows(config_fields: Json) -> LayerWindows:
    """Returns None for each layer, because no layer has a window.  Raises EspalierError for invalid sizes."""
    require_counts(config_fields, HEAD_SIZE_FIELDS, MAX_HEAD_SIZE)
    require_counts(config_fields, COUNT_FIELDS)
    require_multiple(config_fields, "linear_num_value_heads", "linear_num_key_heads")
    if config_fields.get("attn_output_gate", True) is not True:
        raise EspalierError(
            f"attn_output_gate = {shown(config_fields['attn_output_gate'])} is not supported, only True; "
            "use another model"
        )
    return hybrid_windows(config_fields)


def recurrent_state(config: ModelConfig) -> RecurrentState:
    fields = config.raw
    return RecurrentState(
        taps=fields["linear_conv_kernel_dim"],
        heads=fields["linear_num_value_heads"],
        k_heads=fields["linear_num_key_heads"],
        k_size=fields["linear_key_head_dim"],
        v_size=fields["linear_value_head_dim"],
    )


def layer_specs(config: ModelConfig) -> tuple[LayerSpec, ...]:
    state = recurrent_state(config)
    return specs_by_type(config, {LINEAR_LAYER: LayerSpec(state.heads, state)})


def load_mixer(weights: Weights, config: ModelConfig, prefix: str, layer: int, rope: RopeTables) -> Mixer:
    """Loads the first block of layer number `layer`, under `prefix`: the gated delta rule or gated attention."""
    if config.raw["layer_types"][layer] == LINEAR_LAYER:
        return load_delta_net(weights, config, f"{prefix}linear_attn.")
    return load_gated_attention(weights, config, f"{prefix}self_attn.", rope)


def load_gated_attention(weights: Weights, config: ModelConfig, prefix: str, rope: RopeTables) -> GatedAttention:
    """Loads the attention under `prefix`, in which q_proj stacks q and the gate of each head."""
    size, hidden = config.head_size, config.hidden_size
    rows = (2 * config.heads * size, config.kv_heads * size, config.kv_heads * size)
    return GatedAttention(
        weights.linear(prefix, ("q_proj", "k_proj", "v_proj"), rows, hidden, config.attention_bias),
        weights.linear(prefix, ("o_proj",), (hidden,), config.heads * size, config.out_bias),
        size,
        rope,
        load_head_norms(weights, config, prefix)._replace(has_gates=True),
    )


def load_delta_net(weights: Weights, config: ModelConfig, prefix: str) -> DeltaNet:
    """Loads the gated delta rule under `prefix`.
    Qwen3-Next stores q, k, v and z as one matrix, and b and a as another, both grouped by k head.  Qwen3.5 stores qkv,
    z, b and a separately."""
    state, hidden = recurrent_state(config), config.hidden_size
    inner, is_grouped = state.heads * state.v_size, weights.has_matrix(f"{prefix}in_proj_qkvz")

    def load_joined(joined_name: str, separate_names: tuple[str, str], rows: tuple[int, int]) -> Linear:
        """Loads two matrices as one layer, in either way of storage.  rows: the rows of each matrix."""
        names, sizes = ((joined_name,), (sum(rows),)) if is_grouped else (separate_names, rows)
        return weights.linear(prefix, names, sizes, hidden, bias=False)

    return DeltaNet(
        state,
        load_joined("in_proj_qkvz", ("in_proj_qkv", "in_proj_z"), (state.channels, inner)),
        load_joined("in_proj_ba", ("in_proj_b", "in_proj_a"), (state.heads, state.heads)),
        is_grouped,
        ShortConv(weights.load(f"{prefix}conv1d.weight", state.channels, 1, state.taps)[:, 0]),
        weights.load_exact(f"{prefix}A_log", state.heads),
        weights.load_exact(f"{prefix}dt_bias", state.heads),
        weights.norm(f"{prefix}norm", state.v_size, config.rms_norm_eps),
        weights.linear(prefix, ("out_proj",), (hidden,), inner, bias=False),
    )


def experts(config_fields: Json) -> Experts | None:
    declared = experts_with_shared(config_fields, default_num_experts=512)
    return None if declared is None else replace(declared, storage="joined")


FAMILY = replace(
    QWEN3_MOE,
    architecture="Qwen3NextForCausalLM",
    model_type="qwen3_next",
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "intermediate_size": 5632,
        "partial_rotary_factor": 0.25,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
    },
    windows=checked_windows,
    experts=experts,
    norm_offset=1.0,
    usable_in_drafts=False,
    supported_fields=(
        *("num_experts", "num_local_experts", "shared_expert_intermediate_size", "partial_rotary_factor"),
        *("num_nextn_predict_layers", "attn_output_gate"),
    ),
    normalise_fields=normalise_fields,
    extra_layer_types=(LINEAR_LAYER,),
    layer_specs=layer_specs,
    load_mixer=load_mixer,
    mtp=QWEN_MTP,
)


QWEN3_5 = replace(
    FAMILY,
    architecture="Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    defaults={
        **{name: value for name, value in FAMILY.defaults.items() if "expert" not in name},
        "num_key_value_heads": 4,
        "intermediate_size": 12288,
    },
    experts=lambda fields: None,
    supported_fields=("partial_rotary_factor", "num_nextn_predict_layers", "attn_output_gate"),
    multimodal_architectures=("Qwen3_5ForConditionalGeneration",),
)
QWEN3_5_MOE = replace(
    FAMILY,
    architecture="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    defaults={**FAMILY.defaults, "num_experts": 256, "num_experts_per_tok": 8},
    multimodal_architectures=("Qwen3_5MoeForConditionalGeneration",),
)
