"""Qwen3-Coder and Qwen3.5: <tool_call><function=name><parameter=key>value</parameter></function></tool_call>."""

from espalier.tool_calls.arguments import XmlArguments
from espalier.tool_calls.base import CallSyntax, CallWriter, ToolFormat, Writer, read_call
from espalier.tool_calls.reader import Broken, Markers, Reader, Steps

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
# Some outputs have no opening before the function.
CALL = Markers(OPEN, FUNCTION, swallow="\n")


def parse(reader: Reader, writer: Writer) -> Steps[None]:
    while (opening := (yield from reader.until(CALL, writer.content))) is not None:

        def read(call: CallWriter, opening: str = opening) -> Steps[None]:
            if opening == OPEN:
                yield from reader.space()
                yield from reader.expect(FUNCTION)
            name, _ = yield from reader.before(">")
            call.name(name.strip())
            yield from _parameters(reader, call)
            yield from reader.space()
            if (yield from reader.peek()) and opening == OPEN:
                yield from reader.expect(CLOSE)

        if (yield from read_call(reader, writer, opening, read)):
            yield from reader.space()


def _parameters(reader: Reader, call: CallWriter) -> Steps[None]:
    arguments = XmlArguments(call)
    while True:
        yield from reader.space()
        found = yield from reader.literal(PARAMETER, FUNCTION_END)
        # Some outputs leave it out before the closing.
        if found == FUNCTION_END or (yield from reader.sees(CLOSE)):
            return arguments.end()
        if found is None:
            raise Broken(f"{FUNCTION_END} is missing in the tool call")
        name, _ = yield from reader.before(">")
        yield from arguments.read(reader, name.strip(), PARAMETER_END, trim="\n")


FORMAT = ToolFormat(
    name="qwen-coder",
    signs=(OPEN, FUNCTION),
    special_tokens=(OPEN, CLOSE),
    parse=parse,
    syntax=CallSyntax(f"{OPEN}\n{FUNCTION}", ">\n", f"\n{FUNCTION_END}\n{CLOSE}", separator="\n", style="qwen_xml"),
)
