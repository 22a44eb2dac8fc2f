"""Patterns of JSON strings: those that xgrammar enforces, and a string's length as a pattern.

xgrammar matches a pattern against the text between the quotes, so a pattern must not allow a character that JSON
escapes.  It ignores lookarounds, and anchors inside a pattern.
"""

import re
from collections.abc import Iterator

from espalier.errors import EspalierError, shown

# One character of a string that JSON does not escape.
PLAIN_CHARACTER = r'[^"\\\x00-\x1f]'
LOOKAROUNDS = ("(?=", "(?!", "(?<=", "(?<!")
ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|(.))", re.DOTALL)
# Escapes of classes and of characters that stand for themselves.
KNOWN_ESCAPES = frozenset("dDwWsS" + ".*+?()[]{}|^$/-_")


def of_length(least: int, most: int | None) -> str:
    """A pattern for strings of `least` to `most` characters, without escapes."""
    return f"^{PLAIN_CHARACTER}{{{least},{'' if most is None else most}}}$"


def check_pattern(pattern: str) -> None:
    """Refuse a pattern that would not be enforced, or that allows a character that JSON escapes.

    Raises EspalierError.
    """
    if not isinstance(pattern, str):
        raise EspalierError(f"pattern {shown(pattern)} is no string")
    for look in LOOKAROUNDS:
        if look in pattern:
            raise EspalierError(f"pattern {shown(pattern)} has a lookaround, which is not supported")
    body = pattern.removeprefix("^")
    if body.endswith("$") and not body.endswith("\\$"):
        body = body[:-1]
    negated = False
    for part, in_class in _parts(body):
        if part == "[^":
            negated = True
        elif part == "]" and in_class:
            negated = False
        elif part in ("^", "$") and not in_class:
            raise EspalierError(f"pattern {shown(pattern)} has {part!r} in the middle, which is not supported")
        elif not negated:
            _check_character(part, pattern)


def _parts(body: str) -> Iterator[tuple[str, bool]]:
    """(character, escape or class bracket, whether it belongs to a class) from left to right."""
    at, in_class = 0, False
    while at < len(body):
        escape = ESCAPE.match(body, at)
        part = escape[0] if escape else body[at]
        if not in_class and body.startswith("[^", at):
            part = "[^"
        yield part, in_class
        if part in ("[", "[^"):
            in_class = True
        elif part == "]":
            in_class = False
        at += len(part)


def _check_character(part: str, pattern: str) -> None:
    escape = ESCAPE.fullmatch(part)
    if escape is None:
        code = part
    elif escape[3] is not None:
        if escape[3] not in KNOWN_ESCAPES:
            raise EspalierError(f"pattern {shown(pattern)} has {part!r}, which is not supported")
        return
    else:
        code = chr(int(escape[1] or escape[2], 16))
    if code != "[^" and (code in '"\\' or code < " "):
        raise EspalierError(f"pattern {shown(pattern)} allows {code!r}, which JSON strings escape")
