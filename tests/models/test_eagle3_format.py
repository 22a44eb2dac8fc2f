"""EAGLE-3 heads give what the code that defines the format gives (tests/fixtures/eagle3, made by `speculators`)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from espalier.models import DraftModel
from espalier.models.draft import DraftOutput
from espalier.models.eagle3 import LEGACY_FC_NORMS
from tests.checkpoints import load_pair
from tests.oracles.dense import DensePass

FIXTURES = Path(__file__).parents[1] / "fixtures" / "eagle3"
CASES: dict[str, dict[str, Any]] = json.loads((FIXTURES / "origin.json").read_text())["cases"]
LOADING = {"dtype": torch.float32, "device": "cpu", "position_rows": 64}
TOLERANCE = 1e-4


def load(head: Path) -> tuple[Any, DraftModel]:
    return load_pair(FIXTURES / "target", head, **LOADING)


def chained_steps(draft: DraftModel, tokens: Tensor, captured: Tensor, shift: int) -> dict[str, Tensor]:
    """Two steps, the second a branch hanging off each row of the first.  shift: of all RoPE positions alike."""
    width = tokens.shape[1] - 1
    first = tokens[:, 1:]
    second = torch.cat((tokens[:, 2:], torch.zeros(1, 1, dtype=torch.int64)), dim=1)
    positions = torch.arange(width)[None] + shift
    feature = draft.fuse(captured[:, :-1])
    out0 = draft(DensePass(first, draft.layer_specs, positions), feature)
    # Both steps in one pass: step 1's row i sees the chain up to i and itself.
    chain, itself = torch.ones(width, width).tril().bool(), torch.eye(width).bool()
    mask = torch.cat((torch.cat((chain, torch.zeros_like(chain)), 1), torch.cat((chain, itself), 1)))[None]
    tokens, positions = torch.cat((first, second), 1), torch.cat((positions, positions + 1), 1)
    p = DensePass(tokens, draft.layer_specs, positions, mask=mask)
    both = draft(p, torch.cat((feature, out0.hidden), 1))
    out1 = DraftOutput(both.hidden[:, width:], both.normed[:, width:])
    return {
        "logits.0": draft.logits(out0),
        "handed_on.0": out0.hidden,
        "logits.1": draft.logits(out1),
        "handed_on.1": out1.hidden,
    }


def largest_difference(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max((ours[name] - expected[name]).abs().max().item() for name in ours)


def test_every_case_agrees(record_property: Any) -> None:
    worst = {}
    for name, case in CASES.items():
        target, draft = load(FIXTURES / name)
        expected = load_file(FIXTURES / name / "expected.safetensors")
        assert list(draft.spec.captured_layers) == case["resolved_layer_ids"]
        positions = torch.arange(expected["tokens"].shape[1])[None]
        captured = target(DensePass(expected["tokens"], target.layer_specs, positions)).captured
        torch.testing.assert_close(captured, expected["captured"], rtol=TOLERANCE, atol=TOLERANCE)
        # The package rotates by the token's position, we by the feature's: the same up to a shift of all rows.
        worst[name] = max(
            largest_difference(chained_steps(draft, expected["tokens"], expected["captured"], shift), expected)
            for shift in (0, 1)
        )
    print(f"\n{len(worst)} cases of two chained steps, largest difference {max(worst.values()):.1e}")
    record_property("largest_difference", max(worst.values()))
    assert len(worst) == 14
    assert max(worst.values()) < TOLERANCE, worst


@pytest.mark.parametrize("container", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("name", [name for name in CASES if "own_head" in name])
def test_safeailabs_form_of_the_same_head(name: str, container: str, tmp_path: Path) -> None:
    """midlayer. names, a flat config, layer ids "after layer": the same numbers."""
    raw = json.loads((FIXTURES / name / "config.json").read_text())
    flat = {
        **raw["transformer_layer_config"],
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": raw["draft_vocab_size"],
        "norm_before_residual": raw["norm_before_residual"],
    }
    if CASES[name]["layer_ids"]:
        flat["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [i - 1 for i in CASES[name]["layer_ids"]]}
    (tmp_path / "config.json").write_text(json.dumps(flat))
    weights = load_file(FIXTURES / name / "model.safetensors")
    renamed = {key.replace("layers.0.", "midlayer."): value for key, value in weights.items()}
    if container == "pytorch_model.bin":
        torch.save(renamed, tmp_path / container)
    else:
        save_file(renamed, tmp_path / container)
    _, draft = load(tmp_path)
    assert list(draft.spec.captured_layers) == CASES[name]["resolved_layer_ids"]
    expected = load_file(FIXTURES / name / "expected.safetensors")
    ours = chained_steps(draft, expected["tokens"], expected["captured"], 0)
    assert largest_difference(ours, expected) < TOLERANCE


def test_borrowed_weights_are_shared_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    target, draft = load(FIXTURES / "residual_before_norm-borrowed_head-default_ids")
    assert draft.head is target.head
    assert draft.embed.weight.data_ptr() == target.embed.weight.data_ptr()
    assert "lm_head is the target's" in caplog.text
    assert "embed_tokens is the target's" in caplog.text


def test_the_norms_of_captured_layers_may_have_their_old_names(tmp_path: Path) -> None:
    """aux_norm_low, aux_norm_mid and aux_norm_high are fc_norm.0 to fc_norm.2, which then no field declares."""
    name = next(name for name in CASES if "fc_norm.2.weight" in load_file(FIXTURES / name / "model.safetensors"))
    tensors = load_file(FIXTURES / name / "model.safetensors")
    for i, old in enumerate(LEGACY_FC_NORMS):
        tensors[f"{old}.weight"] = tensors.pop(f"fc_norm.{i}.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    raw = {**json.loads((FIXTURES / name / "config.json").read_text()), "fc_norm": False}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (target, now), (_, old) = load(FIXTURES / name), load(tmp_path)
    captured = torch.randn(2, 3, target.config.hidden_size, generator=torch.Generator().manual_seed(0)).flatten(1)
    assert torch.equal(now.fuse(captured), old.fuse(captured))
