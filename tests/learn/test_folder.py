"""The folder of --learn: bounded bytes, whole files, one model."""

import errno
import json
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.errors import EspalierError
from espalier.learn import folder as of_folder
from espalier.learn.folder import (
    TEXT_KINDS,
    KeptTexts,
    LearnConfig,
    LearnFolder,
    publish_draft,
    read_manifest,
    read_texts,
)

ORIGIN = {"target": "a", "draft": "b"}
TEXTS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 300), st.booleans()), max_size=60)


@given(texts=TEXTS, max_bytes=st.integers(2**13, 2**15))
def test_the_sample_is_bounded_and_keeps_the_newest_texts_as_they_were(texts, max_bytes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sample")
    sample, added = KeptTexts(folder / "sample", max_bytes), []
    for number, (prompt_length, length, flushes) in enumerate(texts):
        prompt, before = [number + i for i in range(prompt_length)], sum(sample.texts_per_kind.values())
        sample.add(prompt, output := [7 + i for i in range(length)])
        assert length >= of_folder.MIN_OUTPUT_TOKENS or sum(sample.texts_per_kind.values()) == before
        if sum(sample.texts_per_kind.values()) > before:
            added.append((prompt, output))
        if flushes or sample.must_flush():
            sample.flush()
        assert sample.num_bytes <= max_bytes
    sample.flush()
    assert sample.num_bytes <= max_bytes
    found = {
        kind: [
            (t.tokens[: t.output_start].tolist(), t.tokens[t.output_start :].tolist())
            for t in read_texts(sample.files(kind))
        ]
        for kind in TEXT_KINDS
    }
    both = found["train"] + found["held-back"]
    assert all(text in added for text in both)
    for kind in TEXT_KINDS:
        # The newest first, none left out between.
        own = [text for text in reversed(added) if text in found[kind]]
        assert own == found[kind]
    again = KeptTexts(folder / "sample", max_bytes)
    assert again.files("train") == sample.files("train") and again.num_bytes == sample.num_bytes


@pytest.fixture
def quick_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)


def test_the_oldest_texts_go_and_the_newest_stay(tmp_path, quick_disk):
    sample = KeptTexts(tmp_path / "sample", max_bytes := 2**14)
    for number in range(500):
        sample.add([number], [number] * 20)
        sample.flush()
        assert sample.num_bytes <= max_bytes
    kept = [[int(text.tokens[0]) for text in read_texts(sample.files(kind))] for kind in TEXT_KINDS]
    assert max(map(max, kept)) == 499 and min(map(min, kept)) > 100
    assert sample.num_bytes > max_bytes // 2


def test_many_small_writes_make_few_files_and_lose_no_text(tmp_path, quick_disk):
    sample = KeptTexts(tmp_path / "sample", 2**17)
    for number in range(300):
        sample.add([number], [number] * 20)
        sample.flush()
    for kind, count in sample.texts_per_kind.items():
        assert len(list(read_texts(sample.files(kind)))) == count
        assert len(sample.files(kind)) <= 2 * of_folder.NUM_FILES


def test_a_file_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    names = []
    monkeypatch.setattr(os, "fsync", lambda _: names.extend(file.name for file in (tmp_path / "sample").iterdir()))
    sample = KeptTexts(tmp_path / "sample", 2**20)
    sample.add([1], [2] * 20)
    sample.flush()
    assert len(names) == 1 and names[0].startswith("unfinished-")


def counts_of(sample):
    return dict(sample.texts_per_kind), sample.num_tokens, sample.num_held_back_tokens


@pytest.mark.parametrize("max_bytes", [2**14, 2**20])
def test_what_is_on_disk_counts_after_a_restart_less_what_was_trained_on(max_bytes, tmp_path):
    sample = KeptTexts(tmp_path / "sample", max_bytes)
    for number in range(400):
        if number == 395:
            sample.flush()
            trained, *of_trained = counts_of(sample)
        sample.add([number], [number] * (16 + number % 5))
        if sample.must_flush():
            sample.flush()
    sample.flush()
    texts, *tokens = counts_of(sample)
    assert trained != texts
    again = KeptTexts(tmp_path / "sample", max_bytes, trained)
    assert counts_of(again) == (texts, *(b - a for a, b in zip(of_trained, tokens, strict=True)))
    again.add([0], [1] * 20)
    again.flush()
    assert sum(KeptTexts(tmp_path / "sample", max_bytes, trained).texts_per_kind.values()) == 401
    if max_bytes == 2**20:
        assert counts_of(KeptTexts(tmp_path / "sample", max_bytes))[1] == tokens[0] + 21
    for kind in TEXT_KINDS:
        for file in again.files(kind):
            file.unlink()
    assert counts_of(KeptTexts(tmp_path / "sample", max_bytes, trained)) == (trained, 0, 0), "no number comes twice"


def cut_text(file):
    np.save(file, np.load(file)[:-1])


def cut_header(file):
    np.save(file, np.append(np.load(file), np.int32(1)))


@pytest.mark.parametrize("damage", [cut_text, cut_header, lambda file: file.write_bytes(b""), lambda file: cut(file)])
def test_a_file_of_texts_that_is_not_whole_is_refused(damage, tmp_path):
    sample = KeptTexts(tmp_path / "sample", 2**20)
    sample.add([1], [2] * 20)
    sample.flush()
    [file] = [file for kind in TEXT_KINDS for file in sample.files(kind)]
    (tmp_path / "sample" / f"unfinished-{file.name}").write_bytes(file.read_bytes()[:-4])  # of a killed server
    assert sum(KeptTexts(tmp_path / "sample", 2**20).texts_per_kind.values()) == 1
    damage(file)
    with pytest.raises(EspalierError, match=f"{file.name} is no whole file of texts; delete it"):
        KeptTexts(tmp_path / "sample", 2**20)


def test_the_oldest_files_may_go_while_the_trainer_reads(tmp_path):
    sample = KeptTexts(tmp_path / "sample", 2**14)
    for number in range(100):
        sample.add([number], [number] * 20)
        sample.flush()
    files = sample.files("train")
    texts = [text.tokens.tolist() for text in read_texts(files)]
    files[0].unlink()
    left = [text.tokens.tolist() for text in read_texts(files)]
    assert 0 < len(left) < len(texts) and left == texts[: len(left)]


def test_a_prompt_that_comes_again_stays_in_its_part(tmp_path):
    sample = KeptTexts(tmp_path / "sample", 2**20)
    for number in range(200):
        sample.add([number % 20, 1, 2], [number % 39] * 20)
    sample.flush()
    prompts = [{int(text.tokens[0]) for text in read_texts(sample.files(kind))} for kind in TEXT_KINDS]
    assert prompts[0] and prompts[1] and not prompts[0] & prompts[1]


def test_texts_that_a_full_disk_loses_do_not_count(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    sample = KeptTexts(tmp_path / "sample", 2**20)
    for number in range(80):
        sample.add([number, 1], [2] * of_folder.MIN_OUTPUT_TOKENS)
    assert all(sample.texts_per_kind.values()) and sample.num_held_back_tokens
    with monkeypatch.context() as patched:
        patched.setattr(np, "save", full)
        for _ in of_folder.TEXT_KINDS:
            with pytest.raises(OSError, match="No space"):
                sample.flush()
    assert (sum(sample.texts_per_kind.values()), sample.num_tokens, sample.num_held_back_tokens) == (0, 0, 0)
    sample.add([0, 1], [2] * of_folder.MIN_OUTPUT_TOKENS)
    sample.flush()
    assert (sum(sample.texts_per_kind.values()), sample.num_tokens) == (1, 2 + of_folder.MIN_OUTPUT_TOKENS)


def learned(tmp_path, name="1"):
    folder = LearnFolder(tmp_path / "learn", ORIGIN)
    unfinished = folder.drafts / "unfinished"
    unfinished.mkdir()
    (unfinished / "model.safetensors").write_bytes(np.arange(1000).tobytes())
    (unfinished / "config.json").write_text("{}")
    publish_draft(unfinished, folder.drafts / name, (2.0, 2.0, 2.5), 100, 1.0)
    return folder


def cut(file):
    file.write_bytes(file.read_bytes()[:-1])


def change(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def naming(file, digest):
    file.write_text(json.dumps(json.loads(file.read_text()) | {"digest": digest}))


BREAKS = {
    **{f"{how.__name__} {name}": (how, name) for how in (cut, change) for name in ("model.safetensors", "config.json")},
    "no weights": (lambda file: file.unlink(), "model.safetensors"),
    "no manifest": (lambda file: file.unlink(), "manifest.json"),
    "half a manifest": (lambda file: file.write_bytes(file.read_bytes()[:40]), "manifest.json"),
    "an empty manifest": (lambda file: file.write_text("{}"), "manifest.json"),
    "another draft's manifest": (lambda file: naming(file, "0" * 64), "manifest.json"),
    "a manifest of a list": (lambda file: file.write_text("[1]"), "manifest.json"),
}


@pytest.mark.parametrize("broken", BREAKS)
def test_a_draft_that_is_not_whole_is_never_read(broken, tmp_path):
    folder = learned(tmp_path)
    folder.record_served(folder.drafts / "1")
    assert folder.served_draft() == folder.drafts / "1" and read_manifest(folder.drafts / "1").after == 2.5
    how, name = BREAKS[broken]
    how(folder.drafts / "1" / name)
    with pytest.raises(EspalierError, match="no whole draft"):
        folder.served_draft()


def test_only_the_draft_that_is_served_is_kept(tmp_path):
    folder = learned(tmp_path)
    assert folder.served_draft() is None and folder.new_draft_path().name == "2"
    (folder.drafts / "unfinished").mkdir()
    folder.record_served(folder.drafts / "1")
    assert [each.name for each in folder.drafts.iterdir()] == ["1"]
    (folder.path / "served.json").write_text("{")
    with pytest.raises(EspalierError, match="delete it"):
        folder.served_draft()


@pytest.mark.parametrize("wrong", ["", "{", "[1]", "{}", '{"train": 1}', '{"train": -1, "held-back": 0}'])
def test_the_record_of_what_was_trained_on_is_whole_or_refused(wrong, tmp_path):
    folder = LearnFolder(tmp_path / "learn", ORIGIN)
    assert folder.num_trained() == {"train": 0, "held-back": 0}
    folder.record_trained(counts := {"train": 7, "held-back": 1})
    assert folder.num_trained() == counts
    (folder.path / "trained.json").write_text(wrong)
    with pytest.raises(EspalierError, match="cannot be read; delete it"):
        folder.num_trained()


@pytest.mark.parametrize("what", ORIGIN)
def test_the_folder_of_another_model_and_one_in_use_are_refused(what, tmp_path):
    folder = LearnFolder(tmp_path / "learn", ORIGIN)
    with pytest.raises(EspalierError, match="in use by another server"):
        LearnFolder(tmp_path / "learn", ORIGIN)
    folder.close()
    LearnFolder(tmp_path / "learn", ORIGIN).close()
    with pytest.raises(EspalierError, match=f"another {what}"):
        LearnFolder(tmp_path / "learn", {**ORIGIN, what: "c"})
    (tmp_path / "learn" / "learn.json").write_text("[1")
    with pytest.raises(EspalierError, match="another folder"):
        LearnFolder(tmp_path / "learn", ORIGIN)


def test_a_folder_with_other_files_is_refused_and_left_as_it_was(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(EspalierError, match="other files"):
        LearnFolder(tmp_path, ORIGIN)
    assert [each.name for each in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("wrong", [{"bytes": 1}, {"tokens": 0}, {"seconds": 0}, {"folder": ""}, {"bytes": True}])
def test_settings_out_of_range_are_refused_by_their_flag(wrong):
    [name] = wrong
    with pytest.raises(EspalierError, match="--learn=" if name == "folder" else f"--learn-{name}="):
        LearnConfig(**{"folder": "x", **wrong})
