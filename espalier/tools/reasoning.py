"""Formats that put the reasoning between two marks, at the start of the output or opened by the prompt."""

from espalier.tools.base import ReasoningFormat, Writer
from espalier.tools.reader import Markers, Reader, Steps

NEWLINES = "\n"


def split(reader: Reader, writer: Writer, format: ReasoningFormat, is_open: bool) -> Steps[None]:
    """Read the reasoning, if there is any, up to its end.  is_open: the prompt has opened it.

    Newlines beside the marks belong to them.
    """
    if not is_open:
        space = yield from reader.space()
        if (yield from reader.literal(format.begin)) is None:
            reader.put_back(space)
            return
    writer.in_reasoning = True
    yield from reader.space(NEWLINES)
    ended = yield from reader.until(Markers(format.end, swallow=NEWLINES), writer.reasoning)
    writer.in_reasoning = False
    if ended is not None:
        yield from reader.space(NEWLINES)


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
