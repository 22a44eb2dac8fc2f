"""Whatever is wrong with a checkpoint is said in one line that names it."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from espalier.errors import EspalierError
from espalier.models import load_target, read_config
from espalier.speculate.drafters.registry import load_draft, read_draft
from tests.builders import make_eagle3, make_target
from tests.checkpoints import edit_config, edit_weights, load_pair
from tests.oracles.dense import DensePass

LOADING: dict[str, Any] = {"dtype": torch.float64, "device": "cpu", "position_rows": 8}


def refused(call: Callable[[], object], *says: str) -> None:
    with pytest.raises(EspalierError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for words in says:
        assert re.search(words, message), f"{words!r} is not in {message!r}"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return make_target(tmp_path / "target", layers=4)


@pytest.fixture
def draft(tmp_path: Path, target: Path) -> Path:
    return make_eagle3(tmp_path / "draft", target, draft_vocab=8)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", "supported are LlamaForCausalLM"]),
        ({"architectures": ["MambaForCausalLM"]}, ["MambaForCausalLM", "recurrent state"]),
        ({"architectures": ["JambaForCausalLM"]}, ["JambaForCausalLM", "recurrent state"]),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, ["is a draft", "draft="]),
        ({"architectures": ["Gemma4AssistantForCausalLM"]}, ["is a draft", "draft="]),
        (
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            ["quantization_config = 'bitsandbytes'", "unquantised"],
        ),
        *(
            ({"quantization_config": value}, [f"quantization_config = {re.escape(repr(value))}; an object"])
            for value in ("fp8", "x", ["awq"], 4, True)
        ),
        ({"compression_config": "gptq"}, ["compression_config = 'gptq'; an object"]),
        *(
            ({"quantization_config": {"quant_method": "gguf", "types": {"a": value}}}, ["block type .* not supported"])
            for value in ([], {}, 0, None)
        ),
        ({"hidden_act": "gelu"}, ["hidden_act = 'gelu'", "'silu'"]),
        ({"attn_logit_softcapping": 30.0}, ["attn_logit_softcapping = 30.0"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor = 0.5"]),
        ({"layer_types": ["linear_attention"] * 4}, ["'linear_attention'", "'full_attention'"]),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, ["'spiral'", "llama3"]),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1, 2, 3, 4], "long_factor": [1, 2, 3]}},
            [r"long_factor = \[1, 2, 3\]; a list of 4 positive numbers"],
        ),
        ({"original_max_position_embeddings": "x"}, ["original_max_position_embeddings = 'x'; a positive number"]),
        ({"rope_scaling": {"rope_type": "yarn"}}, ["'yarn'", "'factor'"]),
        ({"rope_parameters": {"llama_4_scaling_beta": 0.1}}, ["llama_4_scaling_beta = 0.1 is not supported"]),
        ({"rope_parameters": {"max_position_embeddings": 7}}, ["max_position_embeddings = 7, but the model has"]),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [2, 2]}}, ["'mrope_section'"]),
        ({"hidden_size": None}, ["hidden_size = None", "positive integer"]),
        ({"rms_norm_eps": None}, ["rms_norm_eps = None; a positive number is needed"]),
        ({"rms_norm_eps": -1}, ["rms_norm_eps = -1; a positive number is needed"]),
        ({"rope_theta": "x"}, ["rope_theta = 'x'; a positive number or null"]),
        ({"rope_theta": -1.0}, ["rope_theta = -1.0; a positive number or null"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, ["rope parameter factor = 0; a positive number"]),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "yarn"}},
            ["rope_type is 'yarn' in rope_parameters and 'linear' in rope_scaling; remove one"],
        ),
        ({"rope_parameters": {"factor": 4.0}}, ["rope parameter factor = 4.0 has no effect with rope_type 'default'"]),
        (
            {"layer_types": ["full_attention"] * 3 + ["sliding_attention"], "sliding_window": 8},
            ["layer_types calls layer 3 'sliding_attention'", "sliding_window = 8", "LlamaForCausalLM"],
        ),
        ({"rope_scaling": 3}, ["rope_scaling = 3; an object or null"]),
        ({"rope_parameters": {"rope_theta": "x"}}, ["rope parameter rope_theta = 'x'; a positive number"]),
        ({"layer_types": 3}, ["layer_types = 3; a list or null"]),
        ({"mlp_only_layers": 3}, ["mlp_only_layers = 3; a list or null"]),
        ({"mlp_layer_types": 3}, ["mlp_layer_types = 3; a list or null"]),
        ({"num_key_value_heads": 3}, ["4 heads over 3 key-value heads"]),
    ],
    ids=lambda value: next(iter(value)) + str(next(iter(value.values())))[:24] if isinstance(value, dict) else "",
)
def test_configs(fields: dict[str, Any], says: list[str], target: Path) -> None:
    edit_config(target, **fields)
    refused(lambda: read_config(target), *says)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"num_hidden_layers": None}, ["num_hidden_layers = None", "positive integer"]),
        ({"kv_lora_rank": None}, ["kv_lora_rank = None", "positive integer"]),
        ({"qk_rope_head_dim": 5}, ["qk_rope_head_dim = 5", "must be even"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_configs_of_latent_attention(family: str, fields: dict[str, Any], says: list[str], tmp_path: Path) -> None:
    path = make_target(tmp_path, family)
    edit_config(path, **fields)
    refused(lambda: read_config(path), *says)


def test_layers_that_predict_several_tokens_stay_unused(tmp_path: Path) -> None:
    """DeepSeek-V3 stores such layers after the target's own.  Layers past those belong to no parameter."""
    path = make_target(tmp_path, "deepseek_v3", layers=2, num_nextn_predict_layers=1)
    edit_weights(path, lambda weights: weights.update({"model.layers.2.eh_proj.weight": torch.zeros(2, 4)}))
    load_target(path, **LOADING)
    edit_weights(path, lambda weights: weights.update({"model.layers.3.eh_proj.weight": torch.zeros(2, 4)}))
    refused(lambda: load_target(path, **LOADING), "'model.layers.3.eh_proj.weight'", "no parameter")


def test_overrides_replace_and_keep_the_rest(target: Path) -> None:
    before = read_config(target)
    after = read_config(target, {"rms_norm_eps": 0.5, "rope_parameters": {"rope_theta": 77.0}})
    assert (after.rms_norm_eps, after.rope.theta, after.rope.type) == (0.5, 77.0, "default")
    assert after.raw["hidden_size"] == before.raw["hidden_size"]
    refused(
        lambda: read_config(target, {"rms_norm_epsilon": 1e-6}), "'rms_norm_epsilon'", "did you mean 'rms_norm_eps'"
    )
    refused(lambda: read_config(target, {"model_type": "bert"}), "model_type", "cannot be replaced; edit config.json")
    refused(lambda: read_config(target, {"foo": 1}), "no field 'foo' in this model's config; see config.json")
    refused(lambda: read_config(target, {"quantization_config": {"quant_method": "exotic"}}), "'exotic'")


def test_missing_files(target: Path) -> None:
    refused(lambda: read_config(target / "nowhere"), "config.json does not exist")
    (target / "model.safetensors").unlink()
    refused(lambda: load_target(target, **LOADING), "holds no weights")
    torch.save({}, target / "pytorch_model.bin")
    refused(lambda: load_target(target, **LOADING), "pytorch_model.bin", "safetensors only")
    (target / "config.json").write_text("{")
    refused(lambda: read_config(target), "config.json is not readable JSON")


def test_weights_that_do_not_belong(target: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    kept = load_file(target / "model.safetensors")
    edit_weights(target, lambda weights: weights.pop(name))
    refused(lambda: load_target(target, **LOADING), re.escape(f"{name}' [64, 32] is missing"))
    save_file({**kept, "model.layers.1.extra.weight": torch.zeros(1)}, target / "model.safetensors")
    refused(lambda: load_target(target, **LOADING), "'model.layers.1.extra.weight'", "no parameter")
    save_file({**kept, name: torch.zeros(63, 32)}, target / "model.safetensors")
    refused(lambda: load_target(target, **LOADING), re.escape(name), re.escape("[63, 32]"), re.escape("[64, 32]"))
    save_file({**kept, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}, target / "model.safetensors")
    load_target(target, **LOADING)


def test_a_truncated_file(target: Path) -> None:
    file = target / "model.safetensors"
    whole = file.read_bytes()
    for length in (len(whole) - 100, 1000, 4, 0):
        file.write_bytes(whole[:length])
        refused(lambda: load_target(target, **LOADING), "model.safetensors", "truncated or corrupt")


def test_shards(target: Path) -> None:
    weights = load_file(target / "model.safetensors")
    names = sorted(weights)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: weights[name] for name in part}, target / file)
    (target / "model.safetensors").unlink()

    def run() -> torch.Tensor:
        model = load_target(target, **LOADING)
        return model(DensePass(torch.arange(8)[None], model.layer_specs)).hidden

    unindexed = run()
    index = {"weight_map": {name: file for file, part in halves.items() for name in part}}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(run(), unindexed)
    (target / "b.safetensors").unlink()
    refused(run, "shard .*b.safetensors is missing")


def test_a_tied_head_that_differs(target: Path) -> None:
    edit_config(target, tie_word_embeddings=True)
    refused(lambda: load_target(target, **LOADING), "'lm_head.weight' differs", "model_overrides")
    load_target(target, overrides={"tie_word_embeddings": False}, **LOADING)


def test_a_capture_beyond_the_target(target: Path) -> None:
    refused(lambda: load_target(target, captured_layers=(5,), **LOADING), "layer 5", "4 layers")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"hidden_size": 64, "target_hidden_size": 64}, ["hidden size 64, the target has 32"]),
        ({"vocab_size": 20}, ["vocabulary 20, the target has 16"]),
        ({"draft_vocab_size": 17}, ["draft_vocab_size = 17"]),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, [r"layers \(1, 2, 9\)", "4 layers"]),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, ["fuses 3 layers, 2 are captured"]),
        ({"num_aux_hidden_states": 4}, ["num_aux_hidden_states = 4"]),
        ({"num_hidden_layers": 2}, ["num_hidden_layers = 2"]),
        ({"eagle_config": 3}, ["eagle_config = 3; an object is needed"]),
        ({"transformer_layer_config": [1]}, [r"transformer_layer_config = \[1\]; an object is needed"]),
        ({"draft_vocab_size": "8"}, ["draft_vocab_size = '8'; an integer of at least 1"]),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": "1"}},
            ["eagle_aux_hidden_state_layer_ids = '1'; a list of target layers"],
        ),
        ({"architectures": 3}, ["architecture None is not a known draft"]),
        ({"norm_before_fc": True, "fc_norm": True}, ["norm_before_fc and fc_norm"]),
        ({"norm_before_fc": True}, ["'input_norm.weight'", "missing"]),
        ({"fc_norm": True}, ["'fc_norm.0.weight'", "missing"]),
        ({"bias": True}, ["'fc.bias'", "missing"]),
        *(
            ({"quantization_config": value}, [f"quantization_config = {re.escape(repr(value))}; an object"])
            for value in ("fp8", "x", ["awq"], 4, True)
        ),
        ({"compression_config": "gptq"}, ["compression_config = 'gptq'; an object"]),
        *(
            ({"quantization_config": {"quant_method": "gguf", "types": {"a": value}}}, ["block type .* not supported"])
            for value in ([], {}, 0, None)
        ),
        ({"hidden_act": "gelu"}, ["hidden_act = 'gelu'"]),
        ({"eagle_config": {"use_aux_hidden_state": False}}, ["use_aux_hidden_state"]),
        ({"architectures": ["LlamaForCausalLMEagle"]}, ["declared as EAGLE ", "EAGLE-3 head"]),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, ["'midlayer.self_attn.q_a_proj.weight'", "missing"]),
        ({"kv_lora_rank": 8, "model_type": "aspen"}, ["model_type 'aspen' is not supported", "deepseek_v3"]),
        (
            {"architectures": ["LlamaForCausalLM"]},
            ["'LlamaForCausalLM' is not a known draft", "pass it as model=", "supported are EAGLE-3 heads"],
        ),
        ({"speculators_model_type": "eagle"}, ["'eagle' .EAGLE-1/2 heads. is not supported yet"]),
        (
            {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "pard_token": 3},
            ["P-EAGLE heads with latent attention are not supported"],
        ),
        ({"norm_before_fc": True, "fc_norm": True}, ["norm_before_fc and fc_norm are both set"]),
        (
            {"speculators_model_type": "medusa"},
            ["'medusa' is not supported; supported are EAGLE-3 heads", "speculators' dflash, dspark"],
        ),
    ],
    ids=lambda value: "+".join(f"{k}={v}"[:40] for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_drafts_that_do_not_fit(fields: dict[str, Any], says: list[str], draft: Path, target: Path) -> None:
    edit_config(draft, **fields)
    refused(lambda: load_pair(target, draft, **LOADING), *says)


def test_earlier_heads(draft: Path, target: Path) -> None:
    """An EAGLE-1 head, honestly declared or declared as EAGLE-3."""
    edit_weights(draft, lambda weights: (weights.pop("midlayer.hidden_norm.weight"), weights.update(fc=torch.zeros(1))))
    edit_weights(draft, lambda weights: (weights.pop("fc"), weights.update({"fc.weight": torch.zeros(32, 64)})))
    refused(lambda: load_pair(target, draft, **LOADING), "declared as EAGLE-3", "EAGLE-1/2 head")
    edit_config(draft, architectures=["LlamaForCausalLMEagle"])
    refused(
        lambda: load_pair(target, draft, **LOADING), "'LlamaForCausalLMEagle' .EAGLE-1/2 heads. is not supported yet"
    )


def test_vocabulary_maps(draft: Path, target: Path) -> None:
    offsets = load_file(draft / "model.safetensors")["d2t"]
    outside, twice = offsets.clone(), offsets.clone()
    outside[7] = 9
    twice[1] = offsets[0] - 1
    edit_weights(draft, lambda weights: weights.update(d2t=outside))
    refused(lambda: load_pair(target, draft, **LOADING), "d2t maps to token 16", r"0 \.\. 15")
    edit_weights(draft, lambda weights: weights.update(d2t=twice))
    refused(lambda: load_pair(target, draft, **LOADING), "d2t maps two draft ids to token")
    edit_weights(draft, lambda weights: weights.pop("d2t"))
    refused(lambda: load_pair(target, draft, **LOADING), "'d2t'", "missing")


def test_draft_weights_that_do_not_belong(draft: Path, target: Path) -> None:
    edit_weights(draft, lambda weights: weights.update({"midlayer.extra": torch.zeros(1)}))
    refused(lambda: load_pair(target, draft, **LOADING), "'midlayer.extra'", "no parameter")
    edit_weights(draft, lambda weights: (weights.pop("midlayer.extra"), weights.pop("lm_head.weight")))
    refused(lambda: load_pair(target, draft, **LOADING), "'lm_head'", r"\[8, 32\]", r"\[16, 32\]")


def test_a_target_loaded_for_another_draft(draft: Path, target: Path) -> None:
    wrong = load_target(target, captured_layers=(0, 1, 2), **LOADING)
    refused(lambda: load_draft(draft, wrong, **LOADING), r"captured_layers=\(2, 2, 1\)")


def test_a_broken_bin(draft: Path, target: Path) -> None:
    (draft / "model.safetensors").unlink()
    (draft / "pytorch_model.bin").write_bytes(b"PK\x03\x04 nothing")
    refused(lambda: load_pair(target, draft, **LOADING), "pytorch_model.bin is truncated or corrupt")


def test_a_draft_of_another_layer_type_is_refused_and_its_window_is_honoured(tmp_path):
    target = make_target(tmp_path / "target", layers=4)
    config = read_config(target)
    strange = make_eagle3(tmp_path / "strange", target, model_type="gemma3_text")
    with pytest.raises(EspalierError, match="model_type 'gemma3_text' is not supported"):
        read_draft(strange, config)
    windowed = make_eagle3(tmp_path / "windowed", target, sliding_window=8)
    assert read_draft(windowed, config).layer.windows == (8,)
