"""What a model's directory may hold: every other kind of file, size, depth or name is refused in one line."""

import json
import os
import re
import resource
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from espalier.errors import EspalierError
from espalier.llm import LLM
from espalier.model_files import MAX_CONFIG_BYTES, MAX_JSON_DEPTH, read_json, require_files
from espalier.models import load_target, read_config
from espalier.models.weight_files import INDEX_FILE, safetensors_files
from espalier.speculate.drafters.registry import load_draft, read_draft
from espalier.startup.checkpoints import find_target
from tests.block import block_directories
from tests.builders import make_target
from tests.folders import new_folder
from tests.harness import directories
from tests.mtp import mtp_directories

LOADING: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "position_rows": 8}
GIB = 2**30


def make_socket(path: Path) -> None:
    """By a relative name: an absolute one may be too long."""
    before = os.getcwd()
    os.chdir(path.parent)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(before)


KINDS: dict[str, Callable[[Path], object]] = {
    "a FIFO": os.mkfifo,
    "a directory": Path.mkdir,
    "a socket": make_socket,
    "a device": lambda path: path.symlink_to("/dev/zero"),
}
READ = (
    *("config.json", "generation_config.json", "hf_quant_config.json", INDEX_FILE, "model.safetensors"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt"),
    *("tokenizer.model", "chat_template.jinja", "additional_chat_templates/one.jinja"),
)


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(EspalierError) as caught:
        call()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000
    return str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_only_regular_files_are_opened(kind: str, tmp_path: Path) -> None:
    whole = make_target(tmp_path / "whole")
    for name in READ:
        path = shutil.copytree(whole, tmp_path / "copy")
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).unlink(missing_ok=True)
        KINDS[kind](path / name)
        assert f"{path / name} is {kind}, not a regular file" in refusal(lambda path=path: LLM(path))
        shutil.rmtree(path)


def test_gguf_beside_safetensors_does_not_matter(tmp_path: Path) -> None:
    path = make_target(tmp_path)
    (path / "model.gguf").write_bytes(b"")
    assert find_target(path) == path


def test_a_repository_without_config_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    assert "no config.json on the Hugging Face hub, as repositories of GGUF" in refusal(lambda: find_target("own/er"))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX_FILE, "model.safetensors"])
def test_the_readers_themselves_open_only_regular_files(name: str, tmp_path: Path) -> None:
    """Not every caller looks through the directory first."""
    path = make_target(tmp_path)
    (path / name).unlink(missing_ok=True)
    os.mkfifo(path / name)
    assert "is a FIFO" in refusal(lambda: load_target(path, **LOADING))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[" * 100_000, "nested in more than"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "nested in more than"),
        ('{"a":' + "[" * MAX_JSON_DEPTH + "]" * MAX_JSON_DEPTH + "}", "nested in more than"),
        ('{"a":' + "[" * (MAX_JSON_DEPTH - 1) + "]" * (MAX_JSON_DEPTH - 1) + "}", None),
        ('{"a": NaN}', "NaN"),
        ('{"a": 1' + "0" * 5000 + "}", "not readable JSON"),
        ('{"a": "\\ud800"}', None),
        (b'{"a": "\xff"}', "not readable JSON"),
        ("3", "holds a int"),
        ("", "not readable JSON"),
        ('{"a": "' + "x" * MAX_CONFIG_BYTES + '"}', "is larger than 8 MiB"),
    ],
    ids=range(11),
)
def test_json_is_bounded(content: str | bytes, says: str | None, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    if says is None:
        assert set(read_json(file)) == {"a"}
    else:
        assert re.search(f"^{file} .*{says}", refusal(lambda: read_json(file)))


def test_a_file_that_a_library_would_read_whole_is_bounded(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(2**40)
    assert "tokenizer.json is larger than 128 MiB" in refusal(lambda: require_files(tmp_path))


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "a/model.safetensors", "..", ".", "", "a\0", "a\\b", 3, None, []]
)
def test_an_index_names_files_of_its_directory(name: object, tmp_path: Path) -> None:
    path = make_target(tmp_path / "inside")
    shutil.copy(path / "model.safetensors", tmp_path)
    (path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": name}}))
    assert f"{INDEX_FILE} names {name!r}" in refusal(lambda: safetensors_files(path))


def test_links_out_of_the_directory_are_followed(tmp_path: Path) -> None:
    """The cache of the Hugging Face hub consists of them."""
    path = make_target(tmp_path / "blobs")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for file in path.iterdir():
        (snapshot / file.name).symlink_to(Path("..") / "blobs" / file.name)
    load_target(snapshot, **LOADING)


NAMES = ("llama", "gpt_oss", "glm4_moe_lite", "deepseek_v3", "qwen2_moe", "dots1")
# They have each kind of field: sinks and windows; latent rows, experts and a RoPE of a part of the head.
QUICK = ("gpt_oss", "glm4_moe_lite")
DRAFTS = ("eagle3", "mtp", "speculators", "dflash2")


@cache
def models() -> dict[str, tuple[Path, Path | None]]:
    """(target, draft) by name; the config of the draft is changed, else that of the target."""
    root = new_folder("sizes-")
    made: dict[str, tuple[Path, Path | None]] = {name: (make_target(root / name, name), None) for name in NAMES}
    drafts = {"eagle3": directories(), "mtp": mtp_directories("qwen3", 2)}
    return made | drafts | {form: block_directories("llama", form, 4) for form in ("speculators", "dflash2")}


def fields(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all values inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*place, key)
        yield from fields(inner, (*place, key))


def replaced(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    if not place:
        return new
    changed = list(value) if isinstance(value, list) else dict(value)
    changed[place[0]] = replaced(value[place[0]], place[1:], new)
    return changed


@contextmanager
def memory_limit(more: int) -> Iterator[None]:
    """An allocation of more than these bytes fails, so that a fault does not take the machine's memory."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(each, marks=pytest.mark.full) for each in NAMES if each not in QUICK), *DRAFTS]
)
@pytest.mark.parametrize(
    "values",
    # The largest, the least, and no number; tests/models/test_neutral_kinds.py has texts.
    [(10**12, 10**400, -1, []), pytest.param((10**9, "x", {}, True), marks=pytest.mark.full)],
    ids=["usual", "more"],
)
def test_no_value_of_a_config_takes_memory_or_raises_another_error(name: str, values: tuple, tmp_path: Path) -> None:
    """Each value of each config, replaced by each of these, is refused in one line, or loads as before."""
    target, draft = models()[name]
    path = shutil.copytree(draft or target, tmp_path / "changed")
    raw = json.loads((path / "config.json").read_text())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    num_refused = 0
    with memory_limit(2 * GIB):
        capture = (
            None
            if draft is None
            else load_target(
                target, **LOADING, captured_layers=read_draft(draft, read_config(target)).spec.captured_layers
            )
        )
        for place in fields(raw):
            for new in values:
                (path / "config.json").write_text(json.dumps(replaced(raw, place, new)))
                try:
                    if capture is None:
                        load_target(path, **LOADING)
                    else:
                        load_draft(path, capture, **LOADING)
                except EspalierError as error:
                    num_refused += 1
                    assert "\n" not in str(error) and len(str(error)) < 1000, error
                except Exception as error:
                    raise AssertionError(f"{name}: {place} = {new!r:.40}: {error!r:.200}") from error
    assert num_refused > 5 * len(values)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < GIB // 2**10
