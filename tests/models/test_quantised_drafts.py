"""Quantised drafts mean what their format says, the head included, and what is stored is never taken for missing."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from espalier.attention import Pass
from espalier.errors import EspalierError
from espalier.kernels.layers.quantised import dequantise
from espalier.models import read_config
from espalier.models.layers.linear import Linear
from espalier.models.layers.norm import RMSNorm
from espalier.models.mtp import holds_mtp_layers
from espalier.models.quantisers import quantise
from espalier.models.weight_formats import quantised
from espalier.models.weight_formats.quantised import QuantisedWeight
from espalier.speculate.drafters.registry import is_draft, read_draft
from espalier.startup.checkpoints import BUNDLED_DRAFTS, BUNDLED_FILES
from tests.block import FORMS, block_directories
from tests.builders import make_eagle3, make_target
from tests.checkpoints import edit_config, load_pair
from tests.harness import CPU, DTYPE
from tests.models.test_refusals import edit_weights, refused
from tests.mtp import mtp_directories, without_target
from tests.oracles.dense import DensePass
from tests.quantised import KINDS

# A kind of each way to name the tensors of a matrix.
NAMED = ("fp8-channel-token", "fp8-block", "fp8-tensor", "awq", "gptq", "packed-group")
TOKENS = torch.tensor([[3, 1, 4, 1, 5]])


def load(target_path: Path, draft_path: Path, dtype: torch.dtype = DTYPE) -> tuple[Any, Any]:
    how: dict[str, Any] = {"dtype": dtype, "device": CPU, "position_rows": 64}
    return load_pair(target_path, draft_path, **how)


def store(path: Path, kind: str, takes: Callable[[str], bool] = lambda name: "embed" not in name) -> None:
    """Rewrite a draft's matrices, the head included, in a kind of KINDS."""
    weights, stored = load_file(path / "model.safetensors"), dict[str, Tensor]()
    for name, tensor in weights.items():
        is_stored = tensor.ndim == 2 and takes(name)
        parts = KINDS[kind][1](tensor)[0] if is_stored else {}
        stored |= {f"{name.removesuffix('weight')}{suffix}": part for suffix, part in parts.items()}
        stored |= {} if is_stored else {name: tensor}
    save_file(stored, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    head = {"ignore": []} if "config_groups" in KINDS[kind][0] else {"lm_head": True}
    config["quantization_config"] = {**KINDS[kind][0], **head}
    (path / "config.json").write_text(json.dumps(config))


def mean(path: Path, kind: str) -> None:
    """Replace a draft's matrices by what they mean in a kind of KINDS."""

    def as_meant(weights: dict[str, Tensor]) -> None:
        weights |= {
            name: KINDS[kind][1](tensor)[1]
            for name, tensor in weights.items()
            if tensor.ndim == 2 and "embed" not in name
        }

    edit_weights(path, as_meant)


def logits(target: Any, draft: Any) -> Tensor:
    positions = torch.arange(TOKENS.shape[1])[None]
    captured = target(DensePass(TOKENS, target.layer_specs, positions)).captured
    return draft.logits(draft(DensePass(TOKENS, draft.layer_specs, positions), draft.fuse(captured)))


@pytest.fixture
def paths(tmp_path: Path) -> tuple[Path, Path]:
    target = make_target(tmp_path / "target", "llama", layers=4)
    return target, make_eagle3(tmp_path / "draft", target, draft_vocab=8)


@pytest.mark.parametrize("kind", NAMED)
def test_a_quantised_head_and_its_layers_mean_what_the_format_says(paths, tmp_path, kind):
    target, draft = paths
    dense = shutil.copytree(draft, tmp_path / "dense")
    mean(dense, kind)
    store(draft, kind)
    made = load(target, draft)[1]
    [layer] = made.layers
    linears = (made.fuse.fc, layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down, made.head)
    assert all(isinstance(linear.weight, QuantisedWeight) for linear in linears)
    torch.testing.assert_close(logits(*load(target, draft)), logits(*load(target, dense)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", NAMED)
def test_a_head_of_the_targets_shape_is_not_taken_for_missing(tmp_path, kind):
    """Neither is one that the config forgets: it is an error."""
    target = make_target(tmp_path / "target", "llama", layers=4)
    draft = make_eagle3(tmp_path / "draft", target, own_head=True)
    store(draft, kind)
    loaded, made = load(target, draft)
    assert made.head is not loaded.head
    config = json.loads((draft / "config.json").read_text())
    config["quantization_config"] |= {"ignore": ["lm_head"], "lm_head": False}
    (draft / "config.json").write_text(json.dumps(config))
    refused(lambda: load(target, draft), "lm_head")


def test_without_a_head_the_targets_is_used_whatever_the_config_says(tmp_path):
    target = make_target(tmp_path / "target", "llama", layers=4)
    draft = make_eagle3(tmp_path / "draft", target)
    store(draft, "packed-group")
    loaded, made = load(target, draft)
    assert made.head is loaded.head


@pytest.mark.parametrize("kind", NAMED)
def test_a_quantised_fc_of_another_width_is_refused_as_a_dense_one(paths, kind):
    target, draft = paths
    edit_config(draft, eagle_aux_hidden_state_layer_ids=[1, 2])
    store(draft, kind)
    refused(lambda: load(target, draft), "fuses 3 layers, 2 are captured")

    def to_eagle1(weights: dict[str, Tensor]) -> None:
        weights.pop("midlayer.hidden_norm.weight")
        weights |= {f"fc.{suffix}": part for suffix, part in KINDS[kind][1](torch.randn(32, 64).double())[0].items()}

    edit_weights(draft, to_eagle1)
    refused(lambda: load(target, draft), "EAGLE-1/2")


@pytest.mark.parametrize("kind", ["fp8-channel-token", "packed-group"])
def test_an_own_head_of_a_targets_mtp_layers_is_not_taken_for_missing(tmp_path, kind):
    """Such layers are in the target's directory; compressed-tensors may quantise their heads too."""
    path = shutil.copytree(mtp_directories("deepseek_v3", 1)[0], tmp_path / "target")
    head = "model.layers.3.shared_head.head"
    edit_weights(path, lambda weights: weights.update({f"{head}.weight": torch.randn_like(weights["lm_head.weight"])}))
    meant = KINDS[kind][1](load_file(path / "model.safetensors")[f"{head}.weight"])[1]
    store(path, kind, lambda name: head in name or "eh_proj" in name)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["config_groups"]["g"]["targets"] = [head, "re:.*eh_proj$"]
    (path / "config.json").write_text(json.dumps(config))
    assert holds_mtp_layers(path, read_config(path))
    target, draft = load(path, path)
    assert draft.modules[0].head is not target.head
    own = dequantise(draft.modules[0].head.weight.matrix, DTYPE)
    torch.testing.assert_close(own, meant, rtol=1e-6, atol=1e-6)


def test_mtp_layers_in_a_directory_of_their_own_are_stored_as_its_config_says(tmp_path):
    """Their target may be stored otherwise."""
    dense = shutil.copytree(mtp_directories("deepseek_v3", 1)[0], tmp_path / "dense")
    quantised_path = shutil.copytree(dense, tmp_path / "quantised")
    store(quantised_path, "fp8-channel-token")
    matrix, formats = "model.layers.3.self_attn.o_proj", {}
    for path in (dense, quantised_path):
        for target in (dense, quantised_path):
            formats[path.name, target.name] = read_draft(path, read_config(target)).layer.formats(matrix)
    assert {names for names, found in formats.items() if found.name != "dense"} == {
        ("quantised", "dense"),
        ("quantised", "quantised"),
    }
    # In the target's directory they follow its overrides, as all its layers do.
    overridden = read_config(dense, {"quantization_config": {"quant_method": "fp8"}})
    assert read_draft(dense, overridden).layer.formats(matrix).name == overridden.formats(matrix).name == "fp8"


@pytest.mark.parametrize("algorithm", BUNDLED_DRAFTS)
def test_a_copy_of_each_bundled_draft_is_loaded(tmp_path, algorithm):
    """Speculators' form has quantization_config beside the layers' config."""
    path, target = BUNDLED_DRAFTS[algorithm], BUNDLED_FILES / "target"
    written = quantise(path, tmp_path / "copy", "fp8", torch.device("cpu"), lambda: None, is_draft=True)
    assert (
        written.num_matrices == {"eagle3": 9, "mtp": 3 * 8, "block": 1 + 3 * 7}[algorithm] and not written.dense_names
    )
    original, copy = (load(target, each, torch.float32) for each in (path, tmp_path / "copy"))
    if algorithm == "eagle3":
        one, other = logits(*original), logits(*copy)
        assert 0 < (one - other).norm() / one.norm() < 0.1
        assert isinstance(copy[1].head.weight, QuantisedWeight)


def test_a_head_that_mtp_layers_have_of_their_own_stays_quantised_and_is_loaded_once(tmp_path):
    target, head = mtp_directories("llama", 2)
    draft = shutil.copytree(head, tmp_path / "draft")
    tensors = load_file(target / "model.safetensors")
    own = {"lm_head.weight": 2 * tensors["lm_head.weight"], "embed_tokens.weight": tensors["model.embed_tokens.weight"]}
    edit_weights(draft, lambda weights: weights.update(own))
    quantise(draft, tmp_path / "copy", "fp8", torch.device("cpu"), lambda: None, is_draft=True)
    first, second = load(target, tmp_path / "copy")[1].modules
    assert isinstance(first.head.weight, QuantisedWeight)
    assert first.head is second.head and first.embed is second.embed
    x = torch.randn(3, own["lm_head.weight"].shape[1], dtype=DTYPE)
    exact = x @ own["lm_head.weight"].to(DTYPE).T
    assert 0 < (first.head(x) - exact).norm() / exact.norm() < 0.1


@pytest.mark.parametrize("form", FORMS)
def test_a_copy_of_a_block_draft_quantises_nothing_that_is_read_as_a_plain_tensor(tmp_path, monkeypatch, form):
    """It would lose bits and save no memory."""
    target, draft = block_directories("llama", form, 4)
    written = quantise(draft, tmp_path / "copy", "fp8", torch.device("cpu"), lambda: None, is_draft=True)
    monkeypatch.setattr("espalier.models.weights.dequantise", None)
    made = load(target, tmp_path / "copy")[1]
    assert written.num_matrices and isinstance(made.fc.weight, QuantisedWeight)


def test_what_a_draft_has_stacked_or_quantised_is_refused(tmp_path):
    draft = shutil.copytree(BUNDLED_DRAFTS["eagle3"], tmp_path / "draft")
    out, how = tmp_path / "out", (torch.device("cpu"), lambda: None, True)
    edit_weights(draft, lambda weights: weights.update({"midlayer.mlp.experts.down_proj": torch.zeros(2, 3, 4)}))
    with pytest.raises(EspalierError, match="stores its experts stacked"):
        quantise(draft, out, "fp8", *how)
    quantise(BUNDLED_DRAFTS["eagle3"], tmp_path / "copy", "fp8", *how)
    with pytest.raises(EspalierError, match="is quantised already"):
        quantise(tmp_path / "copy", out, "fp8", *how)
    assert not out.exists()


def test_targets_and_drafts_are_told_apart():
    assert all(map(is_draft, BUNDLED_DRAFTS.values()))
    assert not is_draft(BUNDLED_FILES / "target")
    for family in ("deepseek_v3", "mimo"):
        assert not is_draft(mtp_directories(family, 1)[0]), "a target with MTP layers of its own"


@pytest.mark.parametrize(("family", "prefix"), [("deepseek_v3", "model.layers.3."), ("mimo", "model.mtp_layers.")])
def test_mtp_layers_alone_are_a_draft(tmp_path, family, prefix):
    """Their config.json is the target's."""
    target = mtp_directories(family, 1)[0]
    alone = without_target(target, tmp_path / "alone", prefix)
    assert is_draft(alone) and is_draft(alone, is_expected=True)
    assert load(target, alone)[1].modules


def test_quantisation_in_a_file_of_its_own_is_read_for_drafts_too(paths):
    """As ModelOpt writes it."""
    target, draft = paths
    (draft / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    formats = read_draft(draft, read_config(target)).layer.formats
    assert [formats(name).name for name in ("fc", "lm_head")] == ["fp8", "fp8"]


def quantised_draft(algorithm: str, path: Path) -> tuple[Any, Callable[[Pass], object], list[tuple[RMSNorm, Linear]]]:
    """(draft, a pass of it, its norms in order, each with the layer that reads it)."""
    if algorithm == "eagle3":
        target = make_target(path / "target", "llama", layers=4)
        made = make_eagle3(path / "made", target, draft_vocab=8)
    else:
        target, made = mtp_directories("llama", 1) if algorithm == "mtp" else block_directories("llama", "dspark", 4)
    quantise(made, path / "copy", "fp8", torch.device("cpu"), lambda: None, is_draft=True)
    draft = load(target, path / "copy")[1]
    if algorithm == "block":
        return draft, draft, of_layers(draft.layers)
    [module] = draft.modules
    hidden = torch.randn(*TOKENS.shape, draft.spec.hidden_size, dtype=DTYPE)
    read = of_layers([module.layer] if algorithm == "mtp" else module.layers)
    return draft, lambda p: module(p, hidden), read


def of_layers(layers: Sequence[Any]) -> list[tuple[RMSNorm, Linear]]:
    each = ([(layer.attention_norm, layer.attention.qkv), (layer.mlp_norm, layer.mlp.gate_up)] for layer in layers)
    return [pair for of_layer in each for pair in of_layer if pair[0] is not None]


@pytest.mark.parametrize("algorithm", ["eagle3", "mtp", "block"])
def test_norms_round_for_the_layers_that_read_them(tmp_path, monkeypatch, algorithm):
    """As in a target, where a layer's format rounds its inputs.  An EAGLE head's qkv reads two norms, which do not."""
    monkeypatch.setattr(quantised, "adapt_to_device", lambda matrix: matrix)
    draft, run, read = quantised_draft(algorithm, tmp_path)
    asked, after = [], RMSNorm.add_and_norm

    def add_and_round(norm: RMSNorm, delta: Any, residual: Tensor, rounding: Any) -> Any:
        asked.append((norm, rounding))
        return after(norm, delta, residual)

    monkeypatch.setattr(RMSNorm, "add_and_round", add_and_round)
    run(DensePass(TOKENS, draft.layer_specs))
    assert asked == [(norm, layer.rounding) for norm, layer in read]
    assert all(rounding is not None for _, rounding in asked)
