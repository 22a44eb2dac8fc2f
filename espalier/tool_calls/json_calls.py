"""Reads a tool call that is a JSON object: {"name": ..., "arguments": {...}}."""

import json

from espalier.tool_calls.base import CallWriter
from espalier.tool_calls.reader import BROKEN_OFF, Broken, Reader, Steps, decoded, is_text

ARGUMENTS = ("arguments", "parameters")


def read_call_object(reader: Reader, call: CallWriter) -> Steps[None]:
    """Read the object.  Arguments that are an object are passed on as they come.  Other keys are read and not used.

    Raises Broken.
    """
    yield from reader.expect("{")
    yield from reader.space()
    if (yield from reader.literal("}")):
        return
    while True:
        yield from reader.space()
        key = yield from reader.json_of()
        yield from reader.space()
        yield from reader.expect(":")
        yield from reader.space()
        if key == "name":
            call.name((yield from reader.json_of()))
        elif key in ARGUMENTS:
            yield from read_arguments(reader, call)
        else:
            yield from reader.json_of()
        yield from reader.space()
        if (yield from reader.literal("}")):
            return
        yield from reader.expect(",")


def read_arguments(reader: Reader, call: CallWriter, *ends: str) -> Steps[None]:
    """Read arguments: a JSON object, or a JSON object as a string, which some models write.  Raises Broken.

    ends: marks that end the call.  Where one of them comes first, or the output ends by itself, there are none.
    """
    if call.has_arguments:
        raise Broken("the tool call has arguments twice")
    if ends and ((yield from is_absent(reader, *ends)) or (yield from reader.literal("null"))):
        return
    if (yield from reader.peek()) == "{":
        yield from reader.json_value(call.arguments)
        return
    value = yield from reader.json_of()
    if isinstance(value, str):
        value = decoded(value) if value.strip() else None
    if value is not None:
        text = json.dumps(value, ensure_ascii=False)
        # Half of a surrogate pair can only be written with an escape.
        call.arguments(text if is_text(text) else json.dumps(value))


def is_absent(reader: Reader, *ends: str) -> Steps[bool]:
    """Whether a call ends here, before its arguments.  Raises Broken if the output was cut off here."""
    if (yield from reader.peek()):
        return (yield from reader.sees(*ends)) is not None
    if reader.is_cut:
        raise Broken(BROKEN_OFF)
    return True
