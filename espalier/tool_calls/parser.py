"""Parses the output text of one sample into the deltas of a message."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from espalier.tool_calls.base import Delta, DeltaWriter, new_call_id, parse_reasoning
from espalier.tool_calls.formats import Formats, harmony
from espalier.tool_calls.reader import Steps, TextReader


class OutputParser:
    """Parses the text of one output into deltas.  The text comes in pieces; their sizes do not change the message.

    schemas: the JSON schema of each callable tool's parameters, by tool name.  answer_start: the text at the prompt's
    end with which the answer begins."""

    def __init__(self, formats: Formats, schemas: Mapping[str, Mapping[str, Any]], answer_start: str = ""):
        self._reader = TextReader()
        self._writer = DeltaWriter(schemas, formats.tools.make_call_id if formats.tools is not None else new_call_id)
        self._steps = _parse_output(self._reader, self._writer, formats)
        # The end of answer_start, if it may begin a marker.  This text of the prompt must not be in the deltas.
        self._held_prompt_text = ""
        self._parse_new_text()
        if answer_start:
            self._writer.resume(self.feed(answer_start))
            self._held_prompt_text = self._reader.buffer

    @property
    def in_reasoning(self) -> bool:
        """True if the text so far ends inside the reasoning."""
        return self._writer.in_reasoning

    @property
    def may_reason(self) -> bool:
        """True if reasoning may still begin or continue."""
        return self._writer.may_reason

    def feed(self, text: str) -> list[Delta]:
        """Returns the deltas of new text.  Text that may begin a marker is held back."""
        if not text:
            return []
        self._reader.buffer += text
        return self._parse_new_text()

    def finish(self, is_cut_off: bool = False) -> list[Delta]:
        """Returns the deltas of the held-back text.  is_cut_off: whether the output ended without a stop token."""
        self._reader.has_ended, self._reader.is_cut_off = True, is_cut_off
        return self._parse_new_text()

    def _parse_new_text(self) -> list[Delta]:
        """Parse the text that has arrived.  Returns the new deltas, without text of the prompt."""
        next(self._steps, None)
        deltas = self._writer.pop_deltas()
        return self._without_prompt_text(deltas) if self._held_prompt_text and deltas else deltas

    def _without_prompt_text(self, deltas: list[Delta]) -> list[Delta]:
        """Returns the deltas without _held_prompt_text at their beginning."""
        first = deltas[0]
        size = min(len(self._held_prompt_text), len(first.text))
        if first.kind not in ("content", "reasoning") or first.text[:size] != self._held_prompt_text[:size]:
            self._held_prompt_text = ""
            return deltas
        self._held_prompt_text, rest = self._held_prompt_text[size:], first.text[size:]
        return [Delta(first.kind, rest), *deltas[1:]] if rest else deltas[1:]


def _parse_output(reader: TextReader, writer: DeltaWriter, formats: Formats) -> Steps[None]:
    """Parse one whole output.  Writes its deltas to `writer`."""
    reasoning, tools = formats.reasoning, formats.tools
    if reasoning is not None and reasoning.includes_calls:
        yield from harmony.parse(reader, writer)
        return
    if reasoning is not None:
        yield from parse_reasoning(reader, writer, reasoning)
    writer.may_reason = False
    if tools is not None and writer.schemas:
        yield from tools.parse(reader, writer)
        return
    while (yield from reader.peek()):
        writer.add_content(reader.take_characters(len(reader.buffer)))


@dataclass(frozen=True)
class ToolCall:
    """A parsed tool call.  arguments: a JSON object as text."""

    id: str
    name: str
    arguments: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Returns the call in OpenAI's form."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class Message:
    """A parsed assistant message.  errors: why tool calls could not be parsed; the text of these calls is content."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def message_of(deltas: Iterable[Delta]) -> Message:
    """Returns the message that consists of all these deltas."""
    content: list[str] = []
    reasoning: list[str] = []
    errors: list[str] = []
    # By index of the call: (the call's first delta, the pieces of its arguments).
    calls: dict[int, tuple[Delta, list[str]]] = {}
    for delta in deltas:
        if delta.kind == "content":
            content.append(delta.text)
        elif delta.kind == "reasoning":
            reasoning.append(delta.text)
        elif delta.kind == "call":
            calls[delta.index] = delta, []
        elif delta.kind == "arguments":
            calls[delta.index][1].append(delta.text)
        elif delta.kind == "broken":
            calls.pop(delta.index, None)
            errors.append(delta.text)
    tool_calls = [ToolCall(call.id, call.text, "".join(arguments)) for call, arguments in calls.values()]
    return Message("".join(content), "".join(reasoning), tool_calls, errors)
