"""Qwen3-MoE (30B-A3B, 235B-A22B, Coder): Qwen3's attention; layers have experts, except those that the config names."""

from dataclasses import replace

from espalier.models.config import Experts, Raw, Windows, windows_if_used
from espalier.models.families.qwen2_moe import expert_layers, routing
from espalier.models.families.qwen3 import FAMILY as QWEN3


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
