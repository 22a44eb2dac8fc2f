"""`espalier train auto` with its commands replaced: what it chooses, what it says, and whose work it keeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from espalier.errors import EspalierError
from espalier.startup.checkpoints import find_target
from espalier.train import auto
from espalier.train.auto import train_auto, write_own_questions
from espalier.train.command import TRAINERS

RATES = {"eagle3": 90.0, "mtp": 120.0, "block": 40.0}


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The commands that are run, whose files are written as they would."""
    commands: list[tuple[str, ...]] = []

    def run(*command: str) -> None:
        commands.append(command)
        flags = dict(zip(command[2::2], command[3::2], strict=False))
        if command[1] in TRAINERS:
            Path(flags["--out"]).mkdir(parents=True, exist_ok=True)
            (Path(flags["--out"]) / "README.md").write_text(command[1])
        elif command[0] == "bench":
            kind = (Path(flags["--draft"]) / "README.md").read_text()
            cells = [(0, 90.0, 1.0), (0, 100.0, 1.0), (5, RATES[kind], 2.5)]
            made = [{"batch": 1, "steps": s, "tokens_per_second": r, "accept_length": a} for s, r, a in cells]
            Path(flags["--json"]).write_text(json.dumps({"cells": made}))

    monkeypatch.setattr(auto, "run_espalier", run)
    return commands


def conversations(folder: Path) -> Path:
    lines = [json.dumps({"messages": [{"role": "user", "content": f"What is {n}?"}]}) for n in range(8)]
    (folder / "data.jsonl").write_text("\n".join(lines))
    return folder / "data.jsonl"


def test_the_fastest_kind_is_trained_and_said(
    ran: list[tuple[str, ...]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, target = conversations(tmp_path), find_target("bundled")
    train_auto(target, data, tmp_path / "out", 30, list(TRAINERS))
    names = [command[1] for command in ran]
    trials = [each for kind in TRAINERS for each in (kind, "choose")]
    assert names == ["own-text", *trials, "mtp", "choose"]
    prompts = [json.loads(line)["token_ids"] for line in (tmp_path / "out/work/held_out.jsonl").open()]
    for command in ran:
        if command[1] == "choose":  # on the prompts that no draft is trained on
            flags = dict(zip(command[2::2], command[3::2], strict=True))
            assert Path(flags["--dataset"]).samefile(tmp_path / "out/work/held_out.jsonl")
            assert int(flags["--context"]) == max(map(len, prompts)) and len(prompts) == 2
    said = capsys.readouterr().out
    assert "chosen: mtp\npredicted: at least 120 tokens/s, 1.20 times plain, accept length 2.50" in said
    assert [line.split()[1] for line in said.splitlines() if line.startswith("  espalier")] == [
        *("serve", "generate", "bench")
    ]
    assert "- chosen: mtp\n" in (tmp_path / "out" / "README.md").read_text()
    ran.clear()
    with pytest.raises(EspalierError, match=r"auto.json was made from another --data; give another --out"):
        train_auto(target, tmp_path / "other.jsonl", tmp_path / "out", 30, list(TRAINERS))
    for minutes, kinds, flag in ((30, ["block"], "kinds"), (60, list(TRAINERS), "minutes")):
        with pytest.raises(EspalierError, match=f"auto.json was made with --{flag} .*, now it is with --{flag} "):
            train_auto(target, data, tmp_path / "out", minutes, kinds)
    assert not ran


@pytest.mark.parametrize("name", ["README.md", "config.json"])
def test_a_folder_of_something_else_is_refused_before_anything_runs(
    name: str, ran: list[tuple[str, ...]], tmp_path: Path
) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(EspalierError, match=f"holds a {name} of something else; give another folder"):
        train_auto(find_target("bundled"), conversations(tmp_path), tmp_path, 30, list(TRAINERS))
    assert not ran and not (tmp_path / "work").exists()


def test_a_draft_that_is_slower_than_plain_decoding_is_called_so(
    ran: list[tuple[str, ...]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_auto(find_target("bundled"), conversations(tmp_path), tmp_path / "out", 30, ["eagle3", "block"])
    assert "plain decoding is faster here" in capsys.readouterr().out


def test_a_kind_is_not_tried_where_no_time_would_be_left_for_the_training(
    ran: list[tuple[str, ...]], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measurements take 8 of 30 minutes, so two trials and the training fit."""
    passed = property(lambda _: 480.0 * sum(command[0] == "bench" for command in ran))
    monkeypatch.setattr(auto.TimeBudget, "elapsed", passed)
    train_auto(find_target("bundled"), conversations(tmp_path), tmp_path / "out", 30, list(TRAINERS))
    first, second, third = TRAINERS
    best = max((first, second), key=lambda kind: RATES[kind])
    assert [command[1] for command in ran] == ["own-text", first, "choose", second, "choose", best, "choose"]
    said = capsys.readouterr().out
    assert f"{third} is not tried: with the training it would take 16 min, and 14 min are left" in said


def test_the_target_asks_itself_and_without_a_template_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(auto.QUESTION_TOKENS, "cpu", 12)
    monkeypatch.setitem(auto.PROMPTS_PER_BATCH, "cpu", 4)
    target = find_target("bundled")
    path = write_own_questions(target, tmp_path / "questions.jsonl", "cpu", 1e-9)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines and all(line["messages"][0]["role"] == "user" for line in lines)
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((target / "config.json").read_bytes())
    with pytest.raises(EspalierError, match="has no chat template, so it asks no questions; give --data"):
        write_own_questions(bare, tmp_path / "others.jsonl", "cpu", 1)
