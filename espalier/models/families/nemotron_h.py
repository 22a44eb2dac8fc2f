"""Nemotron-H and Nemotron 3: each layer is one block: Mamba-2, attention without RoPE, an MLP, or experts.

MLPs have no gate: down(relu(up(x))²).
"""

from espalier.cache.layer_spec import NO_MIXING, LayerSpec, RecurrentState
from espalier.errors import EspalierError, shown
from espalier.kernels.ops.activation import RELU2
from espalier.kernels.ops.experts import Routing
from espalier.models.config import (
    FULL_ATTENTION,
    LINEAR_LAYER,
    Experts,
    Family,
    Json,
    LayerWindows,
    ModelConfig,
    no_windows,
)
from espalier.models.families.granite import require_mamba_sizes, with_numeric_time_step_limit
from espalier.models.layer_loading import load_attention, load_experts, load_mamba2, specs_by_type
from espalier.models.layers.decoder import SingleBlockLayer
from espalier.models.layers.linear import Embedding
from espalier.models.layers.recurrent import Mamba2
from espalier.models.rope import RopeTables
from espalier.models.stored_names import UP_DOWN, StoredNames
from espalier.models.weights import Weights

MOE_LAYER, MLP_LAYER = "moe", "mlp"
# The layer types, by the letters of hybrid_override_pattern and by the names in older configs.
LAYER_TYPES = {
    "M": LINEAR_LAYER,
    "*": FULL_ATTENTION,
    "E": MOE_LAYER,
    "-": MLP_LAYER,
    "mamba": LINEAR_LAYER,
    "attention": FULL_ATTENTION,
}
COUNT_FIELDS = ("mamba_num_heads", "n_groups", "ssm_state_size", "mamba_head_dim", "conv_kernel")
RENAMED_FIELDS = {"layer_norm_epsilon": "rms_norm_eps", "layers_block_type": "layer_types"}


def _normalise_fields(config_json: Json) -> Json:
    """Returns the fields under the names that all families share, with `layer_types` added.  A field rms_norm_eps is
    removed, because transformers does not read it in this family."""
    fields = {name: value for name, value in config_json.items() if name != "rms_norm_eps"}
    fields |= {other: config_json[name] for name, other in RENAMED_FIELDS.items() if name in config_json}
    fields = with_numeric_time_step_limit(fields)
    types = fields.get("layer_types") or config_json.get("hybrid_override_pattern")
    if isinstance(types, list | str):
        fields["layer_types"] = [LAYER_TYPES.get(kind, kind) if isinstance(kind, str) else kind for kind in types]
        fields["num_hidden_layers"] = len(types)
    return fields


def _checked_windows(config_fields: Json) -> LayerWindows:
    """Returns None for each layer, because no layer has a window.  Raises EspalierError for unsupported values."""
    require_mamba_sizes(config_fields, COUNT_FIELDS, ("mamba_num_heads", "n_groups"))
    for name, only in (("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu"), ("moe_latent_size", None)):
        if config_fields[name] != only:
            raise EspalierError(
                f"{name} = {shown(config_fields[name])} is not supported, only {only!r}; use another model"
            )
    for name in ("use_bias", "mlp_bias", "attention_bias"):
        if config_fields[name]:
            raise EspalierError(
                f"{name} = {shown(config_fields[name])} is not supported, only False; use another model"
            )
    return no_windows(config_fields)


def _experts(config_fields: Json) -> Experts | None:
    layers = frozenset(layer for layer, kind in enumerate(config_fields["layer_types"] or ()) if kind == MOE_LAYER)
    if not layers:
        return None
    routing = Routing(
        config_fields["n_routed_experts"],
        config_fields["num_experts_per_tok"],
        scoring="sigmoid",
        norm_topk_prob=bool(config_fields["norm_topk_prob"]),
        routed_scaling_factor=config_fields["routed_scaling_factor"],
        n_group=config_fields["n_group"] or 1,
        topk_group=config_fields["topk_group"] or 1,
        group_score="top2_sum",
        correction_bias=True,
    )
    shared = config_fields["moe_shared_expert_intermediate_size"] if config_fields["n_shared_experts"] else 0
    return Experts(
        layers,
        routing,
        config_fields["moe_intermediate_size"],
        shared,
        "shared_experts",
        activation=RELU2,
        prefix="mixer.",
        names=UP_DOWN,
        shared_names=UP_DOWN,
    )


def _recurrent_state(config: ModelConfig) -> RecurrentState:
    taps, heads, groups, size, v_size = (
        config.raw[name] for name in ("conv_kernel", "mamba_num_heads", "n_groups", "ssm_state_size", "mamba_head_dim")
    )
    return RecurrentState(taps, heads, groups, size, v_size, delta=False, units=False)


def _layer_specs(config: ModelConfig) -> tuple[LayerSpec, ...]:
    state, mlp_spec = _recurrent_state(config), LayerSpec(0, NO_MIXING)
    state_spec = LayerSpec(state.heads, state)
    return specs_by_type(config, {LINEAR_LAYER: state_spec, MOE_LAYER: mlp_spec, MLP_LAYER: mlp_spec})


def _load_layer(weights: Weights, config: ModelConfig, prefix: str, layer: int, rope: RopeTables) -> SingleBlockLayer:
    """Loads layer number `layer`, whose weights' names begin with `prefix`."""
    kind, under = config.raw["layer_types"][layer], f"{prefix}mixer."
    norm = weights.norm(f"{prefix}norm", config.hidden_size, config.rms_norm_eps)
    if kind == LINEAR_LAYER:
        return SingleBlockLayer(layer, norm, mixer=_load_mamba(weights, config, under))
    if kind == FULL_ATTENTION:
        return SingleBlockLayer(layer, norm, mixer=load_attention(weights, config, under, config.hidden_size, rope))
    if kind == MLP_LAYER:
        sizes = config.hidden_size, config.intermediate_size
        return SingleBlockLayer(layer, norm, mlp=weights.mlp(under, *sizes, False, RELU2, names=UP_DOWN))
    assert config.experts is not None
    return SingleBlockLayer(layer, norm, mlp=load_experts(weights, config.experts, under, config.hidden_size, RELU2))


def _load_mamba(weights: Weights, config: ModelConfig, prefix: str) -> Mamba2:
    """Loads the Mamba-2 block whose weights' names begin with `prefix`."""
    fields = config.raw
    options = {"bias": False, "conv_bias": bool(fields["use_conv_bias"]), "dt_limits": fields["time_step_limit"]}
    return load_mamba2(weights, prefix, _recurrent_state(config), config.hidden_size, config.rms_norm_eps, **options)


def _load_embedding(weights: Weights, config: ModelConfig, embedding_scale: float) -> Embedding:
    """Loads the embedding.  embedding_scale: the factor of every embedding."""
    return Embedding(weights.load("model.embeddings.weight", config.vocab_size, config.hidden_size), embedding_scale)


FAMILY = Family(
    architecture="NemotronHForCausalLM",
    model_type="nemotron_h",
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 21504,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "use_bias": False,
        "mlp_bias": False,
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "time_step_limit": (0.0, float("inf")),
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "moe_latent_size": None,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "layer_types": None,
    },
    qkv_bias=lambda fields: False,
    out_bias=lambda fields: False,
    windows=_checked_windows,
    layer_ropes=lambda fields: [None] * fields["num_hidden_layers"],
    experts=_experts,
    supported_fields=(
        *("n_routed_experts", "n_shared_experts", "num_local_experts", "routed_scaling_factor"),
        *("num_nextn_predict_layers", "hidden_act"),
    ),
    normalise_fields=_normalise_fields,
    extra_layer_types=(LINEAR_LAYER, MOE_LAYER, MLP_LAYER),
    layer_specs=_layer_specs,
    load_layer=_load_layer,
    load_embedding=_load_embedding,
    stored_names=StoredNames((("backbone.", "model."),)),
    ignored_weights={"mtp.": "layers of multi-token prediction"},
    final_norm="model.norm_f",
)
