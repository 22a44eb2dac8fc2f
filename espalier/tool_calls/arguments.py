"""Parses a tool call's arguments: a JSON object, or values between tags, whose types are in the tool's JSON schema."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from espalier.tool_calls.base import CallWriter
from espalier.tool_calls.reader import CUT_OFF_REASON, BrokenCall, Markers, Steps, TextReader, decode_json, is_utf8

# JSON's constant for each Python constant, because some models write Python's.
JSON_OF_PYTHON_CONSTANT = {"True": "true", "False": "false", "None": "null"}
JSON_TYPE_NAMES: Mapping[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    dict: "object",
    list: "array",
    type(None): "null",
}


# JSON schema keywords that limit a text.  White space around a text may break such a limit.
LIMITING_KEYWORDS = frozenset(("enum", "const", "pattern", "format", "maxLength"))
MAX_SCHEMA_DEPTH = 16
Schema = Mapping[str, Any]


def property_schemas(schema: Schema, name: str) -> list[Schema]:
    """Returns the alternative schemas of the property `name`: a value must fit at least one.  {} fits every value.

    schema: of the object with the property.  $ref, anyOf and oneOf are resolved."""
    properties = schema.get("properties")
    return _resolved_schemas(properties.get(name) if isinstance(properties, Mapping) else None, schema, 0)


def _resolved_schemas(schema: Any, root: Schema, depth: int) -> list[Schema]:
    """Returns the alternatives of `schema`.  root: the schema to which a $ref refers.  depth: the recursion's depth."""
    if not isinstance(schema, Mapping) or depth > MAX_SCHEMA_DEPTH:
        return [{}]
    if isinstance(schema.get("$ref"), str):
        target: Any = root
        for part in schema["$ref"].split("/")[1:]:
            target = target.get(part) if isinstance(target, Mapping) else None
        return _resolved_schemas(target, root, depth + 1)
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list) and "type" not in schema:
            return [alternative for each in schema[word] for alternative in _resolved_schemas(each, root, depth + 1)]
    return [schema]


def allowed_types(schemas: Sequence[Schema]) -> set[str]:
    """Returns the JSON types that the schemas allow; empty if any schema names no type."""
    types_of_schemas = [_allowed_types(schema) for schema in schemas]
    return set().union(*types_of_schemas) if all(types_of_schemas) else set()


def _allowed_types(schema: Schema) -> set[str]:
    type_value = schema.get("type")
    if type_value is not None:
        type_names = type_value if isinstance(type_value, list | tuple) else [type_value]
        return {each for each in type_names if isinstance(each, str)}
    if "const" in schema:
        return {JSON_TYPE_NAMES[type(schema["const"])]}
    if isinstance(schema.get("enum"), list):
        return {JSON_TYPE_NAMES[type(each)] for each in schema["enum"]}
    return set()


def _limiting_keywords(schemas: Sequence[Schema]) -> set[str]:
    return {name for schema in schemas for name in schema if name in LIMITING_KEYWORDS}


def _trim_to_limits(text: str, schemas: Sequence[Schema]) -> str:
    """Returns the text.  If the white space around it may break a limit of the schemas, the space is removed."""
    limits = _limiting_keywords(schemas)
    lengths = [most for schema in schemas if isinstance(most := schema.get("maxLength"), int)]
    fits = limits == {"maxLength"} and len(text) <= max(lengths, default=0)
    return text if fits or not limits else text.strip()


@dataclass
class TaggedArguments:
    """Writes the arguments of one call, read from tagged text, as a JSON object."""

    call: CallWriter
    num_values: int = 0

    def read_value(self, reader: TextReader, name: str, end_marker: str, strip_chars: str = "") -> Steps[None]:
        """Read a value up to `end_marker`, and write its JSON.  A string is written as it arrives.  Raises BrokenCall.

        name: of the argument.  strip_chars: text that is removed once from each end of the value, because it belongs to
        the tags."""
        schemas = property_schemas(self.call.schema, name)
        types = allowed_types(schemas)
        key = json.dumps(name, ensure_ascii=False)
        self.call.write_arguments(f"{', ' if self.num_values else '{'}{key}: ")
        self.num_values += 1
        if strip_chars:
            yield from reader.read_literal(strip_chars)
        if types == {"string"} and not _limiting_keywords(schemas):
            self.call.write_arguments('"')
            yield from self._read_value_text(
                reader,
                end_marker,
                strip_chars,
                lambda text: self.call.write_arguments(json.dumps(text, ensure_ascii=False)[1:-1]),
            )
            self.call.write_arguments('"')
            return
        parts: list[str] = []
        yield from self._read_value_text(reader, end_marker, strip_chars, parts.append)
        text = "".join(parts)
        self.call.write_arguments(_json_value(name, _trim_to_limits(text, schemas), types))

    def _read_value_text(self, reader: TextReader, end_marker: str, strip_chars: str, on_text: Any) -> Steps[None]:
        """Read a value, and call on_text with its pieces, without strip_chars at the value's end."""
        held_back = ""

        def pass_on_text(text: str) -> None:
            """Call on_text with the text so far, but keep strip_chars at its end until more text comes."""
            nonlocal held_back
            text, held_back = held_back + text, ""
            if strip_chars and text.endswith(strip_chars):
                text, held_back = text[: -len(strip_chars)], strip_chars
            if text:
                on_text(text)

        if (yield from reader.read_until(Markers(end_marker), pass_on_text)) is None:
            raise BrokenCall("the output ends inside the tool call")

    def finish(self) -> None:
        self.call.write_arguments("}" if self.num_values else "{}")


def _json_value(name: str, text: str, types: set[str]) -> str:
    """Returns the JSON text of an argument's value.  text: the value as the model wrote it.  types: the JSON types that
    the schema allows; empty for all types.  Raises BrokenCall for another type."""
    json_text = JSON_OF_PYTHON_CONSTANT.get(text.strip(), text.strip())
    try:
        value = decode_json(json_text)
    except BrokenCall:
        value = None
        json_text = "" if json_text != "null" else json_text
    if json_text and (not types or _has_type(value, types)):
        return json_text
    if not types or "string" in types:
        return json.dumps(text, ensure_ascii=False)
    raise BrokenCall(f"the argument {name!r} of the tool call is not of type {' or '.join(sorted(types))}")


def _has_type(value: Any, types: set[str]) -> bool:
    kind = JSON_TYPE_NAMES[type(value)]
    if kind == "integer" or (isinstance(value, float) and value.is_integer()):
        return bool(types & {"integer", "number"})
    return kind in types


ARGUMENTS_KEYS = ("arguments", "parameters")


def read_call_object(reader: TextReader, call: CallWriter) -> Steps[None]:
    """Read a call that is a JSON object with a name and arguments, and write it to `call`.  Other keys are skipped.
    Arguments are written while they arrive.  Raises BrokenCall."""
    yield from reader.expect("{")
    yield from reader.read_space()
    if (yield from reader.read_literal("}")):
        return
    while True:
        yield from reader.read_space()
        key = yield from reader.read_decoded_json()
        yield from reader.read_space()
        yield from reader.expect(":")
        yield from reader.read_space()
        if key == "name":
            call.write_name((yield from reader.read_decoded_json()))
        elif key in ARGUMENTS_KEYS:
            yield from read_arguments(reader, call)
        else:
            yield from reader.read_decoded_json()
        yield from reader.read_space()
        if (yield from reader.read_literal("}")):
            return
        yield from reader.expect(",")


def read_arguments(reader: TextReader, call: CallWriter, *end_markers: str) -> Steps[None]:
    """Read arguments: a JSON object, or a string that contains a JSON object (from some models).  Raises BrokenCall.

    end_markers: markers that end the call.  If a marker or the output's end comes next, the call has no arguments."""
    if call.has_arguments:
        raise BrokenCall("the tool call has arguments twice")
    if end_markers and ((yield from call_ends_here(reader, *end_markers)) or (yield from reader.read_literal("null"))):
        return
    if (yield from reader.peek()) == "{":
        yield from reader.read_json_value(call.write_arguments)
        return
    value = yield from reader.read_decoded_json()
    if isinstance(value, str):
        value = decode_json(value) if value.strip() else None
    if value is not None:
        text = json.dumps(value, ensure_ascii=False)
        # A lone surrogate is written as a JSON escape, because UTF-8 cannot encode it.
        call.write_arguments(text if is_utf8(text) else json.dumps(value))


def call_ends_here(reader: TextReader, *end_markers: str) -> Steps[bool]:
    """Returns whether the call ends here, at a marker or the output's end.  Raises BrokenCall for a cut-off output."""
    if (yield from reader.peek()):
        return (yield from reader.peek_literal(*end_markers)) is not None
    if reader.is_cut_off:
        raise BrokenCall(CUT_OFF_REASON)
    return True
