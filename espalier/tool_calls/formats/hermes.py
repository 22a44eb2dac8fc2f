"""Hermes and Qwen: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from espalier.tool_calls.arguments import read_call_object
from espalier.tool_calls.base import CallSyntax, CallWriter, ToolFormat, Writer, read_call
from espalier.tool_calls.reader import Markers, Reader, Steps

OPEN, CLOSE = "<tool_call>", "</tool_call>"
CALL = Markers(OPEN, swallow="\n")


def parse(reader: Reader, writer: Writer) -> Steps[None]:
    def read(call: CallWriter) -> Steps[None]:
        yield from reader.space()
        yield from read_call_object(reader, call)
        yield from reader.space()
        # Some models end their turn without it.
        if (yield from reader.peek()):
            yield from reader.expect(CLOSE)

    while (yield from reader.until(CALL, writer.content)) is not None:
        if (yield from read_call(reader, writer, OPEN, read)):
            yield from reader.space()


FORMAT = ToolFormat(
    name="hermes",
    signs=(OPEN, "arguments"),
    special_tokens=(OPEN, CLOSE),
    parse=parse,
    syntax=CallSyntax(f'{OPEN}\n{{"name": "', '", "arguments": ', f"}}\n{CLOSE}", separator="\n"),
)
