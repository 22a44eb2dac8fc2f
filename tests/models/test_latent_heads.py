"""EAGLE-3 heads whose layer has latent attention, against transformers' DeepSeek-V3 layer with a doubled input."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3MLP,
    DeepseekV3RotaryEmbedding,
)

from espalier.attention import BACKENDS, default_backend
from espalier.errors import EspalierError
from espalier.models import read_config
from espalier.speculate.drafters.registry import draft_algorithm, read_draft
from tests.builders import make_eagle3, make_target
from tests.checkpoints import edit_config, load_pair
from tests.harness import LATENT_HEAD
from tests.models.reference import in_float64
from tests.oracles.dense import DensePass

WIDTH = 24
# Fields that would change the config of the oracle: the size of a head is that of the rotated part.
IGNORED = ("architectures", "torch_dtype", "head_dim")
LOADING: dict[str, Any] = {"dtype": torch.float64, "device": "cpu", "position_rows": WIDTH}
YARN = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.7}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "queries without a latent": {"q_lora_rank": None},
    "yarn": {"rope_scaling": {**YARN, "original_max_position_embeddings": 8}},
    "residual normed, norms before fc, normed output": {
        "norm_before_residual": True,
        "fc_norm": True,
        "norm_output": True,
    },
    "a copy of the target's experts in its config": {"n_routed_experts": 8, "first_k_dense_replace": 0},
    "fewer tokens": {"draft_vocab": 9},
}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return make_target(tmp_path / "target", "deepseek_v3", layers=6)


def make_head(path: Path, target: Path, **fields: Any) -> Path:
    return make_eagle3(path, target, seed=5, **{**LATENT_HEAD, **fields})


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight


class Oracle:
    """The head over a whole sequence, of transformers' parts and plain torch."""

    def __init__(self, head: Path) -> None:
        self.raw = json.loads((head / "config.json").read_text())
        self.weights = load_file(head / "model.safetensors")
        known = {name: value for name, value in self.raw.items() if name not in IGNORED}
        config = DeepseekV3Config(**known, attn_implementation="sdpa", pad_token_id=None)
        hidden = config.hidden_size
        attention = DeepseekV3Attention(config, 0)
        first = "q_proj" if config.q_lora_rank is None else "q_a_proj"
        for name in (first, "kv_a_proj_with_mqa"):
            setattr(attention, name, nn.Linear(2 * hidden, getattr(attention, name).out_features, bias=False))
        self.attention = self._filled(attention, "midlayer.self_attn.")
        self.mlp = self._filled(DeepseekV3MLP(config), "midlayer.mlp.")
        self.rotary = DeepseekV3RotaryEmbedding(config)

    def _filled(self, module: nn.Module, prefix: str) -> nn.Module:
        own = {name.removeprefix(prefix): value for name, value in self.weights.items() if name.startswith(prefix)}
        module.to(torch.float64).load_state_dict(own)
        return module

    @torch.no_grad()
    @in_float64
    def __call__(self, embedded: Tensor, captured: Tensor) -> tuple[Tensor, Tensor]:
        """embedded: [1, Q, H], the tokens'; captured: [1, Q, 3·H].  (what is handed on, what the head reads)."""
        weights, raw = self.weights, self.raw
        if raw.get("fc_norm"):
            parts = captured.chunk(3, -1)
            captured = torch.cat([normed(part, weights[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)], -1)
        feature = captured @ weights["fc.weight"].T
        normed_feature = normed(feature, weights["midlayer.hidden_norm.weight"])
        x = normed_feature if raw.get("norm_before_residual") else feature
        both = torch.cat((normed(embedded, weights["midlayer.input_layernorm.weight"]), normed_feature), -1)
        width = both.shape[1]
        mask = torch.full((width, width), -torch.inf, dtype=torch.float64).triu(1)[None, None]
        angles = self.rotary(both, torch.arange(width)[None])
        x = x + self.attention(both, position_embeddings=angles, attention_mask=mask)[0]
        x = x + self.mlp(normed(x, weights["midlayer.post_attention_layernorm.weight"]))
        last = normed(x, weights["norm.weight"])
        return last if raw.get("norm_output") else x, last


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_head_computes_what_transformers_computes(variant: str, target: Path, tmp_path: Path) -> None:
    head = make_head(tmp_path / "head", target, **VARIANTS[variant])
    model, draft = load_pair(target, head, **LOADING)
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 16, (1, WIDTH), generator=generator)
    captured = torch.randn(1, WIDTH, 96, generator=generator, dtype=torch.float64)
    out = draft(DensePass(tokens, draft.layer_specs), draft.fuse(captured))
    handed_on, last = Oracle(head)(model.embed.weight[tokens], captured)
    torch.testing.assert_close(out.hidden, handed_on, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(out.normed, last, rtol=1e-9, atol=1e-9)


def test_both_names_of_its_layer(target: Path, tmp_path: Path) -> None:
    head = make_head(tmp_path / "head", target)
    file = head / "model.safetensors"
    save_file({name.replace("midlayer.", "layers.0."): value for name, value in load_file(file).items()}, file)
    load_pair(target, head, **LOADING)


@pytest.mark.parametrize(
    ("family", "ids", "layers"),
    [
        ("deepseek_v3", [1, 3, 4], (2, 4, 5)),
        ("deepseek_v3", [2, 3, 4], (2, 3, 4)),
        ("glm4_moe_lite", [2, 3, 4], (3, 4, 5)),
        ("llama", [2, 3, 4], (3, 4, 5)),
    ],
)
def test_captured_layers_of_deepseek_are_named_by_their_input(
    family: str, ids: list[int], layers: tuple[int, ...], tmp_path: Path
) -> None:
    """Unless the first is 1: that is the output of layer 1."""
    path = make_target(tmp_path / "target", family, layers=6)
    head = make_eagle3(tmp_path / "head", path, eagle_config={"eagle_aux_hidden_state_layer_ids": ids})
    assert read_draft(head, read_config(path)).spec.captured_layers == layers


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers = 2; only EAGLE-3 heads with one layer"),
        ({"kv_lora_rank": "16"}, "kv_lora_rank = '16'; a positive integer"),
        ({"hidden_size": 64, "target_hidden_size": 64}, "hidden size 64, the target has 32"),
        ({"v_head_dim": 13}, r"'midlayer.self_attn.kv_b_proj.weight' .*has shape \[64, 16\]"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            "quantization_config = 'bitsandbytes' is not supported",
        ),
    ],
    ids=str,
)
def test_heads_that_are_refused(fields: dict[str, Any], says: str, target: Path, tmp_path: Path) -> None:
    head = make_head(tmp_path / "head", target)
    edit_config(head, **fields)
    with pytest.raises(EspalierError, match=says):
        load_pair(target, head, **LOADING)


def test_a_head_with_too_wide_a_latent_runs_on_another_backend_or_is_refused(target: Path, tmp_path: Path) -> None:
    head = make_head(tmp_path / "head", target, kv_lora_rank=1024)
    specs = read_draft(head, read_config(target)).spec.layer_specs
    assert default_backend("cuda", torch.bfloat16, specs[0].cache_spec) == "reference"
    with pytest.raises(EspalierError, match="attention=triton does not support heads of size 1030; it supports sizes"):
        BACKENDS["triton"].support.require("cuda", torch.bfloat16, 16, specs)


def test_a_latent_head_is_found_by_its_architecture(target: Path, tmp_path: Path) -> None:
    for name in ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM"):
        head = make_head(tmp_path / name, target, architectures=[name], model_type="kimi_k2")
        assert draft_algorithm(head) == "eagle3"
        config = read_draft(head, read_config(target))
        assert config.layer.latent is not None and config.layer.latent.kv_rank == LATENT_HEAD["kv_lora_rank"]
