"""Parses regular expressions of Espalier's dialect (the table in docs/server.md).  Errors name other syntax.

An accepted expression has the same meaning in Python's re, and in ECMAScript if ECMAScript has the syntax.  As JSON
Schema defines, a schema's pattern may match anywhere in the string: without ^ any text may come before, and without $
any text may come after.  Generated JSON strings have only characters that need no escape in JSON.
"""

import re

from espalier.errors import EspalierError, shown
from espalier.grammar.regex_tree import (
    ALL_CHARACTERS,
    EMPTY_TEXT,
    JSON_CHARACTERS,
    NEWLINE,
    NEWLINES,
    NO_TEXT,
    SURROGATES,
    Alt,
    Anchor,
    Characters,
    Chars,
    Node,
    Ranges,
    Repeat,
    Seq,
    alt,
    characters_of_class,
    children,
    complement,
    num_ranges,
    num_states,
    regex_of,
    repeat,
    restrict_to,
    same_in_all_dialects,
    seq,
    union,
)

MAX_DEPTH = 64
MAX_STATES = 100_000
MAX_RANGES = 100_000
# Escape letter -> the number of hex digits after the letter.
NUM_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
REPETITION_COUNTS_PATTERN = re.compile(r"\{([0-9]{1,9})(?:(,)([0-9]{0,9}))?\}")
GROUP_NAME_PATTERN = re.compile(r"([A-Za-z_][A-Za-z0-9_]{0,63})>")
POSIX_CLASS_PATTERN = re.compile(r"\[([:.=])[a-z]*\1\]")
CONTROL_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}
# Escapes of other dialects, with the advice what to write instead.
REFUSED_ESCAPES = {
    "A": ("the start of the text", "leave it out, or write ^"),
    "Z": ("the end of the text", "leave it out, or write $"),
    "z": ("the end of the text", "leave it out, or write $"),
    "b": ("a word boundary", "write the characters beside it"),
    "B": ("no word boundary", "write the characters beside it"),
    "G": ("the start of the match", "leave it out"),
    "K": ("the start of the match", "leave it out"),
    "Q": ("a quotation", "escape each character instead"),
    "E": ("the end of a quotation", "escape each character instead"),
    "h": ("a horizontal space", r"write [ \t]"),
    "H": ("no horizontal space", r"write [^ \t]"),
    "N": ("no newline, or a named character", r"write [^\n], or the character"),
    "R": ("a line break", r"write (\r\n|\n|\r)"),
    "X": ("a grapheme", "write a class of characters"),
    "p": ("a Unicode property", "write the characters as a class, such as [A-Za-z]"),
    "P": ("a Unicode property", "write the characters as a class, such as [^A-Za-z]"),
    "k": ("a back reference", "write the group again"),
    "g": ("a back reference", "write the group again"),
    "c": ("a control character", r"write it as \x and two hex digits"),
    "a": ("a control character", r"write \x07"),
    "e": ("a control character", r"write \x1b"),
    "0": ("an octal number", r"write \x and two hex digits"),
    "o": ("an octal number", r"write \x and two hex digits"),
}
# (beginning of the group after its parenthesis, its name, advice what to write instead).
REFUSED_GROUPS = (
    ("?=", "lookaround", "write what may follow as a part of the regex"),
    ("?!", "lookaround", "write what may follow as a part of the regex"),
    ("?<=", "lookaround", "write what comes before as a part of the regex"),
    ("?<!", "lookaround", "write what comes before as a part of the regex"),
    ("?P=", "back reference", "write the group again"),
    ("?>", "atomic group", "write (?:...)"),
    ("?#", "comment", "leave it out"),
    ("?(", "condition", "write the branches with |"),
    ("?R", "recursion", "use a grammar in EBNF"),
)


def ebnf_of_regex(regex: str) -> str:
    """Returns a grammar in xgrammar's EBNF for the texts that the regex matches as a whole.  Raises EspalierError if
    the regex is not in the dialect."""
    node = _without_anchors(_RegexParser(regex, "regex", NEWLINE).parse(), EMPTY_TEXT, regex, "regex")
    text = regex_of(_checked_size(node, regex, "regex", "write one that allows a text"))
    return 'root ::= ""' if node == EMPTY_TEXT else 'root ::= Regex("' + text.replace("\\", "\\\\") + '")'


def pattern_node(pattern: str) -> Node:
    """Returns the regex tree of the JSON strings that match a pattern.  Raises EspalierError."""
    any_text = Repeat(Chars(ALL_CHARACTERS), 0, None)
    node = _without_anchors(_RegexParser(pattern, "pattern", NEWLINES).parse(), any_text, pattern, "pattern")
    return _checked_size(
        restrict_to(node, JSON_CHARACTERS),
        pattern,
        "pattern",
        "write one that allows a text that JSON needs not escape",
    )


def format_node(regex: str) -> Node:
    """Returns the regex tree of a regex that must match the whole JSON string."""
    return restrict_to(_RegexParser(regex, "format", NEWLINES).parse(), JSON_CHARACTERS)


def _checked_size(node: Node, regex: str, noun: str, remedy: str) -> Node:
    """Returns the node.  Raises EspalierError if it is too large or matches no text.  noun: the regex's word in
    errors."""
    if node == NO_TEXT:
        raise EspalierError(f"{noun} {shown(regex)} allows no text; {remedy}")
    if num_states(node) > MAX_STATES:
        raise EspalierError(f"{noun} {shown(regex)} has repetitions of more than {MAX_STATES} characters; lower them")
    if num_ranges(node) > MAX_RANGES:
        raise EspalierError(
            f"{noun} {shown(regex)} has classes of more than {MAX_RANGES} ranges of characters; repeat a class with "
            r"{...}, or write [^a-zA-Z0-9_] for \W"
        )
    return node


def _refusal(noun: str, regex: str, fault: str, position: int, remedy: str) -> EspalierError:
    """noun: the word for the regex.  fault: what it has at `position`, in words.  remedy: what the user can do."""
    return EspalierError(f"{noun} {shown(regex)} has {fault} at position {position}, which is not supported; {remedy}")


# Anchors


def _without_anchors(node: Node, outside: Node, regex: str, noun: str) -> Node:
    """Returns the node without anchors.  outside: the text that is allowed where the node has no anchor."""
    return _resolve_anchors(_resolve_anchors(node, True, outside, regex, noun), False, outside, regex, noun)


def _resolve_anchors(node: Node, is_start: bool, outside: Node, regex: str, noun: str) -> Node:
    """Returns the node without the anchors of one side, ^ if is_start, else $.  outside: the text that is allowed on
    this side where there is no anchor.  regex, noun: the whole regex and the word for it, for errors."""
    if isinstance(node, Alt):
        return alt([_resolve_anchors(branch, is_start, outside, regex, noun) for branch in node.branches])
    parts: list[Node] = list(node.parts) if isinstance(node, Seq) else [node]
    at = 0 if is_start else -1
    if parts and _is_anchor(parts[at], is_start):
        while parts and _is_anchor(parts[at], is_start):
            parts.pop(at)
        _require_no_anchor(Seq(tuple(parts)), is_start, regex, noun)
        return seq(parts)
    if parts and isinstance(parts[at], Alt):
        inner = parts.pop(at)
        _require_no_anchor(Seq(tuple(parts)), is_start, regex, noun)
        resolved = _resolve_anchors(inner, is_start, outside, regex, noun)
        return seq([resolved, *parts] if is_start else [*parts, resolved])
    _require_no_anchor(node, is_start, regex, noun)
    return seq([outside, *parts] if is_start else [*parts, outside])


def _is_anchor(node: Node, is_start: bool) -> bool:
    return isinstance(node, Anchor) and node.is_start == is_start


def _require_no_anchor(node: Node, is_start: bool, regex: str, noun: str) -> None:
    """Raises EspalierError if the node has an anchor of one side: ^ if is_start, else $."""
    if isinstance(node, Anchor) and node.is_start == is_start:
        fault = f"{'^' if is_start else '$'!r} in the middle"
        raise _refusal(noun, regex, fault, node.position, r"write \^ or \$ for the character, or leave it out")
    for child in children(node):
        _require_no_anchor(child, is_start, regex, noun)


# Reading


class _RegexParser:
    """A parser of one regex.  noun: the word for the regex in errors.  newlines: the characters that "." excludes.
    depth: the number of groups around the part to read."""

    def __init__(self, regex: str, noun: str, newlines: Ranges):
        if not isinstance(regex, str):
            raise EspalierError(f"{noun} {shown(regex)} is no string")
        self.regex = regex
        self.noun = noun
        self.newlines = newlines
        self.position = 0
        self.group_names: set[str] = set()

    def parse(self) -> Node:
        node = self._read_branches(0)
        if self.position < len(self.regex):
            raise self._refusal_at("')' without '('", r"write \) for the character")
        return node

    def _refusal_at(self, fault: str, remedy: str, position: int | None = None) -> EspalierError:
        """fault: what is wrong at `position`, by default the parser's.  remedy: what the user can do."""
        return _refusal(self.noun, self.regex, fault, self.position if position is None else position, remedy)

    def _peek(self) -> str:
        return self.regex[self.position : self.position + 1]

    def _skip_if_next(self, text: str) -> bool:
        is_next = self.regex.startswith(text, self.position)
        self.position += len(text) if is_next else 0
        return is_next

    def _read_branches(self, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise self._refusal_at(f"more than {MAX_DEPTH} groups within each other", "flatten it")
        branches = [self._read_sequence(depth)]
        while self._skip_if_next("|"):
            branches.append(self._read_sequence(depth))
        if len(branches) == 1:
            return branches[0]
        # _without_anchors treats each branch separately, so `alt` must not merge branches with anchors.
        return Alt(tuple(branches)) if any(map(_has_anchor, branches)) else alt(branches)

    def _read_sequence(self, depth: int) -> Node:
        parts: list[Node] = []
        while self._peek() not in ("", "|", ")"):
            parts.append(self._read_repetition(self._read_atom(depth)))
        return seq(parts)

    def _read_atom(self, depth: int) -> Node:
        at, char = self.position, self._peek()
        if char == "(":
            return self._read_group(depth)
        if char == "[":
            return _node_of_characters(self._read_class())
        if char == "\\":
            return _node_of_characters(self._read_escape())
        if char in "*+?" or (char == "{" and self._read_counts() is not None):
            raise self._refusal_at(f"{char!r} with nothing to repeat", rf"write \{char} for the character")
        if char == "{":
            raise self._refusal_at("'{' without counts", r"write \{ for the character, or {0,3} to repeat")
        self.position += 1
        if char in "^$":
            return Anchor(char == "^", at)
        return Chars(complement(self.newlines)) if char == "." else _node_of_characters(self._read_literal(char, at))

    def _read_literal(self, char: str, position: int) -> Characters:
        """Returns `char`, which stands for itself.  position: its index in the regex, for the error."""
        if SURROGATES[0] <= ord(char) <= SURROGATES[1]:
            raise self._refusal_at(
                f"half of a surrogate pair, {char!r}", r"write the character, or \U and 8 hex digits", position
            )
        return same_in_all_dialects([(ord(char), ord(char))])

    def _read_group(self, depth: int) -> Node:
        at = self.position
        self.position += 1
        if self._peek() == "?" and not self._skip_if_next("?:"):
            self._check_group_kind()
        node = self._read_branches(depth + 1)
        if not self._skip_if_next(")"):
            raise self._refusal_at("'(' that is not closed", r"add ')', or write \( for the character", at)
        return node

    def _check_group_kind(self) -> None:
        at = self.position - 1
        for sign, fault, remedy in REFUSED_GROUPS:
            if self.regex.startswith(sign, self.position):
                raise self._refusal_at(f"a {fault} ({'(' + sign!r})", remedy, at)
        if not (self._skip_if_next("?P<") or self._skip_if_next("?<")):
            raise self._refusal_at("a flag in a group", "write both cases in a class, and groups as (?:...)", at)
        name_match = GROUP_NAME_PATTERN.match(self.regex, self.position)
        if name_match is None or name_match[1] in self.group_names:
            fault = (
                "a group without a name" if name_match is None else f"a second group with the name {name_match[1]!r}"
            )
            raise self._refusal_at(fault, "use (...) without a name", at)
        self.group_names.add(name_match[1])
        self.position = name_match.end()

    # Repetitions

    def _read_counts(self) -> tuple[int, int | None, int] | None:
        """Returns (least count, most count, position after the braces); None if no count in braces comes next."""
        counts = REPETITION_COUNTS_PATTERN.match(self.regex, self.position)
        if counts is None:
            return None
        least, comma, most = int(counts[1]), counts[2], counts[3]
        return least, int(most) if most else None if comma else least, counts.end()

    def _read_repetition(self, part: Node) -> Node:
        """Reads the quantifier after `part`, if there is one.  Returns the repeated part."""
        at, char = self.position, self._peek()
        counts: tuple[int, int | None]
        if char == "{" and (counts_and_end := self._read_counts()) is not None:
            counts, self.position = counts_and_end[:2], counts_and_end[2]
        elif char and char in "*+?":
            counts = {"*": (0, None), "+": (1, None), "?": (0, 1)}[char]
            self.position += 1
        else:
            return part
        if counts[1] is not None and counts[0] > counts[1]:
            raise self._refusal_at("a repetition whose least is above its most", "swap them", at)
        if max(counts[0], counts[1] or 0) > MAX_STATES:
            raise self._refusal_at(f"a repetition of more than {MAX_STATES}", "lower it", at)
        if _has_anchor(part):
            raise self._refusal_at("a repetition of '^' or '$'", "repeat a part without them", at)
        self._skip_if_next("?")  # a lazy repetition matches the same texts
        if (self._peek() and self._peek() in "*+?") or (self._peek() == "{" and self._read_counts() is not None):
            fault = f"{self.regex[self.position - 1] + self._peek()!r}, a second or possessive repetition"
            raise self._refusal_at(fault, "write one, or a group around the first", self.position - 1)
        return repeat(part, *counts)

    # Classes

    def _read_escape(self, within_class: bool = False) -> Characters:
        r"""Reads an escape such as \d or \n.  within_class: whether it stands between brackets."""
        at = self.position
        self.position += 2
        char = self.regex[at + 1 : at + 2]
        if char in NUM_HEX_DIGITS:
            return self._read_code_point(char, at)
        if char in CONTROL_ESCAPES:
            return same_in_all_dialects([(ord(CONTROL_ESCAPES[char]),) * 2])
        if char and char in "dDwWsS":
            return characters_of_class(char)
        if char and not (char.isascii() and char.isalnum()):
            return self._read_literal(char, at)
        if char and char in "123456789":
            raise self._refusal_at(f"'\\{char}', a back reference", "write the group again", at)
        if within_class and char == "b":
            raise self._refusal_at(r"'\b' in a class", r"write \x08 for a backspace", at)
        if char == "p" or char == "P":
            self._skip_property_name()
        written = self.regex[at : max(self.position, at + 1)]
        meaning, remedy = REFUSED_ESCAPES.get(char, ("an unknown escape", r"write \\ for a backslash"))
        raise self._refusal_at(f"'{written}', {meaning}", remedy, at)

    def _skip_property_name(self) -> None:
        """Skips a property name such as {Letter} after \\p, so that the error shows it."""
        inside, closing_brace, _ = self.regex[self.position :].partition("}")
        if closing_brace and inside.startswith("{") and inside[1:].replace("_", "").replace("=", "").isalnum():
            self.position += len(inside) + 1

    def _read_code_point(self, escape_letter: str, position: int) -> Characters:
        r"""Reads the hex digits after \x, \u or \U.  position: the backslash's index in the regex, for errors."""
        digits = self.regex[self.position : self.position + (num_digits := NUM_HEX_DIGITS[escape_letter])]
        if len(digits) < num_digits or not all(digit in "0123456789abcdefABCDEF" for digit in digits):
            fault = f"'\\{escape_letter}' without {num_digits} hex digits"
            raise self._refusal_at(fault, r"write \x41, \u0041 or \U00000041", position)
        code = int(digits, 16)
        if code > ALL_CHARACTERS[-1][1]:
            raise self._refusal_at(
                f"'\\{escape_letter}{digits}', which is no character", "use 0010ffff at most", position
            )
        self.position += num_digits
        return self._read_literal(chr(code), position)

    def _read_class(self) -> Characters:
        start = self.position
        self.position += 1
        is_negated = self._skip_if_next("^")
        if self._peek() == "]":
            fault = f"'{'[^]' if is_negated else '[]'}'"
            raise self._refusal_at(fault, r"write \] for the character, or [\s\S] for any", start)
        members: list[Characters] = []
        while not self._skip_if_next("]"):
            if not self._peek():
                raise self._refusal_at("'[' that is not closed", r"add ']', or write \[ for the character", start)
            members.append(self._read_class_member())
        characters = Characters(*(union(each for part in side for each in part) for side in zip(*members, strict=True)))
        return characters.negated() if is_negated else characters

    def _read_class_member(self) -> Characters:
        at = self.position
        first = self._read_range_end()
        if self._peek() != "-" or self.regex[self.position + 1 : self.position + 2] in ("]", ""):
            return first
        self.position += 1
        last = self._read_range_end()
        ends = [side.in_every_dialect for side in (first, last)]
        written = self.regex[at : self.position]
        if any(
            side.in_every_dialect != side.in_some_dialect or len(side.in_every_dialect) != 1 for side in (first, last)
        ) or any(low != high for [(low, high)] in ends):
            raise self._refusal_at(f"{written!r}, a range with a class at its end", r"write \- for the character", at)
        if ends[0][0][0] > ends[1][0][0]:
            raise self._refusal_at(f"{written!r}, a range whose first is above its last", "swap them", at)
        return same_in_all_dialects([(ends[0][0][0], ends[1][0][0])])

    def _read_range_end(self) -> Characters:
        at, char = self.position, self._peek()
        if char == "\\":
            return self._read_escape(within_class=True)
        if found := POSIX_CLASS_PATTERN.match(self.regex, at):
            raise self._refusal_at(f"{found[0]!r}, a class in a class", "write its characters, such as a-z", at)
        following = self.regex[at + 1 : at + 2]
        if char in "-&~|" and char == following:
            raise self._refusal_at(f"{char * 2!r} in a class", rf"write \{char} for the character", at)
        self.position += 1
        return self._read_literal(char, at)


def _node_of_characters(characters: Characters) -> Node:
    return Chars(characters.in_every_dialect) if characters.in_every_dialect else NO_TEXT


def _has_anchor(node: Node) -> bool:
    return isinstance(node, Anchor) or any(map(_has_anchor, children(node)))
