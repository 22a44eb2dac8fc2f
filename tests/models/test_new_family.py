"""A model family that only this file knows: its declaration is registered here, and nothing else is touched."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from espalier.config import EngineConfig
from espalier.errors import EspalierError
from espalier.models import load_target
from espalier.models.config import Family, no_windows
from espalier.models.families import FAMILIES
from espalier.startup import load
from tests.builders import make_target
from tests.oracles.dense import DensePass

FAMILY = Family(
    architecture="HazelForCausalLM",
    model_type="hazel",
    # Nothing else says that this family's attention has biases, and that its heads are of a size of their own.
    defaults={"max_position_embeddings": 64, "rms_norm_eps": 1e-6, "hidden_act": "silu", "num_key_value_heads": 2},
    qkv_bias=lambda full: True,
    out_bias=lambda full: True,
    windows=no_windows,
)


def rename(path: Path) -> Path:
    """A Llama checkpoint with biases as one of the new family, which leaves out what its defaults say."""
    raw = json.loads((path / "config.json").read_text())
    raw |= {"architectures": [FAMILY.architecture], "model_type": FAMILY.model_type}
    for name in ("attention_bias", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps"):
        del raw[name]
    (path / "config.json").write_text(json.dumps(raw))
    return path


@pytest.mark.parametrize("act", ["silu", "gelu_pytorch_tanh"])
def test_a_family_is_added_by_its_declaration(tmp_path, monkeypatch, act):
    path = make_target(tmp_path / "model", attention_bias=True, hidden_act=act)
    tokens = torch.randint(0, 16, (1, 12), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)(tokens).logits
    rename(path)
    with pytest.raises(EspalierError, match="'HazelForCausalLM' is not supported; supported are LlamaForCausalLM"):
        load.find_checkpoint(EngineConfig(model=path))
    monkeypatch.setitem(FAMILIES, FAMILY.architecture, FAMILY)
    if act != "silu":
        with pytest.raises(EspalierError, match="hidden_act = 'gelu_pytorch_tanh' is not supported, only 'silu'"):
            load.find_checkpoint(EngineConfig(model=path))
        honouring = replace(FAMILY, supported_fields=("hidden_act",))
        monkeypatch.setitem(FAMILIES, FAMILY.architecture, honouring)
        with pytest.raises(
            EspalierError, match="hidden_act = 'relu2' is not supported, only 'silu' or 'swish' or 'gelu_py"
        ):
            load.find_checkpoint(EngineConfig(model=path, model_overrides={"hidden_act": "relu2"}))
    assert load.find_checkpoint(EngineConfig(model=path)).target.max_position == 64
    target = load_target(path, dtype=torch.float64, device="cpu", position_rows=64)
    out = target(DensePass(tokens, target.layer_specs, torch.arange(12)[None]))
    assert (target.logits(out.hidden) - expected).abs().max() < 1e-5
