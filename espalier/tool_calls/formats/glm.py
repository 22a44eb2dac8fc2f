"""GLM-4.5 to 4.7: <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>."""

from espalier.tool_calls.arguments import XmlArguments
from espalier.tool_calls.base import CallSyntax, CallWriter, ToolFormat, Writer, read_call
from espalier.tool_calls.reader import Broken, Markers, Reader, Steps

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
CALL = Markers(OPEN, swallow="\n")


def parse(reader: Reader, writer: Writer) -> Steps[None]:
    def read(call: CallWriter) -> Steps[None]:
        name, found = yield from reader.before(KEY, CLOSE)
        call.name(name.strip())
        arguments = XmlArguments(call)
        while found == KEY:
            key, _ = yield from reader.before(KEY_END)
            yield from reader.space()
            yield from reader.expect(VALUE)
            yield from arguments.read(reader, key.strip(), VALUE_END)
            yield from reader.space()
            found = (yield from reader.literal(KEY, CLOSE)) or ""
        if found != CLOSE:
            raise Broken(f"{CLOSE} is missing in the tool call")
        arguments.end()

    while (yield from reader.until(CALL, writer.content)) is not None:
        if (yield from read_call(reader, writer, OPEN, read)):
            yield from reader.space()


FORMAT = ToolFormat(
    name="glm",
    signs=(OPEN, KEY),
    special_tokens=(OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END),
    parse=parse,
    syntax=CallSyntax(OPEN, "\n", CLOSE, separator="\n", style="glm_xml"),
)
