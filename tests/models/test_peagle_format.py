"""P-EAGLE heads give what the code that defines the format gives (tests/fixtures/peagle, made by `speculators`)."""

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from espalier.errors import EspalierError
from espalier.models import read_config
from espalier.models.draft import DraftOutput
from espalier.models.eagle3 import PEagleDraft
from espalier.speculate.drafters.registry import draft_algorithm, read_draft
from tests.checkpoints import edit_config, load_pair
from tests.oracles.dense import DensePass

FIXTURES = Path(__file__).parents[1] / "fixtures" / "peagle"
ORIGIN: dict[str, Any] = json.loads((FIXTURES / "origin.json").read_text())
LOADING = {"dtype": torch.float32, "device": "cpu", "position_rows": 64}
TOLERANCE = 1e-4


def load(path: Path) -> tuple[Any, PEagleDraft]:
    target, draft = load_pair(FIXTURES / "target", path, **LOADING)
    assert isinstance(draft, PEagleDraft)
    return target, draft


def two_rounds(draft: PEagleDraft, expected: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rows of decided tokens up to each root, then mask rows behind it, which are dropped."""
    tokens, made, done = expected["tokens"], {}, 0
    feature, specs = draft.fuse(expected["captured"]), draft.layer_specs
    past: list[list[Tensor]] | None = None
    for number, root in enumerate(ORIGIN["roots"]):
        positions = torch.arange(done, root)[None]
        decided = DensePass(tokens[:, done + 1 : root + 1], specs, positions, past=past)
        out = draft(decided, feature[:, done:root])
        past = [
            [torch.cat((old, new[0])) for old, new in zip(before, decided.planes[i], strict=True)]
            for i, before in enumerate(past or [[plane[0, :0] for plane in decided.planes[i]] for i in decided.layers])
        ]
        done = root
        mask_tokens = torch.full((1, len(expected[f"logits.{number}"]) - 1), draft.spec.mask_token_id)
        masks = draft.run_mask_rows(
            DensePass(mask_tokens, specs, root + torch.arange(mask_tokens.shape[1])[None], past=past)
        )
        normed = torch.cat((out.normed[:, -1:], masks.normed), 1)
        made[f"logits.{number}"] = draft.logits(DraftOutput(normed, normed))[0]
    return made


def worst_of(draft: PEagleDraft, expected: dict[str, Tensor]) -> float:
    ours = two_rounds(draft, expected)
    assert ours.keys() == {key for key in expected if key.startswith("logits")}
    return max((ours[key] - expected[key]).abs().max().item() for key in ours)


def test_every_case_agrees(record_property: Any) -> None:
    worst = {}
    for name in ORIGIN["cases"]:
        target, draft = load(FIXTURES / name)
        expected = load_file(FIXTURES / name / "expected.safetensors")
        assert list(draft.spec.captured_layers) == expected["ids"].tolist()
        assert draft.spec.max_steps == len(expected["logits.0"])
        positions = torch.arange(expected["tokens"].shape[1])[None]
        captured = target(DensePass(expected["tokens"], target.layer_specs, positions)).captured
        torch.testing.assert_close(captured, expected["captured"], rtol=TOLERANCE, atol=TOLERANCE)
        worst[name] = worst_of(draft, expected)
    print(f"\n{len(worst)} cases of two rounds, largest difference {max(worst.values()):.1e}")
    record_property("largest_difference", max(worst.values()))
    assert len(worst) == 6
    assert max(worst.values()) < TOLERANCE, worst


def as_vllm(name: str, out: Path, mask: str, architecture: str) -> Path:
    """The same head in vLLM's form: a flat config, `midlayer.`, layer ids in eagle_config."""
    raw = json.loads((FIXTURES / name / "config.json").read_text())
    own = ("draft_vocab_size", "norm_before_residual", "norm_before_fc", "fc_norm")
    flat = {**raw["transformer_layer_config"], **{field: raw[field] for field in own}, mask: raw["mask_token_id"]}
    flat["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": raw["eagle_aux_hidden_state_layer_ids"]}
    out.mkdir()
    (out / "config.json").write_text(json.dumps({**flat, "architectures": [architecture]}))
    weights = load_file(FIXTURES / name / "model.safetensors")
    save_file(
        {key.replace("layers.0.", "midlayer."): value for key, value in weights.items()}, out / "model.safetensors"
    )
    return out


@pytest.mark.parametrize(
    ("name", "mask", "architecture"),
    [
        ("llama", "pard_token", "LlamaForCausalLMEagle3"),
        ("qwen3", "ptd_token_id", "PeagleQwen3ForCausalLM"),
        ("norm_before_fc", "mask_token_id", "Eagle3LlamaForCausalLM"),
    ],
)
def test_vllms_form_of_the_same_head(name: str, mask: str, architecture: str, tmp_path: Path) -> None:
    path = as_vllm(name, tmp_path / "draft", mask, architecture)
    assert draft_algorithm(path) == "peagle"
    assert worst_of(load(path)[1], load_file(FIXTURES / name / "expected.safetensors")) < TOLERANCE


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no mask": ({"mask_token_id": None}, "mask_token_id = None; .* as mask_token_id or pard_token or ptd_token_id"),
    "a mask outside": ({"mask_token_id": 24}, r"mask_token_id = 24; a token of the vocabulary, 0 \.\. 23"),
    "two masks": ({"pard_token": 3}, "names different masks: {'mask_token_id': 7, 'pard_token': 3}"),
    "no list of methods": ({"speculators_config": {"proposal_methods": 3}}, "proposal_methods = 3; a list of objects"),
    "one depth": ({"speculators_config": {"proposal_methods": [{"speculative_tokens": 1}]}}, "speculative_tokens = 1"),
    "both norms": ({"norm_before_fc": True, "fc_norm": True}, "both set, but they exclude each other"),
    "a layer too many": ({"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}, "fuses the inputs of target layers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name: str, tmp_path: Path) -> None:
    fields, text = REFUSED[name]
    path = tmp_path / "draft"
    copytree(FIXTURES / "llama", path)
    edit_config(path, **fields)
    with pytest.raises(EspalierError, match=text):
        read_draft(path, read_config(FIXTURES / "target"))


def test_a_head_without_its_vector_of_masks_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "draft"
    copytree(FIXTURES / "one_layer", path)
    weights = load_file(path / "model.safetensors")
    vector = weights.pop("mask_hidden")
    save_file(weights, path / "model.safetensors")
    with pytest.raises(EspalierError, match="has no 'mask_hidden', which a P-EAGLE head needs"):
        load(path)
    save_file({**weights, "mask_hidden": vector[..., :32].contiguous()}, path / "model.safetensors")
    with pytest.raises(EspalierError, match="mask_hidden has 32 values, but 3 layers of 16"):
        load(path)
