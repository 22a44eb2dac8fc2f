"""Arguments of formats that write each value as plain text between tags.  The tool's schema says which type it has."""

import json
from collections.abc import Mapping
from typing import Any

from espalier.tools.base import CallWriter
from espalier.tools.reader import Broken, Markers, Reader, Steps, decoded

# How Python writes them, as some models do.
PYTHON = {"True": "true", "False": "false", "None": "null"}
TYPES: Mapping[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    dict: "object",
    list: "array",
    type(None): "null",
}


def types_of(schema: Mapping[str, Any], name: str) -> set[str]:
    """The JSON types that a property may have; empty if its schema does not say."""
    properties = schema.get("properties")
    inner = properties.get(name) if isinstance(properties, Mapping) else None
    return _types(inner)


def is_listed(schema: Mapping[str, Any], name: str) -> bool:
    """Whether the schema lists the values of a property."""
    inner = schema.get("properties", {}).get(name)
    return isinstance(inner, Mapping) and ("enum" in inner or "const" in inner)


def _types(schema: Any) -> set[str]:
    if not isinstance(schema, Mapping):
        return set()
    kind = schema.get("type")
    if kind is not None:
        kinds = kind if isinstance(kind, list | tuple) else [kind]
        return {each for each in kinds if isinstance(each, str)}
    if "const" in schema:
        return {TYPES[type(schema["const"])]}
    if isinstance(schema.get("enum"), list):
        return {TYPES[type(each)] for each in schema["enum"]}
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list):
            found = [_types(each) for each in schema[word]]
            # One that does not say may be of any type.
            return set().union(*found) if all(found) else set()
    return set()


class XmlArguments:
    """Writes a call's arguments as a JSON object, one value after another."""

    def __init__(self, call: CallWriter):
        self.call = call
        self.num_values = 0

    def read(self, reader: Reader, name: str, end: str, trim: str = "") -> Steps[None]:
        """Read a value up to its closing tag.  A text is passed on as it comes.  Raises Broken.

        trim: characters around the value that belong to the tags, at most one on each side.
        """
        types = types_of(self.call.schema, name)
        key = json.dumps(name, ensure_ascii=False)
        self.call.arguments(f"{', ' if self.num_values else '{'}{key}: ")
        self.num_values += 1
        if trim:
            yield from reader.literal(trim)
        if types == {"string"} and not is_listed(self.call.schema, name):
            self.call.arguments('"')
            yield from self._until(reader, end, trim, lambda text: self.call.arguments(_escaped(text)))
            self.call.arguments('"')
            return
        parts: list[str] = []
        yield from self._until(reader, end, trim, parts.append)
        text = "".join(parts)
        # White space around a value is not the value's, except in a free text.
        self.call.arguments(_value(name, text.strip() if types == {"string"} else text, types))

    def _until(self, reader: Reader, end: str, trim: str, put: Any) -> Steps[None]:
        held = ""

        def pass_on(text: str) -> None:
            nonlocal held
            text, held = held + text, ""
            if trim and text.endswith(trim):
                text, held = text[: -len(trim)], trim
            if text:
                put(text)

        if (yield from reader.until(Markers(end), pass_on)) is None:
            raise Broken("the output ends inside the tool call")

    def end(self) -> None:
        self.call.arguments("}" if self.num_values else "{}")


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _value(name: str, text: str, types: set[str]) -> str:
    """The JSON text of a value.  Raises Broken if it is of no type that the schema allows."""
    written = PYTHON.get(text.strip(), text.strip())
    try:
        value = decoded(written)
    except Broken:
        value = None
        written = "" if written != "null" else written
    if written and (not types or _is_one_of(value, types)):
        return written
    if not types or "string" in types:
        return json.dumps(text, ensure_ascii=False)
    raise Broken(f"the argument {name!r} of the tool call is not of type {' or '.join(sorted(types))}")


def _is_one_of(value: Any, types: set[str]) -> bool:
    kind = TYPES[type(value)]
    if kind == "integer" or (isinstance(value, float) and value.is_integer()):
        return bool(types & {"integer", "number"})
    return kind in types
