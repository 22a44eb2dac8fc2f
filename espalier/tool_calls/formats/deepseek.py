"""DeepSeek's tool calls: V3 and R1 write the arguments as a block of JSON, V3.1 writes them directly after the name."""

from functools import partial

from espalier.tool_calls.arguments import call_ends_here, read_arguments
from espalier.tool_calls.base import CallSyntax, CallWriter, ToolFormat, Writer, read_call
from espalier.tool_calls.reader import BrokenCall, Markers, Reader, Steps

OPEN, CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
# Some outputs lack the opening before the first call.
STARTS = Markers(OPEN, CALL, strip_before="\n")
FENCE, FENCE_END = "```json\n", "\n```"


def parse(reader: Reader, writer: Writer, fenced: bool) -> Steps[None]:
    while (marker := (yield from reader.until(STARTS, writer.content))) is not None:
        opening = marker
        if marker == OPEN:
            space = yield from reader.space()
            if (yield from reader.literal(CALL)) is None:
                writer.add("broken", f"{CALL} is missing in the tool call")
                writer.content(OPEN + space)
                continue
            opening += space + CALL
        yield from _calls(reader, writer, opening, fenced)


def _calls(reader: Reader, writer: Writer, opening: str, fenced: bool) -> Steps[None]:
    def read(call: CallWriter) -> Steps[None]:
        kind, mark = yield from reader.text_before(SEPARATOR, END)
        name = kind
        if fenced and mark == SEPARATOR:
            if kind.strip() != "function":
                raise BrokenCall(f"the tool call is of type {kind.strip()[:80]!r}; only function is supported")
            name, mark = yield from reader.text_before("\n", END)
        call.name(name.strip())
        if mark == END:
            return
        yield from reader.space()
        if not (yield from call_ends_here(reader, END)):
            yield from (_block(reader, call) if fenced else read_arguments(reader, call, END))
        yield from reader.space()
        if (yield from reader.peek()):
            yield from reader.expect(END)

    while (yield from read_call(reader, writer, opening, read)):
        yield from reader.space()
        opening = (yield from reader.literal(CALL, CLOSE)) or ""
        if opening != CALL:
            yield from reader.space()
            return


def _block(reader: Reader, call: CallWriter) -> Steps[None]:
    yield from reader.expect(FENCE)
    yield from reader.space()
    yield from read_arguments(reader, call, FENCE_END.strip())
    yield from reader.space()
    yield from reader.expect(FENCE_END.strip())


SPECIAL = (OPEN, CLOSE, CALL, SEPARATOR, END)
V3 = ToolFormat(
    name="deepseek-v3",
    template_signs=(OPEN, "```json"),
    special_tokens=SPECIAL,
    parse=partial(parse, fenced=True),
    syntax=CallSyntax(
        f"{CALL}function{SEPARATOR}", f"\n{FENCE}", f"{FENCE_END}{END}", separator="\n", opening=OPEN, closing=CLOSE
    ),
    arguments_as_text=True,
)
FORMAT = ToolFormat(
    name="deepseek-v3.1",
    template_signs=(OPEN,),
    special_tokens=SPECIAL,
    parse=partial(parse, fenced=False),
    syntax=CallSyntax(CALL, SEPARATOR, END, opening=OPEN, closing=CLOSE),
    arguments_as_text=True,
)
