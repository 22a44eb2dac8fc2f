"""Wrong command lines of the trainer: one line that names the flag, before PyTorch is imported or a file is lost."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from espalier.errors import EspalierError
from espalier.startup.checkpoints import find_target
from espalier.train import command
from espalier.train.command import main
from espalier.train.data import read_data

HERE = __file__
# A whole command line, whose flags a test changes.
GIVEN = {"--target": "bundled", "--data": HERE, "--out": "OUT", "--batch": "2", "--length": "16", "--num-tokens": "96"}
WHOLE, SHARE, ABOVE = "use a whole number, 1 or more", "use a number, 0 to 1", "use a number above 0"
RATE = ABOVE + ", up to 1"
WRONG = [
    ("mtp --batch 0", "--batch=0 is not supported; " + WHOLE),
    ("mtp --batch -1", "--batch=-1 is not supported; " + WHOLE),
    ("mtp --batch 1e3", "argument --batch: '1e3' is not supported; " + WHOLE),
    ("mtp --length 1", "--length=1 is not supported; use a whole number, 2 or more"),
    ("mtp --num-tokens 0", "--num-tokens=0.0 is not supported; " + ABOVE),
    ("mtp --num-tokens nan", "--num-tokens=nan is not supported; " + ABOVE),
    ("mtp --num-tokens inf", "--num-tokens=inf is not supported; " + ABOVE),
    ("mtp --num-tokens 31", "is less than one batch of --batch 2 rows of --length 16 tokens; use 32 or more"),
    ("mtp --matrix-lr nan", "--matrix-lr=nan is not supported; " + RATE),
    ("mtp --matrix-lr 0", "--matrix-lr=0.0 is not supported; " + RATE),
    ("mtp --other-lr inf", "--other-lr=inf is not supported; " + RATE),
    ("mtp --other-lr 1e38", "--other-lr=1e+38 is not supported; " + RATE),
    ("mtp --weight-decay nan", "--weight-decay=nan is not supported; use a number, 0 to 10"),
    ("mtp --decay -1", "--decay=-1.0 is not supported; use a number, 0 to 10"),
    ("mtp --own-share 2", "--own-share=2.0 is not supported; " + SHARE),
    ("mtp --sampled-share nan", "--sampled-share=nan is not supported; " + SHARE),
    ("mtp --continuations 0", "--continuations=0 is not supported; " + WHOLE),
    ("mtp --continuation-tokens 0", "--continuation-tokens=0 is not supported; " + WHOLE),
    (
        "mtp --continuation-tokens 5000",
        "the target has 2048 positions, for a prompt too; use at most 2047",
    ),
    ("mtp --generate-batch 0", "--generate-batch=0 is not supported; " + WHOLE),
    ("mtp --seed -1", "--seed=-1 is not supported; use a whole number, 0 to 100000000"),
    ("mtp --max-seconds 0", "--max-seconds=0 is not supported; " + WHOLE),
    ("mtp --log-every 0", "--log-every=0 is not supported; " + WHOLE),
    ("mtp --save-every -3", "--save-every=-3 is not supported; " + WHOLE),
    ("mtp --intermediate-size 0", "--intermediate-size=0 is not supported; " + WHOLE),
    ("mtp --layers 0", "--layers=0 is not supported; use a whole number, 1 to 256"),
    ("mtp --layers 9", "--layers=9 is more than --ttt-steps 3: every layer needs a depth that trains it"),
    ("mtp --ttt-steps 17", "--ttt-steps=17 does not fit into --length 16; use at most 16"),
    ("mtp --length 2049 --num-tokens 1e6", "--length=2049 is more than the target's positions; use at most 2048"),
    ("eagle3 --draft-vocab 0", "--draft-vocab=0 is not supported; " + WHOLE),
    ("eagle3 --ttt-steps 40", "--ttt-steps=40 does not fit into --length 16"),
    ("block --block-size 1", "--block-size=1 is not supported; use a whole number, 2 to 256"),
    ("block --block-size 16 --anchors 1", "--block-size=16 does not fit into --length 16; use 2 to 15"),
    ("block --anchors 64", "--anchors=64 is more than a row has places for"),
    ("block --edge-rank -1", "--edge-rank=-1 is not supported; use a whole number, 0 or more"),
    ("block --edge-kind lstm", "argument --edge-kind: invalid choice: 'lstm' (choose from "),
    (
        "block --edge-kind rnn --edge-rank 0 --anchors 4",
        "--edge-kind=rnn needs a Markov head; use --edge-rank 1 or more",
    ),
    ("block --mask-token 6144 --anchors 4", "--mask-token=6144 is no token of the target; use 0 to 6143, or -1"),
    ("own-text --work OUT --generate-batch 0", "--generate-batch=0 is not supported; " + WHOLE),
    ("evaluate --draft bundled --max-tokens 0", "--max-tokens=0 is not supported; " + WHOLE),
    ("evaluate --draft /no/such", "--draft='/no/such' is not a directory"),
    ("mtp --target /no/such", "--target='/no/such' is not a directory; use one with config.json"),
    ("mtp --out EMPTY", "argument --out: it is empty; give a name"),
    ("mtp --target EMPTY", "argument --target: it is empty; give a name"),
    ("mtp --data /no/such", "--data /no/such is not a file; give JSON lines"),
    (f"mtp --out {HERE}", "cannot be written (Not a directory); use another folder"),
    ("mtp --work /proc/work", "--work /proc/work cannot be written (No such file or directory); use another folder"),
    ("auto --minutes 0.5", "--minutes=0.5 is too few to try drafts; use 1 or more"),
    ("auto --minutes nan", "--minutes=nan is too few to try drafts"),
    ("auto --target /no/such", "--target='/no/such' is not a directory"),
    ("auto --data /no/such", "--data /no/such is not a file"),
    ("bundled --out OUT", "'bundled' is now `python -m lab bundled`, in a clone"),
]
FLAGS_OF = {
    "own-text": ("--target", "--data"),
    "evaluate": ("--target", "--data"),
    "bundled": (),
    "auto": ("--target", "--out"),
}


@pytest.mark.parametrize(("line", "said"), WRONG, ids=[line.replace(HERE, "FILE") for line, _ in WRONG])
def test_what_is_wrong_is_one_line_before_anything_is_loaded(
    line: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "import_function", None)  # what imports PyTorch
    name, *words = line.split()
    flags = {flag: GIVEN[flag] for flag in FLAGS_OF.get(name, GIVEN)} | dict(zip(words[::2], words[1::2], strict=True))
    parts = [part.replace("EMPTY", "").replace("OUT", str(tmp_path / "out")) for pair in flags.items() for part in pair]
    try:
        status = main([name, *parts])
    except SystemExit as left:
        status = int(str(left.code))
    out, err = capsys.readouterr()
    assert (status, out, err.count("\n")) == (2, "", 1) and said in err
    assert not (tmp_path / "out").exists()


LINES = 'an object with "turns" (texts'


@pytest.mark.parametrize(
    ("name", "held", "said"),
    [
        ("ids.npy", np.array([1, 6144]), "holds ids from 1 to 6144, and the target has 6144; give ids of its own"),
        ("ids.npy", np.array([-1, 3]), "holds ids from -1 to 3"),
        ("ids.npy", np.array([1.0, 2.0]), "holds float64 [2]; give whole numbers [num_tokens]"),
        ("ids.npy", np.array([[1, 2]]), "holds int64 [1, 2]; give whole numbers"),
        ("ids.npy", np.array([], dtype=int), "holds int64 [0]; give whole numbers"),
        ("ids.npy", b"", "cannot be read (No data left in file); give a .npy of token ids"),
        ("ids.npy", b"text", "cannot be read (This file contains pickled"),
        ("a.jsonl", b"", "is empty; a record is " + LINES),
        ("a.jsonl", b"\n\n", "is empty; a record is " + LINES),
        ("a.jsonl", b"\xff\xfe", "cannot be read ('utf-8' codec can't decode"),
        ("a.jsonl", b'{"text"', f":1: expected {LINES}"),
        ("a.jsonl", b'{"token_ids": [1]}\n\n[1]', f":3: expected {LINES}"),
        ("a.jsonl", b'{"token_ids": ["a"]}', 'found "token_ids" that are no list of whole numbers'),
        ("a.jsonl", b'{"token_ids": [true]}', 'found "token_ids" that are no list of whole numbers'),
        ("a.jsonl", b'{"text": 3}', "found a text that is empty or none"),
        ("a.jsonl", b'{"token_ids": [1, -5]}', ":1: token id -5, and the target has 6144; give ids of its own"),
        ("a.jsonl", b'{"token_ids": [6144]}', ":1: token id 6144, and the target has 6144"),
    ],
)
def test_data_that_are_no_text_of_the_target_are_refused(
    name: str, held: np.ndarray | bytes, said: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    np.save(path, held) if isinstance(held, np.ndarray) else path.write_bytes(held)
    with pytest.raises(EspalierError) as refused:
        read_data(path, find_target("bundled"))
    assert str(refused.value).startswith(f"--data {path}") and said in str(refused.value)


def test_text_needs_a_tokenizer_and_token_ids_do_not(tmp_path: Path) -> None:
    shutil.copy(find_target("bundled") / "config.json", tmp_path)
    data = tmp_path / "a.jsonl"
    data.write_text(json.dumps({"token_ids": [1, 2]}) + "\n\n" + json.dumps({"token_ids": [3]}))
    assert read_data(data, tmp_path).stream.tolist() == [1, 2, 3]
    np.save(tmp_path / "a.npy", np.array([1, 2], dtype=np.uint64))
    assert read_data(tmp_path / "a.npy", tmp_path).stream.dtype == np.int32
    data.write_text(json.dumps({"text": "a\u2028b"}, ensure_ascii=False))
    with pytest.raises(EspalierError, match=r'has no tokenizer that can be read \(.+\); give "token_ids" in --data'):
        read_data(data, tmp_path)


@pytest.mark.parametrize(
    "line", ["mtp --out new/out --work new/work", "own-text --work new/work", "auto --out new/out"]
)
def test_data_that_are_refused_leave_no_folder(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text("{")
    assert main([*line.split(), "--target", "bundled", "--data", "a.jsonl"]) == 2
    assert "a.jsonl:1: expected" in capsys.readouterr().err and not Path("new").exists()


def test_a_command_without_its_flags_names_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["mtp"])
    assert "the following arguments are required: --target, --data, --out" in capsys.readouterr().err


def test_the_command_line_does_without_pytorch() -> None:
    code = "import sys; sys.modules['torch'] = None; from espalier.cli import start; sys.exit(start(sys.argv[1:]))"
    line = ["train", "mtp", "--target", "/no/such", "--data", HERE, "--out", "/no/such/out"]
    ran = subprocess.run([sys.executable, "-c", code, *line], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (2, "") and "--target='/no/such' is not a directory" in ran.stderr


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel cannot be a target here; use one of Llama"),
        ({"architectures": None}, "an unnamed architecture cannot be a target here"),
        ({"num_hidden_layers": 5}, "has 5 layers, and this draft reads three of a target's layers; use a target of 6"),
        ({"hidden_size": None}, "config.json has hidden_size None; give a model whose file is whole"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_model_that_cannot_be_a_target_is_refused_before_pytorch_is_imported(
    changed: dict[str, object],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(command, "import_function", None)
    config = json.loads((find_target("bundled") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changed}))
    assert main(["eagle3", "--target", str(tmp_path), "--data", HERE, "--out", str(tmp_path / "out")]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1) and said in err
