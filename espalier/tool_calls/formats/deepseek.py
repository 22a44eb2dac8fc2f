"""DeepSeek's tool calls.  V3 and R1 write the arguments in a Markdown code block, V3.1 directly after the name."""

from functools import partial

from espalier.tool_calls.arguments import call_ends_here, read_arguments
from espalier.tool_calls.base import CallSyntax, CallWriter, DeltaWriter, ToolFormat, read_call
from espalier.tool_calls.reader import BrokenCall, Markers, Steps, TextReader

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
# Some outputs lack CALLS_BEGIN before the first call.
FIRST_CALL_MARKERS = Markers(CALLS_BEGIN, CALL_BEGIN, strip_before="\n")
FENCE_BEGIN, FENCE_END = "```json\n", "\n```"


def parse(reader: TextReader, writer: DeltaWriter, has_fence: bool) -> Steps[None]:
    """Parses an answer.  has_fence: whether arguments are in a Markdown code block."""
    while (marker := (yield from reader.read_until(FIRST_CALL_MARKERS, writer.add_content))) is not None:
        opening_marker = marker
        if marker == CALLS_BEGIN:
            space = yield from reader.read_space()
            if (yield from reader.read_literal(CALL_BEGIN)) is None:
                writer.add_delta("broken", f"{CALL_BEGIN} is missing in the tool call")
                writer.add_content(CALLS_BEGIN + space)
                continue
            opening_marker += space + CALL_BEGIN
        yield from _read_calls(reader, writer, opening_marker, has_fence)


def _read_calls(reader: TextReader, writer: DeltaWriter, opening_marker: str, has_fence: bool) -> Steps[None]:
    """Read several calls.  opening_marker: the text of the first call that was already read.  has_fence: see parse."""

    def read_body(call: CallWriter) -> Steps[None]:
        kind, marker = yield from reader.read_text_before(SEPARATOR, CALL_END)
        name = kind
        if has_fence and marker == SEPARATOR:
            if kind.strip() != "function":
                raise BrokenCall(f"the tool call is of type {kind.strip()[:80]!r}; only function is supported")
            name, marker = yield from reader.read_text_before("\n", CALL_END)
        call.write_name(name.strip())
        if marker == CALL_END:
            return
        yield from reader.read_space()
        if not (yield from call_ends_here(reader, CALL_END)):
            yield from (_read_fenced_arguments(reader, call) if has_fence else read_arguments(reader, call, CALL_END))
        yield from reader.read_space()
        if (yield from reader.peek()):
            yield from reader.expect(CALL_END)

    while (yield from read_call(reader, writer, opening_marker, read_body)):
        yield from reader.read_space()
        opening_marker = (yield from reader.read_literal(CALL_BEGIN, CALLS_END)) or ""
        if opening_marker != CALL_BEGIN:
            yield from reader.read_space()
            return


def _read_fenced_arguments(reader: TextReader, call: CallWriter) -> Steps[None]:
    yield from reader.expect(FENCE_BEGIN)
    yield from reader.read_space()
    yield from read_arguments(reader, call, FENCE_END.strip())
    yield from reader.read_space()
    yield from reader.expect(FENCE_END.strip())


SPECIAL_TOKENS = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, SEPARATOR, CALL_END)
V3_FORMAT = ToolFormat(
    name="deepseek-v3",
    template_signs=(CALLS_BEGIN, "```json"),
    special_tokens=SPECIAL_TOKENS,
    parse=partial(parse, has_fence=True),
    syntax=CallSyntax(
        f"{CALL_BEGIN}function{SEPARATOR}",
        f"\n{FENCE_BEGIN}",
        f"{FENCE_END}{CALL_END}",
        separator="\n",
        calls_begin=CALLS_BEGIN,
        calls_end=CALLS_END,
    ),
    arguments_as_text=True,
)
V31_FORMAT = ToolFormat(
    name="deepseek-v3.1",
    template_signs=(CALLS_BEGIN,),
    special_tokens=SPECIAL_TOKENS,
    parse=partial(parse, has_fence=False),
    syntax=CallSyntax(CALL_BEGIN, SEPARATOR, CALL_END, calls_begin=CALLS_BEGIN, calls_end=CALLS_END),
    arguments_as_text=True,
)
