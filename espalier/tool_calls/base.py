"""What the parsers of tool calls and reasoning share: the pieces of a message (deltas), the classes of formats, and the
parser of reasoning between two markers."""

import secrets
import string
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from espalier.tool_calls.reader import BrokenCall, Markers, Steps, TextReader, decode_json

# The kind of a delta tells what the delta's text is.  content: a piece of the answer.  reasoning: a piece of the
# reasoning.  call: the name of a new tool call.  arguments: a piece of this call's arguments.  called: no text; the
# call has ended.  broken: why the call cannot be parsed; the call's whole text follows as content.
DeltaKind = Literal["content", "reasoning", "call", "arguments", "called", "broken"]
ALPHANUMERIC = string.ascii_letters + string.digits


@dataclass(frozen=True)
class Delta:
    """A piece of a streamed message.  index: the number of the tool call, from 0; -1 outside calls, and for a call that
    broke before its name was known.  id: the id of a new call."""

    kind: DeltaKind
    text: str = ""
    index: int = -1
    id: str = ""


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def new_short_call_id() -> str:
    """Returns a new call id of nine characters, the only form that Mistral's chat templates accept."""
    return "".join(secrets.choice(ALPHANUMERIC) for _ in range(9))


@dataclass
class DeltaWriter:
    """Collects the deltas that a parser makes.  schemas: the schema of each callable tool's parameters, by tool name.
    in_reasoning: whether the text so far ends inside the reasoning.  may_reason: whether reasoning may still come."""

    schemas: Mapping[str, Mapping[str, Any]]
    make_call_id: Callable[[], str]
    in_reasoning: bool = False
    may_reason: bool = True
    num_calls: int = 0
    _deltas: list[Delta] = field(default_factory=list)

    def add_delta(self, kind: DeltaKind, text: str = "", index: int = -1, id: str = "") -> None:
        """Add a delta with these fields, or lengthen the last delta if it has the same kind and index."""
        last = self._deltas[-1] if self._deltas and kind in ("content", "reasoning", "arguments") else None
        if last is not None and (last.kind, last.index) == (kind, index):
            self._deltas[-1] = Delta(kind, last.text + text, index)
        else:
            self._deltas.append(Delta(kind, text, index, id))

    def add_content(self, text: str) -> None:
        self.add_delta("content", text)

    def add_reasoning(self, text: str) -> None:
        self.add_delta("reasoning", text)

    def resume(self, deltas: Sequence[Delta]) -> None:
        """Continue an answer that begins at the prompt's end, such as "<think>".  deltas: made from this beginning.

        Text of the prompt is no output, so the deltas are dropped, except those of a call that has not ended."""
        open_call = self.num_calls - 1
        if any(delta.kind in ("called", "broken") and delta.index == open_call for delta in deltas):
            return
        self._deltas = [delta for delta in deltas if delta.index == open_call >= 0]

    def pop_deltas(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas


class CallWriter:
    """Writes the deltas of one tool call.  Arguments that come before the name are kept until the name comes."""

    def __init__(self, writer: DeltaWriter):
        self.writer = writer
        self.index = -1
        self._argument_parts: list[str] = []

    @property
    def schema(self) -> Mapping[str, Any]:
        """The JSON schema of the called tool's parameters."""
        return self.writer.schemas[self._name]

    def write_name(self, name: Any) -> None:
        """Write the call's name.  Raises BrokenCall for an unknown tool."""
        if self.index >= 0:
            raise BrokenCall("the tool call has two names")
        if not isinstance(name, str) or name not in self.writer.schemas:
            shown = name if isinstance(name, str) else "something that is no text"
            raise BrokenCall(f"the tool call names {shown[:80]!r}, which is not in tools")
        self._name = name
        self.index = self.writer.num_calls
        self.writer.num_calls += 1
        self.writer.add_delta("call", name, self.index, self.writer.make_call_id())
        if self._argument_parts:
            self.writer.add_delta("arguments", "".join(self._argument_parts), self.index)

    def write_arguments(self, text: str) -> None:
        """Add a piece of the JSON text of the call's arguments."""
        self._argument_parts.append(text)
        if self.index >= 0:
            self.writer.add_delta("arguments", text, self.index)

    @property
    def has_arguments(self) -> bool:
        return bool(self._argument_parts)

    def end_call(self) -> None:
        """End the call.  Raises BrokenCall if the name is missing, or the arguments are no JSON object."""
        if self.index < 0:
            raise BrokenCall("the tool call has no name")
        if not self._argument_parts:
            self.write_arguments("{}")
        if not isinstance(decode_json("".join(self._argument_parts)), dict):
            raise BrokenCall("the tool call's arguments are not a JSON object")
        self.writer.add_delta("called", "", self.index)


def read_call(
    reader: TextReader, writer: DeltaWriter, opening_marker: str, read_body: Callable[[CallWriter], Steps[None]]
) -> Steps[bool]:
    """Read one call, and return whether the call could be parsed.  If not, the call's whole text becomes content.

    opening_marker: the text of the call that was already read.  read_body: reads the rest of the call."""
    reader.start_recording(opening_marker)
    call = CallWriter(writer)
    try:
        yield from read_body(call)
        call.end_call()
    except BrokenCall as broken:
        writer.add_delta("broken", str(broken), call.index)
        writer.add_content(reader.stop_recording())
        return False
    reader.stop_recording()
    return True


ParseOutput = Callable[[TextReader, DeltaWriter], Generator[None, None, None]]


@dataclass(frozen=True)
class CallSyntax:
    """The syntax of tool calls, from which a grammar is made.

    A call consists of before_name, the tool's name, after_name, the arguments and after_arguments.  separator: the text
    between two calls.  calls_begin, calls_end: the texts before the first and after the last call.  arguments_style:
    how arguments are written, as a `style` of a JSON schema in xgrammar."""

    before_name: str
    after_name: str
    after_arguments: str
    separator: str = ""
    calls_begin: str = ""
    calls_end: str = ""
    arguments_style: str = "json"


@dataclass(frozen=True)
class ToolFormat:
    """The format in which a family of models writes tool calls.

    template_signs: texts that every chat template of this family has.  special_tokens: the special tokens that the
    parser needs, so they must be in the output's text.  parse: parses an answer after its reasoning.  call_ends_output:
    whether the output ends after a call.  make_call_id: returns the id of a new call.  arguments_as_text: whether the
    chat template takes the arguments of earlier calls as JSON text instead of objects."""

    name: str
    template_signs: tuple[str, ...]
    special_tokens: tuple[str, ...]
    parse: ParseOutput
    syntax: CallSyntax
    call_ends_output: bool = False
    make_call_id: Callable[[], str] = new_call_id
    arguments_as_text: bool = False


@dataclass(frozen=True)
class ReasoningFormat:
    """The format in which a family of models separates its reasoning from the answer.

    template_signs: texts that every chat template of this family has.  special_tokens: the special tokens that the
    parser needs.  begin_marker, end_marker: the texts around the reasoning.  answer_marker: the text before an answer
    without tool calls.  template_switches: chat template variables that switch reasoning on or off.  If the template
    reads one of them, the model may reason even if the prompt does not begin the reasoning.  includes_calls: whether
    the tool format with the same name parses the reasoning too.  message_marker: the text that begins a message of the
    model, if includes_calls."""

    name: str
    template_signs: tuple[str, ...]
    special_tokens: tuple[str, ...]
    begin_marker: str
    end_marker: str
    answer_marker: str = ""
    template_switches: tuple[str, ...] = ()
    includes_calls: bool = False
    message_marker: str = ""


NEWLINE_CHARS = "\n"


def parse_reasoning(reader: TextReader, writer: DeltaWriter, format: ReasoningFormat) -> Steps[None]:
    """Read all reasoning that comes next.  All markers and the newlines around them are dropped, even a begin_marker
    inside reasoning or an end_marker outside reasoning."""
    markers = Markers(format.end_marker, format.begin_marker, strip_before=NEWLINE_CHARS)
    while (marker := (yield from _read_first_marker(reader, format))) is not None:
        writer.in_reasoning = marker == format.begin_marker
        while marker == format.begin_marker:
            yield from reader.read_space(NEWLINE_CHARS)
            marker = yield from reader.read_until(markers, writer.add_reasoning)
        writer.in_reasoning = False
        if marker is not None:
            yield from reader.read_space(NEWLINE_CHARS)


def _read_first_marker(reader: TextReader, format: ReasoningFormat) -> Steps[str | None]:
    """Read white space and a reasoning marker.  Returns the marker; if none comes next, reads nothing, returns None."""
    space = yield from reader.read_space()
    marker = yield from reader.read_literal(format.begin_marker, format.end_marker)
    if marker is None:
        reader.put_back(space)
    return marker


THINK_REASONING = ReasoningFormat(
    name="think",
    template_signs=("think>",),
    special_tokens=("<think>", "</think>"),
    begin_marker="<think>",
    end_marker="</think>",
    template_switches=("enable_thinking", "thinking"),
)
MISTRAL_REASONING = ReasoningFormat(
    name="mistral",
    template_signs=("[THINK]",),
    special_tokens=("[THINK]", "[/THINK]"),
    begin_marker="[THINK]",
    end_marker="[/THINK]",
)
