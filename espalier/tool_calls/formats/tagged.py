"""Calls between <tool_call> and </tool_call>.

Hermes and Qwen: {"name": ..., "arguments": {...}}.
GLM-4.5 to 4.7: name<arg_key>key</arg_key><arg_value>value</arg_value>.
Qwen3-Coder and Qwen3.5: <function=name><parameter=key>value</parameter></function>.
"""

from collections.abc import Callable

from espalier.tool_calls.arguments import XmlArguments, read_call_object
from espalier.tool_calls.base import CallSyntax, CallWriter, ToolFormat, Writer, read_call
from espalier.tool_calls.reader import BrokenCall, Markers, Reader, Steps

OPEN, CLOSE = "<tool_call>", "</tool_call>"
CALL = Markers(OPEN, strip_before="\n")
# The tags of GLM.
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
# The tags of Qwen-Coder.
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
# Some outputs lack the opening before the function.
CALL_OR_FUNCTION = Markers(OPEN, FUNCTION, strip_before="\n")


def _read_calls(reader: Reader, writer: Writer, read: Callable[[CallWriter], Steps[None]]) -> Steps[None]:
    """Read an answer to its end.  read: reads a call after its opening tag."""
    while (yield from reader.until(CALL, writer.content)) is not None:
        if (yield from read_call(reader, writer, OPEN, read)):
            yield from reader.space()


def parse_hermes(reader: Reader, writer: Writer) -> Steps[None]:
    def read(call: CallWriter) -> Steps[None]:
        yield from reader.space()
        yield from read_call_object(reader, call)
        yield from reader.space()
        # Some models end their turn without the closing tag.
        if (yield from reader.peek()):
            yield from reader.expect(CLOSE)

    yield from _read_calls(reader, writer, read)


HERMES = ToolFormat(
    name="hermes",
    template_signs=(OPEN, "arguments"),
    special_tokens=(OPEN, CLOSE),
    parse=parse_hermes,
    syntax=CallSyntax(f'{OPEN}\n{{"name": "', '", "arguments": ', f"}}\n{CLOSE}", separator="\n"),
)


def parse_glm(reader: Reader, writer: Writer) -> Steps[None]:
    def read(call: CallWriter) -> Steps[None]:
        name, found = yield from reader.text_before(KEY, CLOSE)
        call.name(name.strip())
        arguments = XmlArguments(call)
        while found == KEY:
            key, _ = yield from reader.text_before(KEY_END)
            yield from reader.space()
            yield from reader.expect(VALUE)
            yield from arguments.read(reader, key.strip(), VALUE_END)
            yield from reader.space()
            found = (yield from reader.literal(KEY, CLOSE)) or ""
        if found != CLOSE:
            raise BrokenCall(f"{CLOSE} is missing in the tool call")
        arguments.end()

    yield from _read_calls(reader, writer, read)


GLM = ToolFormat(
    name="glm",
    template_signs=(OPEN, KEY),
    special_tokens=(OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END),
    parse=parse_glm,
    syntax=CallSyntax(OPEN, "\n", CLOSE, separator="\n", style="glm_xml"),
)


def parse_qwen_coder(reader: Reader, writer: Writer) -> Steps[None]:
    while (opening := (yield from reader.until(CALL_OR_FUNCTION, writer.content))) is not None:

        def read(call: CallWriter, opening: str = opening) -> Steps[None]:
            if opening == OPEN:
                yield from reader.space()
                yield from reader.expect(FUNCTION)
            name, _ = yield from reader.text_before(">")
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
        # Some outputs lack this tag before the closing tag.
        if found == FUNCTION_END or (yield from reader.peek_literal(CLOSE)):
            return arguments.end()
        if found is None:
            raise BrokenCall(f"{FUNCTION_END} is missing in the tool call")
        name, _ = yield from reader.text_before(">")
        yield from arguments.read(reader, name.strip(), PARAMETER_END, trim="\n")


QWEN_CODER = ToolFormat(
    name="qwen-coder",
    template_signs=(OPEN, FUNCTION),
    special_tokens=(OPEN, CLOSE),
    parse=parse_qwen_coder,
    syntax=CallSyntax(f"{OPEN}\n{FUNCTION}", ">\n", f"\n{FUNCTION_END}\n{CLOSE}", separator="\n", style="qwen_xml"),
)
