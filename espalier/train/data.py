"""Reads the given text: documents or prompts from JSON lines, or a .npy of token ids.

Everything is checked here, before a model is loaded: a file that cannot be read, a line that is no document, and token
ids that the target does not have.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from espalier.errors import EspalierError, one_line
from espalier.terminal.console import read_text
from espalier.tokenizer_files import hugging_face_tokenizer
from espalier.train.configs import read_target

FORM = 'one JSON object a line with "text", "prompt" or "token_ids"'


def read_prompts(path: Path, target: Path) -> list[list[int]]:
    """The token ids of every line: "token_ids" as given, or "text" or "prompt" encoded by the target's tokenizer.

    Raises EspalierError, naming the line.
    """
    vocab_size, tokenizer = int(read_target(target)["vocab_size"]), cache(lambda: _tokenizer(target))
    documents = []
    # Not splitlines(), which also splits at line separators inside JSON strings.
    for number, line in enumerate(read_text("--data", path).split("\n"), 1):
        if not line.strip():
            continue
        where = f"--data {path}, line {number}:"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise EspalierError(f"{where} not JSON ({error.msg}); write {FORM}") from None
        tokens, text = _content(record)
        if text is not None:
            tokens = tokenizer()(text)["input_ids"]
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise EspalierError(f"{where} neither a text nor a list of token ids; write {FORM}")
        if wrong := [token for token in tokens if not 0 <= token < vocab_size]:
            raise EspalierError(
                f"{where} token id {wrong[0]}, and the target has {vocab_size}; give ids of its own tokenizer"
            )
        documents.append(tokens)
    if not documents:
        raise EspalierError(f"--data {path} is empty; write {FORM}")
    return documents


def _content(record: Any) -> tuple[Any, str | None]:
    """(token ids, text) of a line, of which one is None."""
    if not isinstance(record, dict):
        return None, None
    text = record.get("text", record.get("prompt"))
    if "token_ids" in record or not isinstance(text, str):
        return record.get("token_ids"), None
    return None, text


def _tokenizer(target: Path) -> Any:
    try:
        return hugging_face_tokenizer(target)
    except EspalierError as error:
        raise EspalierError(
            f'--target {target} has no tokenizer that can be read ({error}); give "token_ids" in --data'
        ) from None


def read_stream(path: Path, target: Path) -> np.ndarray:
    """The token ids of all documents, one after another, as uint16 or int32.  Raises EspalierError."""
    if path.suffix != ".npy":
        return np.concatenate([np.array(d, dtype=np.int32) for d in read_prompts(path, target)])
    try:
        stream = np.load(path)
    except (OSError, ValueError, EOFError) as error:
        raise EspalierError(f"--data {path} cannot be read ({one_line(error)}); give a .npy of token ids") from None
    vocab_size = int(read_target(target)["vocab_size"])
    if stream.ndim != 1 or stream.dtype.kind not in "iu" or not len(stream):
        raise EspalierError(f"--data {path} holds {stream.dtype} {list(stream.shape)}; give whole numbers [num_tokens]")
    if stream.min() < 0 or stream.max() >= vocab_size:
        raise EspalierError(
            f"--data {path} holds ids from {stream.min()} to {stream.max()}, and the target has {vocab_size}; give ids "
            "of its own tokenizer"
        )
    return stream if stream.dtype == np.uint16 else stream.astype(np.int32)
