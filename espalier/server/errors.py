"""Error responses in OpenAI's format, {"error": {"message", "type", "param", "code"}}, with the request's id added."""

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType, UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin

import msgspec
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response

from espalier import other_engines
from espalier.errors import ContextOverflow, EspalierError, unknown_name_error
from espalier.server.logs import request_id
from espalier.server.openai import ChatRequest, CompletionRequest, RefusedField

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    # OpenAI sends this type with the code model_not_found, and clients check type and code.
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "overloaded_error",
    504: "timeout_error",
}
BODY_MODELS: dict[str, type[BaseModel]] = {"/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest}
INTERNAL_ERROR = "internal server error; the server's log has the details under this request_id"
RETRY_AFTER_S = 1
# Matches the name of a body's field at the start of an error message.
LEADING_FIELD_PATTERN = re.compile(r"^([a-z_]+)(?:\[|=| entry=| token=| (?:and|are|excludes|is|needs|with) )")
# Messages quote the client's values, which may be very long.
MAX_MESSAGE_CHARS = 1000
MAX_PARAM_CHARS = 100


class ApiError(HTTPException):
    """An error response.  A message or param that is too long is shortened.

    param: the name of the body field at fault.  code: OpenAI's error code, such as model_not_found.  retry_after_s: the
    header retry-after in seconds; None for no header.  retry: False tells OpenAI's clients not to retry.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        retry: bool = True,
        headers: Mapping[str, str] = MappingProxyType({}),
    ):
        retrying = {} if retry_after_s is None else {"retry-after": str(retry_after_s)}
        retrying |= {} if retry else {"x-should-retry": "false"}
        super().__init__(status, _shorten_middle(message, MAX_MESSAGE_CHARS), {**headers, **retrying})
        self.param = None if param is None else _shorten_middle(param, MAX_PARAM_CHARS)
        self.code = code

    def body(self) -> dict[str, Any]:
        kind = ERROR_TYPES.get(self.status_code, "invalid_request_error" if self.status_code < 500 else "server_error")
        error = {"message": self.detail, "type": kind, "param": self.param, "code": self.code}
        return {"error": {**error, "request_id": request_id.get()}}

    def response(self) -> Response:
        return json_response(self.body(), self.status_code, self.headers)


def queue_full_error(message: str) -> ApiError:
    """Returns the error for a full queue.  message: says which queue is full."""
    code = "rate_limit_exceeded"
    return ApiError(429, f"{message}; retry later", code=code, retry_after_s=RETRY_AFTER_S)


def _shorten_middle(text: str, limit: int) -> str:
    """Removes the middle of a long message, because the start names the problem, and the end tells what to do."""
    return text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 2 :]}"


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, "application/json")


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None
    request_id: str


class ErrorBody(BaseModel):
    """The body of every error response."""

    error: ErrorDetail


def bad_request_error(error: EspalierError, field: str | None = None) -> ApiError:
    """Returns an ApiError with status 400.  field: the ApiError's param if the error's message names no field."""
    match = LEADING_FIELD_PATTERN.match(str(error))
    code = "context_length_exceeded" if isinstance(error, ContextOverflow) else None
    return ApiError(400, str(error), param=match.group(1) if match else field, code=code)


def validation_error(errors: Sequence[Mapping[str, Any]], model: type[BaseModel] | None) -> ApiError:
    """Returns an ApiError with status 400 for a body that pydantic refused.  The message reports one of `errors`.
    model: the class of the body; None if unknown."""
    first = errors[0]
    if first["type"] == "missing":
        # Report an unknown field instead: the client probably misspelt the missing name, or meant another endpoint.
        first = next((e for e in errors if e["type"] == "extra_forbidden" and len(_path_in_body(e)) == 1), first)
    error_path = _path_in_body(first)
    if first["type"] == "json_invalid":
        why = f"{first['ctx']['error']}: character {error_path[0]}"
        return ApiError(400, f"the body is not JSON ({why}); send a JSON object with content-type application/json")
    if not error_path and first["type"] in ("missing", "model_attributes_type"):
        return ApiError(400, "the body is not a JSON object; send one with content-type application/json")
    if not error_path or model is None:
        return ApiError(400, f"the body is invalid: {_reason_of_error(first)}")
    if first["type"] == "extra_forbidden" and len(error_path) == 1:
        name = str(error_path[0])
        return ApiError(400, _unknown_field_message(model, name), param=name)
    # For a union field, pydantic reports an error for each type of the union.  The client most likely meant the type
    # whose error is deepest in the body.
    path = _error_location(model, error_path).path
    locations = [(each, _error_location(model, _path_in_body(each))) for each in errors]
    first, location = max(
        ((each, location) for each, location in locations if location.path[: len(path)] == path),
        key=lambda pair: len(pair[1].path),
    )
    refused = _refused_field(location.owner_model, location.name)
    if refused is not None:
        why = f"{location.name} is not supported with this value: {refused.reason}"
        return ApiError(400, why, param=location.name, code="unsupported")
    if first["type"] == "extra_forbidden":
        known_fields = _sibling_fields(model, _path_in_body(first))
        unknown = unknown_name_error(".".join(location.path[:-1]), location.path[-1], known_fields, python=False)
        return ApiError(400, str(unknown), param=str(error_path[0]))
    field_info = location.owner_model.model_fields.get(location.name)
    description = None if field_info is None else field_info.description
    problem = f"{'.'.join(location.path)}: {_reason_of_error(first)}"
    return ApiError(400, f"{problem} ({description})" if description else problem, param=str(error_path[0]))


def _unknown_field_message(model: type[BaseModel], name: str) -> str:
    """Returns the message for an unknown field.  If another endpoint has the field, the message names that endpoint."""
    if model in BODY_MODELS.values() and other_engines.keyword_advice(name, model.model_fields, python=False) is None:
        for path, other in BODY_MODELS.items():
            if name in other.model_fields and _refused_field(other, name) is None:
                return f"the body has no {name!r}; send it to {path}"
    return str(unknown_name_error("the body", name, model.model_fields, "/openapi.json lists its fields", python=False))


def _sibling_fields(model: type[BaseModel], error_path: Sequence[Any]) -> list[str]:
    """Returns the valid field names of the object with an unknown field.  error_path: pydantic's path to it."""
    location = _error_location(model, error_path[:-1])
    models = _models_in_annotation(location.owner_model.model_fields[location.name].annotation)
    # If the field `type` selects the object's class, pydantic's path contains the value of `type`, next to last.
    typed = [
        m for m in models if "type" in m.model_fields and error_path[-2] in get_args(m.model_fields["type"].annotation)
    ]
    return list(dict.fromkeys(f.alias or name for m in typed or models for name, f in m.model_fields.items()))


def _path_in_body(error: Mapping[str, Any]) -> list[Any]:
    """Returns the path from the body to the field at fault.  error: one error of pydantic."""
    return [part for part in error["loc"] if part != "body"]


def _reason_of_error(error: Mapping[str, Any]) -> str:
    """Returns the reason to report for one error of pydantic."""
    if error["type"] in ("model_attributes_type", "model_type", "dict_type"):
        return "Input should be an object"
    if error["type"] == "union_tag_not_found":
        return "type is missing; give one"
    if error["type"] == "union_tag_invalid":
        return f"type={error['ctx']['tag']!r} is not supported; use one of {error['ctx']['expected_tags']}"
    return str(error["msg"]).removeprefix("Value error, ")


class ErrorLocation(NamedTuple):
    """The place of an error in a body.  owner_model: the pydantic class of the innermost object around the error.
    name: the wrong field of this object.  path: the names from the body to the error, as the client wrote them."""

    owner_model: type[BaseModel]
    name: str
    path: list[str]


def _error_location(model: type[BaseModel], error_path: Sequence[Any]) -> ErrorLocation:
    """Returns the place of an error.  model: the body's class.  error_path: pydantic's path to the error."""
    owner, name, path = model, str(error_path[0]), [str(error_path[0])]
    is_type_next = _is_union(owner, name)
    for part in error_path[1:]:
        if is_type_next:
            is_type_next = False
            continue
        path.append(str(part))
        models = _models_in_annotation(owner.model_fields[name].annotation) if name in owner.model_fields else []
        nested = next((m for m in models if isinstance(part, str) and part in m.model_fields), None)
        if nested is not None and _refused_field(owner, name) is None:
            owner, name = nested, str(part)
            is_type_next = _is_union(owner, name)
    return ErrorLocation(owner, name, path)


def _is_union(model: type[BaseModel], name: str) -> bool:
    """Returns whether the field `name` is a union, for which pydantic adds a member type's name to an error's path."""
    annotation = model.model_fields[name].annotation if name in model.model_fields else None
    return sum(kind is not type(None) for kind in _union_members(annotation)) > 1


def _union_members(annotation: Any) -> list[Any]:
    """Returns the members of a union.  Members of a nested union with a discriminator are included."""
    if get_origin(annotation) is Annotated:
        return _union_members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [kind for part in get_args(annotation) for kind in _union_members(part)]
    return [annotation]


def _models_in_annotation(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models_in_annotation(part)]


def _refused_field(model: type[BaseModel], name: str) -> RefusedField | None:
    """Returns the RefusedField note of a field; None if the server supports the field."""
    if name not in model.model_fields:
        return None
    return next((note for note in model.model_fields[name].metadata if isinstance(note, RefusedField)), None)
