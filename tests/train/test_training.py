"""The small Llama against transformers' own, and a draft trained for a few steps, interrupted and resumed."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from espalier.train.checkpoint import load_draft
from espalier.train.data import UserText
from espalier.train.eagle3 import choose_vocabulary
from espalier.train.kinds import train
from espalier.train.llama import LlamaShape
from espalier.train.settings import Eagle3Config
from espalier.train.state import SavedState
from espalier.train.target import Eagle3Target
from espalier.train.writer import TargetWriter, cut_before_loop
from lab.bundle.base import bits_per_byte
from lab.bundle.llama import Llama, save_llama

SHAPE = LlamaShape(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=7,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
)
CONFIG = Eagle3Config(
    draft_vocab=24,
    length=16,
    batch=4,
    num_tokens=6 * 64,
    ttt_steps=3,
    continuations=8,
    continuation_tokens=8,
    generate_batch=4,
    log_every=2,
    save_every=3,
)


@pytest.fixture
def target_dir(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = Llama(SHAPE)
    for parameter in model.parameters():
        # bfloat16 values, so that what is saved is what is computed with
        parameter.data = (torch.randn_like(parameter) * 0.3).bfloat16().float()
    save_llama(model, tmp_path / "target", [0, 3])
    torch.save(model.state_dict(), tmp_path / "model.pt")
    return tmp_path / "target"


@pytest.fixture
def stream() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 40, 3000).astype(np.uint16)


def test_loss_equals_that_of_transformers_on_the_saved_model(target_dir: Path) -> None:
    model = Llama(SHAPE)
    model.load_state_dict(torch.load(target_dir.parent / "model.pt"))
    tokens = torch.randint(40, (2, 30))
    theirs = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32)(tokens[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(theirs.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    torch.testing.assert_close(model(tokens[:, :-1], tokens[:, 1:]).flatten(), expected, rtol=1e-5, atol=1e-5)


def test_bits_per_byte_counts_every_token_once(stream: np.ndarray) -> None:
    def target_as_nats(_: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return targets.float()

    result = bits_per_byte(target_as_nats, stream[: 64 * 9 + 2], 2 * (64 * 9 + 2), torch.device("cpu"), length=64)
    assert result == pytest.approx(stream[1 : 64 * 9 + 1].mean() / np.log(2) / 2)


def test_features_are_the_inputs_of_layers_2_half_and_last_but_three(target_dir: Path) -> None:
    target = Eagle3Target(target_dir, torch.device("cpu"))
    inputs = {}
    for index, layer in enumerate(target.model.model.layers):
        layer.register_forward_pre_hook(lambda _, args, index=index: inputs.__setitem__(index, args[0]))
    features, _ = target(torch.arange(9)[None])
    assert torch.equal(features, torch.cat([inputs[2], inputs[3], inputs[4]], dim=-1))


def test_a_continuation_ends_before_a_loop() -> None:
    looping = np.array([9] + list(range(10, 28)) * 3)
    assert len(cut_before_loop(looping, 1)) == 1 + 18 + 15
    assert cut_before_loop(looping, len(looping)).tolist() == looping.tolist()  # a prompt may repeat itself


@pytest.mark.parametrize(
    ("counts", "vocab_size", "chosen", "share"),
    [
        ([0, 3, 0, 6, 1, 0], 3, [1, 3, 4], 1.0),
        ([0, 3, 0, 6, 1, 0], None, [0, 1, 2, 3, 4, 5], 1.0),
        ([1] * 4000 + [0] * 6000, None, list(range(4096)), 1.0),
        ([1] * 5000 + [0] * 5000, None, list(range(8192)), 1.0),
        ([99] * 4096 + [1] * 2000, None, list(range(4096)), 99 * 4096 / (99 * 4096 + 2000)),
    ],
    ids=["a size", "few ids", "at least", "a power of two", "almost all"],
)
def test_vocabulary_follows_what_the_target_says(
    counts: list[int], vocab_size: int | None, chosen: list[int], share: float
) -> None:
    """Without a size: a power of two of ids, with almost all that the target says."""
    ids, coverage = choose_vocabulary(np.array([1, 1, 2, 4]), np.array(counts), vocab_size)
    assert ids.tolist() == chosen
    assert coverage == pytest.approx(share)


class Stopped(Exception):
    pass


def test_an_interrupted_run_resumes_to_the_same_draft(
    target_dir: Path, stream: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["/bin/espalier", "train", "eagle3", "--out", "my draft"])
    whole = train("eagle3", target_dir, UserText(stream), tmp_path / "whole", tmp_path / "work1", CONFIG)
    assert "`espalier train eagle3 --out 'my draft'`" in (tmp_path / "whole" / "README.md").read_text()

    save = SavedState.save

    def save_and_stop(*arguments) -> None:
        save(*arguments)
        raise Stopped

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(SavedState, "save", save_and_stop)
        train("eagle3", target_dir, UserText(stream), tmp_path / "parts", tmp_path / "work2", CONFIG)
    resumed = train("eagle3", target_dir, UserText(stream), tmp_path / "parts", tmp_path / "work2", CONFIG)
    assert resumed == whole
    drafts = [load_draft(tmp_path / name) for name in ("whole", "parts")]
    for one, two in zip(*(draft.parameters() for draft in drafts), strict=True):
        assert torch.equal(one, two)
    assert json.loads((tmp_path / "work2" / "eagle3-parts.json").read_text())["config"] == asdict(CONFIG)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_own_text_has_no_penalty_and_no_cut(target_dir: Path, temperature: float) -> None:
    """Whatever generation_config.json says: drafts learn the target's own probabilities.  It ends at the end token."""
    prompts = torch.arange(64).view(8, 8) % 40

    def texts() -> list[list[int]]:
        with TargetWriter(target_dir, 40, 8) as writer:
            return [text.tolist() for text in writer.continuations(prompts.numpy(), 24, temperature, seed=1)]

    before, file = texts(), target_dir / "generation_config.json"
    ended = [text for text in before if {0, 3} & set(text[8:])]
    assert ended and all(text[-1] in (0, 3) and not {0, 3} & set(text[8:-1]) for text in ended)
    assert [text[:8] for text in before] == prompts.tolist()
    changed = {"repetition_penalty": 1.5, "temperature": 0.1, "do_sample": True, "top_p": 0.3, "min_p": 0.2, "top_k": 2}
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed, "min_new_tokens": 9}))
    assert texts() == before


def test_the_writer_says_what_transformers_says(target_dir: Path) -> None:
    prompt = torch.arange(8)[None]
    model = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32)
    theirs = model.generate(prompt, max_new_tokens=12, do_sample=False)[0].numpy()
    with TargetWriter(target_dir, 20, 1) as writer:
        [ours] = writer.continuations(prompt.numpy(), 12, 0.0)
    assert ours.tolist() == cut_before_loop(theirs, 8).tolist()
