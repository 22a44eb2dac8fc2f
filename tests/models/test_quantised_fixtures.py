"""Each format reads what the library that defines it wrote, as that library reads it (tests/fixtures/quantised/)."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from espalier.kernels.layers.quantised import QuantisedMatrix, dequantise
from espalier.models.weight_formats import FORMATS
from espalier.models.weight_formats.e2m1 import Mxfp4Format
from espalier.models.weights import Weights
from tests.quantised import mxfp4

FIXTURES = sorted((Path(__file__).parents[1] / "fixtures" / "quantised").glob("*.safetensors"))


@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda path: path.stem)
def test_what_a_library_wrote_is_read_as_it_reads_it(fixture, tmp_path):
    with safe_open(fixture, framework="pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        config = json.loads(file.metadata()["quantization_config"])
    meant = stored.pop("meant")
    save_file({f"layer.{name}": tensor for name, tensor in stored.items()}, tmp_path / "model.safetensors")
    weights = Weights(tmp_path, torch.float32, "cpu", FORMATS[config["quant_method"]](config))
    matrix = weights.matrix(["layer"], [32], 64)
    weights.require_all_used()
    assert isinstance(matrix, QuantisedMatrix)
    # AutoGPTQ reads back in float16.
    rounding = 2.0**-11 if fixture.stem.startswith("gptq") else 0
    torch.testing.assert_close(dequantise(matrix, torch.float32), meant, rtol=rounding, atol=0)


def test_mxfp4_experts_are_read_as_transformers_reads_them():
    stored, meant = mxfp4(torch.randn(3, 64, 10, dtype=torch.float64), "")
    # Every nibble occurs, and scales from tiny to large.
    stored["blocks"].view(-1)[:256] = torch.arange(256, dtype=torch.uint8)
    stored["scales"].view(-1)[:4] = torch.tensor([100, 127, 128, 140], dtype=torch.uint8)
    matrix = Mxfp4Format().expert_matrix({f"_{name}": tensor for name, tensor in stored.items()})
    theirs = convert_moe_packed_tensors(stored["blocks"], stored["scales"], dtype=torch.float32)
    for expert in range(3):
        assert torch.equal(dequantise(matrix[expert], torch.float32), theirs[expert].T)
    assert torch.equal(theirs[2].double(), meant[2])
