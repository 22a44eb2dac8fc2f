"""Checks a request's tools and tool_choice: which tools the model may or must call."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from espalier.errors import EspalierError, shown, unknown_name_error

FUNCTION_NAME_PATTERN = re.compile(r"[A-Za-z0-9_.-]{1,128}")
MAX_TOOLS = 1024
# The most characters of the schema of one tool's parameters, as JSON.
MAX_SCHEMA_CHARS = 64 * 1024
FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
TOOL_CHOICES = ("auto", "none", "required")
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True)
class RequestTools:
    """The checked tools and tool_choice of a request.

    definitions: the client's tools.  choice: "auto", "none", "required", or the name of the tool that must be called.
    is_named: whether `choice` is a name.  parallel: whether one answer may have several calls."""

    definitions: tuple[Mapping[str, Any], ...] = ()
    choice: str = "none"
    is_named: bool = False
    parallel: bool = True

    @property
    def callable_functions(self) -> list[Mapping[str, Any]]:
        """The definitions of the functions that the model may call."""
        functions = [each["function"] for each in self.definitions]
        if self.is_named:
            return [each for each in functions if each["name"] == self.choice]
        return [] if self.choice == "none" else functions

    @property
    def is_forced(self) -> bool:
        """True if the answer must be a call."""
        return self.is_named or self.choice == "required"

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """The JSON schema of each callable function's parameters, by function name."""
        return {each["name"]: each.get("parameters") or ANY_OBJECT for each in self.callable_functions}


def checked_tools(tools: Any, choice: Any = None, parallel: bool | None = None) -> RequestTools:
    """Check a request's fields tools, tool_choice and parallel_tool_calls in OpenAI's form.  Raises EspalierError,
    whose message begins with the name of the wrong field."""
    if not isinstance(parallel, bool | None):
        raise EspalierError(f"parallel_tool_calls={shown(parallel)} is not supported; use True or False")
    definitions = _checked_definitions(tools)
    name = _named_tool(choice)
    if name is None:
        choice = ("auto" if definitions else "none") if choice is None else choice
        if choice not in TOOL_CHOICES:
            _refuse_choice(choice)
        if choice == "required" and not definitions:
            raise EspalierError("tool_choice='required' needs tools; send tools, or leave tool_choice out")
        # Without tools, "auto" means "none".
        return RequestTools(definitions, choice if definitions else "none", False, parallel is not False)
    names = [each["function"]["name"] for each in definitions]
    if name not in names:
        known_names = ", ".join(names)[:200] or "none"
        raise EspalierError(f"tool_choice={shown(name)} is not the name of a tool; use one of: {known_names}")
    return RequestTools(definitions, name, True, parallel is not False)


def _named_tool(choice: Any) -> str | None:
    """Returns the name of the tool in a tool_choice; None if tool_choice is no object.  Raises EspalierError."""
    if not isinstance(choice, Mapping):
        return None
    if choice.get("type") != "function":
        _refuse_choice(choice)
    function = choice.get("function", choice)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        _refuse_choice(choice)
    return name


def _refuse_choice(choice: Any) -> NoReturn:
    raise EspalierError(
        f"tool_choice={shown(choice)} is not supported; use {', '.join(TOOL_CHOICES)} or "
        '{"type": "function", "function": {"name": ...}}'
    )


def _checked_definitions(tools: Any) -> tuple[Mapping[str, Any], ...]:
    """Returns the functions in a request's field `tools`.  Raises EspalierError for an invalid tool."""
    if tools is None:
        return ()
    if isinstance(tools, str) or not isinstance(tools, Sequence):
        raise EspalierError(f"tools={shown(tools)} is not supported; use a list of tools")
    if len(tools) > MAX_TOOLS:
        raise EspalierError(f"tools with more than {MAX_TOOLS} entries is not supported; send fewer")
    seen_names: set[str] = set()
    for i, tool in enumerate(tools):
        name = _checked_tool_name(f"tools[{i}]", tool)
        if name in seen_names:
            raise EspalierError(f"tools[{i}].function.name={name!r} is the name of an earlier tool; use another")
        seen_names.add(name)
    return tuple(tools)


def _checked_tool_name(location: str, tool: Any) -> str:
    """Checks a tool and returns its name.  location: for errors, such as tools[0].  Raises EspalierError."""
    form = '{"type": "function", "function": {"name": ..., "parameters": {...}}}'
    if not isinstance(tool, Mapping) or tool.get("type") != "function" or not isinstance(tool.get("function"), Mapping):
        raise EspalierError(f"{location}={shown(tool)} is not supported; use {form}")
    for name in tool:
        if name not in ("type", "function"):
            raise unknown_name_error(location, str(name), ("type", "function"))
    function, location = tool["function"], f"{location}.function"
    for name in function:
        if name not in FUNCTION_FIELDS:
            raise unknown_name_error(location, str(name), FUNCTION_FIELDS)
    name = function.get("name")
    if not isinstance(name, str) or not FUNCTION_NAME_PATTERN.fullmatch(name):
        raise EspalierError(
            f"{location}.name={shown(name)} is not supported; use 1 to 128 of the letters a to z, digits, _, - and ."
        )
    _require_type(f"{location}.description", function.get("description"), str | None, "text")
    _require_type(f"{location}.strict", function.get("strict"), bool | None, "true or false")
    _check_parameters(f"{location}.parameters", function.get("parameters"))
    return name


def _check_parameters(location: str, parameters: Any) -> None:
    """Raises EspalierError unless `parameters` is the JSON schema of an object.  location: its path in the body."""
    _require_type(location, parameters, Mapping | None, "a JSON schema, an object")
    if parameters is None:
        return
    try:
        size = len(json.dumps(parameters))
    except (TypeError, ValueError, RecursionError):
        raise EspalierError(f"{location} is not JSON; use a JSON schema") from None
    if size > MAX_SCHEMA_CHARS:
        raise EspalierError(f"{location} has {size} characters, which is not supported; use at most {MAX_SCHEMA_CHARS}")
    if parameters.get("type", "object") != "object":
        raise EspalierError(f"{location}.type={shown(parameters['type'])} is not supported; use 'object'")
    properties, required = parameters.get("properties"), parameters.get("required")
    _require_type(f"{location}.properties", properties, Mapping | None, "an object, from names to JSON schemas")
    for name, schema in (properties or {}).items():
        _require_type(f"{location}.properties.{name}", schema, Mapping | bool, "a JSON schema")
    _require_type(f"{location}.required", required, list | tuple | None, "a list of names")
    for name in required or ():
        _require_type(f"{location}.required", name, str, "a list of names")


def _require_type(location: str, value: Any, expected_type: Any, expected_text: str) -> None:
    """Raises EspalierError unless a value has the expected type.  location: the value's path in the body."""
    if not isinstance(value, expected_type):
        raise EspalierError(f"{location}={shown(value)} is not supported; use {expected_text}")
