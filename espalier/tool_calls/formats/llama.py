"""The tool calls of Llama 3.1 to 3.3: {"name": ..., "parameters": {...}}, or several such objects, separated by "; ".

A call comes at the start of the output, or after <|python_tag|>.
"""

from espalier.tool_calls.arguments import read_call_object
from espalier.tool_calls.base import CallSyntax, CallWriter, DeltaWriter, ToolFormat, read_call
from espalier.tool_calls.reader import Markers, Steps, TextReader

PYTHON_TAG = "<|python_tag|>"
CALL_MARKERS = Markers(PYTHON_TAG)


def parse(reader: TextReader, writer: DeltaWriter) -> Steps[None]:
    space = yield from reader.read_space()
    if (yield from reader.peek()) == "{":
        yield from _read_calls(reader, writer, space)
    elif space:
        writer.add_content(space)
    while (yield from reader.read_until(CALL_MARKERS, writer.add_content)) is not None:
        yield from _read_calls(reader, writer, PYTHON_TAG)


def _read_calls(reader: TextReader, writer: DeltaWriter, opening_marker: str) -> Steps[None]:
    """Read calls, separated by semicolons.  opening_marker: the text of the first call that was already read."""

    def read_body(call: CallWriter) -> Steps[None]:
        yield from reader.read_space()
        yield from read_call_object(reader, call)

    while (yield from read_call(reader, writer, opening_marker, read_body)):
        yield from reader.read_space()
        if (yield from reader.read_literal(";")) is None:
            break
        opening_marker = ";" + (yield from reader.read_space())
        if (yield from reader.peek()) != "{":
            writer.add_content(opening_marker)
            break


TOOL_FORMAT = ToolFormat(
    name="llama",
    template_signs=("<|start_header_id|>", "parameters"),
    special_tokens=(PYTHON_TAG,),
    parse=parse,
    syntax=CallSyntax('{"name": "', '", "parameters": ', "}", separator="; "),
)
