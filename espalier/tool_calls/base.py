"""What parsers of tool calls and reasoning share: the deltas that they make, the declaration of a format, and
reasoning between two marks."""

import secrets
import string
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from espalier.tool_calls.reader import Broken, Markers, Reader, Steps, decoded

# What a delta is: text of the answer; text of the reasoning; the name of a new call; text of its arguments; its end;
# the reason why a call is broken.  The whole text of a broken call follows as content.
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


def short_id() -> str:
    """The only form that Mistral's chat templates take."""
    return "".join(secrets.choice(ALPHANUMERIC) for _ in range(9))


class Writer:
    """Where a parser puts what it finds.

    schemas: the parameters' JSON schema of each tool that may be called.  in_reasoning, may_reason: set by the parser.
    """

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]], make_id: Callable[[], str]):
        self.schemas = schemas
        self.make_id = make_id
        self.in_reasoning = False
        self.may_reason = True
        self.num_calls = 0
        self._deltas: list[Delta] = []

    def add(self, kind: Kind, text: str = "", index: int = -1, id: str = "") -> None:
        last = self._deltas[-1] if self._deltas else None
        if (
            last is not None
            and kind in ("content", "reasoning", "arguments")
            and (last.kind, last.index) == (kind, index)
        ):
            self._deltas[-1] = Delta(kind, last.text + text, index)
        else:
            self._deltas.append(Delta(kind, text, index, id))

    def content(self, text: str) -> None:
        self.add("content", text)

    def reasoning(self, text: str) -> None:
        self.add("reasoning", text)

    def resume(self, deltas: Sequence[Delta]) -> None:
        """Go on after deltas that the prompt has shown.  A call that is open in them is the answer's."""
        open_call = self.num_calls - 1
        if any(delta.kind in ("called", "broken") and delta.index == open_call for delta in deltas):
            return
        self._deltas = [delta for delta in deltas if delta.index == open_call >= 0]

    def take(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas


class CallWriter:
    """One tool call.  Its arguments are held back until its name is known."""

    def __init__(self, writer: Writer):
        self.writer = writer
        self.index = -1
        self._parts: list[str] = []

    @property
    def schema(self) -> Mapping[str, Any]:
        return self.writer.schemas[self._name]

    def name(self, name: Any) -> None:
        """Raises Broken if there is no such tool."""
        if self.index >= 0:
            raise Broken("the tool call has two names")
        if not isinstance(name, str) or name not in self.writer.schemas:
            shown = name if isinstance(name, str) else "something that is no text"
            raise Broken(f"the tool call names {shown[:80]!r}, which is not in tools")
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
        """Raises Broken if the name is missing, or if the arguments are not a JSON object."""
        if self.index < 0:
            raise Broken("the tool call has no name")
        if not self._parts:
            self.arguments("{}")
        if not isinstance(decoded("".join(self._parts)), dict):
            raise Broken("the tool call's arguments are not a JSON object")
        self.writer.add("called", "", self.index)


def read_call(reader: Reader, writer: Writer, opening: str, read: Callable[[CallWriter], Steps[None]]) -> Steps[bool]:
    """Read one call.  False: it is broken, and all of it is content.

    opening: what was read of it; read: reads the rest.
    """
    reader.keep(opening)
    call = CallWriter(writer)
    try:
        yield from read(call)
        call.end()
    except Broken as broken:
        writer.add("broken", str(broken), call.index)
        writer.content(reader.kept())
        return False
    reader.kept()
    return True


Parse = Callable[[Reader, Writer], Generator[None, None, None]]


@dataclass(frozen=True)
class CallSyntax:
    """How a call is written, for a grammar that forces one: before_name, name, after_name, arguments, end.

    separator: between calls; opening, closing: around all of them.  style: of the arguments, one of xgrammar's styles
    of a JSON schema.
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

    signs: texts of a chat template of this family, all of which must be there.  special_tokens: those that the parser
    reads; they appear in its text if the tokenizer has them.  parse: reads an answer to its end.  one_call: a call ends
    the output.  make_id: ids of calls.  takes_text: the chat template takes the arguments of earlier calls as text, not
    as an object.
    """

    name: str
    signs: tuple[str, ...]
    special_tokens: tuple[str, ...]
    parse: Parse
    syntax: CallSyntax
    one_call: bool = False
    make_id: Callable[[], str] = call_id
    takes_text: bool = False


@dataclass(frozen=True)
class ReasoningFormat:
    """How a family of models separates its reasoning.

    begin, end: around the reasoning.  answer: text between the reasoning and an answer that is no call.  switches:
    variables of a chat template with which such a model reasons where its prompt does not say so.  whole: the tool
    format of this name reads the reasoning too, and such a model always may reason; turn: the text with which each of
    its messages begins.
    """

    name: str
    signs: tuple[str, ...]
    special_tokens: tuple[str, ...]
    begin: str
    end: str
    answer: str = ""
    switches: tuple[str, ...] = ()
    whole: bool = False
    turn: str = ""


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
