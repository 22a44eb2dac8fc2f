"""The target's own text in a work folder, token ids as data, and runs that a time limit ends."""

from __future__ import annotations

import errno
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from espalier.errors import EspalierError
from espalier.train import own_text
from espalier.train.command import make_parser, run
from espalier.train.data import UserText
from espalier.train.draft_run import StepClock, prepare_run
from espalier.train.kinds import train
from espalier.train.llama import LlamaShape
from espalier.train.own_text import (
    load_own_text,
    open_unfinished,
    own_text_command,
    require_unfinished,
    write_own_text,
)
from espalier.train.settings import MtpConfig, OwnTextConfig
from espalier.train.work import origin_of
from espalier.train.writer import TargetWriter
from lab.bundle.llama import Llama, save_llama
from tests import warm

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
# The stream and the greedy counts of a file.
Made = tuple[list[int], list[int]]
OWN7 = replace(OWN, continuations=7)
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
    origin = origin_of(target_dir, stream)
    for seed in (1, 2):
        write_own_text(target_dir, UserText(stream), replace(OWN, seed=seed), tmp_path, origin)
    parts = [np.load(tmp_path / f"own_text-{seed}.npz") for seed in (1, 2)]
    assert not np.array_equal(parts[0]["texts_tokens"], parts[1]["texts_tokens"])
    monkeypatch.setattr(own_text, "make_own_text", None)
    own = load_own_text(target_dir, UserText(stream), OWN, tmp_path, origin)
    assert own.texts.tokens.tolist() == [*parts[0]["texts_tokens"].tolist(), *parts[1]["texts_tokens"].tolist()]
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
    monkeypatch.setattr("espalier.train.draft_run.set_learning_rate", lambda _, factor: factors.append(factor))
    figures = train(
        "mtp", target_dir, UserText(stream), tmp_path / "cut", tmp_path, replace(RUN, num_tokens=1e6, max_seconds=4)
    )
    assert figures["seen_tokens"] == 5 * 2 * 16
    assert factors[-1] == pytest.approx(0.25 / 0.55) and (tmp_path / "cut" / "model.safetensors").exists()
    factors.clear()
    figures = train(
        "mtp", target_dir, UserText(stream), tmp_path / "whole", tmp_path / "2", replace(RUN, num_tokens=3 * 32)
    )
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
    target_dir: Path, stream: np.ndarray, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_own_text(target_dir, UserText(stream), OWN, tmp_path, origin_of(target_dir, stream))
    assert [line.split(",")[0] for line in capsys.readouterr().out.splitlines()] == [
        "continued 2 prompts",
        "continued 4 prompts",
    ]


@dataclass
class Making:
    """Runs that make the text of OWN7 in a work folder.  prompt_batches: of all batches, in order."""

    target_dir: Path
    stream: np.ndarray
    work: Path
    prompt_batches: list[list[int]] = field(default_factory=list)

    @property
    def origin(self) -> dict[str, str]:
        return origin_of(self.target_dir, self.stream)

    @property
    def unfinished(self) -> Path:
        return self.work / "own_text-0.unfinished"

    def run(self, num_batches: int | None = None, config: OwnTextConfig = OWN7) -> None:
        """num_batches: after which the run is interrupted."""
        continuations, left = TargetWriter.continuations, iter(range(99 if num_batches is None else num_batches))

        def counted(writer: TargetWriter, prompts: list[np.ndarray], num_tokens: int, *args: Any) -> list[np.ndarray]:
            if args[1:]:  # not the prompts that are held out
                if next(left, None) is None:
                    raise KeyboardInterrupt
                self.prompt_batches += [prompt.tolist() for prompt in prompts]
            return continuations(writer, prompts, num_tokens, *args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TargetWriter, "continuations", counted)
            write_own_text(self.target_dir, UserText(self.stream), config, self.work, self.origin)

    def interrupted(self, num_batches: int) -> None:
        with pytest.raises(KeyboardInterrupt):
            self.run(num_batches)

    def made(self) -> Made:
        assert [path.name for path in self.work.iterdir()] == ["own_text-0.npz"]
        with np.load(self.work / "own_text-0.npz") as saved:
            return saved["texts_tokens"].tolist(), saved["greedy_counts"].tolist()


@pytest.fixture
def making(target_dir: Path, stream: np.ndarray, tmp_path: Path) -> Making:
    return Making(target_dir, stream, tmp_path / "work")


@pytest.fixture(scope="module")
def whole(target_dir: Path, stream: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The text of a run that nothing interrupts."""
    making = Making(target_dir, stream, tmp_path_factory.mktemp("whole"))
    making.run()
    return making.made()


@pytest.mark.parametrize("num_batches", [1, 3])
def test_an_interrupted_run_goes_on_to_the_same_text(
    num_batches: int, making: Making, whole: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    """Greedy and sampled batches, before and after the interruption."""
    making.interrupted(num_batches)
    capsys.readouterr()
    making.run()
    found, *lines = capsys.readouterr().out.splitlines()
    count = 2 * num_batches
    assert found == f"{making.unfinished} has {count} continuations, {7 - count} are left"
    counts = [min(n, 7) for n in range(count + 2, 9, 2)]
    assert [line.split(",")[0] for line in lines] == [f"continued {n} prompts" for n in counts]
    assert making.made() == whole and len(making.prompt_batches) == 7


def test_text_ends_in_time_and_a_run_without_a_limit_takes_it(making: Making, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = count()
    monkeypatch.setattr("espalier.train.own_text.time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    making.run(None, replace(OWN7, text_seconds=2))
    assert len(making.prompt_batches) == 4 and making.made()
    assert own_text.saved_texts(OWN7, making.work, making.origin) == [making.work / "own_text-0.npz"]


def test_another_batch_size_repeats_no_prompt(making: Making) -> None:
    """A number that followed from the prompts that are done would be the second batch's again."""
    making.interrupted(2)
    kept = making.unfinished.read_bytes()
    with pytest.raises(KeyboardInterrupt):
        making.run(1, replace(OWN7, generate_batch=1))
    assert making.unfinished.read_bytes().startswith(kept)
    making.run(None, replace(OWN7, generate_batch=4))
    assert len(making.prompt_batches) == len({tuple(prompt) for prompt in making.prompt_batches}) == 7
    tokens, _ = making.made()
    assert len(tokens) > sum(map(len, making.prompt_batches))


@pytest.mark.parametrize(
    "damaged",
    [
        lambda data: data[:-1],
        pytest.param(lambda data: data[:-20], marks=pytest.mark.full),  # is both that is wrong with its neighbours
        lambda data: data[:-20] + bytes(19) + b"\n",
        lambda data: data[:30],
        lambda data: b"",
    ],
    ids=["without its end", "torn", "zeros", "the first line torn", "empty"],
)
def test_a_torn_line_is_made_again(damaged: Callable[[bytes], bytes], making: Making, whole: Made) -> None:
    making.interrupted(2)
    making.unfinished.write_bytes(damaged(making.unfinished.read_bytes()))
    making.interrupted(2)  # so that a line that is glued to the torn one is not the last, and is read
    making.run()
    assert making.made() == whole


def test_unfinished_text_of_something_else_is_refused_before_the_target_is_loaded(
    making: Making, monkeypatch: pytest.MonkeyPatch
) -> None:
    making.interrupted(1)
    monkeypatch.setattr(own_text, "TargetWriter", None)
    before = making.unfinished.read_bytes()
    sizes = {name: getattr(OWN7, name) for name in vars(OWN7)}
    mtp = MtpConfig(length=16, batch=2, num_tokens=8 * 32, ttt_steps=2, **sizes)
    remedy = "go on with the command that began it, or give another --work, or delete it"
    for changed, stream, said in (
        ({"continuations": 8}, making.stream, "with --continuations 7, now it is with --continuations 8"),
        ({"sampled_share": 0.25}, making.stream, "with --sampled-share 0.5, now it is with --sampled-share 0.25"),
        ({}, making.stream[1:], "from another --data"),
    ):
        with pytest.raises(EspalierError) as refused:
            own_text_command(making.target_dir, UserText(stream), replace(OWN7, **changed), making.work)
        assert str(refused.value) == f"{making.unfinished} was made {said}; {remedy}"
        with pytest.raises(EspalierError) as refused:
            prepare_run(
                "mtp",
                making.target_dir,
                UserText(stream),
                making.work / "out",
                making.work,
                replace(mtp, **changed),
            )
        assert str(refused.value) == f"{making.unfinished} was made {said}; {remedy}"
    with pytest.raises(EspalierError, match="was made from another --target"):
        require_unfinished(OWN7, making.work, {**making.origin, "--target": "another"})
    # Another seed's text is another part.
    require_unfinished(replace(OWN7, seed=1), making.work, making.origin)
    assert making.unfinished.read_bytes() == before
    first, _, rest = before.partition(b"\n")
    for data, said in (
        (first + b"\n{\n" + rest, r"cannot be read \(.+\); delete it to make it anew"),
        (b"[]\n" + rest, "does not say what it was made from"),
    ):
        making.unfinished.write_bytes(data)
        with pytest.raises(EspalierError, match=f"own_text-0.unfinished {said}"):
            own_text_command(making.target_dir, UserText(making.stream), OWN7, making.work)


def test_two_trainers_do_not_write_one_text(making: Making, whole: Made) -> None:
    making.work.mkdir()
    said = "own_text-0.unfinished is being written by another trainer; wait for it, or end it"
    with open_unfinished(OWN7, making.work, making.origin):
        for second in (
            making.run,
            lambda: own_text_command(making.target_dir, UserText(making.stream), OWN7, making.work),
        ):
            with pytest.raises(EspalierError, match=said):
                second()
    making.run()
    assert making.made() == whole


def test_a_full_disk_keeps_the_batches_before(making: Making, whole: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    room, write = [2000], os.write

    def writing(file: int, data: bytes) -> int:
        """As much as there is room for."""
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        room[0] -= (written := write(file, data[: room[0]]))
        return written

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left") as failed:
        patch.setattr(os, "write", writing)
        making.run()
    remedy = "free some space there, and start again to go on"
    assert str(failed.value) == f"{making.unfinished} cannot be written (No space left on device); {remedy}"
    assert 0 < len(making.prompt_batches) < 7
    making.run()
    assert making.made() == whole


def test_a_trainer_that_is_terminated_goes_on(making: Making, whole: Made) -> None:
    """It waits in the line that says how many prompts are continued: nobody reads the pipe, which is full."""
    making.work.mkdir()
    np.save(making.work.parent / "ids.npy", making.stream)
    flags = {"target": making.target_dir, "data": making.work.parent / "ids.npy", "work": making.work, **vars(OWN7)}
    line = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items() if value is not None]
    reads, writes = os.pipe()
    with open(reads, "rb"), open(writes, "wb", buffering=0) as out, tempfile.TemporaryFile("w+") as err:
        os.set_blocking(writes, False)
        while out.write(bytes(4096)):
            pass
        os.set_blocking(writes, True)
        server = warm.server()
        process = server.start("espalier", ["train", "own-text", *line], server.environment, out, err)
        try:
            end = time.monotonic() + 60
            while not (making.unfinished.exists() and making.unfinished.read_bytes().count(b"\n") == 2):
                assert process.poll(0.01) is None and time.monotonic() < end, err.seek(0) or err.read()
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 130
        finally:
            process.kill()
    making.run()
    assert making.made() == whole and len(making.prompt_batches) == 5
