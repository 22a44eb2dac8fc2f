"""Mistral's tool calls: [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...], and the newer
[TOOL_CALLS]name[ARGS]{...}."""

from espalier.tool_calls.arguments import read_arguments, read_call_object
from espalier.tool_calls.base import CallSyntax, CallWriter, DeltaWriter, ToolFormat, new_short_call_id, read_call
from espalier.tool_calls.reader import BrokenCall, Markers, Steps, TextReader

CALLS_BEGIN, ID_BEGIN, ARGUMENTS_BEGIN = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
CALL_MARKERS = Markers(CALLS_BEGIN)


def parse(reader: TextReader, writer: DeltaWriter) -> Steps[None]:
    while (yield from reader.read_until(CALL_MARKERS, writer.add_content)) is not None:
        space = yield from reader.read_space()
        if (yield from reader.read_literal("[")) is not None:
            yield from _read_call_list(reader, writer, CALLS_BEGIN + space + "[")
        else:
            yield from _read_named_call(reader, writer, CALLS_BEGIN + space)


def _read_call_list(reader: TextReader, writer: DeltaWriter, opening_marker: str) -> Steps[None]:
    """Read a list of calls after "[", up to "]".  A broken call ends the list."""

    def read_body(call: CallWriter) -> Steps[None]:
        yield from reader.read_space()
        yield from read_call_object(reader, call)
        yield from reader.read_space()
        if (yield from reader.peek()) not in ("", ",", "]"):
            raise BrokenCall("] is missing after the tool calls")

    while (yield from read_call(reader, writer, opening_marker, read_body)):
        opening_marker = (yield from reader.read_literal(",", "]")) or ""
        if opening_marker != ",":
            yield from reader.read_space()
            return


def _read_named_call(reader: TextReader, writer: DeltaWriter, opening_marker: str) -> Steps[None]:
    """Read a call that begins with its name.  The marker [ARGS] may be missing, because some servers leave it out."""

    def read_body(call: CallWriter) -> Steps[None]:
        name = yield from reader.read_word("{[")
        call.write_name(name.strip())
        if (yield from reader.read_literal(ID_BEGIN)):
            # The model's id is dropped.  CallWriter makes another id, because ids must be unique in a conversation.
            yield from reader.read_word("{[")
        yield from reader.read_literal(ARGUMENTS_BEGIN)
        yield from reader.read_space()
        if (yield from reader.peek()) not in ("", "{", "[", '"', "n"):
            raise BrokenCall("the tool call has no arguments")
        yield from read_arguments(reader, call, CALLS_BEGIN)

    if (yield from read_call(reader, writer, opening_marker, read_body)):
        yield from reader.read_space()


LIST_FORMAT = ToolFormat(
    name="mistral-list",
    template_signs=(CALLS_BEGIN,),
    special_tokens=(CALLS_BEGIN, ID_BEGIN, ARGUMENTS_BEGIN),
    parse=parse,
    syntax=CallSyntax(
        '{"name": "', '", "arguments": ', "}", separator=", ", calls_begin=f"{CALLS_BEGIN} [", calls_end="]"
    ),
    make_call_id=new_short_call_id,
)
NAMED_FORMAT = ToolFormat(
    name="mistral",
    template_signs=(CALLS_BEGIN, ARGUMENTS_BEGIN),
    special_tokens=(CALLS_BEGIN, ID_BEGIN, ARGUMENTS_BEGIN),
    parse=parse,
    syntax=CallSyntax(CALLS_BEGIN, ARGUMENTS_BEGIN, ""),
    make_call_id=new_short_call_id,
)
