"""Qwen2-MoE and Qwen3-MoE (30B-A3B, 235B-A22B, Coder): layers have experts, except those that the config names.

Qwen2-MoE has Qwen2's attention and a gated shared expert, Qwen3-MoE has Qwen3's attention.
"""

from dataclasses import replace

from espalier.kernels.ops.experts import Routing
from espalier.models.config import Experts, Raw, Windows, windows_if_used
from espalier.models.config_values import require_counts
from espalier.models.families.qwen import QWEN2 as QWEN2
from espalier.models.families.qwen import QWEN3 as QWEN3


def expert_layers(full: Raw) -> frozenset[int]:
    """Every decoder_sparse_step-th layer, counted from 1, except mlp_only_layers."""
    require_counts(full, ("decoder_sparse_step",))
    step = full["decoder_sparse_step"]
    sparse = frozenset(range(step - 1, int(full["num_hidden_layers"]), step))
    return sparse - {*(full["mlp_only_layers"] or ())}


def routing(full: Raw, default: int) -> Routing | None:
    """Qwen's routing; None for a config without experts.  default: the number of experts where the config has none."""
    # Transformers 5 writes num_local_experts for some of the families.
    names = ("num_experts", "num_local_experts")
    num_experts = next((full[name] for name in names if full.get(name) is not None), default)
    if num_experts == 0:
        return None
    return Routing(num_experts, full["num_experts_per_tok"], norm_topk_prob=bool(full["norm_topk_prob"]))


def experts_beside_shared(full: Raw, default: int = 60) -> Experts | None:
    """Experts beside a gated shared one.  default: as `routing` takes it."""
    how = routing(full, default)
    if how is None:
        return None
    shared, gate = full["shared_expert_intermediate_size"], "shared_expert_gate"
    return Experts(expert_layers(full), how, full["moe_intermediate_size"], shared, "shared_expert", gate)


def _qwen2_windows(full: Raw) -> Windows:
    """With `use_sliding_window`, as `layer_types` says, else every second layer below `max_window_layers`."""
    return windows_if_used(full, lambda layer: layer % 2 == 0 and layer < full["max_window_layers"])


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
    qkv_bias=lambda full: bool(full["qkv_bias"]),
    windows=_qwen2_windows,
    experts=experts_beside_shared,
    honours=("num_experts", "num_local_experts", "shared_expert_intermediate_size"),
)


def _experts(full: Raw) -> Experts | None:
    how = routing(full, default=128)
    return None if how is None else Experts(expert_layers(full), how, full["moe_intermediate_size"])


def _windows(full: Raw) -> Windows:
    """With `use_sliding_window`, every layer has the window, or those that `layer_types` names."""
    return windows_if_used(full, lambda layer: True)


FAMILY = replace(
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
    windows=_windows,
    experts=_experts,
    honours=("num_experts", "num_local_experts"),
)
