"""Mixture-of-experts blocks: routing equals transformers' routers, experts are loaded whole, misfits are refused."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from espalier.errors import EspalierError
from espalier.kernels.ops.experts import Routing, route
from espalier.models import load_target, read_config
from espalier.models.config import Experts
from espalier.models.families import FAMILIES
from espalier.models.layer_loading import load_experts
from espalier.models.layers.mlp import MixtureMLP, router_logits
from espalier.models.layers.norm import RMSNorm
from espalier.models.weight_files import count_weights_in
from espalier.models.weight_formats import WeightFormat, all_dense
from espalier.models.weight_formats.dense import DenseFormat
from espalier.models.weights import Weights
from espalier.speculate.drafters.registry import read_draft
from tests.builders import make_eagle3, make_target
from tests.checkpoints import edit_config

EXPERTS, HIDDEN = 16, 12
LOADING: dict[str, Any] = {"dtype": torch.float64, "device": "cpu", "position_rows": 8}
# Routing, the router of transformers, and the fields of its config.
ROUTERS: dict[str, tuple[Routing, Any, dict[str, Any]]] = {
    "Qwen3-MoE": (Routing(EXPERTS, 4, norm_topk_prob=True), Qwen3MoeTopKRouter, {"norm_topk_prob": True}),
    "Qwen3-MoE, weights as they are": (Routing(EXPERTS, 4), Qwen3MoeTopKRouter, {"norm_topk_prob": False}),
    "GPT-OSS": (Routing(EXPERTS, 4, "topk_softmax"), GptOssTopKRouter, {}),
    "DeepSeek-V2": (
        Routing(EXPERTS, 4, n_group=4, topk_group=2, group_score="max", routed_scaling_factor=16.0),
        DeepseekV2TopkRouter,
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 16.0},
    ),
    "DeepSeek-V3": (
        Routing(EXPERTS, 4, "sigmoid", True, 2.5, 4, 2, "top2_sum", correction_bias=True),
        DeepseekV3TopkRouter,
        {"norm_topk_prob": True, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
    ),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_routing_is_that_of_transformers(name: str) -> None:
    routing, router, fields = ROUTERS[name]
    sizes = {"num_experts": EXPERTS, "num_local_experts": EXPERTS, "n_routed_experts": EXPERTS, "hidden_size": HIDDEN}
    module = router(SimpleNamespace(num_experts_per_tok=4, **sizes, **fields))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        module.weight.copy_(torch.randn(EXPERTS, HIDDEN, generator=generator))
        for buffer in ("bias", "e_score_correction_bias"):
            if hasattr(module, buffer):
                getattr(module, buffer).copy_(torch.randn(EXPERTS, generator=generator))
        x = torch.randn(50, HIDDEN, generator=generator)
        _, their_weights, their_ids = module(x)
        logits = router_logits(x, module.weight) + getattr(module, "bias", 0.0)
    ids, weights = route(logits, getattr(module, "e_score_correction_bias", None), routing)
    order = their_ids.argsort(-1)
    assert ids.dtype == torch.int64 and torch.equal(ids, their_ids.gather(1, order))
    torch.testing.assert_close(weights, their_weights.gather(1, order))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "topk_softmax"])
def test_ties_go_to_the_lower_id(scoring: Any) -> None:
    """More experts than a short sort would leave in order by chance."""
    count = 200
    logits = torch.zeros(3, count)
    logits[1, 150], logits[2, 199], logits[2, 100:] = 1.0, 2.0, 1.0
    ids, _ = route(logits, None, Routing(count, 3, scoring))
    assert ids.tolist() == [[0, 1, 2], [0, 1, 150], [100, 101, 102]]
    grouped = Routing(count, 3, scoring, n_group=10, topk_group=2)
    assert route(logits, None, grouped)[0].tolist() == [[0, 1, 2], [0, 1, 150], [100, 101, 102]]
    bias = torch.zeros(count)
    bias[50:] = 1.0
    assert route(torch.zeros(1, count), bias, Routing(count, 3, scoring))[0].tolist() == [[50, 51, 52]]


# Without the sigmoid of DeepSeek-V3: a CPU computes the last values of a tensor with other instructions.
@pytest.mark.parametrize("name", [name for name in ROUTERS if name != "DeepSeek-V3"])
@pytest.mark.parametrize("rows", [1, 7, 300])
def test_a_rows_routing_does_not_depend_on_the_batch(name: str, rows: int) -> None:
    routing, bias = ROUTERS[name][0], torch.linspace(-1, 1, EXPERTS)
    logits = torch.randn(rows, EXPERTS, generator=torch.Generator().manual_seed(1))
    ids, weights = route(logits, bias, routing)
    for row in range(0, rows, 13):
        alone = route(logits[row : row + 1], bias, routing)
        assert torch.equal(alone[0][0], ids[row]) and torch.equal(alone[1][0], weights[row])


def test_a_row_without_a_finite_logit_is_routed() -> None:
    """To some experts, so that nothing is read out of bounds; its weights are not finite."""
    ids, weights = route(torch.full((2, 8), torch.nan), None, Routing(8, 3, norm_topk_prob=True))
    assert ids.tolist() == [[0, 1, 2]] * 2 and weights.isnan().all()


def test_the_router_computes_in_float32() -> None:
    x, weight = torch.randn(5, 64).bfloat16(), torch.randn(8, 64).bfloat16()
    logits = router_logits(x, weight)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), F.linear(x.double(), weight.double()), rtol=1e-5, atol=1e-5)
    assert router_logits(x.double(), weight.double()).dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_norm_adds_the_parts_in_order(dtype: torch.dtype) -> None:
    parts = torch.randn(5, 3, 32, dtype=torch.promote_types(dtype, torch.float32))
    norm, residual = RMSNorm(torch.randn(32, dtype=dtype), 1e-5), torch.randn(3, 32, dtype=dtype)
    in_order = parts[0].clone()
    for part in parts[1:]:
        in_order += part
    total, normed = norm.add_and_norm(parts, residual)
    assert torch.equal(total, residual + in_order.to(dtype)) and torch.equal(normed, norm(total))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"scoring": "sparsemixer"}, "scoring = 'sparsemixer' is not supported, only 'softmax', 'sigmoid'"),
        ({"group_score": "mean"}, "group_score = 'mean' is not supported"),
        ({"top_k": 9}, "top_k = 9, but 1 to 8"),
        ({"top_k": 0}, "top_k = 0, but 1 to 8"),
        ({"num_experts": 0}, "num_experts = 0"),
        ({"n_group": 3}, "3 equal groups of 8 experts"),
        ({"n_group": 4, "topk_group": 1, "top_k": 3}, "cannot choose 3 experts from 1 of 4"),
        ({"n_group": 8, "topk_group": 8, "group_score": "top2_sum"}, "groups of 2 experts"),
    ],
    ids=str,
)
def test_routings_that_are_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(EspalierError, match=says):
        Routing(**{"num_experts": 8, "top_k": 2, **fields})


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return make_target(tmp_path / "target", "qwen3_moe", layers=4)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"num_experts_per_tok": 7}, "top_k = 7, but 1 to 6"),
        ({"num_local_experts": "6"}, "num_local_experts = '6'"),
        ({"moe_intermediate_size": None}, "experts of size None"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step = 0; a positive integer"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid' is not supported"),
        ({"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc' is not supported"),
        ({"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size = 8 is not supported"),
        ({"routed_scaling_factor": 2.5}, "routed_scaling_factor = 2.5 is not supported"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "'bitsandbytes' is not supported"),
    ],
    ids=str,
)
def test_configs_that_are_refused(fields: dict[str, Any], says: str, target: Path) -> None:
    edit_config(target, **fields)
    with pytest.raises(EspalierError, match=says):
        read_config(target)


def test_a_dense_family_has_no_experts(tmp_path: Path) -> None:
    path = make_target(tmp_path)
    edit_config(path, num_experts=4)
    with pytest.raises(EspalierError, match="num_experts = 4 is not supported"):
        read_config(path)


def test_which_layers_have_experts(target: Path) -> None:
    def layers(**fields: Any) -> set[int]:
        edit_config(target, **fields)
        experts = read_config(target).experts
        return set() if experts is None else set(experts.layers)

    assert layers() == {0, 2, 3}
    assert layers(mlp_only_layers=[]) == {0, 1, 2, 3}
    assert layers(decoder_sparse_step=2, mlp_only_layers=[3]) == {1}
    assert layers(num_local_experts=None, num_experts=0) == set()


def test_published_configs(tmp_path: Path) -> None:
    """The fields of Qwen3-30B-A3B and Qwen1.5-MoE-A2.7B that matter here, as they were published."""
    qwen3 = {"architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu"}
    qwen3 |= {"hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960, "mlp_only_layers": []}
    qwen3 |= {"max_window_layers": 48, "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32}
    qwen3 |= {"num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4}
    qwen3 |= {"rope_scaling": None, "rope_theta": 1e6, "sliding_window": None, "use_sliding_window": False}
    qwen2 = {"architectures": ["Qwen2MoeForCausalLM"], "decoder_sparse_step": 1, "hidden_act": "silu"}
    qwen2 |= {"hidden_size": 2048, "intermediate_size": 5632, "max_position_embeddings": 8192, "num_experts": 60}
    qwen2 |= {"moe_intermediate_size": 1408, "norm_topk_prob": False, "num_attention_heads": 16}
    qwen2 |= {"num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 16, "rope_theta": 1e6}
    qwen2 |= {"shared_expert_intermediate_size": 5632, "sliding_window": 32768, "use_sliding_window": False}
    read = []
    for raw in (qwen3, qwen2):
        (tmp_path / "config.json").write_text(json.dumps({**raw, "vocab_size": 151936, "rms_norm_eps": 1e-6}))
        read.append(read_config(tmp_path))
    assert read[0].experts == Experts(frozenset(range(48)), Routing(128, 8, norm_topk_prob=True), 768)
    layers, shared = frozenset(range(24)), ("shared_expert", "shared_expert_gate")
    assert read[1].experts == Experts(layers, Routing(60, 4), 1408, 5632, *shared)
    assert [config.head_size for config in read] == [128, 128] and {*read[0].windows, *read[1].windows} == {None}


def test_weights_of_experts_are_all_needed_and_used(target: Path) -> None:
    file = target / "model.safetensors"
    kept = load_file(file)

    def refused(weights: dict[str, torch.Tensor], says: str) -> None:
        save_file(weights, file)
        with pytest.raises(EspalierError, match=says):
            load_target(target, **LOADING)

    for name in ("mlp.experts.5.up_proj.weight", "mlp.experts.0.down_proj.weight", "mlp.gate.weight"):
        full = f"model.layers.2.{name}"
        refused({key: value for key, value in kept.items() if key != full}, f"{full}' .* is missing")
    extra = "model.layers.2.mlp.experts.6.up_proj.weight"
    refused({**kept, extra: torch.zeros(24, 32)}, f"{extra}' .*belongs to no parameter")
    short = "model.layers.0.mlp.experts.3.gate_proj.weight"
    refused({**kept, short: torch.zeros(23, 32)}, rf"{short}' .*has shape \[23, 32\]")


def test_each_expert_is_in_its_place(target: Path) -> None:
    weights, mlp = load_file(target / "model.safetensors"), load_target(target, **LOADING).layers[2].mlp
    assert isinstance(mlp, MixtureMLP)
    for expert in range(6):
        prefix = f"model.layers.2.mlp.experts.{expert}."
        gate, up, down = (weights[f"{prefix}{name}_proj.weight"] for name in ("gate", "up", "down"))
        assert torch.equal(mlp.gate_up[expert], torch.cat((gate, up))) and torch.equal(mlp.down[expert], down)


def test_experts_in_another_format_are_refused(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Strange(DenseFormat):
        name = "strange"

    def formats(name: str) -> WeightFormat:
        return Strange() if ".2.mlp.experts.3" in name else all_dense(name)

    weights = Weights(target, torch.float64, "cpu", formats)
    # Plain tensors are dense whatever config.json says.
    monkeypatch.setattr(weights, "format_of", formats)
    with pytest.raises(
        EspalierError, match=r"'model.layers.2.mlp.experts.3.gate_proj' .*different formats \(dense and strange\)"
    ):
        load_experts(weights, read_config(target).experts, "model.layers.2.mlp.", 32)


def test_memory_counts_every_expert(target: Path) -> None:
    """What the file holds is what is loaded: nothing is stored twice or left out."""
    count = count_weights_in(target, read_config(target).formats).nbytes(torch.float64)
    assert count == sum(tensor.nbytes for tensor in load_file(target / "model.safetensors").values())
    dense = count_weights_in(make_target(target.parent / "dense", "qwen3", layers=4), read_config(target).formats)
    assert count > dense.nbytes(torch.float64)


def test_a_correction_bias_is_loaded_in_float32(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family = FAMILIES["Qwen3MoeForCausalLM"]

    def biased(full: dict[str, Any]) -> Any:
        experts = family.experts(full)
        return replace(experts, routing=replace(experts.routing, scoring="sigmoid", correction_bias=True))

    monkeypatch.setitem(FAMILIES, family.architecture, replace(family, experts=biased))
    bias = torch.randn(6)
    names = [f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (0, 2, 3)]
    stored = load_file(target / "model.safetensors")
    save_file({**stored, **{name: bias.clone() for name in names}}, target / "model.safetensors")
    loaded = load_target(target, **{**LOADING, "dtype": torch.bfloat16}).layers[0].mlp
    assert loaded.router_bias.dtype == torch.float32 and torch.equal(loaded.router_bias, bias)


def test_a_draft_with_experts_is_refused(target: Path, tmp_path: Path) -> None:
    draft = make_eagle3(tmp_path / "draft", target, model_type="qwen3_moe")
    with pytest.raises(EspalierError, match="Qwen3MoeForCausalLM has experts, which is not supported"):
        read_draft(draft, read_config(target))
