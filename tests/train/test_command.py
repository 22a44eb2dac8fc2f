"""The trainer's command line: flags are explained, no other model is overwritten, measurements are readable."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from espalier.cli import start
from espalier.startup.checkpoints import BUNDLED_DRAFTS, BUNDLED_FILES
from espalier.train import evaluate
from espalier.train.command import TRAINERS, main, make_config, make_parser, refuse_other_model
from espalier.train.configs import read_draft_kind
from espalier.train.evaluate import continue_prompts, make_report
from espalier.train.own_text import print_planned_work
from espalier.train.settings import OwnTextConfig


def commands() -> dict[str, argparse.ArgumentParser]:
    actions = make_parser()._actions
    return next(dict(each.choices) for each in actions if isinstance(each, argparse._SubParsersAction))


@pytest.mark.parametrize("command", commands())
def test_every_flag_is_explained_in_words(command: str) -> None:
    for action in commands()[command]._actions:
        assert len((action.help or "").partition("(")[0].split()) >= 2, action.option_strings


@pytest.mark.parametrize("command", commands())
def test_help_fits_eighty_columns(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([command, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and lines.index("") <= 5
    assert not lines[0].split()[-1].startswith("--"), "a flag and its value stay together"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "a command is missing; use one of eagle3, mtp"),
        (["eagle"], "unknown command 'eagle'; use one of auto, eagle3"),
    ],
    ids=["none", "unknown"],
)
def test_a_missing_or_unknown_command_is_said_with_those_that_exist(
    given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(given)
    out, err = capsys.readouterr()
    assert (left.value.code, out, err.count("\n")) == (2, "", 1) and said in err


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("espalier.train.command", "espalier"),
        ("espalier.train.data", "espalier train"),
        ("espalier.train.kinds", "espalier train"),
    ],
)
def test_an_interrupt_while_modules_load_ends_in_a_line(
    module: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupting:
        def find_spec(self, name: str, *_: object) -> None:
            if name == module:
                raise KeyboardInterrupt

    for name in ("espalier.train.command", module):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    np.save(tmp_path / "ids.npy", np.arange(9))
    data = ["--data", str(tmp_path / "ids.npy")]
    assert start(["train", "mtp", "--target", "bundled", *data, "--out", str(tmp_path / "out")]) == 130
    assert capsys.readouterr() == ("", f"{said}: interrupted\n")


@pytest.mark.parametrize(("kind", "draft"), BUNDLED_DRAFTS.items(), ids=BUNDLED_DRAFTS)
def test_a_draft_of_the_same_kind_may_be_replaced(kind: str, draft: Path, tmp_path: Path) -> None:
    assert read_draft_kind(draft) == kind
    refuse_other_model(draft, kind)
    refuse_other_model(tmp_path, kind)


@pytest.mark.parametrize("kind", [*TRAINERS, "own-text"])
def test_the_first_line_says_device_and_work_and_how_to_make_it_small(
    kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flags that it names are valid, and make it small."""
    config = OwnTextConfig if kind == "own-text" else TRAINERS[kind].config
    monkeypatch.setattr("espalier.train.own_text.training_device", lambda: torch.device("cpu"))
    print_planned_work(config(), makes_text=True)
    line = capsys.readouterr().err
    assert line.startswith("on cpu: 40960 continuations of up to 256 tokens") and line.count("\n") == 1
    assert ("7629 steps of 32 x 1024 tokens" in line) == (kind != "own-text")
    out = [] if kind == "own-text" else ["--out", "out"]
    flags = [kind, "--target", "x", "--data", "y", "--work", "z", *out, *line.partition(" give ")[2].split()]
    small = make_config(config, make_parser().parse_args(flags))
    print_planned_work(small, makes_text=kind == "own-text")
    assert re.search(
        r"on cpu: (97 steps of 4 x 256 tokens|64 continuations of up to 64 tokens);", capsys.readouterr().err
    )
    monkeypatch.setattr("espalier.train.own_text.training_device", lambda: torch.device("cuda"))
    print_planned_work(config(), makes_text=True)
    assert capsys.readouterr().err.startswith("on cuda: 40960 cont") and "trial" not in line.partition(";")[0]


@pytest.mark.parametrize(
    ("kind", "held", "said"),
    [
        ("mtp", BUNDLED_DRAFTS["eagle3"], "a draft of the kind eagle3, which mtp would overwrite; give another folder"),
        ("eagle3", BUNDLED_DRAFTS["block"], "a draft of the kind block"),
        ("block", BUNDLED_DRAFTS["mtp"], "a draft of the kind mtp"),
        ("mtp", BUNDLED_FILES / "target", "a model that is no draft of this trainer"),
    ],
    ids=["eagle3", "block", "mtp", "target"],
)
def test_another_model_is_not_overwritten(
    kind: str,
    held: Path,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("espalier.train.command.find_target", None)
    shutil.copy(held / "config.json", tmp_path)
    assert main([kind, "--target", "bundled", "--data", __file__, "--out", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1) and said in err
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize("draft", BUNDLED_DRAFTS.values(), ids=BUNDLED_DRAFTS)
def test_accept_lengths_are_a_table(draft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "p.jsonl"
    data.write_text(json.dumps({"prompt": "def f(x):\n    return"}))
    flags = ["--draft", str(draft), "--data", str(data), "--max-tokens", "12"]
    assert main(["evaluate", "--target", "bundled", *flags]) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if line.startswith("  ") and "%" in line]
    assert len(rows) == (2 if draft == BUNDLED_DRAFTS["mtp"] else 3)
    assert all(float(row[-4]) >= 1 and row[-3] == "-" for row in rows)  # in new text, in repeated text
    assert "nan" not in out and "Report" not in out


@pytest.mark.parametrize("draft", BUNDLED_DRAFTS.values(), ids=BUNDLED_DRAFTS)
@pytest.mark.parametrize(
    ("tokens", "max_tokens", "said"),
    [
        ([5], 8, "--max-tokens=8 is too few to measure a tree of"),
        ([5], 2048, "a prompt has 1 tokens, and the target has 2048 positions; use at most 2047"),
        (
            [5] * 2050,
            50,
            "a prompt has 2050 tokens, and the target has 2048 positions; use shorter prompts, or another",
        ),
        ([], 50, "a prompt of --data has no tokens"),
    ],
    ids=["few", "many", "long", "none"],
)
def test_texts_too_short_to_measure_are_refused_before_the_target_is_loaded(
    draft: Path,
    tokens: list[int],
    max_tokens: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for module in ("target._load_model", "evaluate.TargetWriter"):
        monkeypatch.setattr(f"espalier.train.{module}", None)
    data = tmp_path / "p.jsonl"
    data.write_text(json.dumps({"token_ids": tokens}))
    flags = ["--draft", str(draft), "--data", str(data), "--max-tokens", str(max_tokens)]
    assert main(["evaluate", "--target", "bundled", *flags]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1) and said in err


def test_continuations_that_the_target_ends_early_are_left_out_in_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [np.arange(2 + 10), np.arange(1 + 11)]

    class Told(nullcontext):
        def __init__(self, *_: object) -> None:
            pass

        def continuations(self, *_: object) -> list[np.ndarray]:
            return texts

        def __enter__(self) -> Told:
            return self

    monkeypatch.setattr(evaluate, "TargetWriter", Told)
    kept, firsts = continue_prompts(None, [[0, 1], [0]], 20, 10)
    assert ([len(text) for text in kept], firsts) == ([12], [1])
    assert capsys.readouterr().out == "1 of 2 prompts are left out: the target ends them within 10 tokens\n"
    assert make_report([evaluate.torch.ones(1, dtype=int)], kept, firsts).fresh == 1
    with pytest.raises(ValueError, match="the target ends all 2 prompts of --data within 11 tokens"):
        continue_prompts(None, [[0, 1], [0]], 20, 11)


def test_a_draft_of_another_target_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((BUNDLED_FILES / "target" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_size": 512}))
    data = tmp_path / "p.jsonl"
    data.write_text(json.dumps({"token_ids": [5]}))
    for draft in BUNDLED_DRAFTS.values():
        assert main(["evaluate", "--target", str(tmp_path), "--draft", str(draft), "--data", str(data)]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1) and "hidden size 256, the target has 512" in err
