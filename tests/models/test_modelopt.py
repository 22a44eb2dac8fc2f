"""Checkpoints as ModelOpt exports them, made by hand: where they are described, scales, K and V; others are refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from espalier.config import FP8_KV
from espalier.errors import EspalierError
from espalier.kernels.layers.quantised import dequantise
from espalier.models import load_target, read_config
from espalier.models.weight_formats import declared_kv_dtype, quantised
from espalier.models.weights import Weights
from tests.builders import make_target
from tests.quantised import INPUT, quantise

# As exports of 2024 have it, in hf_quant_config.json, and as later ones have it in config.json.
APART = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head", "*.layers.1.mlp*"]}
INSIDE = {
    "quant_method": "modelopt",
    "quant_algo": "FP8",
    "ignore": ["lm_head", "model.layers.1.mlp*"],
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    "config_groups": {"group_0": {"input_activations": {"dynamic": False, "num_bits": 8, "type": "float"}}},
    "producer": {"name": "modelopt", "version": "0.33.0"},
}


def exported(path, where, **changes):
    """A target in FP8 whose second layer has a dense MLP, and the dense weights that it means."""
    target = make_target(path / "target", "llama")
    dense = load_file(target / "model.safetensors")
    meant = quantise(target, "fp8-tensor-static")
    stored = load_file(target / "model.safetensors")
    for name in [name for name in stored if name.startswith("model.layers.1.mlp")]:
        del stored[name]
    stored |= {name: tensor for name, tensor in dense.items() if name.startswith("model.layers.1.mlp")}
    meant |= {name: tensor for name, tensor in dense.items() if name.startswith("model.layers.1.mlp")}
    # ModelOpt's scales are scalars, without a dimension.
    stored = {name: tensor.reshape(()) if name.endswith("_scale") else tensor for name, tensor in stored.items()}
    for layer in range(3):
        names = {"k_proj.k_scale": 0.5, "v_proj.v_scale": 2.0}
        stored |= {f"model.layers.{layer}.self_attn.{name}": torch.tensor(value) for name, value in names.items()}
    save_file(stored, target / "model.safetensors")
    config = json.loads((target / "config.json").read_text())
    del config["quantization_config"]
    if where == "apart":
        described = {"producer": {"name": "modelopt"}, "quantization": {**APART, **changes}}
        (target / "hf_quant_config.json").write_text(json.dumps(described))
    else:
        config["quantization_config"] = {**INSIDE, **changes}
    (target / "config.json").write_text(json.dumps(config))
    return target, meant


@pytest.mark.parametrize("where", ["apart", "inside"])
def test_weights_scales_and_cache_are_read(tmp_path, monkeypatch, where):
    monkeypatch.setattr(quantised, "adapt_to_device", lambda matrix: matrix)
    path, meant = exported(tmp_path, where)
    config = read_config(path)
    weights = Weights(path, torch.float64, "cpu", config.formats)
    for name in ("model.layers.0.mlp.down_proj", "model.layers.1.self_attn.o_proj", "model.layers.1.mlp.down_proj"):
        dense = meant[f"{name}.weight"]
        matrix = weights.matrix([name], [len(dense)], dense.shape[1])
        if ".1.mlp" in name:
            assert torch.equal(matrix, dense)
            continue
        assert torch.equal(dequantise(matrix, torch.float64), dense)
        assert matrix.input_scales.static_scale.tolist() == INPUT.tolist()
    target = load_target(path, dtype=torch.float64, device="cpu", position_rows=64)
    assert [(float(s.k[0]), float(s.v[0])) for s in target.kv_scales] == [(0.5, 2.0)] * 3
    assert config.declared_kv_dtype == FP8_KV


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"quant_algo": "NVFP4_AWQ"}, "quant_algo = 'NVFP4_AWQ' is not supported, only 'FP8' or 'NVFP4'"),
        ({"quant_algo": "NVFP4", "group_size": 32}, "group_size = 32 is not supported"),
        ({"quant_algo": "W4A8_AWQ"}, "quant_algo = 'W4A8_AWQ'"),
    ],
)
@pytest.mark.parametrize("where", ["apart", "inside"])
def test_other_algorithms_are_refused_by_name(tmp_path, where, changes, says):
    with pytest.raises(EspalierError, match=says):
        read_config(exported(tmp_path, where, **changes)[0])


def test_a_cache_in_other_bits_is_refused_by_name():
    with pytest.raises(EspalierError, match="kv_cache_quant_algo 'NVFP4' is not supported"):
        declared_kv_dtype({"quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}})
