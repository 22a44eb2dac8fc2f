"""Tool calls between <tool_call> and </tool_call>.  The text between the tags depends on the model family.

Hermes and Qwen: {"name": ..., "arguments": {...}}.
GLM-4.5 to 4.7: name<arg_key>key</arg_key><arg_value>value</arg_value>.
Qwen3-Coder and Qwen3.5: <function=name><parameter=key>value</parameter></function>.
"""

from collections.abc import Callable

from espalier.tool_calls.arguments import TaggedArguments, read_call_object
from espalier.tool_calls.base import CallSyntax, CallWriter, DeltaWriter, ToolFormat, read_call
from espalier.tool_calls.reader import BrokenCall, Markers, Steps, TextReader

CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"
CALL_MARKERS = Markers(CALL_BEGIN, strip_before="\n")
# The tags of GLM.
KEY_BEGIN, KEY_END = "<arg_key>", "</arg_key>"
VALUE_BEGIN, VALUE_END = "<arg_value>", "</arg_value>"
# The tags of Qwen-Coder.
FUNCTION_BEGIN, FUNCTION_END = "<function=", "</function>"
PARAMETER_BEGIN, PARAMETER_END = "<parameter=", "</parameter>"
# In some outputs, <tool_call> is missing before <function=.
CALL_OR_FUNCTION_MARKERS = Markers(CALL_BEGIN, FUNCTION_BEGIN, strip_before="\n")


def _read_calls(reader: TextReader, writer: DeltaWriter, read_body: Callable[[CallWriter], Steps[None]]) -> Steps[None]:
    """Read a whole answer with its calls.  read_body: reads a call after <tool_call>."""
    while (yield from reader.read_until(CALL_MARKERS, writer.add_content)) is not None:
        if (yield from read_call(reader, writer, CALL_BEGIN, read_body)):
            yield from reader.read_space()


def parse_hermes(reader: TextReader, writer: DeltaWriter) -> Steps[None]:
    def read_body(call: CallWriter) -> Steps[None]:
        yield from reader.read_space()
        yield from read_call_object(reader, call)
        yield from reader.read_space()
        # Some models leave out </tool_call> at the end of the output.
        if (yield from reader.peek()):
            yield from reader.expect(CALL_END)

    yield from _read_calls(reader, writer, read_body)


HERMES_FORMAT = ToolFormat(
    name="hermes",
    template_signs=(CALL_BEGIN, "arguments"),
    special_tokens=(CALL_BEGIN, CALL_END),
    parse=parse_hermes,
    syntax=CallSyntax(f'{CALL_BEGIN}\n{{"name": "', '", "arguments": ', f"}}\n{CALL_END}", separator="\n"),
)


def parse_glm(reader: TextReader, writer: DeltaWriter) -> Steps[None]:
    def read_body(call: CallWriter) -> Steps[None]:
        name, marker = yield from reader.read_text_before(KEY_BEGIN, CALL_END)
        call.write_name(name.strip())
        arguments = TaggedArguments(call)
        while marker == KEY_BEGIN:
            key, _ = yield from reader.read_text_before(KEY_END)
            yield from reader.read_space()
            yield from reader.expect(VALUE_BEGIN)
            yield from arguments.read_value(reader, key.strip(), VALUE_END)
            yield from reader.read_space()
            marker = (yield from reader.read_literal(KEY_BEGIN, CALL_END)) or ""
        if marker != CALL_END:
            raise BrokenCall(f"{CALL_END} is missing in the tool call")
        arguments.finish()

    yield from _read_calls(reader, writer, read_body)


GLM_FORMAT = ToolFormat(
    name="glm",
    template_signs=(CALL_BEGIN, KEY_BEGIN),
    special_tokens=(CALL_BEGIN, CALL_END, KEY_BEGIN, KEY_END, VALUE_BEGIN, VALUE_END),
    parse=parse_glm,
    syntax=CallSyntax(CALL_BEGIN, "\n", CALL_END, separator="\n", arguments_style="glm_xml"),
)


def parse_qwen_coder(reader: TextReader, writer: DeltaWriter) -> Steps[None]:
    while (opening := (yield from reader.read_until(CALL_OR_FUNCTION_MARKERS, writer.add_content))) is not None:

        def read_body(call: CallWriter, opening_marker: str = opening) -> Steps[None]:
            if opening_marker == CALL_BEGIN:
                yield from reader.read_space()
                yield from reader.expect(FUNCTION_BEGIN)
            name, _ = yield from reader.read_text_before(">")
            call.write_name(name.strip())
            yield from _read_parameters(reader, call)
            yield from reader.read_space()
            if (yield from reader.peek()) and opening_marker == CALL_BEGIN:
                yield from reader.expect(CALL_END)

        if (yield from read_call(reader, writer, opening, read_body)):
            yield from reader.read_space()


def _read_parameters(reader: TextReader, call: CallWriter) -> Steps[None]:
    """Read a call's parameters, up to its end, and write them to `call` as one JSON object."""
    arguments = TaggedArguments(call)
    while True:
        yield from reader.read_space()
        marker = yield from reader.read_literal(PARAMETER_BEGIN, FUNCTION_END)
        # In some outputs, </function> is missing before </tool_call>.
        if marker == FUNCTION_END or (yield from reader.peek_literal(CALL_END)):
            return arguments.finish()
        if marker is None:
            raise BrokenCall(f"{FUNCTION_END} is missing in the tool call")
        name, _ = yield from reader.read_text_before(">")
        yield from arguments.read_value(reader, name.strip(), PARAMETER_END, strip_chars="\n")


QWEN_CODER_FORMAT = ToolFormat(
    name="qwen-coder",
    template_signs=(CALL_BEGIN, FUNCTION_BEGIN),
    special_tokens=(CALL_BEGIN, CALL_END),
    parse=parse_qwen_coder,
    syntax=CallSyntax(
        f"{CALL_BEGIN}\n{FUNCTION_BEGIN}",
        ">\n",
        f"\n{FUNCTION_END}\n{CALL_END}",
        separator="\n",
        arguments_style="qwen_xml",
    ),
)
