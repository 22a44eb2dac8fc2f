"""The learner beside a running engine: what it keeps, which drafts it swaps in, and what the trainer's end does."""

import errno
import json
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from functools import cache
from itertools import islice

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from espalier.errors import EspalierError
from espalier.learn import learner as of_learner
from espalier.learn import trainer as of_trainer
from espalier.learn.folder import (
    TEXT_KINDS,
    KeptTexts,
    LearnConfig,
    publish_draft,
    read_manifest,
    read_texts,
    sample_files,
)
from espalier.learn.learner import Learner
from espalier.learn.trainer import GO_SIGNAL, WAIT_SIGNAL, TrainSignal, make_run, train_once
from espalier.llm import LLM
from espalier.request import SamplingParams
from espalier.train import block, mtp
from espalier.train.draft_run import mixed_batches
from espalier.train.kinds import DRAFT_KINDS
from espalier.train.mtp_checkpoint import save_mtp
from espalier.train.settings import BlockConfig, MtpConfig
from espalier.train.target import Eagle3Target, FrozenTarget
from tests.learn.pair import draft, engine, prepared, target
from tests.learn.test_swap import swap
from tests.server.serving import exists

PARAMS = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
# Of the engine that learns: enough rounds for two drafts to be told apart.
ANSWER_PARAMS = replace(PARAMS, max_tokens=16)
COPIES = """
import json, shutil, sys
run = json.load(open(sys.argv[-1] + "/run.json"))
shutil.copytree({made!r}, run["out"])
"""
SLEEPS = "import sys, time; print('now', flush=True); time.sleep(600)"
FAILS = "print('first'); print('the disk is full'); raise SystemExit(1)"


@cache
def served():
    return LLM.from_prepared(prepared(1))


@cache
def texts():
    """What the target says by itself, first to the prompt of every test."""
    prompts = [[1, 2, 0], *([number % 16, 3 + number // 16] for number in range(24))]
    with engine(speculation=None, max_batch=25, num_pages=400) as plain:
        outputs = plain.generate(prompts, PARAMS)
    return [(prompt, output.token_ids) for prompt, output in zip(prompts, outputs, strict=True)]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(of_learner, "POLL_S", 0.02)
    monkeypatch.setattr(of_learner, "FIRST_PAUSE_S", 0.1)


class Learning:
    """An engine that learns, driven as the engine process drives it.  One engine for all, with its first draft."""

    def __init__(self, folder, code):
        command = (sys.executable, "-S", "-E", "-c", code)
        self.learner = Learner(LearnConfig(str(folder), tokens=1024), prepared(1), command)
        self.llm = served()
        swap(self.llm, draft(1))
        self.llm.engine.prefix_tree.clear()
        self.learner.attach(self.llm)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.learner.close()

    @property
    def figures(self):
        return self.learner.figures

    def answer(self, prompt, params=ANSWER_PARAMS):
        [request] = self.llm.new_requests(prompt, self.llm.inputs.resolve(params), detokenize=False)
        self.llm.engine.add(request)
        while self.llm.engine.has_work:
            self.learner.swap_between_steps(self.llm.engine)
            self.llm.step()
        self.learner.swap_between_steps(self.llm.engine)
        self.learner.keep_text(request)
        return request

    def serve_until(self, holds, seconds=60.0):
        """Take in texts of the target until it holds, then answer a prompt."""
        end = time.monotonic() + seconds
        while not holds():
            for prompt, output in texts():
                self.learner.kept_texts.add(prompt, output)
            self.learner.swap_between_steps(self.llm.engine)
            time.sleep(0.01)
            assert time.monotonic() < end, self.figures
        assert self.answer([1, 2, 0]).output == texts()[0][1][: ANSWER_PARAMS.max_tokens]


def made(tmp_path, before, after, seed=2, given=None):
    """A draft as the trainer's process leaves it.  given: length of the first draft, if that is not served."""
    unfinished = tmp_path / "unfinished"
    unfinished.mkdir()
    for file in draft(seed).iterdir():
        (unfinished / file.name).write_bytes(file.read_bytes())
    publish_draft(unfinished, tmp_path / "made", (before if given is None else given, before, after), 1000, 1.0)
    return tmp_path / "made"


def test_a_draft_that_accepts_more_is_swapped_in_and_served_after_a_restart(tmp_path):
    code = COPIES.format(made=str(made(tmp_path, 2.0, 2.5)))
    with Learning(tmp_path / "learn", code) as learning:
        first = learning.answer([1, 2, 0])
        learning.serve_until(lambda: learning.figures.swaps)
        again = learning.answer([1, 2, 0])
        assert again.output == first.output and again.stats != first.stats
        assert (learning.figures.served_accept_length, learning.figures.trained_accept_length) == (2.0, 2.5)
        assert learning.figures.failures == 0
    [served] = (tmp_path / "learn" / "drafts").iterdir()
    with Learning(tmp_path / "learn", SLEEPS) as learning:
        assert learning.learner.draft_dir == served
        assert learning.answer([1, 2, 0]).stats == again.stats
    change = served / "model.safetensors"
    change.write_bytes(change.read_bytes()[:-8])
    with Learning(tmp_path / "learn", SLEEPS) as learning:
        assert learning.learner.draft_dir == draft(1) and learning.answer([1, 2, 0]).stats == first.stats


@pytest.mark.parametrize(
    ("given", "after", "is_back"),
    [pytest.param(3.0, 2.9, True, marks=pytest.mark.full), (3.0, float("nan"), True), (2.9, 3.0, False)],
)
def test_the_given_draft_comes_back_where_it_accepts_more_of_new_traffic(given, after, is_back, tmp_path, caplog):
    caplog.set_level("INFO", "espalier")
    first = tmp_path / "first"
    first.mkdir()
    copies = COPIES.format(made=str(made(first, 2.0, 2.5)))
    with Learning(tmp_path / "learn", copies) as learning:
        of_given = learning.answer([1, 2, 0])
        learning.serve_until(lambda: learning.figures.swaps == 1)
        second = made(tmp_path, 2.0, after, seed=3, given=given)
        learning.learner.trainer = (*learning.learner.trainer[:-1], COPIES.format(made=str(second)))
        said = f"swapped in {'the given draft again' if is_back else 'a draft'}: accept length 3.000"
        learning.serve_until(lambda: said in caplog.text)
        learning.llm.engine.prefix_tree.clear()  # which hold the draft's rows of the draft before
        assert (learning.answer([1, 2, 0]).stats == of_given.stats) == is_back
        learning.serve_until(lambda: not learning.learner.is_swapping)
        assert (learning.learner.draft_dir == draft(1)) == is_back
    assert len(list((tmp_path / "learn" / "drafts").iterdir())) == (not is_back)
    with Learning(tmp_path / "learn", SLEEPS) as learning:
        assert (learning.answer([1, 2, 0]).stats == of_given.stats) == is_back, "also after a restart"


@pytest.mark.parametrize("gain", [pytest.param(-0.5, marks=pytest.mark.full), 0.01, float("nan")])
def test_a_draft_that_does_not_accept_more_is_not_used(gain, tmp_path):
    code = COPIES.format(made=str(made(tmp_path, 2.0, 2.0 + gain)))
    with Learning(tmp_path / "learn", code) as learning:
        first = learning.answer([1, 2, 0])
        learning.serve_until(lambda: learning.figures.trainings)
        learning.serve_until(lambda: not list(learning.learner.folder.drafts.iterdir()))
        assert learning.figures.swaps == 0
        assert learning.answer([1, 2, 0]).stats == first.stats


def test_a_draft_that_is_not_whole_is_not_read(tmp_path):
    broken = made(tmp_path, 2.0, 9.0) / "model.safetensors"
    data = broken.read_bytes()
    broken.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))  # as long as it was, and it could be loaded
    with Learning(tmp_path / "learn", COPIES.format(made=str(broken.parent))) as learning:
        learning.serve_until(lambda: learning.figures.failures)
        assert learning.figures.swaps == 0


def test_a_killed_trainer_is_started_again_and_serving_goes_on(tmp_path, caplog):
    with Learning(tmp_path / "learn", SLEEPS) as learning:
        pids = []
        for kills in (1, 2):
            learning.serve_until(lambda: learning.learner.training_pid is not None)
            pids.append(learning.learner.training_pid)
            os.kill(pids[-1], signal.SIGKILL)
            learning.serve_until(lambda n=kills: learning.figures.failures == n)
            assert f"the training process {pids[-1]} was ended by signal 9; serving goes on" in caplog.text
            assert f"in {0.1 * kills:g} s" in caplog.text, "each pause is twice the last"
        assert pids[0] != pids[1]
        learning.serve_until(lambda: learning.learner.training_pid is not None)
        last = learning.learner.training_pid
        assert exists(last)
    assert not exists(last), "the trainer ends with the server"


def test_what_the_trainer_said_last_is_logged(tmp_path, caplog):
    with Learning(tmp_path / "learn", FAILS) as learning:
        learning.serve_until(lambda: learning.figures.failures)
    assert "ended: the disk is full; serving goes on" in caplog.text


def test_a_full_disk_loses_texts_and_nothing_else(tmp_path, monkeypatch, caplog):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    code = COPIES.format(made=str(made(tmp_path, 2.0, 2.5)))
    with Learning(tmp_path / "learn", code) as learning, monkeypatch.context() as patched:
        patched.setattr(np, "save", full)
        learning.serve_until(lambda: learning.figures.failures > 1)
        assert learning.figures.swaps == 0, "texts that are lost start no training"
        assert not list((tmp_path / "learn" / "sample").iterdir())
        assert "No space left on device" in caplog.text and "serving goes on" in caplog.text
        patched.undo()
        learning.serve_until(lambda: learning.figures.swaps)


def texts_on_disk(folder):
    sample = folder / "sample"
    return [text.tokens.tolist() for kind in TEXT_KINDS for text in read_texts(sample_files(sample, kind))]


def test_texts_are_on_disk_after_a_stop_and_count_after_a_restart(tmp_path):
    with Learning(tmp_path / "learn", SLEEPS) as learning:
        time.sleep(0.1)  # the write of the first poll is over, and the next one is due in FLUSH_INTERVAL_S
        for prompt, output in texts():
            learning.learner.kept_texts.add(prompt, output)
        assert not texts_on_disk(tmp_path / "learn")
    expected = sorted([*prompt, *output] for prompt, output in texts())
    assert sorted(texts_on_disk(tmp_path / "learn")) == expected
    with Learning(tmp_path / "learn", SLEEPS) as learning:
        learning.serve_until(lambda: learning.figures.texts >= len(expected))
        assert learning.learner.kept_texts.num_tokens >= sum(map(len, expected))


def test_texts_are_written_within_an_interval_also_during_a_training(tmp_path, monkeypatch):
    monkeypatch.setattr(of_learner, "FLUSH_INTERVAL_S", 0.05)
    with Learning(tmp_path / "learn", SLEEPS) as learning:
        learning.serve_until(lambda: learning.learner.training_pid is not None)
        learning.learner.kept_texts.add([15, 15, 15], [3] * 20)
        written = [15, 15, 15, *[3] * 20]
        end = time.monotonic() + 10
        while written not in texts_on_disk(tmp_path / "learn"):
            time.sleep(0.01)
            assert time.monotonic() < end
        assert learning.learner.training_pid is not None and learning.figures.failures == 0


@pytest.mark.parametrize("gain", [0.0, 0.5])
def test_texts_are_trained_on_once_whether_or_not_the_draft_is_used(gain, tmp_path):
    with Learning(tmp_path / "learn", SLEEPS) as learning:
        learning.serve_until(lambda: learning.learner.training_pid is not None)
        pid = learning.learner.training_pid
    code = COPIES.format(made=str(made(tmp_path, 2.0, 2.0 + gain)))
    with Learning(tmp_path / "learn", code) as learning:
        end = time.monotonic() + 30  # no text comes: those on disk start the training that the stop ended
        while not learning.figures.trainings or learning.learner.is_swapping:
            learning.learner.swap_between_steps(learning.llm.engine)
            time.sleep(0.01)
            assert time.monotonic() < end, (pid, learning.figures)
        counts = dict(learning.learner.kept_texts.texts_per_kind)
    assert learning.figures.swaps == (gain > 0)
    with Learning(tmp_path / "learn", SLEEPS) as learning:
        assert learning.learner.kept_texts.texts_per_kind == counts and learning.learner.kept_texts.num_tokens == 0
        time.sleep(0.1)
        assert learning.learner.training_pid is None


def test_a_write_that_failed_is_not_tried_again_before_the_pause_is_over(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(of_learner, "FLUSH_INTERVAL_S", 0.01)
    monkeypatch.setattr(of_learner, "FIRST_PAUSE_S", 100.0)
    monkeypatch.setattr(np, "save", full)
    with Learning(tmp_path / "learn", SLEEPS) as learning:
        for _ in range(20):
            learning.learner.kept_texts.add([1, 2, 0], [3] * 20)
            time.sleep(0.02)
        assert learning.figures.failures == 1


def test_a_full_disk_does_not_keep_a_server_from_its_end(tmp_path, monkeypatch, caplog):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with Learning(tmp_path / "learn", SLEEPS) as learning:
        time.sleep(0.1)
        learning.answer([1, 2, 0])
        monkeypatch.setattr(np, "save", full)
    assert "No space left on device" in caplog.text and "are lost" in caplog.text
    Learner(LearnConfig(str(tmp_path / "learn")), prepared(1)).close()  # the folder is not locked


def test_the_trainer_computes_only_in_its_turn_and_ends_with_the_server():
    heard, said = os.pipe()
    ended = threading.Event()
    with os.fdopen(heard, "rb") as stdin, pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "_exit", lambda status: ended.set())
        turn = TrainSignal(stdin)
        worked = threading.Event()
        threading.Thread(target=lambda: (turn.wait_until_allowed(), worked.set()), daemon=True).start()
        os.write(said, WAIT_SIGNAL)
        assert not worked.wait(0.05)
        os.write(said, GO_SIGNAL)
        assert worked.wait(10) and not ended.is_set()
        os.close(said)
        assert ended.wait(10)


class Always:
    def wait_until_allowed(self):
        pass


def test_a_training_writes_a_whole_draft_that_accepts_more_of_this_traffic(tmp_path, monkeypatch):
    """The trainer's work itself, in this process, on the text of a target that repeats itself."""
    # A random draft has nothing to lose.
    monkeypatch.setattr(of_trainer, "LEARNING_RATES", {"matrix_lr": 2e-2, "other_lr": 2e-2})
    with Learning(tmp_path / "learn", SLEEPS) as learning:
        learning.serve_until(lambda: learning.learner.training_pid is not None)
        folder = learning.learner.folder.path
    run = json.loads((folder / "run.json").read_text())
    assert run["draft"] == str(draft(1)) and run["tree"] == [3, 4, 12]
    monkeypatch.setattr(of_trainer, "SAMPLE_PASSES", 1)
    monkeypatch.setattr(of_trainer, "STEPS_PER_PASS", 16)
    out = train_once(folder, Always())
    manifest = read_manifest(out)
    assert manifest.after > manifest.before >= 1 and manifest.num_tokens > 500
    assert [each.name for each in out.parent.iterdir()] == [out.name], "nothing unfinished stays"
    # A given draft that accepts more than the served one is the start; a single step, the first, changes nothing.
    monkeypatch.setattr(of_trainer, "SAMPLE_PASSES", 0)
    (folder / "run.json").write_text(json.dumps(run | {"given": str(out), "out": str(out.parent / "2")}))
    again = read_manifest(train_once(folder, Always()))
    assert again.after == again.given == manifest.after > again.before == manifest.before


def other_kind(kind, directory):
    if kind == "mtp":
        target_of = FrozenTarget(target(), torch.device("cpu"))
        save_mtp(mtp.new_head(target_of, MtpConfig(layers=2)), target(), directory)
    else:
        target_of = Eagle3Target(target(), torch.device("cpu"))
        block.save_block(block.new_head(target_of, BlockConfig(layers=1)), target_of, target(), directory)
    return directory


@pytest.mark.parametrize("kind", DRAFT_KINDS)
def test_every_kind_learns_the_newest_texts_in_rows_that_begin_with_one(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(of_trainer, "SAMPLE_PASSES", 1)
    sample = KeptTexts(tmp_path / "sample", 2**20)
    for number in range(240):  # token 1 begins a prompt; the older half have outputs of token 8 alone
        output = [8] * 30 if number < 120 else [9 + (number + i) % 7 for i in range(30)]
        sample.add([1, 2 + number % 6, 2 + number // 40], output)
    sample.flush()
    given = draft(1) if kind == "eagle3" else other_kind(kind, tmp_path / "given")
    out = tmp_path / "drafts" / "1"
    run = {
        "kind": kind,
        "target": str(target()),
        "draft": str(given),
        "tree": [3, 4, 12],
        "out": str(out),
        "given": str(given),
        "seconds": 60,
        "texts": {"train": 50, "held-back": 10},
    }
    training = make_run(DRAFT_KINDS[kind], tmp_path / "sample", run, tmp_path / "unused", 1)
    for tokens, learned in islice(mixed_batches(training, 0), 5):
        assert bool(learned.all()) and bool((tokens[:, 0] == 1).all()) and not bool((tokens == 8).any())
    (tmp_path / "run.json").write_text(json.dumps(run))
    assert train_once(tmp_path, Always()) == out and read_manifest(out).before >= 1
    before, after = (load_file(each / "model.safetensors") for each in (given, out))
    assert any(not torch.equal(after[name], value) for name, value in before.items())


def test_what_cannot_be_learned_is_refused_by_name(tmp_path):
    cases = [
        ({"speculation": None}, "none"),
        ({"tensor_parallel": 2}, "--tensor-parallel"),
        ({"model_overrides": {"rms_norm_eps": 1e-3}}, "--model-overrides"),
    ]
    for settings, said in cases:
        with pytest.raises(EspalierError, match=said):
            Learner(LearnConfig(str(tmp_path / "learn")), prepared(1, **settings))
    assert not (tmp_path / "learn").exists(), "refused before anything is written"
