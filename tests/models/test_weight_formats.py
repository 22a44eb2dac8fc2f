"""A weight format is one file and an entry in FORMATS: this file adds one, int8 with a scale for each row.

The loader checks, stacks and cuts its tensors like those of any format, and an engine runs on them.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from espalier.errors import EspalierError
from espalier.layout import RoundLayout
from espalier.models import load_target, read_config, weight_formats
from espalier.models.weight_files import WeightSize, count_weights_in
from espalier.models.weight_formats import StoredTensor, Weight, WeightFormat, all_dense
from espalier.models.weights import Weights
from espalier.startup.build import LoadedModels, assemble_engine, config_without_files
from tests.builders import make_eagle3, make_target
from tests.checkpoints import edit_config, load_pair, replace_weights
from tests.harness import request, run

DTYPE = torch.float64


class Int8Weight(Weight):
    format = "toy-int8"

    def __init__(self, numbers: Tensor, scales: Tensor) -> None:
        super().__init__((numbers.shape[0], numbers.shape[1]), numbers.nbytes + scales.nbytes)
        self.numbers, self.scales = numbers, scales

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        assert x.ndim == 2
        return torch.nn.functional.linear(x, self.numbers * self.scales[:, None], bias)


@dataclass(frozen=True)
class Int8Format(WeightFormat):
    name = "toy-int8"

    def stored_tensors(self, rows: int, columns: int) -> tuple[StoredTensor, ...]:
        return (
            StoredTensor(".weight_int8", (rows, columns), torch.int8, row_dim=0),
            StoredTensor(".weight_scale", (rows,), row_dim=0),
            StoredTensor(".weight_shape", (2,), torch.int64),
        )

    def build_weight(self, tensors: Mapping[str, Tensor], row_counts: Sequence[int], columns: int) -> Weight:
        assert tensors[".weight_int8"].shape == (sum(row_counts), columns)
        assert tensors[".weight_shape"].shape == (len(row_counts), 2)
        return Int8Weight(tensors[".weight_int8"], tensors[".weight_scale"])

    def keeps_stored_dtype(self, name: str, dtype: torch.dtype) -> bool:
        return name.endswith((".weight_int8", ".weight_shape"))


def formats_of(quantisation):
    """As in real checkpoints, some matrices are left alone."""
    return lambda name: all_dense(name) if name in quantisation["ignore"] else Int8Format()


@pytest.fixture(autouse=True)
def with_int8(monkeypatch):
    formats = {**weight_formats.FORMATS, "toy-int8": formats_of}
    monkeypatch.setattr(weight_formats, "FORMATS", MappingProxyType(formats))


def quantise(path: Path) -> dict[str, Tensor]:
    """Rewrite a checkpoint, all linear layers but the head; returns what its tensors mean."""
    weights, meant, stored = load_file(path / "model.safetensors"), {}, {}
    for name, tensor in weights.items():
        meant[name] = stored[name] = tensor
        if tensor.ndim == 2 and "embed" not in name and "lm_head" not in name:
            scales = tensor.abs().amax(1) / 127
            numbers = (tensor / scales[:, None]).round().to(torch.int8)
            meant[name] = numbers * scales[:, None]
            prefix = stored.pop(name) is not None and name.removesuffix(".weight")
            stored |= {f"{prefix}.weight_int8": numbers, f"{prefix}.weight_scale": scales}
            stored[f"{prefix}.weight_shape"] = torch.tensor(tensor.shape)
    save_file(stored, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    quantisation = {"quant_method": "toy-int8", "ignore": ["lm_head"]}
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": quantisation}))
    return meant


@pytest.fixture
def both(tmp_path):
    """A target and its draft in int8, and the same with the meant weights stored dense."""
    found = []
    for kind in ("int8", "dense"):
        target = make_target(tmp_path / kind / "target", layers=4, attention_bias=True)
        draft = make_eagle3(tmp_path / kind / "draft", target)
        found.append((target, draft))
    for int8, dense in zip(*found, strict=True):
        save_file(quantise(int8), dense / "model.safetensors")
    return found


def tokens_of(target_path: Path, draft_path: Path) -> list[list[int]]:
    how = {"dtype": DTYPE, "device": "cpu", "position_rows": 128}
    target, draft = load_pair(target_path, draft_path, **how)
    layout = RoundLayout(4, 3, 2, 8, 4, 96, 1, 32)
    config = config_without_files(layout, "eagle3", "sdpa", DTYPE, torch.device("cpu"), prefix_cache=True)
    engine = assemble_engine(LoadedModels(config, target, draft))
    requests = [request(i, [(i * 5 + j * j) % 16 for j in range(4 + i)]) for i in range(3)]
    run(engine, requests)
    return [r.output for r in requests]


def test_an_engine_runs_on_it_and_gives_the_tokens_of_the_dequantised_weights(both):
    int8, dense = both
    assert isinstance(loaded(int8[0]).weight(["model.layers.0.mlp.up_proj"], [64], 32), Int8Weight)
    assert tokens_of(*int8) == tokens_of(*dense)


def loaded(path: Path) -> Weights:
    return Weights(path, DTYPE, "cpu", read_config(path).formats)


QKV = (["q_proj", "k_proj", "v_proj"], [32, 16, 16], 32, True)


def test_memory_is_counted_as_it_is_stored(both):
    int8, dense = (count_weights_in(path, read_config(path).formats) for path, _ in both)
    with_shape = [name for name in load_file(both[0][0] / "model.safetensors") if name.endswith("weight_shape")]
    matrices = 4 * (64 * 32 + 32 * 32 + 3 * 64 * 32)
    scales = 4 * (64 + 32 + 64 + 64 + 32)
    assert int8.uncast_bytes == matrices + 16 * len(with_shape)
    assert int8.num_cast_values == dense.num_cast_values - matrices + scales
    assert int8.nbytes(torch.bfloat16) == int8.uncast_bytes + 2 * int8.num_cast_values


def test_memory_counts_the_files_that_are_loaded(tmp_path):
    """Some publishers add a second copy of all weights in a file of another name."""
    path = make_target(tmp_path)
    formats = read_config(path).formats
    once = count_weights_in(path, formats)
    shutil.copy(path / "model.safetensors", path / "consolidated.safetensors")
    assert count_weights_in(path, formats) == once
    names = load_file(path / "model.safetensors")
    (path / "model.safetensors").rename(path / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert count_weights_in(path, formats) == once


def test_memory_counts_a_draft_in_pytorchs_format(tmp_path):
    path = make_eagle3(tmp_path / "draft", make_target(tmp_path / "target"))
    count = count_weights_in(path, all_dense)
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    assert count_weights_in(path, all_dense) == count != WeightSize()


@pytest.mark.parametrize(
    ("suffix", "tensor", "says"),
    [
        ("weight_scale", None, r"weight_scale' \[64\] is missing"),
        ("weight_scale", torch.ones(63), r"weight_scale' .* shape \[63\], .* needs \[64\]"),
        ("weight_int8", torch.ones(64, 32), "weight_int8' .* stored as float32, .* needs int8"),
        ("weight_zero_point", torch.ones(64), "weight_zero_point' .* belongs to no parameter"),
    ],
)
def test_tensors_that_the_format_does_not_ask_for_are_refused(both, suffix, tensor, says):
    path = both[0][0]
    replace_weights(path, **{f"model.layers.2.mlp.up_proj.{suffix}": tensor})
    with pytest.raises(EspalierError, match=says):
        load_target(path, dtype=DTYPE, device="cpu", position_rows=8)


def test_numbers_in_fewer_bits_are_no_dense_weights(both):
    path = both[1][0]
    replace_weights(path, **{"model.layers.2.mlp.up_proj.weight": torch.ones(64, 32, dtype=torch.int8)})
    with pytest.raises(EspalierError, match=r"up_proj\.weight' .* stored as int8, .* needs float64, float32"):
        load_target(path, dtype=DTYPE, device="cpu", position_rows=8)


def test_a_format_that_is_not_there_is_refused_by_name(both):
    path = both[0][0]
    edit_config(path, quantization_config={"quant_method": "exotic"})
    with pytest.raises(
        EspalierError, match=r"quantization_config = 'exotic' is not supported, only None or 'awq' .*'toy-int8'"
    ):
        read_config(path)
