"""DeepSeek's experts and the families that have taken them over: published configs, refusals, and weights."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from espalier.errors import EspalierError
from espalier.kernels.ops.experts import MAX_SHARED_ROWS, ExpertBiases, Routing, route
from espalier.models import ModelConfig, load_target, read_config
from espalier.models.config import Experts
from espalier.models.layer_loading import layer_specs_of
from espalier.models.layers.linear import Linear
from espalier.models.layers.mlp import GatedMLP, MixtureMLP
from espalier.models.weight_formats.dense import DenseWeight
from tests.builders import make_target

LOADING: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cpu", "position_rows": 8}
# The fields that matter here, as they were published.
YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn"}
# fmt: off
LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "attention_bias": False, "aux_loss_alpha": 0.001, "first_k_dense_replace": 1, "hidden_act": "silu",
    "hidden_size": 2048, "intermediate_size": 10944, "kv_lora_rank": 512, "max_position_embeddings": 163840,
    "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2,
    "norm_topk_prob": False, "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27,
    "num_key_value_heads": 16, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6, "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax",
    "seq_aux": True, "topk_group": 1, "topk_method": "greedy", "v_head_dim": 128, "vocab_size": 102400,
    "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
}
V2: dict[str, Any] = {
    **LITE,
    "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536, "n_group": 8,
    "n_routed_experts": 160, "num_attention_heads": 128, "num_hidden_layers": 60, "num_key_value_heads": 128,
    "q_lora_rank": 1536, "routed_scaling_factor": 16.0, "topk_group": 3, "topk_method": "group_limited_greedy",
}
V3: dict[str, Any] = {
    **V2,
    "architectures": ["DeepseekV3ForCausalLM"],
    "first_k_dense_replace": 3, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 8,
    "num_hidden_layers": 61, "num_nextn_predict_layers": 1, "routed_scaling_factor": 2.5, "topk_group": 4,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "vocab_size": 129280,
    "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
}
FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
AIR: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True, "first_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 10944, "max_position_embeddings": 131072, "moe_intermediate_size": 1408, "n_group": 1,
    "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 96,
    "num_experts_per_tok": 8, "num_hidden_layers": 46, "num_key_value_heads": 8, "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 1000000,
    "routed_scaling_factor": 1.0, "topk_group": 1, "use_qk_norm": False, "vocab_size": 151552,
}
FLASH: dict[str, Any] = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "attention_bias": False, "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048,
    "intermediate_size": 10240, "kv_lora_rank": 512, "max_position_embeddings": 202752, "n_group": 1,
    "moe_intermediate_size": 1536, "n_routed_experts": 64, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": 20, "num_experts_per_tok": 4, "num_hidden_layers": 47, "num_key_value_heads": 20,
    "num_nextn_predict_layers": 1, "partial_rotary_factor": 1.0, "q_lora_rank": 768, "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 1000000, "topk_group": 1,
    "routed_scaling_factor": 1.8, "topk_method": "noaux_tc", "v_head_dim": 256, "vocab_size": 154880,
}
# fmt: on
BIASED: dict[str, Any] = {"scoring": "sigmoid", "group_score": "top2_sum", "correction_bias": True}
BIASED |= {"norm_topk_prob": True}


def read(path: Path, raw: dict[str, Any]) -> ModelConfig:
    (path / "config.json").write_text(json.dumps(raw))
    return read_config(path)


@pytest.mark.parametrize(
    ("raw", "first", "routing", "size", "shared"),
    [
        (LITE, 1, Routing(64, 6), 1408, 2816),
        (V2, 1, Routing(160, 6, routed_scaling_factor=16.0, n_group=8, topk_group=3), 1536, 3072),
        (V3, 3, Routing(256, 8, routed_scaling_factor=2.5, n_group=8, topk_group=4, **BIASED), 2048, 2048),
        (AIR, 1, Routing(128, 8, **BIASED), 1408, 1408),
        (FLASH, 1, Routing(64, 4, routed_scaling_factor=1.8, **BIASED), 1536, 1536),
    ],
    ids=["V2-Lite", "V2", "V3", "GLM-4.5-Air", "GLM-4.7-Flash"],
)
def test_published_configs(
    raw: dict[str, Any], first: int, routing: Routing, size: int, shared: int, tmp_path: Path
) -> None:
    config = read(tmp_path, raw)
    layers = frozenset(range(first, raw["num_hidden_layers"]))
    assert config.experts == Experts(layers, routing, size, shared, "shared_experts")


def test_yarn_scales_the_softmax_of_published_configs(tmp_path: Path) -> None:
    """By (0.1 · mscale_all_dim · ln 40 + 1)²; cos and sin by mscale over mscale_all_dim, which is 1."""
    for raw, mscale in ((LITE, 0.707), (V3, 1.0)):
        config = read(tmp_path, raw)
        expected = 192**-0.5 * (0.1 * mscale * math.log(40) + 1) ** 2
        assert layer_specs_of(config)[0].softmax_scale == pytest.approx(expected, rel=1e-12)
        assert config.rope.attention_factor == 1.0
    assert layer_specs_of(read(tmp_path, FLASH))[0].softmax_scale == pytest.approx(256**-0.5, rel=1e-12)


def test_published_fp8_weights(tmp_path: Path) -> None:
    """V3's config names no layers that stay dense: the head, routers and the MTP layer's projection are."""
    formats = read(tmp_path, {**V3, "quantization_config": FP8}).formats
    quantised = formats("model.layers.61.mlp.experts.7.down_proj").stored_tensors(7168, 2048)
    assert [(stored.suffix, stored.shape) for stored in quantised] == [
        (".weight", (7168, 2048)),
        (".weight_scale_inv", (56, 16)),
    ]
    for name in ("lm_head", "model.layers.61.eh_proj", "model.layers.61.shared_head.head"):
        assert formats(name).name == "dense"


def test_half_of_a_head_is_rotated(tmp_path: Path) -> None:
    assert read(tmp_path, AIR).rope.dim == 64
    nested = {**AIR, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}}
    assert read(tmp_path, nested).rope.dim == 32


@pytest.mark.parametrize(
    ("raw", "fields", "says"),
    [
        (V3, {"quantization_config": {**FP8, "fmt": "e5m2"}}, "fmt = 'e5m2' is not supported"),
        (V3, {"topk_method": "greedy"}, "topk_method = 'greedy' is not supported, only 'noaux_tc'"),
        (V3, {"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported, only 'sigmoid'"),
        (V3, {"n_group": 7}, "7 equal groups of 256 experts"),
        (V3, {"topk_group": 9}, "topk_group = 9, but 1 to 8"),
        (V3, {"n_group": 128, "topk_group": 1}, "cannot choose 8 experts from 1 of 128"),
        (
            V3,
            {"routed_scaling_factor": "2.5"},
            "routed_scaling_factor = '2.5'; a number of at least 0 or null is needed",
        ),
        (V3, {"moe_intermediate_size": None}, "experts of size None"),
        (V3, {"n_shared_experts": -1}, "n_shared_experts = -1; 0 to 2147483647 or null is needed"),
        (V3, {"n_shared_experts": "x"}, "n_shared_experts = 'x'; 0 to 2147483647 or null is needed"),
        (V3, {"moe_layer_freq": "1"}, "moe_layer_freq = '1'; an integer"),
        (V3, {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        (V3, {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
        (V3, {"kv_lora_rank": None}, "kv_lora_rank = None; a positive integer"),
        (LITE, {"topk_method": "noaux_tc"}, "'noaux_tc' is not supported, only 'greedy' or 'group_limited_greedy'"),
        (LITE, {"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid' is not supported, only 'softmax'"),
        (LITE, {"num_experts_per_tok": None}, "top_k = None"),
        (AIR, {"partial_rotary_factor": 0.31}, "partial_rotary_factor = 0.31 of heads of 128 values .*even"),
        (AIR, {"partial_rotary_factor": 1.5}, "partial_rotary_factor = 1.5"),
        (AIR, {"partial_rotary_factor": "half"}, "partial_rotary_factor = 'half'"),
        (FLASH, {"mlp_layer_types": ["dense"]}, "mlp_layer_types = .*each of 47 layers"),
        (FLASH, {"mlp_layer_types": ["moe"] * 47}, "'dense' or 'sparse' is needed"),
    ],
    ids=lambda value: "" if "architectures" in value else str(value)[:40],
)
def test_configs_that_are_refused(raw: dict[str, Any], fields: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(EspalierError, match=says) as caught:
        read(tmp_path, {**raw, **fields})
    assert "\n" not in str(caught.value)


def test_which_layers_have_experts(tmp_path: Path) -> None:
    def layers(raw: dict[str, Any], **fields: Any) -> list[int]:
        experts = read(tmp_path, {**raw, "num_hidden_layers": 6, **fields}).experts
        return [] if experts is None else sorted(experts.layers)

    assert layers(V3) == [3, 4, 5]
    assert layers(V3, moe_layer_freq=2, first_k_dense_replace=1) == [2, 4]
    assert layers(V3, n_routed_experts=None) == layers(V3, first_k_dense_replace=6) == []
    assert layers(FLASH) == [1, 2, 3, 4, 5]
    assert layers(FLASH, mlp_layer_types=["sparse", *["dense"] * 4, "sparse"]) == [0, 5]


@pytest.mark.parametrize("norm", [False, True])
def test_v2_either_norms_or_scales_its_weights(norm: bool, tmp_path: Path) -> None:
    """As the publisher's code does.  That of transformers has no norm."""
    experts = read(tmp_path, {**V2, "norm_topk_prob": norm}).experts
    assert experts is not None
    logits = torch.randn(5, 160, generator=torch.Generator().manual_seed(0))
    ids, weights = route(logits, None, experts.routing)
    chosen = logits.softmax(-1).gather(1, ids)
    torch.testing.assert_close(weights, chosen / chosen.sum(-1, keepdim=True) if norm else 16.0 * chosen)


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite", "dots1"])
def test_weights_are_all_needed_and_used(family: str, tmp_path: Path) -> None:
    target = make_target(tmp_path, family)
    file = target / "model.safetensors"
    kept = load_file(file)

    def refused(weights: dict[str, torch.Tensor], says: str) -> None:
        save_file(weights, file)
        with pytest.raises(EspalierError, match=says):
            load_target(target, **LOADING)

    bias = [] if family == "deepseek_v2" else ["gate.e_score_correction_bias"]
    for name in (*bias, "gate.weight", "experts.7.up_proj.weight", "shared_experts.down_proj.weight"):
        full = f"model.layers.2.mlp.{name}"
        refused({key: value for key, value in kept.items() if key != full}, f"{full}' .* is missing")
    extra = "model.layers.2.mlp.experts.8.up_proj.weight"
    refused({**kept, extra: torch.zeros(20, 32)}, f"{extra}' .*belongs to no parameter")
    save_file(kept, file)
    mlp = load_target(target, **LOADING).layers[2].mlp  # type: ignore[attr-defined]
    assert isinstance(mlp, MixtureMLP)
    if bias:
        stored = kept["model.layers.2.mlp.gate.e_score_correction_bias"]
        assert mlp.router_bias is not None and mlp.router_bias.dtype == torch.float32
        assert torch.equal(mlp.router_bias, stored.float()) and not torch.equal(
            mlp.router_bias, stored.bfloat16().float()
        )


@pytest.mark.parametrize("rows", [16, 17])
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen2_moe"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_shared_expert_comes_last(family: str, dtype: torch.dtype, rows: int, tmp_path: Path) -> None:
    """In one part, or in pieces that sum to it for few rows; for rows that go to no routed expert too."""
    target = load_target(make_target(tmp_path, family), **{**LOADING, "dtype": dtype})
    mlp = target.layers[2].mlp  # type: ignore[attr-defined]
    x = torch.randn(rows, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    live = torch.arange(rows) % 3 != 1
    parts, top_k = mlp(mlp.route_rows(x), live), mlp.routing.top_k
    exact = torch.promote_types(dtype, torch.float32)
    shared = mlp.shared_expert(x).to(exact)
    if mlp.shared_expert_gate is not None:
        shared = shared * F.sigmoid(mlp.shared_expert_gate(x).to(exact))
    in_tiles = rows <= MAX_SHARED_ROWS and mlp.shared_expert_tiles is not None
    # Packed for the CPU in float32, the shared expert is no plain tensor; a gate scales it in qwen2_moe.
    assert (mlp.shared_expert_tiles is not None) == (family == "deepseek_v3" and dtype != torch.float32)
    assert parts.dtype == exact and parts.shape == (top_k + (2 if in_tiles else 1), rows, 32)
    rounding = {torch.bfloat16: 2e-2, torch.float64: 1e-14}
    if in_tiles:
        assert (parts[top_k:].sum(0) - shared).abs().max() <= rounding[dtype] * shared.abs().max()
    else:
        assert torch.equal(parts[-1], shared)
    assert not parts[:top_k, ~live].any() and parts[:top_k, live].any(-1).all()


def test_shared_tiles_take_no_memory(tmp_path: Path) -> None:
    """Both forms of the shared expert are the same tensors."""
    mlp = load_target(make_target(tmp_path, "deepseek_v3"), **LOADING).layers[2].mlp  # type: ignore[attr-defined]
    assert mlp.shared_expert_tiles.gate_up is mlp.shared_expert.gate_up.weight.tensor
    assert mlp.shared_expert_tiles.down is mlp.shared_expert.down.weight.tensor


@pytest.mark.parametrize("what", ["fits", "bias", "another dtype", "half an expert", "biases of experts"])
def test_what_does_not_fit_tiles_runs_apart(what: str) -> None:
    """The routed experts are 8 wide."""
    wide = 12 if what == "half an expert" else 16
    dtype = torch.bfloat16 if what == "another dtype" else torch.float64
    gate_up = Linear(
        DenseWeight(torch.zeros(2 * wide, 4, dtype=dtype)), torch.zeros(2 * wide) if what == "bias" else None
    )
    down = Linear(DenseWeight(torch.zeros(4, wide, dtype=dtype)), None)
    routed = torch.zeros(6, 16, 4, dtype=torch.float64), torch.zeros(6, 4, 8, dtype=torch.float64)
    biases = ExpertBiases(torch.zeros(6, 16), torch.zeros(6, 4)) if what == "biases of experts" else None
    mlp = MixtureMLP(Routing(6, 2), torch.zeros(6, 4), None, *routed, GatedMLP(gate_up, down), biases=biases)
    assert (mlp.shared_expert_tiles is None) == (what != "fits")
