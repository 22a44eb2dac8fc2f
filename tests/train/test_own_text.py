"""The target's own text in a work folder, token ids as data, and runs that a time limit ends."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from espalier.train import own_text
from espalier.train.command import make_parser, run
from espalier.train.draft_run import StepClock
from espalier.train.llama import Llama, LlamaShape, save_llama
from espalier.train.mtp import train_mtp
from espalier.train.own_text import load_own_text, write_own_text
from espalier.train.settings import MtpConfig, OwnTextConfig
from espalier.train.target import FrozenTarget
from espalier.train.work import origin_of

SHAPE = LlamaShape(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
)
OWN = OwnTextConfig(continuations=4, continuation_tokens=6, generate_batch=2, sampled_share=0.5)
RUN = MtpConfig(
    length=16, batch=2, num_tokens=8 * 32, ttt_steps=2, continuations=2, continuation_tokens=4, generate_batch=2
)


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("own") / "target"
    save_llama(Llama(SHAPE), directory, [0])
    return directory


@pytest.fixture(scope="module")
def stream() -> np.ndarray:
    return np.random.default_rng(0).integers(1, 32, 4000).astype(np.uint16)


def test_texts_of_all_seeds_add_up_and_a_run_makes_no_other(
    target_dir: Path, stream: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, origin = FrozenTarget(target_dir, torch.device("cpu")), origin_of(target_dir, stream)
    for seed in (1, 2):
        write_own_text(target, stream, replace(OWN, seed=seed), tmp_path, origin)
    parts = [np.load(tmp_path / f"own_text-{seed}.npz") for seed in (1, 2)]
    assert not np.array_equal(parts[0]["stream"], parts[1]["stream"])
    monkeypatch.setattr(own_text, "make_own_text", None)
    own = load_own_text(target, stream, OWN, tmp_path, origin)
    assert own.stream.tolist() == [*parts[0]["stream"].tolist(), *parts[1]["stream"].tolist()]
    assert own.greedy_counts.tolist() == (parts[0]["greedy_counts"] + parts[1]["greedy_counts"]).tolist()
    assert own.greedy_counts.sum() > 0
    assert {path.name for path in tmp_path.iterdir()} == {"own_text-1.npz", "own_text-2.npz"}


def test_heads_of_several_forms_train_on_the_text_of_one_command(
    target_dir: Path, stream: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(tmp_path / "ids.npy", stream)
    common = ["--target", str(target_dir), "--data", str(tmp_path / "ids.npy"), "--work", str(tmp_path / "work")]
    sizes = ["--continuations", "2", "--generate-batch", "2", "--continuation-tokens", "4", "--seed", "3"]
    run(make_parser().parse_args(["own-text", *common, *sizes]))
    monkeypatch.setattr(own_text, "make_own_text", None)
    sizes = ["--batch", "2", "--length", "16", "--num-tokens", "96", "--layers", "2", "--ttt-steps", "2"]
    for form in ("chain", "target"):
        run(make_parser().parse_args(["mtp", *common, "--out", str(tmp_path / form), "--form", form, *sizes]))
        config = json.loads((tmp_path / form / "config.json").read_text())
        assert (config["mtp_form"], config["num_nextn_predict_layers"]) == (form, 2)


def test_a_time_limit_ends_a_run_whose_rate_fell_to_zero(
    target_dir: Path, stream: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that moves on by a second a step, so that the machine's speed decides nothing."""
    factors: list[float] = []
    monkeypatch.setattr(StepClock, "progress", property(lambda clock: max(0, clock.num_steps - 1) / 4))
    monkeypatch.setattr("espalier.train.draft_run.set_rate", lambda _, factor: factors.append(factor))
    figures = train_mtp(target_dir, stream, tmp_path / "cut", tmp_path, replace(RUN, num_tokens=1e6, max_seconds=4))
    assert figures["seen_tokens"] == 5 * 2 * 16
    assert factors[-1] == pytest.approx(0.25 / 0.55) and (tmp_path / "cut" / "model.safetensors").exists()
    factors.clear()
    figures = train_mtp(target_dir, stream, tmp_path / "whole", tmp_path / "2", replace(RUN, num_tokens=3 * 32))
    assert (figures["seen_tokens"], len(factors)) == (3 * 32, 3)


def test_a_clock_counts_from_the_end_of_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("espalier.train.draft_run.time.perf_counter", lambda: now[0])
    clock, endless = StepClock(10), StepClock(None)
    now[0] = 150.0
    assert clock.progress == 0
    clock.count_step()
    endless.count_step()
    now[0] = 155.0
    assert (clock.progress, endless.progress) == (0.5, 0.0)
    clock.count_step()
    assert clock.steps_per_second == pytest.approx(1 / 5)


def test_as_many_prompts_are_continued_as_were_asked_for(
    target_dir: Path, stream: np.ndarray, capsys: pytest.CaptureFixture[str]
) -> None:
    own_text.make_own_text(FrozenTarget(target_dir, torch.device("cpu")), stream, replace(OWN, continuations=3))
    assert [line.split(",")[0] for line in capsys.readouterr().out.splitlines()] == [
        "continued 2 prompts",
        "continued 3 prompts",
    ]
