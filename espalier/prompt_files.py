"""Reads the records of a file of prompts: JSON lines, a JSON list or a Parquet file, recognised by the content.

A record is an object.  Records of SPEED-Bench have the field "turns", records of ShareGPT "conversations".  All other
records have "messages" (a conversation), "prompt" or "text" (a text), or "token_ids".
"""

import json
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from espalier.errors import EspalierError, one_line
from espalier.inputs import InputProcessor
from espalier.terminal.console import read_text

PARQUET_MAGIC = b"PAR1"
# SPEED-Bench's public file has this text in place of a text that only its owner may publish.
HIDDEN_TEXT_MARKER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
ROLES = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "tool", "function"), "assistant"),
}
# The fields of a message that hold its speaker and its text, by the field that holds the messages.
MESSAGE_FIELDS: Mapping[str, tuple[str, str]] = {"conversations": ("from", "value"), "messages": ("role", "content")}
TEXT_FIELDS = ("prompt", "text")
RECORD_FORMAT = (
    'an object with "turns" (texts, as SPEED-Bench has them), "conversations" (objects with "from" and "value", as '
    'ShareGPT has them), "messages" (objects with "role" and "content"), "prompt" or "text" (a text)'
)
Record = tuple[str, dict[str, Any]]


def read_records(flag: str, path: Path) -> Iterator[Record]:
    """Yields (location, record) in the file's order.  location: the record's place, for error messages, such as
    "--file a.jsonl:3".  flag: the flag that gives `path`.  Raises EspalierError."""
    for location, value in _file_values(flag, path):
        if not isinstance(value, dict):
            raise unexpected_record_error(location, "not an object")
        yield location, value


def _file_values(flag: str, path: Path) -> Iterator[tuple[str, Any]]:
    """Yields (location, value) for each record of a file.  The caller checks that the value is an object."""
    try:
        with path.open("rb") as file:
            is_parquet = file.read(len(PARQUET_MAGIC)) == PARQUET_MAGIC
    except OSError as error:
        raise EspalierError(f"{flag} {path} cannot be read ({error.strerror}); use a file of prompts") from None
    if is_parquet:
        yield from _parquet_values(flag, path)
        return
    text = read_text(flag, path)
    if text.lstrip().startswith("["):
        for i, value in enumerate(_parse_json(flag, path, 1, text), 1):
            yield f"{flag} {path}, record {i}", value
        return
    # Not splitlines(), which also splits at line separators inside JSON strings.
    for i, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield f"{flag} {path}:{i}", _parse_json(flag, path, i, line)


def _parquet_values(flag: str, path: Path) -> Iterator[tuple[str, Any]]:
    """Yields (location, record) for each row of a Parquet file.  flag: the flag that names the file, for errors."""
    try:
        parquet = import_module("pyarrow.parquet")
    except ImportError:
        raise EspalierError(f"{flag} {path} is a Parquet file; run `pip install pyarrow` to read it") from None
    try:
        rows = parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as error:
        raise EspalierError(f"{flag} {path} is no whole Parquet file ({one_line(error)}); fetch it again") from None
    yield from ((f"{flag} {path}, row {i}", row) for i, row in enumerate(rows, 1))


def _parse_json(flag: str, path: Path, first_line: int, text: str) -> Any:
    """Parses `text`, whose first line is line number `first_line` of the file.  flag, path: for errors."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise unexpected_record_error(
            f"{flag} {path}:{first_line + error.lineno - 1}", f"not JSON ({error.msg})"
        ) from None
    except (ValueError, RecursionError):
        raise unexpected_record_error(f"{flag} {path}:{first_line}", "not JSON that can be read") from None


def prompt_field(location: str, record: Mapping[str, Any]) -> str:
    """Returns the name of the field that holds a record's prompt.  Raises EspalierError for a record without one."""
    field = next((name for name in ("turns", *MESSAGE_FIELDS, "token_ids", *TEXT_FIELDS) if name in record), None)
    if field is None:
        raise unexpected_record_error(location, "an object without a prompt")
    if field not in TEXT_FIELDS and not isinstance(record[field], list):
        raise unexpected_record_error(location, f'"{field}" that is no list')
    return field


def messages_of(location: str, record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the messages of a conversation, with the roles user, system and assistant.  Raises EspalierError."""
    field = prompt_field(location, record)
    if field not in MESSAGE_FIELDS:
        texts: list[Any] = record[field] if field == "turns" else [record[field]]
        return [{"role": "user", "content": require_text(location, text)} for text in texts]
    role_field, text_field = MESSAGE_FIELDS[field]
    messages: list[dict[str, Any]] = []
    for message in record[field]:
        role = ROLES.get(speaker) if isinstance(speaker := _get_field(message, role_field), str) else None
        if role is None:
            raise unexpected_record_error(location, f'a message whose "{role_field}" is none of {", ".join(ROLES)}')
        content = message.get(text_field)
        if role != "assistant" and not (field == "conversations" and content == ""):
            require_text(location, content)
        messages.append({"role": role, "content": content})
    return messages


def _get_field(message: Any, name: str) -> Any:
    """Returns the value of a message's field `name`; None if it is missing or the message is no object."""
    return message.get(name) if isinstance(message, dict) else None


def require_text(location: str, text: Any) -> str:
    """Returns the text of a message.  Raises EspalierError for text that is not valid, is empty or is a placeholder."""
    if not isinstance(text, str) or not text.strip():
        raise unexpected_record_error(location, "a text that is empty or none")
    if HIDDEN_TEXT_MARKER in text:
        raise EspalierError(
            f"{location} has no text but where to fetch it; prepare the file with SPEED-Bench's prepare_data.py"
        )
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise unexpected_record_error(location, "half of a UTF-16 pair, which is no text")
    return text


def unexpected_record_error(location: str, problem: str) -> EspalierError:
    return EspalierError(f"{location}: expected {RECORD_FORMAT}, but found {problem}")


def prompt_token_ids(
    location: str, record: Mapping[str, Any], vocab_size: int, inputs: Callable[[], InputProcessor]
) -> list[int]:
    """Returns the token ids of a record's prompt.  Raises EspalierError.

    A conversation is rendered by the chat template.  If its last message is the assistant's, that message is left out.
    Of "turns", only the first is used, because the model would answer before the second.
    inputs: returns the InputProcessor; not called for token ids."""
    field = prompt_field(location, record)
    if field in TEXT_FIELDS:
        text = record[field]
        return inputs().require_tokenizer("a text").encode(text if text == "" else require_text(location, text))
    if field != "token_ids":
        return _conversation_tokens(location, record, field, inputs())
    tokens: list[Any] = record[field]
    if not all(type(token) is int for token in tokens):
        raise unexpected_record_error(location, '"token_ids" that are no list of whole numbers')
    if outside := [token for token in tokens if not 0 <= token < vocab_size]:
        raise EspalierError(
            f"{location}: token id {outside[0]}, and the target has {vocab_size}; give ids of its own tokenizer"
        )
    return tokens


def _conversation_tokens(location: str, record: Mapping[str, Any], field: str, inputs: InputProcessor) -> list[int]:
    """Returns the token ids of the prompt in a record's field `field`.  location: file and line, for errors."""
    messages: Any = record[field] if field == "messages" else messages_of(location, record)
    messages = messages[:1] if field == "turns" else messages
    if messages and _get_field(messages[-1], "role") == "assistant":
        messages = messages[:-1]
    try:
        return inputs.chat_tokens(messages)
    except EspalierError as error:
        raise EspalierError(f"{location}: {error}") from None
