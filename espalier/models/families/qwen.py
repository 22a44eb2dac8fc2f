"""Qwen2, 2.5 and 3, dense and with experts (30B-A3B, 235B-A22B, Coder); MiMo-7B.

In Qwen2, q, k and v always have a bias and the output projection never has one.  Upper layers may have a sliding
window.  Qwen3 norms each head of q and k before RoPE, and its head_dim is independent of hidden_size.  MiMo-7B is Qwen2
with MTP layers, whose projection reads the hidden state first, then the embedding.  In Qwen2-MoE and Qwen3-MoE, all
layers have experts, except the layers in mlp_only_layers.  Qwen2-MoE also has a gated shared expert.
"""

from dataclasses import replace

from espalier.kernels.ops.experts import Routing
from espalier.models.config import Experts, Family, Json, LayerWindows, windows_if_enabled
from espalier.models.config_values import require_counts
from espalier.models.stored_names import SPECULATORS

QWEN_WINDOW_DEFAULTS = {
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}


def qwen_windows(config_fields: Json) -> LayerWindows:
    """Returns the window of each layer, if `use_sliding_window` is set.  `layer_types` says which layers are sliding;
    without that field, the layers from `max_window_layers` on are sliding."""
    return windows_if_enabled(config_fields, lambda layer: layer >= config_fields["max_window_layers"])


QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    defaults={
        "num_key_value_heads": 32,
        "head_dim": None,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        **QWEN_WINDOW_DEFAULTS,
    },
    qkv_bias=lambda fields: True,
    out_bias=lambda fields: False,
    windows=qwen_windows,
    usable_in_drafts=True,
)


MIMO = replace(
    QWEN2,
    architecture="MiMoForCausalLM",
    model_type="mimo",
    supported_fields=("num_nextn_predict_layers",),
    mtp=replace(SPECULATORS, prefix="model.mtp_layers.{}.", hidden_before_embedding=True),
)


QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    defaults={
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        **QWEN_WINDOW_DEFAULTS,
    },
    windows=qwen_windows,
    qk_norm=True,
    usable_in_drafts=True,
)


def expert_layers(config_fields: Json) -> frozenset[int]:
    """Returns the layers with experts: every decoder_sparse_step-th layer, counted from 1, except mlp_only_layers."""
    require_counts(config_fields, ("decoder_sparse_step",))
    step = config_fields["decoder_sparse_step"]
    sparse = frozenset(range(step - 1, int(config_fields["num_hidden_layers"]), step))
    return sparse - {*(config_fields["mlp_only_layers"] or ())}


def read_routing(config_fields: Json, default_num_experts: int) -> Routing | None:
    """Returns the routing; None without experts.  default_num_experts: the number of experts if no field has it."""
    # For some families, transformers 5 writes num_local_experts.
    names = ("num_experts", "num_local_experts")
    num_experts = next(
        (config_fields[name] for name in names if config_fields.get(name) is not None), default_num_experts
    )
    if num_experts == 0:
        return None
    return Routing(
        num_experts, config_fields["num_experts_per_tok"], norm_topk_prob=bool(config_fields["norm_topk_prob"])
    )


def experts_with_shared(config_fields: Json, default_num_experts: int = 60) -> Experts | None:
    """Returns the experts of a family with a gated shared expert; None for a model without experts.
    default_num_experts: the number of experts if no field has it."""
    routing = read_routing(config_fields, default_num_experts)
    if routing is None:
        return None
    shared_size, gate = config_fields["shared_expert_intermediate_size"], "shared_expert_gate"
    return Experts(
        expert_layers(config_fields),
        routing,
        config_fields["moe_intermediate_size"],
        shared_size,
        "shared_expert",
        gate,
    )


QWEN2_MOE = replace(
    QWEN2,
    architecture="Qwen2MoeForCausalLM",
    model_type="qwen2_moe",
    defaults={
        **QWEN2.defaults,
        "num_key_value_heads": 16,
        "qkv_bias": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts_per_tok": 4,
        "norm_topk_prob": False,
    },
    qkv_bias=lambda fields: bool(fields["qkv_bias"]),
    windows=lambda fields: windows_if_enabled(
        fields, lambda layer: layer % 2 == 0 and layer < fields["max_window_layers"]
    ),
    experts=experts_with_shared,
    supported_fields=("num_experts", "num_local_experts", "shared_expert_intermediate_size"),
)


def _experts(config_fields: Json) -> Experts | None:
    routing = read_routing(config_fields, default_num_experts=128)
    return (
        None
        if routing is None
        else Experts(expert_layers(config_fields), routing, config_fields["moe_intermediate_size"])
    )


QWEN3_MOE = replace(
    QWEN3,
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    defaults={
        **QWEN3.defaults,
        "num_key_value_heads": 4,
        "head_dim": None,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
    windows=lambda fields: windows_if_enabled(fields, lambda layer: True),
    experts=_experts,
    supported_fields=("num_experts", "num_local_experts"),
)
