"""Reads the user's training text: a file of documents and conversations (espalier/prompt_files.py), or a .npy file of
token ids.

The text is checked before a model is loaded.  Unreadable files, lines without text, and token ids outside the target's
vocabulary are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from espalier.errors import EspalierError, one_line
from espalier.inputs import InputProcessor, ModelInfo
from espalier.prompt_files import RECORD_FORMAT, TEXT_FIELDS, prompt_field, prompt_token_ids, read_records
from espalier.text import load_tokenizer
from espalier.train.configs import read_target

# Drafts are measured on answers to about HELDOUT_PROMPTS prompts.  Prompts from documents have at most HELDOUT_TOKENS.
HELDOUT_PROMPTS, HELDOUT_TOKENS = 16, 64


@dataclass(frozen=True)
class Conversation:
    """A conversation that the target answers.  tokens: the token ids of the chat prompt, up to the answer.
    kind: the field `kind` of the conversation's record, such as "code"."""

    tokens: np.ndarray
    kind: str = ""


@dataclass(frozen=True)
class UserText:
    """The user's training text.  stream: the concatenated token ids of all documents, as uint16 or int32.
    conversations: the conversations that the target answers.  licenses: the licences that the records name."""

    stream: np.ndarray
    conversations: Sequence[Conversation] = ()
    licenses: Sequence[str] = ()

    @property
    def all_tokens(self) -> np.ndarray:
        return np.concatenate([self.stream, *(conversation.tokens for conversation in self.conversations)])

    def split_held_out(self) -> tuple[UserText, list[np.ndarray]]:
        """Returns (the data to train on, the held-out prompts).  Held-out prompts are the last conversations of each
        kind; without conversations, they are cut from the end of the documents."""
        if not self.conversations:
            size = min(HELDOUT_TOKENS, len(self.stream) // (4 * HELDOUT_PROMPTS))
            num_kept_tokens = len(self.stream) - size * HELDOUT_PROMPTS
            prompts: Any = self.stream[num_kept_tokens:].astype(np.int32).reshape(HELDOUT_PROMPTS, size) if size else []
            return replace(self, stream=self.stream[:num_kept_tokens]), list(prompts)
        by_kind: dict[str, list[int]] = {}
        for number, conversation in enumerate(self.conversations):
            by_kind.setdefault(conversation.kind, []).append(number)
        max_per_kind = max(1, HELDOUT_PROMPTS // len(by_kind))
        counts = {kind: min(max_per_kind, len(numbers) // 4) for kind, numbers in by_kind.items()}
        held_out = [n for kind, numbers in by_kind.items() for n in numbers[len(numbers) - counts[kind] :]]
        kept = [conversation for number, conversation in enumerate(self.conversations) if number not in set(held_out)]
        return replace(self, conversations=kept), [self.conversations[number].tokens for number in held_out]


def read_data(path: Path, target: Path) -> UserText:
    """Reads the user's training text as token ids of the target.  Raises EspalierError for invalid text."""
    if path.suffix == ".npy":
        return UserText(_read_ids(path, target))
    documents, conversations, licenses = [], [], set()
    for record, tokens in _read_prompts(path, target):
        licenses |= {str(record[name]) for name in ("license",) if record.get(name)}
        if prompt_field("", record) not in (*TEXT_FIELDS, "token_ids"):
            conversations.append(Conversation(np.array(tokens, np.int32), str(record.get("kind", ""))))
        else:
            documents.append(np.array(tokens, dtype=np.int32))
    return UserText(np.concatenate([np.zeros(0, np.int32), *documents]), conversations, sorted(licenses))


def read_prompts(path: Path, target: Path) -> list[list[int]]:
    """Returns the token ids of the prompt in every line.  Raises EspalierError for an invalid line."""
    return [tokens for _, tokens in _read_prompts(path, target)]


def _read_prompts(path: Path, target: Path) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Yields each record with its token ids.  See prompt_files.prompt_token_ids."""
    config, has_records = read_target(target), False
    vocab_size, inputs = int(config["vocab_size"]), cache(lambda: _input_processor(target, config))
    for location, record in read_records("--data", path):
        yield record, prompt_token_ids(location, record, vocab_size, inputs)
        has_records = True
    if not has_records:
        raise EspalierError(f'--data {path} is empty; a record is {RECORD_FORMAT}, or "token_ids"')


def _input_processor(target: Path, config: dict[str, Any]) -> InputProcessor:
    """Returns a target's InputProcessor (tokenizer).  target: its directory.  config: its config.json."""
    vocab_size, positions = int(config["vocab_size"]), int(config["max_position_embeddings"])
    try:
        inputs = InputProcessor(ModelInfo(str(target), vocab_size, positions), load_tokenizer(target, vocab_size))
        inputs.require_tokenizer("text")
        return inputs
    except EspalierError as error:
        raise EspalierError(
            f'--target {target} has no tokenizer that can be read ({error}); give "token_ids" in --data'
        ) from None


def _read_ids(path: Path, target: Path) -> np.ndarray:
    """Returns the token ids of a .npy file, as uint16 or int32."""
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
