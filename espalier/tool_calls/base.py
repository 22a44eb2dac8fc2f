"""Shared parts of the parsers of tool calls and reasoning: the deltas that they make, the declaration of a format, and
the reader of reasoning between two marks."""

import secrets
import string
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from espalier.tool_calls.reader import BrokenCall, Markers, Steps, TextReader, decode_json

# The kinds of deltas: text of the answer; text of the reasoning; the name of a new call; text of the call's arguments;
# the call's end; the reason why a call is broken.  The whole text of a broken call follows as content.
Kind = Literal["content", "reasoning", "call", "arguments", "called", "broken"]
ALPHANUMERIC = string.ascii_letters + string.digits


@dataclass(frozen=True)
class Delta:
    """A part of a message.

    index: of the call, in the order of the calls; -1 for a broken call whose name was not sent.  id: of a new call.
    """

    kind: Kind
    text: str = ""
    index: int = -1
    id: str = ""


def call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def new_short_call_id() -> str:
    """Returns a new call id in the only form that Mistral's chat templates accept."""
    return "".join(secrets.choice(ALPHANUMERIC) for _ in range(9))


@dataclass
class DeltaWriter:
    """Collects the deltas that a parser makes.

    schemas: for each tool that may be called, the parameters' JSON schema.  in_reasoning, may_reason: the parser's.
    """

    schemas: Mapping[str, Mapping[str, Any]]
    make_id: Callable[[], str]
    in_reasoning: bool = False
    may_reason: bool = True
    num_calls: int = 0
    _deltas: list[Delta] = field(default_factory=list)

    def add(self, kind: Kind, text: str = "", index: int = -1, id: str = "") -> None:
        last = self._deltas[-1] if self._deltas and kind in ("content", "reasoning", "arguments") else None
        if last is not None and (last.kind, last.index) == (kind, index):
            self._deltas[-1] = Delta(kind, last.text + text, index)
        else:
            self._deltas.append(Delta(kind, text, index, id))

    def content(self, text: str) -> None:
        self.add("content", text)

    def reasoning(self, text: str) -> None:
        self.add("reasoning", text)

    def resume(self, deltas: Sequence[Delta]) -> None:
        """Continue after the deltas of a prompt that begins the answer.  Only a call that is open in them is kept."""
        open_call = self.num_calls - 1
        if any(delta.kind in ("called", "broken") and delta.index == open_call for delta in deltas):
            return
        self._deltas = [delta for delta in deltas if delta.index == open_call >= 0]

    def pop_deltas(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas


class CallWriter:
    """Writes one tool call.  Its arguments are held back until its name is known."""

    def __init__(self, writer: DeltaWriter):
        self.writer = writer
        self.index = -1
        self._parts: list[str] = []

    @property
    def schema(self) -> Mapping[str, Any]:
        return self.writer.schemas[self._name]

    def name(self, name: Any) -> None:
        """Write the name of the call.  Raises BrokenCall if there is no such tool."""
        if self.index >= 0:
            raise BrokenCall("the tool call has two names")
        if not isinstance(name, str) or name not in self.writer.schemas:
            shown = name if isinstance(name, str) else "something that is no text"
            raise BrokenCall(f"the tool call names {shown[:80]!r}, which is not in tools")
        self._name = name
        self.index = self.writer.num_calls
        self.writer.num_calls += 1
        self.writer.add("call", name, self.index, self.writer.make_id())
        if self._parts:
            self.writer.add("arguments", "".join(self._parts), self.index)

    def arguments(self, text: str) -> None:
        self._parts.append(text)
        if self.index >= 0:
            self.writer.add("arguments", text, self.index)

    @property
    def has_arguments(self) -> bool:
        return bool(self._parts)

    def end(self) -> None:
        """End the call.  Raises BrokenCall if the name is missing, or if the arguments are not a JSON object."""
        if self.index < 0:
            raise BrokenCall("the tool call has no name")
        if not self._parts:
            self.arguments("{}")
        if not isinstance(decode_json("".join(self._parts)), dict):
            raise BrokenCall("the tool call's arguments are not a JSON object")
        self.writer.add("called", "", self.index)


def read_call(
    reader: TextReader, writer: DeltaWriter, opening: str, read: Callable[[CallWriter], Steps[None]]
) -> Steps[bool]:
    """Read one call.  Returns False if the call is broken; its whole text is then content.

    opening: the text of the call that was already read.  read: reads the rest.
    """
    reader.start_recording(opening)
    call = CallWriter(writer)
    try:
        yield from read(call)
        call.end()
    except BrokenCall as broken:
        writer.add("broken", str(broken), call.index)
        writer.content(reader.stop_recording())
        return False
    reader.stop_recording()
    return True


ParseOutput = Callable[[TextReader, DeltaWriter], Generator[None, None, None]]


@dataclass(frozen=True)
class CallSyntax:
    """How a call is written, for a grammar that forces a call: before_name, name, after_name, arguments, end.

    separator: the text between calls.  opening, closing: the text around all calls.  style: of the arguments, one of
    xgrammar's styles of a JSON schema.
    """

    before_name: str
    after_name: str
    end: str
    separator: str = ""
    opening: str = ""
    closing: str = ""
    style: str = "json"


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes tool calls.

    template_signs: texts that all stand in a chat template of this family.  special_tokens: the special tokens that the
    parser reads; they appear in its text if the tokenizer has them.  parse: reads an answer to its end.
    call_ends_output: a call ends the output.  make_id: returns the id of a new call.  arguments_as_text: the chat
    template takes the arguments of earlier calls as text, not as an object.
    """

    name: str
    template_signs: tuple[str, ...]
    special_tokens: tuple[str, ...]
    parse: ParseOutput
    syntax: CallSyntax
    call_ends_output: bool = False
    make_id: Callable[[], str] = call_id
    arguments_as_text: bool = False


@dataclass(frozen=True)
class ReasoningFormat:
    """How a family of models separates its reasoning.

    begin, end: the marks around the reasoning.  answer: text between the reasoning and an answer that is no call.
    template_switches: variables of a chat template.  A model whose template reads one of them reasons even if its
    prompt does not open the reasoning.  includes_calls: the tool format of this name also reads the reasoning, and such
    a model may always reason.  message_start: the text with which each message of such a model begins.
    """

    name: str
    template_signs: tuple[str, ...]
    special_tokens: tuple[str, ...]
    begin: str
    end: str
    answer: str = ""
    template_switches: tuple[str, ...] = ()
    includes_calls: bool = False
    message_start: str = ""


NEWLINE_CHARS = "\n"


def parse_reasoning(reader: TextReader, writer: DeltaWriter, format: ReasoningFormat) -> Steps[None]:
    """Read the reasoning, if there is any, up to its end, and again if more follows directly.

    Newlines beside the marks belong to the marks.  A begin mark inside reasoning, or an end mark outside, is left out.
    """
    marks = Markers(format.end, format.begin, strip_before=NEWLINE_CHARS)
    while (marker := (yield from _first_marker(reader, format))) is not None:
        writer.in_reasoning = marker == format.begin
        while marker == format.begin:
            yield from reader.read_space(NEWLINE_CHARS)
            marker = yield from reader.read_until(marks, writer.reasoning)
        writer.in_reasoning = False
        if marker is not None:
            yield from reader.read_space(NEWLINE_CHARS)


def _first_marker(reader: TextReader, format: ReasoningFormat) -> Steps[str | None]:
    """Read the white space and the reasoning mark that come next.  Returns the mark, None if no mark comes next."""
    space = yield from reader.read_space()
    marker = yield from reader.read_literal(format.begin, format.end)
    if marker is None:
        reader.put_back(space)
    return marker


THINK_REASONING = ReasoningFormat(
    name="think",
    template_signs=("think>",),
    special_tokens=("<think>", "</think>"),
    begin="<think>",
    end="</think>",
    template_switches=("enable_thinking", "thinking"),
)
MISTRAL_REASONING = ReasoningFormat(
    name="mistral",
    template_signs=("[THINK]",),
    special_tokens=("[THINK]", "[/THINK]"),
    begin="[THINK]",
    end="[/THINK]",
)
