"""Configs of indexers: which layers choose rows, published files, overrides that keep the other fields, refusals."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from espalier.attention import BACKENDS, backend
from espalier.attention.support import Provider
from espalier.cache.kv import bytes_per_token
from espalier.cache.layer_spec import LatentKV, LayerSpec, with_row_dtype
from espalier.config import EngineConfig
from espalier.errors import EspalierError
from espalier.kernels.layers.quantised import FP8, InputScales, dequantise
from espalier.kernels.ops.selection import MAX_TOPK
from espalier.models import ModelConfig, load_target, read_config
from espalier.models.latent_config import FULL_INDEXER, SHARED_INDEXER, IndexerConfig
from espalier.models.layer_loading import layer_specs_of
from espalier.models.layers.latent_attention import common_input_scales
from espalier.models.mtp import read_mtp
from espalier.startup import load
from tests.builders import make_target
from tests.checkpoints import replace_weights
from tests.models.test_deepseek import FP8 as FP8_CONFIG
from tests.models.test_deepseek import V3
from tests.quantised import quantise

# The fields that matter here, as they were published.
# fmt: off
V32: dict[str, Any] = {
    **V3, "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "index_head_dim": 128,
    "index_n_heads": 64, "index_topk": 2048, "quantization_config": FP8_CONFIG,
}
GLM: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa",
    "attention_bias": False, "first_k_dense_replace": 3, "head_dim": 192, "hidden_act": "silu", "hidden_size": 6144,
    "index_head_dim": 128, "index_n_heads": 32, "index_share_for_mtp_iteration": True, "index_skip_topk_offset": 3,
    "index_topk": 2048, "index_topk_freq": 4, "index_topk_pattern": None, "indexer_rope_interleave": True,
    "intermediate_size": 12288, "kv_lora_rank": 512, "max_position_embeddings": 1048576,
    "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 256, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 78,
    "num_key_value_heads": 64, "num_nextn_predict_layers": 1, "q_lora_rank": 2048, "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-5, "rope_interleave": True,
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"}, "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid", "topk_group": 1, "topk_method": "noaux_tc", "v_head_dim": 256, "vocab_size": 154880,
    "indexer_types": [FULL_INDEXER if max(i - 2, 0) % 4 == 0 else SHARED_INDEXER for i in range(78)],
}
# fmt: on
# Published before layers shared: the fields are null.
GLM_5 = {**GLM, "indexer_types": None, "index_topk_freq": None, "index_skip_topk_offset": None}
SMALL = {**GLM_5, "num_hidden_layers": 6, "first_k_dense_replace": 1}


def read(path: Path, raw: dict[str, Any], overrides: dict[str, Any] | None = None) -> ModelConfig:
    (path / "config.json").write_text(json.dumps(raw))
    return read_config(path, overrides or {})


def index_of(config: ModelConfig) -> IndexerConfig:
    assert config.latent is not None and config.latent.indexer is not None
    return config.latent.indexer


def letters(config: ModelConfig) -> str:
    return "".join(kind[0] for kind in index_of(config).layer_types)


def test_published_configs(tmp_path: Path) -> None:
    config = read(tmp_path, V32)
    assert index_of(config) == IndexerConfig(2048, 64, 128, False, (FULL_INDEXER,) * 61)
    # The latent row and the index key of each layer, in bfloat16; and with the latent in FP8.
    specs = layer_specs_of(config)
    assert bytes_per_token(specs, torch.bfloat16) == 61 * 2 * (576 + 128)
    assert bytes_per_token(with_row_dtype(specs, FP8), torch.bfloat16) == 61 * (576 + 2 * 128)
    assert letters(read(tmp_path, GLM_5)) == "f" * 78
    config = read(tmp_path, GLM)
    assert letters(config) == "fff" + "sssf" * 18 + "sss"
    assert bytes_per_token(layer_specs_of(config), torch.bfloat16) == 2 * (78 * 576 + 21 * 128)
    # The layer behind the last one is shared by the schedule, but an MTP layer chooses for itself.
    [layer] = read_mtp(tmp_path, GLM, config).spec.layer_specs
    assert layer.cache_spec.planes["index"] == (1, 128)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "ffffff"),
        ({"index_topk_freq": 2}, "ffsfsf"),
        ({"index_topk_freq": 3, "index_skip_topk_offset": 1}, "fssfss"),
        ({"index_topk_freq": 3, "index_skip_topk_offset": 3}, "fffssf"),
        ({"index_topk_freq": 0, "index_skip_topk_offset": 0}, "ffffff"),
        ({"index_topk_pattern": "FSSFFS"}, "fssffs"),
        # A pattern comes before a schedule.
        ({"index_topk_pattern": [FULL_INDEXER, SHARED_INDEXER] * 3, "index_topk_freq": 4}, "fsfsfs"),
        ({"indexer_types": [FULL_INDEXER, SHARED_INDEXER] * 3, "index_topk_pattern": "FSFSFS"}, "fsfsfs"),
    ],
)
@pytest.mark.parametrize("raw", [SMALL, {**V32, "num_hidden_layers": 6}], ids=["glm_moe_dsa", "deepseek_v32"])
def test_three_spellings_of_what_layers_choose(raw: Any, fields: Any, expected: str, tmp_path: Path) -> None:
    """In config.json or as overrides, which leave every other field as it was (report 27114)."""
    assert letters(read(tmp_path, {**raw, **fields})) == expected
    before, after = read(tmp_path, raw), read(tmp_path, raw, fields)
    assert letters(after) == expected
    assert {**after.raw, **dict.fromkeys(fields)} == {**before.raw, **dict.fromkeys(fields)}


@pytest.mark.parametrize("name", ["indexed_attention", "deepseek_sparse_attention"])
@pytest.mark.parametrize("raw", [SMALL, {**V32, "num_hidden_layers": 6}], ids=["glm_moe_dsa", "deepseek_v32"])
def test_both_names_that_releases_of_transformers_write(raw: Any, name: str, tmp_path: Path) -> None:
    assert letters(read(tmp_path, {**raw, "layer_types": [name] * 6})) == "ffffff"


def test_an_override_keeps_the_other_fields_of_the_indexer(tmp_path: Path) -> None:
    after = index_of(read(tmp_path, GLM, {"index_topk": 512}))
    assert (after.topk, after.layer_types) == (512, index_of(read(tmp_path, GLM)).layer_types)
    # What contradicts a field that is kept is no silent half.
    with pytest.raises(EspalierError, match=r"indexer_types and index_topk_freq = 2 .* indexer_types=null"):
        read(tmp_path, GLM, {"index_topk_freq": 2})
    chosen = read(tmp_path, GLM, {"index_topk_freq": 2, "indexer_types": None})
    assert letters(chosen) == "fff" + "sf" * 37 + "s"


REFUSED = [
    ({"index_topk_pattern": "FSS"}, r"index_topk_pattern has 3 entries for num_hidden_layers = 6; make them agree"),
    ({"indexer_types": [FULL_INDEXER] * 7}, r"indexer_types has 7 entries for num_hidden_layers = 6; make them agree"),
    (
        {"indexer_types": [FULL_INDEXER, "skipped"] * 3},
        r"indexer_types names 'skipped'; supported are 'full' and 'shared'",
    ),
    ({"indexer_types": 3}, r"indexer_types = 3; a list or null is needed"),
    ({"indexer_types": [SHARED_INDEXER] * 6}, r"layer 0 is 'shared', but no layer before it chooses rows"),
    ({"index_topk_freq": 2, "index_skip_topk_offset": 0}, r"layer 0 is 'shared', but no layer before it chooses rows"),
    ({"index_topk_freq": -1}, r"index_topk_freq = -1; an integer of at least 0 or null is needed"),
    ({"index_skip_topk_offset": "2"}, r"index_skip_topk_offset = '2'; an integer of at least 0 or null is needed"),
    (
        {"index_topk_pattern": "FFFFFF", "indexer_types": [FULL_INDEXER, SHARED_INDEXER] * 3},
        r"indexer_types and index_topk_pattern say different things of layer 1 \(shared and full\)",
    ),
    ({"index_topk": 0}, r"index_topk = 0; a positive integer is needed"),
    ({"index_topk": None}, r"index_topk = None; a positive integer is needed"),
    ({"index_n_heads": 1.5}, r"index_n_heads = 1.5; a positive integer is needed"),
    ({"index_head_dim": 32}, r"index_head_dim = 32 is less than qk_rope_head_dim = 64"),
    ({"q_lora_rank": None}, r"q_lora_rank is null, but index queries are made from the queries' latent"),
]


@pytest.mark.parametrize(("fields", "says"), REFUSED, ids=lambda value: str(value)[:30])
def test_wrong_fields_are_refused_before_weights_are_read(fields: Any, says: str, tmp_path: Path) -> None:
    """There are no weights."""
    with pytest.raises(EspalierError, match=says) as caught:
        read(tmp_path, {**SMALL, **fields})
    assert str(caught.value).startswith(str(tmp_path)) and "\n" not in str(caught.value)


def test_another_family_does_not_drop_the_field(tmp_path: Path) -> None:
    with pytest.raises(EspalierError, match="index_topk = 2048 is not supported, only None; use another model"):
        read(tmp_path, {**V3, "index_topk": 2048})


def test_backends_without_chosen_rows_are_refused_by_name(tmp_path: Path) -> None:
    path = make_target(tmp_path, "glm_moe_dsa")
    specs = layer_specs_of(read_config(path))
    without = [name for name, made in BACKENDS.items() if made.support.selection is Provider.NOTHING]
    assert {"fa3", "flashinfer", "trtllm"} <= {*without}
    for name in without:
        support = backend(name).support
        if support.is_installed:
            with pytest.raises(EspalierError, match=rf"attention={name} does not support"):
                support.require(support.devices[0], support.dtypes[0], 64, specs)
    config = EngineConfig(model=path, device="cpu", dtype="float64", max_context=64, attention="triton")
    with pytest.raises(EspalierError, match="attention=triton"):
        load.resolve_config(config, load.find_checkpoint(config))


def test_what_the_kernels_do_not_take_is_refused_by_name() -> None:
    """Before anything is allocated; the reference takes it."""
    row = LatentKV(576, 512, index_size=128)
    for topk, keeps, says in (
        (MAX_TOPK + 1, row, f"does not support index_topk = {MAX_TOPK + 1}; it supports {MAX_TOPK} at most"),
        (2048, replace(row, index_size=512), "does not support index_head_dim = 512; it supports 256 at most"),
    ):
        spec = LayerSpec(16, keeps, topk=topk)
        with pytest.raises(EspalierError, match=says):
            backend("triton").support.require("cuda", torch.bfloat16, 64, [spec])
        backend("reference").support.require("cuda", torch.bfloat16, 64, [spec])
    backend("triton").support.require("cuda", torch.bfloat16, 64, [LayerSpec(16, row, topk=MAX_TOPK)])


def test_indexers_of_an_fp8_checkpoint(tmp_path: Path) -> None:
    """In blocks, as DeepSeek's are published: what the blocks mean is what is computed."""
    path = make_target(tmp_path, "deepseek_v32")
    meant = quantise(path, "fp8-block")
    model: Any = load_target(path, dtype=torch.float64, device="cpu", position_rows=8)
    for i, layer in enumerate(model.layers):
        under, indexer = f"model.layers.{i}.self_attn.indexer.", layer.attention.indexer
        for linear, name in ((indexer.q, "wq_b"), (indexer.k, "wk")):
            assert torch.equal(dequantise(linear.weight.matrix, torch.float64), meant[f"{under}{name}.weight"])
        assert torch.equal(indexer.score_weights, meant[f"{under}weights_proj.weight"])


def test_a_norm_rounds_for_both_products_only_what_both_take_so() -> None:
    by_block, by_row = InputScales(128), InputScales()
    static = InputScales(static_scale=torch.ones(1))
    assert common_input_scales(by_block, InputScales(128)) == by_block and common_input_scales(by_row, by_row) == by_row
    for one, other in ((by_block, by_row), (by_block, None), (None, by_row), (static, static), (by_row, static)):
        assert common_input_scales(one, other) is None


def test_a_shared_layer_reads_no_indexer_and_leaves_one_that_is_stored(tmp_path: Path) -> None:
    """An override lets more layers share than the checkpoint has weights for."""
    how: dict[str, Any] = {"dtype": torch.float64, "device": "cpu", "position_rows": 8}
    path = make_target(tmp_path, "deepseek_v32")
    model: Any = load_target(path, overrides={"index_topk_pattern": "FSF"}, **how)
    assert [layer.attention.indexer is None for layer in model.layers] == [False, True, False]
    assert [len(spec.cache_spec.planes) for spec in model.layer_specs] == [2, 1, 2]
    replace_weights(path, **{"model.layers.2.self_attn.indexer.wk.weight": None})
    with pytest.raises(EspalierError, match=r"layers\.2\.self_attn\.indexer\.wk"):
        load_target(path, **how)
