"""Reads the text of an output for parsers.  The text arrives in pieces, whose sizes do not change the result.

A parser is a generator (Steps).  It reads the text from start to end, and yields None when it needs more text.
"""

import json
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from espalier.grammar.spec import refuse_json_constant

T = TypeVar("T")
# A function of a parser: a generator that yields None when it needs more text, and returns a T.
Steps = Generator[None, None, T]
TextCallback = Callable[[str], None]
WHITE_SPACE = " \t\r\n"
# The most characters of a tool's name.
MAX_NAME_CHARS = 256


class BrokenCall(Exception):
    """A tool call cannot be parsed.  The message is the reason, for the user."""


CUT_OFF_REASON = "the output ends inside the tool call"


class Markers:
    """Texts at which reading stops.  No marker may be a part of another marker.  strip_before: characters that are
    dropped if they come directly before a marker."""

    def __init__(self, *texts: str, strip_before: str = ""):
        self.texts = texts
        self.strip_before = strip_before
        self.longest = max(map(len, texts))
        self.pattern = re.compile("|".join(map(re.escape, texts)))

    def num_held_back(self, text: str) -> int:
        """Returns how many characters at the end of `text` may be the beginning of a marker.  The strip_before
        characters before this beginning are counted too.

        text: contains no whole marker."""
        num_held = 0
        for marker in self.texts:
            for size in range(min(len(marker) - 1, len(text)), num_held, -1):
                if marker.startswith(text[-size:]):
                    num_held = size
                    break
        if not self.strip_before:
            return num_held
        return len(text) - len(text[: len(text) - num_held].rstrip(self.strip_before))


@dataclass
class TextReader:
    """The text of an output, with methods to read it.  buffer: text that has arrived and is not yet read.  has_ended:
    whether all text has arrived.  is_cut_off: whether the output ended without a stop token."""

    buffer: str = ""
    has_ended: bool = False
    is_cut_off: bool = False
    _recorded_texts: list[str] | None = None

    def start_recording(self, text: str) -> None:
        """Record the text that is read from now on.  text: the record's beginning, which was read before."""
        self._recorded_texts = [text]

    def stop_recording(self) -> str:
        kept, self._recorded_texts = self._recorded_texts or [], None
        return "".join(kept)

    def take_characters(self, num_characters: int) -> str:
        """Read and return `num_characters` characters of the buffer."""
        text, self.buffer = self.buffer[:num_characters], self.buffer[num_characters:]
        if self._recorded_texts is not None:
            self._recorded_texts.append(text)
        return text

    def put_back(self, text: str) -> None:
        """Put text that was just read back into the buffer.  Not allowed while recording."""
        self.buffer = text + self.buffer

    def wait_for_text(self) -> Steps[bool]:
        """Wait for more text.  Returns False at the end of the output."""
        size = len(self.buffer)
        while len(self.buffer) == size and not self.has_ended:
            yield
        return len(self.buffer) > size

    def read_until(self, markers: Markers, on_text: TextCallback) -> Steps[str | None]:
        """Read the text up to and including the first marker.  Returns the marker; None at the end of the output.

        on_text: called with each piece of text before the marker, when the piece cannot be part of a marker."""
        start = 0
        while True:
            if (match := markers.pattern.search(self.buffer, start)) is not None:
                before = self.take_characters(len(self.buffer[: match.start()].rstrip(markers.strip_before)))
                self.take_characters(match.end() - len(before))
                if before:
                    on_text(before)
                return match[0]
            held = markers.num_held_back(self.buffer)
            if text := self.take_characters(len(self.buffer) - held):
                on_text(text)
            # A model may write many strip_before characters.  They are held back, but not searched for a marker again.
            start = max(0, held - markers.longest + 1)
            if not (yield from self.wait_for_text()):
                if rest := self.take_characters(len(self.buffer)):
                    on_text(rest)
                return None

    def read_text_before(self, *markers: str) -> Steps[tuple[str, str]]:
        """Read a short text up to a marker.  Returns (text, marker).  Raises BrokenCall if no marker comes."""
        parts: list[str] = []

        def add_part(text: str) -> None:
            parts.append(text)
            if sum(map(len, parts)) > MAX_NAME_CHARS:
                raise BrokenCall(f"{' or '.join(markers)} is missing in the tool call")

        marker = yield from self.read_until(Markers(*markers), add_part)
        if marker is None:
            raise BrokenCall(CUT_OFF_REASON)
        return "".join(parts), marker

    def read_word(self, stops: str) -> Steps[str]:
        """Read a short text up to one of the characters `stops`, or to the end.  Raises BrokenCall for a long text."""
        parts: list[str] = []
        while (char := (yield from self.peek())) and char not in stops:
            parts.append(self.take_characters(1))
            if len(parts) > MAX_NAME_CHARS:
                raise BrokenCall(f"{' or '.join(stops)} is missing in the tool call")
        return "".join(parts)

    def peek(self) -> Steps[str]:
        """Returns the next character without reading it; "" at the end of the output."""
        if not self.buffer:
            yield from self.wait_for_text()
        return self.buffer[:1]

    def read_space(self, characters: str = WHITE_SPACE) -> Steps[str]:
        """Read and return the white space that comes next.  characters: what counts as white space."""
        parts: list[str] = []
        while (char := (yield from self.peek())) and char in characters:
            parts.append(self.take_characters(len(self.buffer) - len(self.buffer.lstrip(characters))))
        return "".join(parts)

    def peek_literal(self, *texts: str) -> Steps[str | None]:
        """Returns which of the texts comes next, without reading it; None if none of them does."""
        while True:
            for text in texts:
                if self.buffer.startswith(text):
                    return text
            if not any(text.startswith(self.buffer) for text in texts) or not (yield from self.wait_for_text()):
                return None

    def read_literal(self, *texts: str) -> Steps[str | None]:
        """If one of `texts` comes next, read and return it, else return None.  No text may be the start of another."""
        literal = yield from self.peek_literal(*texts)
        return None if literal is None else self.take_characters(len(literal))

    def expect(self, text: str) -> Steps[None]:
        """Read `text`.  Raises BrokenCall if other text comes next."""
        if (yield from self.read_literal(text)) is None:
            at_end = self.has_ended and text.startswith(self.buffer)
            raise BrokenCall(CUT_OFF_REASON if at_end else f"{text} is missing in the tool call")

    def read_json_value(self, on_text: TextCallback) -> Steps[None]:
        """Read one JSON value.  on_text: called with the pieces of its text.  Raises BrokenCall for a cut-off value.

        Only brackets and quotes are interpreted, so the value may be invalid JSON."""
        end_finder = _JsonEndFinder()
        while True:
            if size := end_finder.scan(self.buffer):
                on_text(self.take_characters(size))
            if end_finder.is_found:
                return
            if not (yield from self.wait_for_text()):
                raise BrokenCall(CUT_OFF_REASON)

    def read_decoded_json(self) -> Steps[Any]:
        """Read one JSON value and decode it.  Raises BrokenCall."""
        parts: list[str] = []
        yield from self.read_json_value(parts.append)
        return decode_json("".join(parts))


def decode_json(text: str) -> Any:
    """Returns the value of a JSON text.  Raises BrokenCall."""
    try:
        return json.loads(text, parse_constant=refuse_json_constant)
    except (ValueError, RecursionError):
        raise BrokenCall("the tool call is not valid JSON") from None


def is_utf8(text: str) -> bool:
    """Returns whether UTF-8 can encode the text.  UTF-8 cannot encode a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass
class _JsonEndFinder:
    """Finds the end of a JSON value that arrives in pieces."""

    is_found: bool = False
    _depth: int = 0
    _in_string: bool = False
    _escaped: bool = False
    _in_scalar: bool = False

    def scan(self, text: str) -> int:
        """Returns how many characters of `text` belong to the value.  text: the next piece of the output."""
        for i, char in enumerate(text):
            if self._in_string:
                self._in_string = self._escaped or char != '"'
                self._escaped = char == "\\" and not self._escaped
            elif self._in_scalar and char in ",]}" + WHITE_SPACE:
                self.is_found = True
                return i
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
            elif not self._depth:
                self._in_scalar = True
            if not (self._depth > 0 or self._in_string or self._in_scalar):
                self.is_found = True
                return i + 1
        return len(text)
