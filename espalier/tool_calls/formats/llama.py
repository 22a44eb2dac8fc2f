"""The tool calls of Llama 3.1 to 3.3: {"name": ..., "parameters": {...}}, or several such objects with "; " between.

A call stands at the start of the output, or after the tag.
"""

from espalier.tool_calls.arguments import read_call_object
from espalier.tool_calls.base import CallSyntax, CallWriter, ToolFormat, Writer, read_call
from espalier.tool_calls.reader import Markers, Reader, Steps

TAG = "<|python_tag|>"
CALL = Markers(TAG)


def parse(reader: Reader, writer: Writer) -> Steps[None]:
    space = yield from reader.space()
    if (yield from reader.peek()) == "{":
        yield from _calls(reader, writer, space)
    elif space:
        writer.content(space)
    while (yield from reader.until(CALL, writer.content)) is not None:
        yield from _calls(reader, writer, TAG)


def _calls(reader: Reader, writer: Writer, opening: str) -> Steps[None]:
    def read(call: CallWriter) -> Steps[None]:
        yield from reader.space()
        yield from read_call_object(reader, call)

    while (yield from read_call(reader, writer, opening, read)):
        yield from reader.space()
        if (yield from reader.literal(";")) is None:
            break
        opening = ";" + (yield from reader.space())
        if (yield from reader.peek()) != "{":
            writer.content(opening)
            break


FORMAT = ToolFormat(
    name="llama",
    template_signs=("<|start_header_id|>", "parameters"),
    special_tokens=(TAG,),
    parse=parse,
    syntax=CallSyntax('{"name": "', '", "parameters": ', "}", separator="; "),
)
