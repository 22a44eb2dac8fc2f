"""A run that goes on, or finds text of the target, comes from the same target, data and settings; files are whole."""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from espalier.errors import EspalierError
from espalier.train import checkpoint, command, draft_run
from espalier.train.data import UserText
from espalier.train.draft_run import RunFiles, backward, prepare_run, require_own_rows
from espalier.train.kinds import train
from espalier.train.llama import LlamaShape
from espalier.train.own_text import load_own_text, saved_texts
from espalier.train.settings import BlockConfig, Eagle3Config, MtpConfig, TrainConfig
from espalier.train.state import SavedState
from espalier.train.target import FrozenTarget
from espalier.train.work import origin_of, replace_file
from lab.bundle.llama import Llama, save_llama

SHAPE = LlamaShape(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=6,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
)
SIZES = {"length": 16, "batch": 2, "num_tokens": 6 * 32}
OWN = {"continuations": 2, "continuation_tokens": 4, "generate_batch": 2}
MTP = MtpConfig(**SIZES, **OWN, log_every=1, save_every=2)
BLOCK = BlockConfig(**SIZES, **OWN, block_size=4, anchors=4)
EAGLE3 = Eagle3Config(**SIZES, **OWN)
STREAM = np.random.default_rng(0).integers(1, 32, 4200).astype(np.uint16)


def make_target(directory: Path, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    save_llama(Llama(SHAPE), directory, [0])
    return directory


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("work") / "target")


@pytest.fixture(scope="module")
def other_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the same config and sizes; its weights are others."""
    return make_target(tmp_path_factory.mktemp("work") / "target", seed=1)


def prepared(
    target: Path, work: Path, config: TrainConfig, stream: np.ndarray = STREAM, out: str = "draft"
) -> RunFiles:
    kind = {MtpConfig: "mtp", BlockConfig: "block", Eagle3Config: "eagle3"}[type(config)]
    return prepare_run(kind, target, UserText(stream), work / out, work, config)


def begun(target: Path, work: Path, config: TrainConfig) -> Path:
    """The state of an interrupted run."""
    state = prepared(target, work, config).state
    state.save(nn.Linear(1, 1), [], 3)
    return state.path


@pytest.mark.parametrize(
    ("config", "changed", "said"),
    [
        (BLOCK, {"block_size": 8}, "with --block-size 4, now it is with --block-size 8"),
        (BLOCK, {"layers": 4}, "with --layers 3, now it is with --layers 4"),
        (BLOCK, {"mask_token": 5}, "with --mask-token -1, now it is with --mask-token 5"),
        (EAGLE3, {"draft_vocab": 16}, "without --draft-vocab, now it is with --draft-vocab 16"),
        (MTP, {"form": "target"}, "with --form chain, now it is with --form target"),
        (MTP, {"intermediate_size": 8}, "without --intermediate-size, now it is with --intermediate-size 8"),
        (MTP, {"batch": 4}, "with --batch 2, now it is with --batch 4"),
        (MTP, {"matrix_lr": 0.1}, "with --matrix-lr 0.004, now it is with --matrix-lr 0.1"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_run_goes_on_by_its_own_settings_alone(
    config: TrainConfig, changed: dict[str, object], said: str, target: Path, tmp_path: Path
) -> None:
    path = begun(target, tmp_path, config)
    with pytest.raises(EspalierError) as refused:
        prepared(target, tmp_path, replace(config, **changed))
    remedy = "give the same flags to go on, or another --out to begin anew, or delete it"
    assert str(refused.value) == f"{path} was made {said}; {remedy}"
    # How long a run is, and what it prints, may change; another --out begins anew.
    prepared(target, tmp_path, replace(config, num_tokens=1e6, max_seconds=5, save_every=9, generate_batch=1))
    prepared(target, tmp_path, replace(config, **changed), out="other")


def test_a_run_goes_on_with_its_own_target_and_data(target: Path, other_target: Path, tmp_path: Path) -> None:
    path = begun(target, tmp_path, MTP)
    with pytest.raises(EspalierError, match="was made from another --target; give the same flags"):
        prepared(other_target, tmp_path, MTP)
    with pytest.raises(EspalierError, match="was made from another --data"):
        prepared(target, tmp_path, MTP, STREAM[:-1])
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(EspalierError, match=r"mtp-draft.pt cannot be read \(.+\); delete it to begin anew"):
        prepared(target, tmp_path, MTP)
    torch.save({"model": {}, "step": 3}, path)
    with pytest.raises(EspalierError, match="does not say what it was made from"):
        prepared(target, tmp_path, MTP)


def test_a_target_is_known_by_its_files_wherever_it_stands(target: Path, other_target: Path, tmp_path: Path) -> None:
    moved = make_target(tmp_path / "moved")
    assert origin_of(moved, STREAM) == origin_of(target, STREAM.astype(np.int32)) != origin_of(other_target, STREAM)


def test_text_of_the_target_is_not_taken_for_another(target: Path, other_target: Path, tmp_path: Path) -> None:
    origin = origin_of(target, STREAM)
    own = load_own_text(target, UserText(STREAM), MTP, tmp_path, origin)
    assert own.texts.tokens.dtype == np.int32  # whatever the data's dtype: the target may say any id
    path = tmp_path / "own_text-0.npz"
    assert saved_texts(replace(MTP, generate_batch=1), tmp_path, origin) == [path]
    # Another seed's text is another part: its settings are its own.
    assert saved_texts(replace(MTP, continuations=3, seed=1), tmp_path, origin) == [path]
    for config, now, said in (
        (MTP, origin_of(other_target, STREAM), "from another --target"),
        (replace(MTP, seed=1), origin_of(other_target, STREAM), "from another --target"),
        (MTP, origin_of(target, STREAM[1:]), "from another --data"),
        (replace(MTP, continuations=3), origin, "with --continuations 2, now it is with --continuations 3"),
    ):
        with pytest.raises(EspalierError, match=f"{path} was made {said}"):
            saved_texts(config, tmp_path, now)
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(EspalierError, match=r"own_text-0.npz cannot be read"):
        saved_texts(MTP, tmp_path, origin)
    np.savez(path, stream=own.texts.tokens, greedy_counts=own.greedy_counts)
    with pytest.raises(EspalierError, match="does not say what it was made from"):
        saved_texts(MTP, tmp_path, origin)


def test_data_too_short_are_refused_before_the_target_is_loaded(target: Path, tmp_path: Path) -> None:
    for stream, config, said in (
        (STREAM[:40], MTP, "--data holds 40 tokens to train on: 1 rows of 16 tokens, .* takes 2 of them"),
        (STREAM[:90], MTP, "--data holds 74 tokens: 0 rows of 48 tokens, .* takes 2 of them; .*--generate-batch"),
        (STREAM, replace(MTP, generate_batch=90, continuations=90), "65 rows of 48 tokens, and a batch takes 90"),
        (STREAM, replace(MTP, continuations=4201), "--continuations=4201 is more than --data has prompts"),
        (STREAM, replace(MTP, length=100, batch=4, num_tokens=400, own_share=0.5), "the target's own text has 104"),
    ):
        with pytest.raises(EspalierError, match=said):
            prepared(target, tmp_path, replace(config, own_share=0 if len(stream) < 99 else config.own_share), stream)
    with pytest.raises(EspalierError, match="use more --continuations, or a smaller --own-share"):
        require_own_rows(32, MTP, 2)


def trained(target: Path, tmp_path: Path, config: MtpConfig = MTP) -> dict[str, float]:
    return train("mtp", target, UserText(STREAM), tmp_path / "draft", tmp_path, config)


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def fails_at(number: int, error: BaseException) -> Callable[..., object]:
    """`backward`, whose call of this number, from 1, fails."""
    calls = iter(range(1, 100))

    def failing(run: draft_run.DraftRun, *batch: torch.Tensor) -> object:
        if next(calls) == number:
            raise error
        return backward(run, *batch)

    return failing


def test_an_interruption_before_the_first_step_leaves_a_finished_draft(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(target, tmp_path)
    before = files_in(tmp_path / "draft")
    assert set(files_in(tmp_path)) == {"mtp-draft.json", "own_text-0.npz"}  # no state: the run is finished
    monkeypatch.setattr(draft_run, "backward", fails_at(1, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        trained(target, tmp_path)
    assert files_in(tmp_path / "draft") == before and "mtp-draft.pt" not in files_in(tmp_path)


def test_a_run_that_diverges_saves_nothing(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(target, tmp_path)
    before = files_in(tmp_path / "draft")

    def diverging(run: draft_run.DraftRun, *batch: torch.Tensor) -> object:
        next(run.draft.parameters()).data.fill_(math.nan)
        return backward(run, *batch)

    monkeypatch.setattr(draft_run, "backward", diverging)
    # Seen in the loss that is printed; without one, in the weights that would be saved.
    for config, step in ((MTP, 1), (replace(MTP, log_every=99), 2)):
        with pytest.raises(EspalierError, match=f"at step {step} the loss or a weight is no finite number"):
            trained(target, tmp_path, config)
    assert files_in(tmp_path / "draft") == before and "mtp-draft.pt" not in files_in(tmp_path)


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_loses_neither_the_draft_nor_the_state(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(MTP, save_every=4)  # not at the end
    with (
        monkeypatch.context() as patch,
        pytest.raises(OSError, match=r"mtp-draft.pt cannot be written \(No space left"),
    ):
        patch.setattr("espalier.train.state.torch.save", full)
        trained(target, tmp_path, config)
    assert set(files_in(tmp_path / "draft")) == {"config.json", "model.safetensors"}
    before = files_in(tmp_path / "draft")
    with (
        monkeypatch.context() as patch,
        pytest.raises(OSError, match=r"model.safetensors cannot be written \(No space"),
    ):
        patch.setattr(checkpoint, "write_weights", full)
        trained(target, tmp_path, config)
    assert files_in(tmp_path / "draft") == before
    assert "mtp-draft.pt holds step 6: start again to save the draft" in capsys.readouterr().out
    monkeypatch.setattr(draft_run, "backward", None)  # no step is run again
    assert trained(target, tmp_path, config)["seen_tokens"] == SIZES["num_tokens"]
    assert files_in(tmp_path / "draft") != before
    assert not list(tmp_path.rglob("unfinished*"))


def test_a_file_that_fails_leaves_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")
    for error in (KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")):
        with pytest.raises((KeyboardInterrupt, OSError)), replace_file(path, "free some space") as unfinished:
            unfinished.write_text("half")
            raise error
    assert files_in(tmp_path) == {"file": b"before"}


def test_a_target_without_whole_weights_is_refused(target: Path, tmp_path: Path) -> None:
    weights = (target / "model.safetensors").read_bytes()
    copy = make_target(tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    (copy / "model.safetensors").write_bytes(weights[:3000])
    with pytest.raises(EspalierError, match=r"--target .* cannot be loaded \(.+\); give a directory whose weights"):
        FrozenTarget(copy, torch.device("cpu"))
    (copy / "model.safetensors").write_bytes(weights)
    (copy / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 7}))
    with pytest.raises(EspalierError, match=r"--target .* has no weight model.layers.6"):
        FrozenTarget(copy, torch.device("cpu"))
    (copy / "config.json").write_text(json.dumps({**config, "hidden_size": None}))
    with pytest.raises(EspalierError, match=r"config.json has hidden_size None"):
        FrozenTarget(copy, torch.device("cpu"))
    (copy / "config.json").write_text("{")
    with pytest.raises(EspalierError, match=r"config.json is not readable JSON"):
        FrozenTarget(copy, torch.device("cpu"))


def test_a_full_gpu_is_one_line(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "ids.npy", STREAM)
    out_of_memory = torch.OutOfMemoryError("CUDA: 2 GiB")
    monkeypatch.setattr("espalier.train.target._load_model", lambda *_: (_ for _ in ()).throw(out_of_memory))
    line = ["mtp", "--target", str(target), "--data", str(tmp_path / "ids.npy"), "--out", str(tmp_path / "draft")]
    sizes = [
        "--length",
        "16",
        "--batch",
        "2",
        "--continuations",
        "2",
        "--generate-batch",
        "2",
        "--continuation-tokens",
        "4",
    ]
    assert command.main([*line, *sizes]) == 1
    assert capsys.readouterr().err.endswith(
        "espalier train: the GPU's memory is full (CUDA: 2 GiB); use a smaller --batch, --length or --generate-batch\n"
    )


def test_a_state_that_is_removed_is_gone_and_one_that_is_missing_is_step_0(tmp_path: Path) -> None:
    state, model = SavedState(tmp_path / "a.pt", {"--layers": "1"}), nn.Linear(1, 1)
    assert state.load(model, []) == 0
    state.save(model, [], 7)
    assert state.load(model, []) == 7
    state.remove()
    assert state.load(model, []) == 0
