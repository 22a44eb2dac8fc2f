"""Checkpoints of models with states as they are published: nested configs, a vision tower, experts in one tensor."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from espalier.config import EngineConfig
from espalier.errors import EspalierError
from espalier.kernels.layers.quantised import QuantisedMatrix
from espalier.models import load_target, read_config
from espalier.models.loading import unread_prefixes
from espalier.models.stored_names import TEXT_PART_NAMES
from espalier.models.weight_files import count_weights_in
from espalier.models.weights import Weights
from espalier.startup import load
from tests.builders import make_target
from tests.checkpoints import edit_config
from tests.mtp import mtp_directories
from tests.oracles.dense import DensePass
from tests.quantised import quantise

TOKENS = torch.arange(9)[None] % 16
OF_WHOLE = ("architectures", "tie_word_embeddings", "dtype", "transformers_version")


def logits_of(path: Path) -> torch.Tensor:
    model = load_target(path, dtype=torch.float64, device="cpu", position_rows=9)
    return model.logits(model(DensePass(TOKENS, model.layer_specs)).hidden)


def with_vision(text: Path, path: Path, architecture: str) -> Path:
    """A copy of a text model's directory as published beside a vision tower."""
    raw, weights = json.loads((text / "config.json").read_text()), load_file(text / "model.safetensors")
    nested = {name: value for name, value in raw.items() if name not in OF_WHOLE}
    rope = {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    nested |= {"rope_parameters": {**nested["rope_parameters"], **rope}, "attn_output_gate": True}
    config = {
        "architectures": [architecture],
        "model_type": "of a model with vision",
        "tie_word_embeddings": False,
        "text_config": nested,
        "vision_config": {"depth": 2, "hidden_size": 3},
        "image_token_id": 7,
    }
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    renamed = {name.replace("model.", "model.language_model.", 1): value for name, value in weights.items()}
    save_file({**renamed, "model.visual.patch_embed.proj.weight": torch.ones(2, 3)}, path / "model.safetensors")
    return path


@pytest.mark.parametrize(
    ("family", "architecture"),
    [("qwen3_5", "Qwen3_5ForConditionalGeneration"), ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration")],
)
def test_a_vision_tower_is_left_and_said_so(family, architecture, tmp_path, caplog):
    text = make_target(tmp_path / "text", family)
    path = with_vision(text, tmp_path / "published", architecture)
    with caplog.at_level(logging.INFO, logger="espalier"):
        assert torch.equal(logits_of(path), logits_of(text))
    assert f"only the text part of {architecture} is loaded (other parts: visual)" in caplog.text
    config = read_config(path)
    without = count_weights_in(path, config.formats, unread_prefixes(config), config.stored_names)
    assert without == count_weights_in(text, read_config(text).formats)


def test_layers_stay_unquantised_by_the_names_that_the_checkpoint_has(tmp_path):
    path = with_vision(make_target(tmp_path / "text", "qwen3_5"), tmp_path / "it", "Qwen3_5ForConditionalGeneration")
    raw = json.loads((path / "config.json").read_text())
    left = ["model.language_model.layers.0.linear_attn.in_proj_a", "lm_head"]
    raw["quantization_config"] = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": left,
    }
    (path / "config.json").write_text(json.dumps(raw))
    formats = Weights(path, torch.float64, "cpu", read_config(path).formats, stored_names=TEXT_PART_NAMES).formats
    dense = [
        name for name in ("in_proj_a", "in_proj_qkv") if formats(f"model.layers.0.linear_attn.{name}").name == "dense"
    ]
    assert dense == ["in_proj_a"] and formats("lm_head").name == "dense"


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe"])
def test_experts_in_one_tensor(family, tmp_path):
    path = make_target(tmp_path / "model", family)
    expected = logits_of(path)
    join_experts(path)
    assert torch.equal(logits_of(path), expected)


def join_experts(path: Path) -> None:
    """Store each layer's experts as two stacks."""
    weights = load_file(path / "model.safetensors")
    for layer in range(3):
        prefix, made = f"model.layers.{layer}.mlp.experts.", {}
        for half in ("gate", "up", "down"):
            made[half] = torch.stack([weights.pop(f"{prefix}{i}.{half}_proj.weight") for i in range(6)])
        weights[f"{prefix}gate_up_proj"] = torch.cat((made["gate"], made["up"]), 1)
        weights[f"{prefix}down_proj"] = made["down"]
    save_file(weights, path / "model.safetensors")


@pytest.mark.parametrize("size", [16, 20], ids=["whole blocks", "a cut block"])
def test_fp8_experts_in_one_tensor(size, tmp_path):
    """As transformers names them, with scales for blocks: the logits of what they mean, and held in FP8."""
    path = make_target(tmp_path / "model", "qwen3_5_moe", moe_intermediate_size=size)
    join_experts(path)
    dense, file = (path / "config.json").read_text(), path / "model.safetensors"
    meant = quantise(path, "fp8-joined")
    quantised, stored = (path / "config.json").read_text(), load_file(file)
    (path / "config.json").write_text(dense)
    save_file(meant, file)
    expected = logits_of(path)
    (path / "config.json").write_text(quantised)
    save_file(stored, file)
    torch.testing.assert_close(logits_of(path), expected, rtol=0, atol=1e-9)
    layers = load_target(path, dtype=torch.float64, device="cpu", position_rows=9).layers
    for matrix in (half for layer in layers for half in (layer.mlp.gate_up, layer.mlp.down)):
        # Kernels count the rows of all experts on.
        assert isinstance(matrix, QuantisedMatrix) and matrix.shape[1] % matrix.rows_per_scale == 0


def test_a_config_without_layer_types_has_attention_in_every_fourth_layer(tmp_path):
    path = make_target(tmp_path, "qwen3_next", layers=5)
    edit_config(path, layer_types=None, full_attention_interval=None)
    kinds = [spec.cache_spec.kind for spec in load.layer_specs_of(read_config(path))]
    assert kinds == ["a state", "a state", "a state", "K and V heads", "a state"]


@pytest.mark.parametrize("named", ["num_nextn_predict_layers", "mtp_num_hidden_layers", None])
def test_the_mtp_layer_is_the_draft_without_being_asked(named, tmp_path):
    """Published configs of Qwen3-Next do not name it."""
    target, _ = mtp_directories("qwen3_next", 1)
    raw = json.loads((target / "config.json").read_text())
    del raw["num_nextn_predict_layers"], raw["mtp_form"]
    (tmp_path / "config.json").write_text(json.dumps(raw | ({} if named is None else {named: 1})))
    (tmp_path / "model.safetensors").symlink_to(target / "model.safetensors")
    found = load.find_checkpoint(EngineConfig(model=tmp_path, device="cpu"))
    assert (found.spec.algorithm, found.spec.num_recomputed_tokens) == ("mtp", 1)
    assert [spec.cache_spec.kind for spec in found.spec.layer_specs] == ["K and V heads"]


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("qwen3_next", {"attn_output_gate": False}, "attn_output_gate = False is not supported"),
        ("qwen3_next", {"linear_num_value_heads": 3}, "linear_num_value_heads = 3 is no multiple"),
        ("qwen3_next", {"linear_key_head_dim": 0}, "linear_key_head_dim = 0; a positive integer"),
        ("qwen3_next", {"linear_conv_kernel_dim": True}, "linear_conv_kernel_dim = True; a positive integer"),
        ("qwen3_5", {"layer_types": ["linear_attention"] * 3}, "names no 'full_attention'"),
        ("qwen3_5", {"layer_types": ["mamba"] * 3}, "layer_types names 'mamba'"),
        ("lfm2", {"layer_types": ["conv"] * 3}, "names no 'full_attention'"),
        ("lfm2", {"conv_L_cache": 0}, "conv_L_cache = 0; a positive integer"),
        ("lfm2", {"block_ffn_dim_multiplier": "2"}, "block_ffn_dim_multiplier = '2'; a positive number"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act = .silu. is not supported"),
        ("nemotron_h", {"moe_latent_size": 8}, "moe_latent_size = 8 is not supported"),
        ("nemotron_h", {"n_groups": 3}, "mamba_num_heads = 4 is no multiple of n_groups = 3"),
        ("granite_hybrid", {"position_embedding_type": "alibi"}, "position_embedding_type = .alibi. is not supported"),
        ("granite_hybrid", {"time_step_limit": 3}, "time_step_limit = 3; a list of two numbers"),
        ("granite_hybrid", {"residual_multiplier": 0}, "residual_multiplier = 0; a positive number"),
        ("llama", {"attn_output_gate": True}, "attn_output_gate = True is not supported"),
    ],
)
def test_what_no_layer_computes_is_refused(family: str, fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = make_target(tmp_path, family)
    edit_config(path, **fields)
    with pytest.raises(EspalierError, match=f"^{tmp_path}.*{message}"):
        read_config(path)


def test_memory_of_states_is_counted_and_divided(tmp_path):
    target, plain = make_target(tmp_path / "hybrid", "qwen3_5"), make_target(tmp_path / "plain")
    how = {"device": "cpu", "max_batch": 3, "max_context": 64, "num_pages": 40}
    resolved = [resolve(target, **how, **more) for more in ({}, {"num_snapshots": 5}, {"prefix_cache": False})]
    assert [each.num_snapshots for each in resolved] == [12, 5, 0]
    assert resolve(plain, **how).num_snapshots == 0
    for path, more, why in (
        (plain, {"num_snapshots": 2}, "no layer of this model keeps a recurrent state"),
        (target, {"num_snapshots": 2, "prefix_cache": False}, "the prefix cache is off"),
        (target, {"num_snapshots": 10**12}, r"num_snapshots=1000000000000 need .* GiB, which the free memory"),
    ):
        with pytest.raises(EspalierError, match=why):
            resolve(path, **how, **more)


def resolve(path: Path, **fields: Any):
    config = EngineConfig(model=path, **fields)
    return load.resolve_config(config, load.find_checkpoint(config))
