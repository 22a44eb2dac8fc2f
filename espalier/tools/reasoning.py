"""Formats that put the reasoning between two marks, at the start of the output or begun by the prompt."""

from espalier.tools.base import ReasoningFormat, Writer
from espalier.tools.reader import Markers, Reader, Steps

NEWLINES = "\n"


def split(reader: Reader, writer: Writer, format: ReasoningFormat) -> Steps[None]:
    """Read the reasoning, if there is any, up to its end, and again if more follows at once.

    Newlines beside the marks belong to them.  A mark that opens what is open already is left out.
    """
    marks = Markers(format.end, format.begin, swallow=NEWLINES)
    while (yield from _begins(reader, format.begin)):
        writer.in_reasoning = True
        marker: str | None = format.begin
        while marker == format.begin:
            yield from reader.space(NEWLINES)
            marker = yield from reader.until(marks, writer.reasoning)
        writer.in_reasoning = False
        if marker is not None:
            yield from reader.space(NEWLINES)


def _begins(reader: Reader, begin: str) -> Steps[bool]:
    """Read the mark that opens the reasoning, with the white space before it, if the output goes on with it."""
    space = yield from reader.space()
    if (yield from reader.literal(begin)) is not None:
        return True
    reader.put_back(space)
    return False


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
