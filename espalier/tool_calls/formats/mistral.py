"""Mistral's tool calls: [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...], and the newer
[TOOL_CALLS]name[ARGS]{...}."""

from espalier.tool_calls.arguments import read_arguments, read_call_object
from espalier.tool_calls.base import CallSyntax, CallWriter, ToolFormat, Writer, read_call, short_id
from espalier.tool_calls.reader import BrokenCall, Markers, Reader, Steps

OPEN, ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
CALL = Markers(OPEN)


def parse(reader: Reader, writer: Writer) -> Steps[None]:
    while (yield from reader.until(CALL, writer.content)) is not None:
        space = yield from reader.space()
        if (yield from reader.literal("[")) is not None:
            yield from _list(reader, writer, OPEN + space + "[")
        else:
            yield from _named(reader, writer, OPEN + space)


def _list(reader: Reader, writer: Writer, opening: str) -> Steps[None]:
    """Read the calls after "[", up to "]".  A broken call ends the list."""

    def read(call: CallWriter) -> Steps[None]:
        yield from reader.space()
        yield from read_call_object(reader, call)
        yield from reader.space()
        if (yield from reader.peek()) not in ("", ",", "]"):
            raise BrokenCall("] is missing after the tool calls")

    while (yield from read_call(reader, writer, opening, read)):
        opening = (yield from reader.literal(",", "]")) or ""
        if opening != ",":
            yield from reader.space()
            return


def _named(reader: Reader, writer: Writer, opening: str) -> Steps[None]:
    """Read a call that begins with its name.  Some servers leave [ARGS] out, so the arguments may follow directly."""

    def read(call: CallWriter) -> Steps[None]:
        name = yield from reader.word("{[")
        call.name(name.strip())
        if (yield from reader.literal(ID)):
            # The model's id is not used: the server makes ids, which must be unique within a conversation.
            yield from reader.word("{[")
        yield from reader.literal(ARGS)
        yield from reader.space()
        if (yield from reader.peek()) not in ("", "{", "[", '"', "n"):
            raise BrokenCall("the tool call has no arguments")
        yield from read_arguments(reader, call, OPEN)

    if (yield from read_call(reader, writer, opening, read)):
        yield from reader.space()


LIST = ToolFormat(
    name="mistral-list",
    template_signs=(OPEN,),
    special_tokens=(OPEN, ID, ARGS),
    parse=parse,
    syntax=CallSyntax('{"name": "', '", "arguments": ', "}", separator=", ", opening=f"{OPEN} [", closing="]"),
    make_id=short_id,
)
FORMAT = ToolFormat(
    name="mistral",
    template_signs=(OPEN, ARGS),
    special_tokens=(OPEN, ID, ARGS),
    parse=parse,
    syntax=CallSyntax(OPEN, ARGS, ""),
    make_id=short_id,
)
