"""Reads the output of one sample: text in, deltas of a message out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from espalier.tools.base import Delta, Writer, call_id
from espalier.tools.formats import Formats, harmony
from espalier.tools.reader import Reader, Steps
from espalier.tools.reasoning import split


class OutputParser:
    """The joined deltas do not depend on how the text was cut.

    schemas: by the name of each tool that may be called; is_open: the prompt has opened the reasoning.
    """

    def __init__(
        self,
        formats: Formats,
        schemas: Mapping[str, Mapping[str, Any]],
        is_open: bool = False,
        make_id: Callable[[], str] | None = None,
    ):
        self._reader = Reader()
        ids = formats.tools.make_id if formats.tools is not None else call_id
        self._writer = Writer(schemas, make_id or ids)
        self._steps = _parse(self._reader, self._writer, formats, is_open)
        self._read()

    @property
    def in_reasoning(self) -> bool:
        """Whether the text so far ends inside the reasoning."""
        return self._writer.in_reasoning

    @property
    def may_reason(self) -> bool:
        """Whether reasoning may still come or go on."""
        return self._writer.may_reason

    def feed(self, text: str) -> list[Delta]:
        """The deltas that a text adds.  Text that may become a part of a mark is held back."""
        if not text:
            return []
        self._reader.buffer += text
        return self._read()

    def finish(self) -> list[Delta]:
        """The deltas of what was held back."""
        self._reader.ended = True
        return self._read()

    def _read(self) -> list[Delta]:
        next(self._steps, None)
        return self._writer.take()


def _parse(reader: Reader, writer: Writer, formats: Formats, is_open: bool) -> Steps[None]:
    reasoning, tools = formats.reasoning, formats.tools
    if reasoning is not None and reasoning.whole:
        yield from harmony.parse(reader, writer)
        return
    if reasoning is not None:
        yield from split(reader, writer, reasoning, is_open)
    writer.may_reason = False
    if tools is not None and writer.schemas:
        yield from tools.parse(reader, writer)
        return
    while (yield from reader.peek()):
        writer.content(reader.take(len(reader.buffer)))


@dataclass
class ToolCall:
    """A call of a tool.  arguments: a JSON object, as text."""

    id: str
    name: str
    arguments: str = ""

    def as_dict(self) -> dict[str, Any]:
        """In OpenAI's form."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass
class Message:
    """An assistant's message.  errors: why calls were broken; their text is in the content."""

    content: str = ""
    reasoning: str = ""
    calls: dict[int, ToolCall] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)

    @property
    def tool_calls(self) -> list[ToolCall]:
        return list(self.calls.values())

    def add(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            if delta.kind == "content":
                self.content += delta.text
            elif delta.kind == "reasoning":
                self.reasoning += delta.text
            elif delta.kind == "call":
                self.calls[delta.index] = ToolCall(delta.id, delta.text)
            elif delta.kind == "arguments":
                self.calls[delta.index].arguments += delta.text
            elif delta.kind == "broken":
                self.calls.pop(delta.index, None)
                self.errors.append(delta.text)
