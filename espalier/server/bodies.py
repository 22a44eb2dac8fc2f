"""One request's body, from bytes to a checked record.  Pure functions: they run here or in the body process alike."""

import json
from collections.abc import Mapping
from email.message import Message as Headers
from types import MappingProxyType
from typing import Any

import msgspec
from pydantic import BaseModel, ValidationError

from espalier.errors import EspalierError
from espalier.request import check_prompt
from espalier.server.errors import ApiError, of_validation, refusal
from espalier.server.openai import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

MODELS: Mapping[str, type[BaseModel]] = MappingProxyType(
    {each.__name__: each for each in (CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest)}
)
UNREADABLE = (
    "the body cannot be read as JSON: it is not UTF-8, or nested too deep; send a plain object with content-type "
    "application/json"
)
# Of messages; and in any field but prompt and tokens, of all its lists and objects.  A body of body_reader.SMALL_BYTES
# holds less.
MOST_MESSAGES = 4096
MOST_ENTRIES = 65536


class BodyLimits(msgspec.Struct, frozen=True):
    """What a body is checked against.  Plain values: they cross a process.

    prompts: entries of a prompt that is a list of prompts; tokens: ids of /detokenize.
    """

    vocab_size: int
    max_context: int
    prompts: int
    tokens: int


def read_body(name: str, content_type: str, data: bytes, limits: BodyLimits) -> Any:
    """A record of the model called `name`, the parts of its messages joined.  Raises ApiError."""
    model = MODELS[name]
    value = _parsed(content_type, data)
    if not isinstance(value, dict):
        raise _no_object()
    _check_counts(value, limits)
    try:
        body = model.model_validate(value)
    except ValidationError as error:
        raise of_validation(error.errors(include_url=False, include_input=False), model) from None
    if isinstance(body, CompletionRequest):
        _check_prompts(body, limits)
    for message in getattr(body, "messages", None) or ():
        if isinstance(message.content, list):
            message.content = message.text
    return body


def _parsed(content_type: str, data: bytes) -> Any:
    if not data or not _is_json(content_type):
        raise _no_object()
    try:
        return json.loads(data)
    except json.JSONDecodeError as error:
        found = {"type": "json_invalid", "loc": (error.pos,), "msg": "", "ctx": {"error": error.msg}}
        raise of_validation([found], None) from None
    except (ValueError, RecursionError):
        raise ApiError(400, UNREADABLE) from None


def _no_object() -> ApiError:
    return of_validation([{"type": "missing", "loc": (), "msg": ""}], None)


def _is_json(content_type: str) -> bool:
    headers = Headers()
    headers["content-type"] = content_type
    subtype = headers.get_content_subtype()
    return headers.get_content_maintype() == "application" and (subtype == "json" or subtype.endswith("+json"))


def _check_counts(value: dict[str, Any], limits: BodyLimits) -> None:
    """Refuse what has too many entries before anything is made of them.  Raises ApiError."""
    prompt, rest = value.get("prompt"), {name: each for name, each in value.items() if name not in ("prompt", "tokens")}
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        _require_at_most("prompt", len(prompt), limits.prompts)
    for name, most in (("tokens", limits.tokens), ("messages", MOST_MESSAGES)):
        if isinstance(value.get(name), list):
            _require_at_most(name, len(value[name]), most)
    for name, each in rest.items():
        _require_at_most(name, _num_entries(each, MOST_ENTRIES), MOST_ENTRIES)


def _require_at_most(name: str, count: int, most: int) -> None:
    if count > most:
        raise ApiError(400, f"{name} with more than {most} entries is not supported; send fewer", name)


def _num_entries(value: Any, most: int) -> int:
    """Entries of all lists and objects in a value, counted no further than beyond `most`."""
    count, open_values = 0, [value]
    while open_values and count <= most:
        inner = open_values.pop()
        if isinstance(inner, dict):
            inner = inner.values()
        elif not isinstance(inner, list):
            continue
        count += len(inner)
        open_values += inner
    return count


def _check_prompts(body: CompletionRequest, limits: BodyLimits) -> None:
    """Refuse ids that no request can start from, as the inputs would.  Raises ApiError."""
    try:
        keep = body.truncate_prompt_tokens
        for prompt in body.prompts():
            if not isinstance(prompt, str):
                check_prompt(prompt if keep is None else prompt[-keep:], limits.vocab_size, limits.max_context)
    except EspalierError as error:
        raise refusal(error, "prompt") from None
