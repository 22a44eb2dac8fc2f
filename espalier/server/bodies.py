"""Reads request bodies: small bodies in the API server, large bodies in a separate process, the body process.

Parsing a large body holds Python's GIL for up to a second, so parsing in a thread would stop every stream.  This module
is also the program of the body process, which exits when the API server exits.  A message to or from the body process
is a frame: a length and a pickle.  Pickle is safe here, because no other process can write to the pipes.
"""

import json
import pickle
import sys
from collections.abc import Mapping
from email.message import Message as Headers
from functools import lru_cache
from typing import Any

import msgspec
from pydantic import BaseModel, ValidationError
from python_multipart.multipart import parse_options_header
from starlette.requests import Request

from espalier.errors import EspalierError, shown, without_duplicate_keys
from espalier.request import check_prompt
from espalier.server.errors import INTERNAL_ERROR, ApiError, bad_request_error, validation_error
from espalier.server.helper_process import HelperProcess, HelperProcessFailed, run_helper_loop
from espalier.server.openai import CompletionRequest

UNREADABLE_JSON = (
    "the body cannot be read as JSON: it is not UTF-8, it is nested too deeply, or a number has thousands of digits; "
    "send a JSON object with content-type application/json"
)
MAX_MESSAGES = 4096
MAX_CONTENT_TYPE = 1024
# The most entries in all lists and objects of one field.  BodyLimits has other limits for the fields prompt and tokens.
MAX_ENTRIES_PER_FIELD = 65536
# The largest body that the API server reads itself.  Reading takes a few milliseconds.
MAX_INLINE_BYTES = 65536
MAX_WAITING_BODIES = 32
# The content-encoding of an uncompressed body.
IDENTITY_ENCODING = "identity"


class BodyLimits(msgspec.Struct, frozen=True):
    """The limits of a request body.  All fields are numbers, because they are sent to the body process.

    max_prompts: the most prompts of a request.  max_token_ids: the most token ids for /detokenize.  max_position: how
    many positions the model supports, None if unknown.  The error for a prompt that is too long names max_position.
    """

    vocab_size: int
    max_context: int
    max_prompts: int
    max_token_ids: int
    max_position: int | None = None


def read_body(model: type[BaseModel], content_type: str, data: bytes, limits: BodyLimits) -> Any:
    """Returns the body as an object of the class `model`, with each message's text parts joined.  Raises ApiError."""
    value = _parse_json(content_type, data)
    if not isinstance(value, dict):
        raise _not_an_object_error()
    _check_entry_counts(value, limits)
    try:
        body = model.model_validate(value)
    except ValidationError as error:
        if model is CompletionRequest:
            _refuse_mixed_types(value.get("prompt"))
        raise validation_error(error.errors(include_url=False, include_input=False), model) from None
    if isinstance(body, CompletionRequest):
        _check_prompts(body, limits)
    for message in getattr(body, "messages", None) or ():
        message.join_parts()
    return body


def require_utf8(content_type: str) -> None:
    """Refuse a content type that names a charset other than UTF-8, before anything is decoded.  Raises ApiError.

    Otherwise a client could choose a codec of Python that takes time quadratic in the body's length.
    """
    if len(content_type) > MAX_CONTENT_TYPE:
        raise ApiError(415, f"a content-type of {len(content_type)} characters is not supported; send a shorter one")
    _, options = parse_options_header(content_type)
    charset = options.get(b"charset", b"utf-8").decode("latin-1")
    if charset.lower() not in ("utf-8", "utf8"):
        raise ApiError(415, f"charset={shown(charset)} is not supported; send UTF-8")


def require_uncompressed(headers: Mapping[str, str]) -> None:
    """Refuse a compressed body.  Raises ApiError."""
    if (encoding := headers.get("content-encoding", IDENTITY_ENCODING)) != IDENTITY_ENCODING:
        raise ApiError(400, f"content-encoding {shown(encoding)} is not supported; send the body uncompressed")


def _parse_json(content_type: str, data: bytes) -> Any:
    """Returns the JSON value of a request's body.  data: the bytes of the body.  Raises ApiError."""
    if not data:
        raise _not_an_object_error()
    require_utf8(content_type)
    if not _is_json(content_type):
        why = f"content-type {content_type} is not supported" if content_type else "the body has no content-type"
        raise ApiError(400, f"{why}; send a JSON object with content-type application/json")
    try:
        return json.loads(data, object_pairs_hook=without_duplicate_keys)
    except json.JSONDecodeError as error:
        detail = {"type": "json_invalid", "loc": (error.pos,), "msg": "", "ctx": {"error": error.msg}}
        raise validation_error([detail], None) from None
    except EspalierError as error:
        raise bad_request_error(error) from None
    except (ValueError, RecursionError):
        raise ApiError(400, UNREADABLE_JSON) from None


def _not_an_object_error() -> ApiError:
    return validation_error([{"type": "missing", "loc": (), "msg": ""}], None)


@lru_cache(maxsize=64)
def _is_json(content_type: str) -> bool:
    headers = Headers()
    headers["content-type"] = content_type
    subtype = headers.get_content_subtype()
    return headers.get_content_maintype() == "application" and (subtype == "json" or subtype.endswith("+json"))


def _check_entry_counts(body: dict[str, Any], limits: BodyLimits) -> None:
    """Refuse a field with too many entries before pydantic builds objects from the entries.  Raises ApiError."""
    prompt, rest = body.get("prompt"), {name: each for name, each in body.items() if name not in ("prompt", "tokens")}
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        _require_at_most("prompt", len(prompt), limits.max_prompts)
    for name, limit in (("tokens", limits.max_token_ids), ("messages", MAX_MESSAGES), ("input", MAX_MESSAGES)):
        if isinstance(body.get(name), list):
            _require_at_most(name, len(body[name]), limit)
    for name, each in rest.items():
        if isinstance(each, list | dict):
            _require_at_most(name, _num_entries(each, MAX_ENTRIES_PER_FIELD), MAX_ENTRIES_PER_FIELD)


def _require_at_most(name: str, count: int, limit: int) -> None:
    """Raises ApiError for more than `limit` entries.  name: the field that has `count` entries."""
    if count > limit:
        raise ApiError(400, f"{name} with more than {limit} entries is not supported; send fewer", name)


def _num_entries(value: Any, limit: int) -> int:
    """Returns how many entries all lists and objects in a value have together.  Above the limit, counting stops."""
    count, uncounted_values = 0, [value]
    while uncounted_values and count <= limit:
        inner = uncounted_values.pop()
        if isinstance(inner, dict):
            inner = inner.values()
        elif not isinstance(inner, list):
            continue
        count += len(inner)
        uncounted_values += inner
    return count


def _refuse_mixed_types(prompt: Any) -> None:
    """Refuse a list of prompts of mixed types, because pydantic's error would name only one type.  Raises ApiError."""
    for i, entry in enumerate(prompt if isinstance(prompt, list) else ()):
        if type(entry) is not type(prompt[0]):
            allowed = "send a text, texts, token ids, or lists of token ids"
            raise ApiError(400, f"prompt.{i} is of another kind than prompt.0; {allowed}", "prompt")


def _check_prompts(body: CompletionRequest, limits: BodyLimits) -> None:
    """Refuse token ids that are invalid or do not fit max_context.  Raises ApiError."""
    try:
        keep_last = body.truncate_prompt_tokens
        for prompt in body.prompts():
            if not isinstance(prompt, str):
                kept = prompt if keep_last is None else prompt[-keep_last:]
                check_prompt(kept, limits.vocab_size, limits.max_context, limits.max_position)
    except EspalierError as error:
        raise bad_request_error(error, "prompt") from None


class BodyReader:
    """Reads request bodies.  The first large body starts the body process.

    num_large_bodies_read: how many bodies the body process has read."""

    def __init__(self, limits: BodyLimits):
        self.limits = limits
        self.num_large_bodies_read = 0
        program = "espalier.server.bodies", msgspec.json.encode(limits).decode()
        self.helper = HelperProcess("body", MAX_WAITING_BODIES, "large bodies are already waiting to be read", *program)

    async def read(self, http: Request, model: type[BaseModel]) -> Any:
        """Returns the body as an object of the class `model`.  Raises ApiError or ClientDisconnect."""
        # http.body() would keep the bytes until the request ends.
        data, content_type = b"".join([part async for part in http.stream()]), http.headers.get("content-type", "")
        require_uncompressed(http.headers)
        if len(data) <= MAX_INLINE_BYTES:
            return read_body(model, content_type, data, self.limits)
        try:
            body, error_arguments = pickle.loads(await self.helper.call(pickle_bytes((model, content_type, data))))
        except HelperProcessFailed:
            raise ApiError(500, INTERNAL_ERROR) from None
        self.num_large_bodies_read += 1
        if error_arguments is not None:
            raise ApiError(*error_arguments)
        return body


def pickle_bytes(value: Any) -> bytes:
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def parse_frame(frame: bytes, limits: BodyLimits) -> bytes:
    """Parses the body in a frame.  frame: the pickle of (class of the body, content type, bytes of the body).

    Returns the pickle of (body, None), or of (None, arguments of ApiError) for a refused body."""
    model, content_type, data = pickle.loads(frame)
    try:
        return pickle_bytes((read_body(model, content_type, data, limits), None))
    except ApiError as error:
        return pickle_bytes((None, (error.status_code, error.detail, error.param, error.code)))


if __name__ == "__main__":
    limits = msgspec.json.decode(sys.argv[1], type=BodyLimits)
    run_helper_loop(lambda frame: parse_frame(frame, limits))
