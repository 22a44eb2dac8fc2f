"""GPT-OSS: published configs, the layout of its stored experts, its sinks; what it cannot run is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from espalier.errors import EspalierError
from espalier.kernels.ops.activation import Activation
from espalier.kernels.ops.experts import Routing
from espalier.models import load_target, read_config
from espalier.models.config import Experts
from espalier.models.layers.attention import Attention
from espalier.models.layers.mlp import MixtureMLP
from tests.builders import make_target

LOADING: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cpu", "position_rows": 8}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return make_target(tmp_path, "gpt_oss", layers=2)


def edit_config(path: Path, **fields: Any) -> None:
    file = path / "config.json"
    kept = {**json.loads(file.read_text()), **fields}
    file.write_text(json.dumps({name: value for name, value in kept.items() if value != "absent"}))


def test_the_published_config(tmp_path: Path) -> None:
    """The fields of gpt-oss-20b that matter here, as they were published, without the weights' format."""
    raw = {"architectures": ["GptOssForCausalLM"], "attention_bias": True, "head_dim": 64, "hidden_act": "silu"}
    raw |= {"experts_per_token": 4, "hidden_size": 2880, "initial_context_length": 4096, "intermediate_size": 2880}
    raw |= {"layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072}
    raw |= {"num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8}
    raw |= {"num_local_experts": 32, "rms_norm_eps": 1e-5, "rope_theta": 150000, "sliding_window": 128}
    raw |= {"swiglu_limit": 7.0, "tie_word_embeddings": False, "vocab_size": 201088, "output_router_logits": False}
    rope = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096}
    raw |= {"rope_scaling": rope | {"rope_type": "yarn", "truncate": False}}
    configs = []
    for fields in (raw, {name: raw[name] for name in raw if name not in ("rope_scaling", "rope_theta", "layer_types")}):
        (tmp_path / "config.json").write_text(json.dumps(fields))
        configs.append(read_config(tmp_path))
    routing = Routing(32, 4, "topk_softmax", logit_bias=True)
    how = {"router_name": "router", "storage": "stacked", "has_biases": True, "activation": Activation(1.702, 1.0, 7.0)}
    for config in configs:
        assert config.experts == Experts(frozenset(range(24)), routing, 2880, **how)
        assert config.windows == (128, None) * 12 and config.family.has_sinks
        assert (config.heads, config.kv_heads, config.head_size) == (64, 8, 64)
        assert config.attention_bias and config.out_bias and config.max_position == 131072
        assert (config.rope.type, config.rope.theta, config.rope.truncate) == ("yarn", 150000.0, False)
        assert config.rope.attention_factor == pytest.approx(1.3466, abs=1e-4)
        assert config.rope == configs[0].rope


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported, only 'silu'"),
        ({"swiglu_limit": "absent"}, "swiglu_limit = None; a positive number is needed"),
        ({"swiglu_limit": 0}, "swiglu_limit = 0; a positive number is needed"),
        ({"swiglu_limit": "7"}, "swiglu_limit = '7'; a number of at least 0 or null is needed"),
        ({"swiglu_alpha": None}, "swiglu_alpha = None; a positive number is needed"),
        ({"num_local_experts": None}, "num_experts = None, but 1 to"),
        ({"num_experts_per_tok": 7}, "top_k = 7, but 1 to 6"),
        ({"intermediate_size": None}, "intermediate_size = None"),
        ({"sliding_window": 0}, "sliding_window = 0; a positive integer or null"),
    ],
    ids=str,
)
def test_configs_that_are_refused(fields: dict[str, Any], says: str, target: Path) -> None:
    edit_config(target, **fields)
    with pytest.raises(EspalierError, match=says):
        read_config(target)


def test_a_family_without_this_activation_refuses_its_limit(tmp_path: Path) -> None:
    path = make_target(tmp_path, "qwen3_moe")
    edit_config(path, swiglu_limit=7.0)
    with pytest.raises(EspalierError, match=r"swiglu_limit = 7\.0 is not supported"):
        read_config(path)


@pytest.mark.parametrize(
    "name",
    [
        "mlp.experts.gate_up_proj",
        "mlp.experts.gate_up_proj_bias",
        "mlp.experts.down_proj",
        "mlp.experts.down_proj_bias",
        "mlp.router.weight",
        "mlp.router.bias",
        "self_attn.sinks",
        "self_attn.o_proj.bias",
    ],
)
def test_every_weight_is_needed_in_its_shape(name: str, target: Path) -> None:
    file, full = target / "model.safetensors", f"model.layers.1.{name}"
    kept = load_file(file)
    short, as_bytes = {**kept, full: kept[full][1:].clone()}, {**kept, full: kept[full].to(torch.uint8)}
    lacking = {key: value for key, value in kept.items() if key != full}
    for weights, says in ((lacking, "is missing"), (short, "has shape"), (as_bytes, "is stored as uint8")):
        save_file(weights, file)
        with pytest.raises(EspalierError, match=rf"{full}' .*{says}"):
            load_target(target, **LOADING)


def test_quantised_experts_are_unused_weights(target: Path) -> None:
    """A config without its quantization_config does not hide them."""
    file = target / "model.safetensors"
    extra = "model.layers.1.mlp.experts.gate_up_proj_scales"
    save_file({**load_file(file), extra: torch.zeros(2, dtype=torch.uint8)}, file)
    with pytest.raises(EspalierError, match=f"{extra}' .*belongs to no parameter"):
        load_target(target, **LOADING)


def test_each_weight_is_in_its_place(target: Path) -> None:
    """Gate and up alternate in the file; here all gates come first.  Sinks and the router's bias are float32."""
    weights, layer = load_file(target / "model.safetensors"), load_target(target, **LOADING).layers[1]
    stored = {name: weights[f"model.layers.1.mlp.experts.{name}"].bfloat16() for name in ("gate_up_proj", "down_proj")}
    biases = {name: weights[f"model.layers.1.mlp.experts.{name}_bias"].bfloat16() for name in stored}
    mlp = layer.mlp
    assert isinstance(mlp, MixtureMLP) and isinstance(layer.attention, Attention) and mlp.biases is not None
    for expert in range(6):
        gate, up = stored["gate_up_proj"][expert, :, 0::2].T, stored["gate_up_proj"][expert, :, 1::2].T
        assert torch.equal(mlp.gate_up[expert], torch.cat((gate, up)))
        assert torch.equal(mlp.down[expert], stored["down_proj"][expert].T)
        gate_bias, up_bias = biases["gate_up_proj"][expert, 0::2], biases["gate_up_proj"][expert, 1::2]
        assert torch.equal(mlp.biases.gate_up[expert], torch.cat((gate_bias, up_bias)))
        assert torch.equal(mlp.biases.down[expert], biases["down_proj"][expert])
    assert mlp.gate_up.is_contiguous() and mlp.down.is_contiguous() and mlp.biases.gate_up.is_contiguous()
    for loaded, name in ((mlp.router_bias, "mlp.router.bias"), (layer.attention.sink, "self_attn.sinks")):
        assert loaded is not None and loaded.dtype == torch.float32
        assert torch.equal(loaded, weights[f"model.layers.1.{name}"].float())
