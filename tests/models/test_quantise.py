"""`quantise` writes what the formats read: near the original, whole, file by file; what it cannot write is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from espalier.errors import EspalierError
from espalier.models import load_target, read_config
from espalier.models.quantisers import QUANTISERS, quantise
from espalier.models.weight_files import INDEX_FILE
from espalier.models.weights import Weights
from tests.builders import make_target

CPU = torch.device("cpu")
# Of a matrix of normal values, the norm of what quantising loses, over its own: E4M3 rounds to 2^-4, half of it lost.
LOSS = {"fp8": 0.03, "int4": 0.12}


def sharded(path: Path, count: int = 2) -> Path:
    """The same checkpoint in several files with an index."""
    weights = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    places = {name: f"model-{i % count}.safetensors" for i, name in enumerate(sorted(weights))}
    for file in set(places.values()):
        save_file({name: weights[name] for name, place in places.items() if place == file}, path / file)
    (path / INDEX_FILE).write_text(json.dumps({"weight_map": places}))
    return path


def made(path: Path, family: str = "llama", **config) -> Path:
    return make_target(path, family, hidden=128, intermediate_size=256, head_dim=32, **config)


@pytest.mark.parametrize("to", ["fp8", "int4"])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_copy_is_read_back_near_the_original(tmp_path, to, is_sharded):
    path = made(tmp_path / "target")
    original = load_file(path / "model.safetensors")
    (path / "tokenizer.json").write_text("{}")
    if is_sharded:
        sharded(path)
    files = []
    written = quantise(path, tmp_path / "out", to, CPU, lambda: files.append(1))
    assert len(files) == len(list((tmp_path / "out").glob("*.safetensors"))) == 1 + is_sharded
    assert written.num_matrices == 3 * 7 and not written.dense_names
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    load_target(tmp_path / "out", dtype=torch.float32, device="cpu", position_rows=8)
    copy = Weights(tmp_path / "out", torch.float64, "cpu", read_config(tmp_path / "out").formats)
    for name, tensor in original.items():
        if tensor.ndim == 1 or "embed" in name or "lm_head" in name:
            assert torch.equal(copy.load(name, *tensor.shape), tensor)
            continue
        lost = copy.load_dense_matrix(name.removesuffix(".weight"), *tensor.shape) - tensor
        assert 0 < lost.norm() / tensor.norm() < LOSS[to]


def test_a_group_takes_the_best_of_several_scales(tmp_path, monkeypatch):
    """One large value in a group would cost all others."""
    path = made(tmp_path / "target")
    weights = load_file(path / "model.safetensors")
    for tensor in weights.values():
        if tensor.ndim == 2:
            tensor[:, 0] *= 3
    save_file(weights, path / "model.safetensors")

    def error(out):
        quantise(path, out, "int4", CPU, lambda: None)
        copy = Weights(out, torch.float64, "cpu", read_config(out).formats)
        name = "model.layers.0.mlp.up_proj"
        return float((copy.load_dense_matrix(name, 256, 128) - weights[f"{name}.weight"]).norm())

    searched = error(tmp_path / "searched")
    monkeypatch.setattr("espalier.models.quantisers.SCALE_FACTORS", (1.0,))
    assert searched < 0.97 * error(tmp_path / "one")


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("to", ["fp8", "int4"])
def test_experts_and_latent_layers(tmp_path, family, to):
    """Routers stay dense, and so do matrices whose columns no group divides."""
    config = {} if family == "qwen3_moe" else {"num_nextn_predict_layers": 0}
    path = made(tmp_path / "target", family, moe_intermediate_size=128, **config)
    written = quantise(path, tmp_path / "out", to, CPU, lambda: None)
    names = load_file(tmp_path / "out" / "model.safetensors")
    assert "model.layers.2.mlp.gate.weight" in names and not any("gate.weight_scale" in name for name in names)
    assert any("experts.0.up_proj.weight_scale" in name for name in names)
    # The latents of the tiny DeepSeek have 12 and 14 values.
    assert bool(written.dense_names) == (family == "deepseek_v3" and to == "int4")
    load_target(tmp_path / "out", dtype=torch.float32, device="cpu", position_rows=8)


@pytest.mark.parametrize(
    ("hidden", "inner", "groups"), [(96, 320, {32: 15, 64: 3}), (64, 128, {64: 15}), (128, 96, {32: 3})]
)
def test_int4_takes_the_largest_group_that_divides(tmp_path, hidden, inner, groups):
    """As 576 columns of a model of 135M, which 128 does not divide."""
    path = make_target(tmp_path / "target", hidden=hidden, intermediate_size=inner, head_dim=32, heads=4)
    original = load_file(path / "model.safetensors")
    written = quantise(path, tmp_path / "out", "int4", CPU, lambda: None)
    assert (written.num_matrices, written.dense_names, written.num_matrices_by_small_group_size) == (21, [], groups)
    stored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["config_groups"]
    assert all(len(group["targets"]) <= 7 for group in stored.values()), "a pattern for all layers"
    load_target(tmp_path / "out", dtype=torch.float32, device="cpu", position_rows=8)
    copy = Weights(tmp_path / "out", torch.float64, "cpu", read_config(tmp_path / "out").formats)
    for name, tensor in original.items():
        if ".layers." in name and tensor.ndim == 2:
            lost = copy.load_dense_matrix(name.removesuffix(".weight"), *tensor.shape) - tensor
            assert 0 < lost.norm() / tensor.norm() < LOSS["int4"]


def test_layers_that_differ_are_named_one_by_one():
    """A pattern for all layers would take those of another group too."""
    columns = {"model.layers.0.mlp.down_proj": 192, "model.layers.1.mlp.down_proj": 256, "model.layers.10.x": 64}
    formats = QUANTISERS["int4"].storage_formats(columns)
    assert [formats(name).group_size for name in columns] == [64, 128, 64]


def test_what_cannot_be_written_is_refused(tmp_path):
    path = made(tmp_path / "target")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    quantise(path, tmp_path / "out", "fp8", CPU, lambda: None)
    stacked = make_target(tmp_path / "stacked", "gpt_oss")
    for source, out, says in (
        (path, tmp_path / "full", "is not an empty directory"),
        (tmp_path / "out", tmp_path / "again", "is quantised already"),
        (stacked, tmp_path / "again", "stores its experts stacked"),
    ):
        with pytest.raises(EspalierError, match=says):
            quantise(source, out, "int4", CPU, lambda: None)
        assert out == tmp_path / "full" or not out.exists()
