"""A regular expression as a tree of nodes, and as a text that all parts of xgrammar interpret correctly.

A set of characters is a tuple of sorted, disjoint ranges of code points, without surrogates.  \\d, \\w and \\s match
only ASCII in some dialects of regular expressions, and all of Unicode in others.  So each class has two sets: the
characters that every dialect accepts, and the characters that at least one dialect accepts.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

LAST_CODE_POINT = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)

# (first, last) code points.
Ranges = tuple[tuple[int, int], ...]


class Characters(NamedTuple):
    """The characters that a class accepts in every dialect, and those that it accepts in at least one dialect."""

    in_every_dialect: Ranges
    in_some_dialect: Ranges

    def negated(self) -> "Characters":
        return Characters(complement(self.in_some_dialect), complement(self.in_every_dialect))


def same_in_all_dialects(ranges: Iterable[tuple[int, int]]) -> Characters:
    """ranges: pairs (first, last) of code points, of the characters that a class accepts in every dialect."""
    valid_ranges = complement(complement(union(ranges)))  # without surrogates
    return Characters(valid_ranges, valid_ranges)


def union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Returns the same characters as sorted, disjoint ranges."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(last, merged[-1][1])
        else:
            merged.append((first, last))
    return tuple(merged)


def complement(ranges: Ranges) -> Ranges:
    """Returns all other characters, except surrogates."""
    next_free, gaps = 0, []
    for first, last in union((*ranges, SURROGATES)):
        if next_free < first:
            gaps.append((next_free, first - 1))
        next_free = last + 1
    return (*gaps, (next_free, LAST_CODE_POINT)) if next_free <= LAST_CODE_POINT else tuple(gaps)


def intersection(first: Ranges, second: Ranges) -> Ranges:
    return complement(union((*complement(first), *complement(second))))


def ranges_of_text(characters: str) -> Ranges:
    return union((ord(character), ord(character)) for character in characters)


@lru_cache
def _ranges_of_python_class(escape: str) -> Ranges:
    """Returns the characters that an escape such as \\d matches in Python's re."""
    text = "".join(map(chr, (*range(SURROGATES[0]), *range(SURROGATES[1] + 1, LAST_CODE_POINT + 1))))
    return union((ord(run[0][0]), ord(run[0][-1])) for run in re.finditer(f"{escape}+", text))


@lru_cache
def characters_of_class(escape: str) -> Characters:
    r"""Returns the characters of \d, \w, \s, \D, \W or \S.  escape: the letter."""
    if escape in "DWS":
        return characters_of_class(escape.lower()).negated()
    ascii_part = {"d": ((48, 57),), "w": ((48, 57), (65, 90), (95, 95), (97, 122)), "s": ((9, 13), (32, 32))}[escape]
    # In ECMAScript, the byte order mark is white space.
    ecmascript_only = ranges_of_text("\ufeff") if escape == "s" else ()
    return Characters(ascii_part, union((*_ranges_of_python_class("\\" + escape), *ecmascript_only)))


ALL_CHARACTERS: Ranges = complement(())
# The characters that a JSON string may have without an escape.
JSON_CHARACTERS: Ranges = complement(union(((0, 0x1F), *ranges_of_text('"\\'))))
NEWLINE: Ranges = ranges_of_text("\n")
# The characters that "." does not match in ECMAScript.  In Python, "." matches all characters but NEWLINE.
NEWLINES: Ranges = ranges_of_text("\n\r\u2028\u2029")


CARET_RANGES = ranges_of_text("^")
# The last code points that have two and three bytes in UTF-8.  No range may contain one of them and also the code point
# after it (see _without_utf8_gaps).
UTF8_GAPS = (0x7FF, 0xFFFF)
# The largest repetition count that xgrammar unrolls.
MAX_UNROLLED = 128
# A larger repetition of a character is written as repeated blocks of about BLOCK_CHARS characters.  A regex with more
# than MAX_CHARS_IN_BLOCKS characters is written without blocks, because xgrammar would compile the blocks too slowly.
BLOCK_CHARS = 100
MAX_CHARS_IN_BLOCKS = 1000


@dataclass(frozen=True)
class Chars:
    """One character of a set."""

    ranges: Ranges


@dataclass(frozen=True)
class Seq:
    """A sequence of parts.  A Seq without parts is the empty text."""

    parts: tuple["Node", ...]


@dataclass(frozen=True)
class Alt:
    """Any of several branches, as in a|b.  An Alt without branches matches no text."""

    branches: tuple["Node", ...]


@dataclass(frozen=True)
class Repeat:
    """A part, repeated `minimum` to `maximum` times.  maximum: None for no upper bound."""

    repeated: "Node"
    minimum: int
    maximum: int | None


@dataclass(frozen=True)
class Anchor:
    """The anchor ^ (if is_start) or $.  position: the anchor's index in the regex, for errors."""

    is_start: bool
    position: int


Node = Chars | Seq | Alt | Repeat | Anchor
EMPTY_TEXT = Seq(())
NO_TEXT = Alt(())


def seq(parts: list[Node]) -> Node:
    """Returns a node for the concatenated parts, with nested sequences made flat."""
    flat_parts: list[Node] = []
    for part in parts:
        if part == NO_TEXT:
            return NO_TEXT
        flat_parts += part.parts if isinstance(part, Seq) else [part]
    return flat_parts[0] if len(flat_parts) == 1 else Seq(tuple(flat_parts))


def alt(branches: list[Node]) -> Node:
    """Returns a node for any of the branches.  If a branch is empty, this branch is left out and the other branches
    become optional, so that no text matches in two ways."""
    distinct = tuple(branch for branch in dict.fromkeys(branches) if branch not in (EMPTY_TEXT, NO_TEXT))
    node = distinct[0] if len(distinct) == 1 else Alt(distinct)
    return repeat(node, 0, 1) if EMPTY_TEXT in branches else node


def repeat(repeated: Node, minimum: int, maximum: int | None) -> Node:
    """Returns a node for `minimum` to `maximum` repetitions; maximum None: no upper limit."""
    if repeated == EMPTY_TEXT or maximum == 0 or (repeated == NO_TEXT and minimum == 0):
        return EMPTY_TEXT
    return repeated if repeated == NO_TEXT or (minimum, maximum) == (1, 1) else Repeat(repeated, minimum, maximum)


def restrict_to(node: Node, allowed: Ranges) -> Node:
    """Returns the node, limited to texts of allowed characters; NO_TEXT if no text is left."""
    if isinstance(node, Chars):
        allowed_ranges = intersection(node.ranges, allowed)
        return Chars(allowed_ranges) if allowed_ranges else NO_TEXT
    if isinstance(node, Seq):
        return seq([restrict_to(part, allowed) for part in node.parts])
    if isinstance(node, Alt):
        return alt([restrict_to(branch, allowed) for branch in node.branches])
    if isinstance(node, Repeat):
        return repeat(restrict_to(node.repeated, allowed), node.minimum, node.maximum)
    return node


def children(node: Node) -> tuple[Node, ...]:
    if isinstance(node, Repeat):
        return (node.repeated,)
    return node.parts if isinstance(node, Seq) else node.branches if isinstance(node, Alt) else ()


def num_states(node: Node) -> int:
    """Returns the number of Chars in the node, where a part that is repeated n times counts n times."""
    if isinstance(node, Seq):
        return sum(map(num_states, node.parts))
    if isinstance(node, Alt):
        return sum(map(num_states, node.branches))
    if isinstance(node, Repeat):
        return num_states(node.repeated) * max(node.minimum, node.maximum or 1)
    return 1


def num_ranges(node: Node) -> int:
    """Returns the number of character ranges in all classes of the node.  A repeated class counts once."""
    return len(node.ranges) if isinstance(node, Chars) else sum(map(num_ranges, children(node)))


def regex_of(node: Node) -> str:
    """Returns the regex in ASCII, with only classes, groups and repetitions, which all parts of xgrammar read alike.

    xgrammar merges the states of its automaton in which a text may end.  The merge fails if there are several such
    states, or if a text can lead back to the first state.  The empty groups add an extra first and last state."""
    return f"(){{0,1}}({_text_of(node, num_states(node) <= MAX_CHARS_IN_BLOCKS)})()"


def _text_of(node: Node, uses_blocks: bool) -> str:
    """Returns a node's regex.  uses_blocks: whether large repetitions of a character are written as blocks."""
    if isinstance(node, Chars):
        return _class_text(node.ranges)
    if isinstance(node, Seq):
        texts = (_text_of(part, uses_blocks) for part in node.parts)
        return "".join(
            f"({text})" if isinstance(part, Alt) else text for part, text in zip(node.parts, texts, strict=True)
        )
    if isinstance(node, Alt):
        return "|".join(_text_of(branch, uses_blocks) for branch in node.branches)
    assert isinstance(node, Repeat), "anchors are resolved before"
    return _repetition_text(node, uses_blocks)


def _repetition_text(node: Repeat, uses_blocks: bool) -> str:
    """Returns a repetition's text without "?" and {2,}, which xgrammar misreads after a part of variable length."""
    least, most = node.minimum, node.maximum
    has_large_count = max(least, most or 0) > MAX_UNROLLED
    if isinstance(node.repeated, Chars):
        part = _text_of(node.repeated, uses_blocks)
        if has_large_count and uses_blocks:
            return _repeat_in_blocks(part, least, most)
    else:
        # xgrammar makes a separate rule of a part that is repeated often.  So this part is a whole regex (regex_of).
        part = f"({regex_of(node.repeated) if has_large_count else _text_of(node.repeated, uses_blocks)})"
    if most is None:
        return part + ("*" if least == 0 else "+" if least == 1 else f"{{{least}}}{part}*")
    if (least, most) == (0, 1) and isinstance(node.repeated, Chars):
        return f"{part}?"
    return part + (f"{{{least}}}" if least == most else f"{{{least},{most}}}")


def _repeat_in_blocks(char: str, minimum: int, maximum: int | None) -> str:
    """Returns the regex of a repeated character, without a count above MAX_UNROLLED.  char: the character's regex.

    xgrammar evaluates larger counts at run time.  Then it tries each token, so a mask takes a thousand times as long.
    """
    times, rest = divmod(minimum, BLOCK_CHARS)
    text = (f"({char}{{{BLOCK_CHARS}}}){{{times}}}" if times else "") + (f"{char}{{{rest}}}" if rest else "")
    if maximum is None:
        return f"{text}{char}*"
    if not (left := maximum - minimum):
        return text
    # The last part is at least as long as a block, so that every count up to `left` is possible.
    blocks = -(-left // BLOCK_CHARS) - 1
    size = left // (blocks + 1)
    return text + (f"({char}{{{size}}}){{0,{blocks}}}" if blocks else "") + f"{char}{{0,{left - blocks * size}}}"


def _class_text(ranges: Ranges) -> str:
    """Returns the regex of a class in xgrammar's spelling."""
    if ranges == CARET_RANGES:
        return r"\^"
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1] and _needs_no_escape(ranges[0][0]):
        return chr(ranges[0][0])
    ranges = _without_utf8_gaps(ranges)
    # A caret at the beginning would negate the class.
    is_first = ranges[0] == CARET_RANGES[0]
    return "[" + "".join(map(_range_text, ranges[is_first:] + ranges[:is_first])) + "]"


def _without_utf8_gaps(ranges: Ranges) -> Ranges:
    """Splits ranges that contain one of UTF8_GAPS and the code point after it.  The first of the two is left out.
    From such a range, xgrammar would generate bytes that are not UTF-8."""
    pieces = []
    for first, last in ranges:
        for gap in UTF8_GAPS:
            if first <= gap < last:
                pieces += [(first, gap - 1)] if first < gap else []
                first = gap + 1
        pieces.append((first, last))
    return tuple(pieces)


def _range_text(bounds: tuple[int, int]) -> str:
    """bounds: the first and last code point of a range, both included."""
    first, last = bounds
    return _code_point_text(first) if first == last else f"{_code_point_text(first)}-{_code_point_text(last)}"


def _code_point_text(code_point: int) -> str:
    return chr(code_point) if _needs_no_escape(code_point) else f"\\u{{{code_point:x}}}"


def _needs_no_escape(code_point: int) -> bool:
    return chr(code_point).isascii() and chr(code_point).isalnum()
