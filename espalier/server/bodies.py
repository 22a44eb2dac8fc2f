"""Reads one request's body: from bytes to a checked record.  Pure functions, for the front and for the body process."""

import json
from collections.abc import Mapping
from email.message import Message as Headers
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import msgspec
from pydantic import BaseModel, ValidationError
from python_multipart.multipart import parse_options_header

from espalier.errors import EspalierError, once_each, shown
from espalier.request import check_prompt
from espalier.server.errors import ApiError, of_validation, refusal
from espalier.server.openai import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from espalier.server.responses import ResponsesRequest
from espalier.server.stored import BatchRequest

MODELS: Mapping[str, type[BaseModel]] = MappingProxyType(
    {
        each.__name__: each
        for each in (
            CompletionRequest,
            ChatRequest,
            ResponsesRequest,
            TokenizeRequest,
            DetokenizeRequest,
            BatchRequest,
        )
    }
)
UNREADABLE = (
    "the body cannot be read as JSON: it is not UTF-8, it is nested too deeply, or a number has thousands of digits; "
    "send a JSON object with content-type application/json"
)
MAX_MESSAGES = 4096
MAX_CONTENT_TYPE = 1024
# Entries of all lists and objects in one field; prompt and tokens have limits of their own (BodyLimits).  A body of
# body_reader.SMALL_BYTES has fewer.
MAX_ENTRIES = 65536


class BodyLimits(msgspec.Struct, frozen=True):
    """The limits that a body is checked against.  Plain values, because they are sent to the body process.

    prompts: most prompts in one request; tokens: most token ids for /detokenize; max_position: of the model, for a
    message (errors.prompt_too_long).
    """

    vocab_size: int
    max_context: int
    prompts: int
    tokens: int
    max_position: int | None = None


def read_body(name: str, content_type: str, data: bytes, limits: BodyLimits) -> Any:
    """The body as a record of MODELS[name].  The text parts of each message are joined.  Raises ApiError."""
    model = MODELS[name]
    value = _parsed(content_type, data)
    if not isinstance(value, dict):
        raise _no_object()
    _check_counts(value, limits)
    try:
        body = model.model_validate(value)
    except ValidationError as error:
        if model is CompletionRequest:
            _refuse_several_kinds(value.get("prompt"))
        raise of_validation(error.errors(include_url=False, include_input=False), model) from None
    if isinstance(body, CompletionRequest):
        _check_prompts(body, limits)
    for message in getattr(body, "messages", None) or ():
        message.join_parts()
    return body


def require_utf8(content_type: str) -> None:
    """Refuse a content type that names another charset, before anything is decoded.  Raises ApiError.

    A client may name any of Python's codecs.  Some take a time that grows with the square of the text.
    """
    if len(content_type) > MAX_CONTENT_TYPE:
        raise ApiError(415, f"a content-type of {len(content_type)} characters is not supported; send a shorter one")
    _, options = parse_options_header(content_type)
    charset = options.get(b"charset", b"utf-8").decode("latin-1")
    if charset.lower() not in ("utf-8", "utf8"):
        raise ApiError(415, f"charset={shown(charset)} is not supported; send UTF-8")


def _parsed(content_type: str, data: bytes) -> Any:
    if not data:
        raise _no_object()
    require_utf8(content_type)
    if not _is_json(content_type):
        why = f"content-type {content_type} is not supported" if content_type else "the body has no content-type"
        raise ApiError(400, f"{why}; send a JSON object with content-type application/json")
    try:
        return json.loads(data, object_pairs_hook=once_each)
    except json.JSONDecodeError as error:
        detail = {"type": "json_invalid", "loc": (error.pos,), "msg": "", "ctx": {"error": error.msg}}
        raise of_validation([detail], None) from None
    except EspalierError as error:
        raise refusal(error) from None
    except (ValueError, RecursionError):
        raise ApiError(400, UNREADABLE) from None


def _no_object() -> ApiError:
    return of_validation([{"type": "missing", "loc": (), "msg": ""}], None)


@lru_cache(maxsize=64)
def _is_json(content_type: str) -> bool:
    headers = Headers()
    headers["content-type"] = content_type
    subtype = headers.get_content_subtype()
    return headers.get_content_maintype() == "application" and (subtype == "json" or subtype.endswith("+json"))


def _check_counts(value: dict[str, Any], limits: BodyLimits) -> None:
    """Refuse a field with too many entries before pydantic makes objects of them.  Raises ApiError."""
    prompt, rest = value.get("prompt"), {name: each for name, each in value.items() if name not in ("prompt", "tokens")}
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        _require_at_most("prompt", len(prompt), limits.prompts)
    for name, limit in (("tokens", limits.tokens), ("messages", MAX_MESSAGES), ("input", MAX_MESSAGES)):
        if isinstance(value.get(name), list):
            _require_at_most(name, len(value[name]), limit)
    for name, each in rest.items():
        if isinstance(each, list | dict):
            _require_at_most(name, _num_entries(each, MAX_ENTRIES), MAX_ENTRIES)


def _require_at_most(name: str, count: int, limit: int) -> None:
    if count > limit:
        raise ApiError(400, f"{name} with more than {limit} entries is not supported; send fewer", name)


def _num_entries(value: Any, limit: int) -> int:
    """Entries of all lists and objects in a value.  Counting stops above the limit."""
    count, open_values = 0, [value]
    while open_values and count <= limit:
        inner = open_values.pop()
        if isinstance(inner, dict):
            inner = inner.values()
        elif not isinstance(inner, list):
            continue
        count += len(inner)
        open_values += inner
    return count


def _refuse_several_kinds(prompt: Any) -> None:
    """Refuse a list whose entries differ: pydantic would say what one of them is not.  Raises ApiError."""
    for i, entry in enumerate(prompt if isinstance(prompt, list) else ()):
        if type(entry) is not type(prompt[0]):
            allowed = "send a text, texts, token ids, or lists of token ids"
            raise ApiError(400, f"prompt.{i} is of another kind than prompt.0; {allowed}", "prompt")


def _check_prompts(body: CompletionRequest, limits: BodyLimits) -> None:
    """Refuse token ids that are invalid or do not fit max_context.  Raises ApiError."""
    try:
        keep = body.truncate_prompt_tokens
        for prompt in body.prompts():
            if not isinstance(prompt, str):
                kept = prompt if keep is None else prompt[-keep:]
                check_prompt(kept, limits.vocab_size, limits.max_context, limits.max_position)
    except EspalierError as error:
        raise refusal(error, "prompt") from None
