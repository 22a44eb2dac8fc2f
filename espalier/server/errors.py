"""What goes wrong, in OpenAI's shape: {"error": {"message", "type", "param", "code"}}, with the request's id."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel
from starlette.exceptions import HTTPException

from espalier.errors import EspalierError, unknown_name
from espalier.server.logs import request_id
from espalier.server.openai import Refused

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "overloaded_error",
    504: "timeout_error",
}
FAILED = "the server failed on this request; its log says more, under this request_id"
FIELD_FIRST = re.compile(r"^([a-z_]+)(?:\[|=| entry=| token=| is | with )")


# A message quotes what it is about, which may be as long as a body.
LONGEST_MESSAGE = 1000
LONGEST_PARAM = 100


class ApiError(HTTPException):
    """An answer that is an error.  What is too long of its message and param is left out.

    retry_after_s: when to come again, where that helps; retry: False tells OpenAI's clients not to try again by
    themselves.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        retry: bool = True,
    ):
        headers = {} if retry_after_s is None else {"retry-after": str(retry_after_s)}
        headers = headers if retry else headers | {"x-should-retry": "false"}
        super().__init__(status, _cut(message, LONGEST_MESSAGE), headers)
        self.param = None if param is None else _cut(param, LONGEST_PARAM)
        self.code = code

    def body(self) -> dict[str, Any]:
        kind = KINDS.get(self.status_code, "invalid_request_error" if self.status_code < 500 else "server_error")
        error = {"message": self.detail, "type": kind, "param": self.param, "code": self.code}
        return {"error": {**error, "request_id": request_id.get()}}


def _cut(text: str, most: int) -> str:
    """The middle of a text that is too long is left out: what it is about stands first, and what to do last."""
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None
    request_id: str


class ErrorBody(BaseModel):
    """Every error, whatever its status."""

    error: ErrorDetail


def refusal(error: EspalierError) -> ApiError:
    """What the house refuses, as an answer; the field is the one that its message begins with."""
    found = FIELD_FIRST.match(str(error))
    return ApiError(400, str(error), param=found.group(1) if found else None)


def of_validation(errors: Sequence[Mapping[str, Any]], model: type[BaseModel] | None) -> ApiError:
    """The first thing that is wrong with a body, in one line."""
    first = errors[0]
    where = [part for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        return ApiError(400, "the body is not JSON; send an object with content-type application/json")
    if not where and first["type"] in ("missing", "model_attributes_type"):
        return ApiError(400, "the body is no JSON object; send one with content-type application/json")
    if not where or model is None:
        return ApiError(400, f"the body is refused: {_reason(first)}")
    path = ".".join(str(part) for part in where)
    if first["type"] == "extra_forbidden" and len(where) == 1:
        return ApiError(400, str(unknown_name("the body", str(where[0]), list(model.model_fields))), param=path)
    owner, name = _owner(model, where)
    refused = _refused(owner, name)
    if refused is not None:
        return ApiError(400, f"{name} is not supported with this value: {refused.why}", param=name, code="unsupported")
    return ApiError(400, f"{path}: {_reason(first)}", param=str(where[0]))


def _reason(error: Mapping[str, Any]) -> str:
    return str(error["msg"]).removeprefix("Value error, ")


def _owner(model: type[BaseModel], where: Sequence[Any]) -> tuple[type[BaseModel], str]:
    """The innermost model on the way to an error, and its field's name."""
    owner, name = model, str(where[0])
    for part in where[1:]:
        inner = _models(owner.model_fields[name].annotation) if name in owner.model_fields else []
        nested = next((m for m in inner if isinstance(part, str) and part in m.model_fields), None)
        if nested is not None and _refused(owner, name) is None:
            owner, name = nested, str(part)
    return owner, name


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for part in get_args(annotation) for found in _models(part)]


def _refused(model: type[BaseModel], name: str) -> Refused | None:
    if name not in model.model_fields:
        return None
    return next((note for note in model.model_fields[name].metadata if isinstance(note, Refused)), None)
