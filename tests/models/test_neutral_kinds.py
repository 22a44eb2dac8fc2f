"""A value of a wrong kind in a field that some family honours is refused by a line that names the field."""

from pathlib import Path
from typing import Any

import pytest

from espalier.errors import EspalierError
from espalier.models.config import NEUTRAL_VALUES, Family, parse_config
from espalier.models.loading import FAMILIES

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 32,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "n_group": 2,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "sliding_window": 8,
    "use_sliding_window": False,
    "max_window_layers": 2,
}
HONOURED = {
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "shared_expert_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "query_pre_attn_scalar": 16,
    "swiglu_limit": 7.0,
    "swiglu_alpha": 1.7,
    "shared_intermediate_size": 16,
}
# Of single families: fields that they need, and values that they honour.
QWEN = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
WITH_STATES = {"layer_types": ["linear_attention", "full_attention"] * 2}
NEEDED: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {"layer_types": ["attention"] * 4},
    **dict.fromkeys((*QWEN, "nemotron_h"), WITH_STATES),
}
RIGHT = [("laguna", "gating", True), *((family, "attn_output_gate", True) for family in QWEN)]
WRONG: tuple[Any, ...] = ("x", [1], True, {"a": 1}, 10**400, -1, float("inf"), float("nan"))


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.model_type)
def test_a_value_of_a_wrong_kind_is_refused_by_name(family: Family) -> None:
    right = SIZES | {name: value for name, value in HONOURED.items() if name in family.supported_fields}
    right |= NEEDED.get(family.model_type, {})
    parse_config(right, family, Path("config.json"))
    for name in NEUTRAL_VALUES:
        for value in WRONG:
            if (family.model_type, name, value) in RIGHT:
                continue
            with pytest.raises(EspalierError, match=name) as caught:
                parse_config({**right, name: value}, family, Path("config.json"))
            assert "\n" not in str(caught.value) and len(str(caught.value)) < 400, (name, value)
