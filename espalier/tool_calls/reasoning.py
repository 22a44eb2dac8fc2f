"""Formats that put the reasoning between two marks, at the start of the output or begun by the prompt."""

from espalier.tool_calls.base import ReasoningFormat, Writer
from espalier.tool_calls.reader import Markers, Reader, Steps

NEWLINES = "\n"


def split(reader: Reader, writer: Writer, format: ReasoningFormat) -> Steps[None]:
    """Read the reasoning, if there is any, up to its end, and again if more follows at once.

    Newlines beside the marks belong to them.  A mark that opens what is open, or ends what is not, is left out.
    """
    marks = Markers(format.end, format.begin, swallow=NEWLINES)
    while (marker := (yield from _first(reader, format))) is not None:
        writer.in_reasoning = marker == format.begin
        while marker == format.begin:
            yield from reader.space(NEWLINES)
            marker = yield from reader.until(marks, writer.reasoning)
        writer.in_reasoning = False
        if marker is not None:
            yield from reader.space(NEWLINES)


def _first(reader: Reader, format: ReasoningFormat) -> Steps[str | None]:
    """Read a mark of the reasoning, with the white space before it, if the output goes on with one."""
    space = yield from reader.space()
    marker = yield from reader.literal(format.begin, format.end)
    if marker is None:
        reader.put_back(space)
    return marker


THINK = ReasoningFormat(
    name="think",
    signs=("think>",),
    special_tokens=("<think>", "</think>"),
    begin="<think>",
    end="</think>",
    switches=("enable_thinking", "thinking"),
)
MISTRAL = ReasoningFormat(
    name="mistral",
    signs=("[THINK]",),
    special_tokens=("[THINK]", "[/THINK]"),
    begin="[THINK]",
    end="[/THINK]",
)
