"""Checks that xgrammar enforces a regular expression, alone or as the pattern of a JSON string.

xgrammar always matches a whole text: anchors at the ends add nothing, and it ignores all other anchors.  A pattern is
matched against the text between the quotes, so it must not allow a character that JSON escapes.
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
# White space of ECMAScript's or Python's \s that xgrammar's lacks; \S must not allow it.
OTHER_SPACE = r"\u0085\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
SURROGATES = range(0xD800, 0xE000)

# A character, an escape or the bracket of a class, and the class that it belongs to: "", "[" or "[^".
Part = tuple[str, str]


def of_length(least: int, most: int | None) -> str:
    """A pattern for strings of `least` to `most` characters, without escapes."""
    return f"{PLAIN_CHARACTER}{{{least},{'' if most is None else most}}}"


def enforceable_regex(regex: str) -> str:
    """The regular expression without its anchors.  Raises EspalierError if xgrammar would not enforce it."""
    return "".join(part for part, _ in _checked(regex, "regex"))


def enforceable_pattern(pattern: str) -> str:
    """The pattern of a JSON string, in the form that xgrammar enforces.

    Raises EspalierError for one that would not be enforced, or that allows a character that JSON escapes.
    """
    if not isinstance(pattern, str):
        raise EspalierError(f"pattern {shown(pattern)} is no string")
    made = []
    for part, within in _checked(pattern, "pattern"):
        if within != "[^" and part != "[^":
            _check_character(part, pattern)
        made.append(_without_space(part, within, pattern))
    return "".join(made)


def _checked(regex: str, kind: str) -> list[Part]:
    """The parts without anchors.  kind: how an error calls the regex.  Raises EspalierError."""

    def refuse(what: str) -> EspalierError:
        return EspalierError(f"{kind} {shown(regex)} has {what}, which is not supported")

    for look in LOOKAROUNDS:
        if look in regex:
            raise refuse("a lookaround")
    made: list[Part] = []
    depth = 0
    parts = list(_parts(regex))
    texts = ["|", *(part for part, _ in parts), "|"]
    for (part, within), before, after in zip(parts, texts, texts[2:], strict=False):
        if (code := _code(part)) is not None and code in SURROGATES:
            raise refuse(f"half of a surrogate pair, {part!r}")
        if part in ("[", "[^") and not within and after == "]":
            raise refuse(f"'{part}]'")
        if not within and part in ("*", "+", "{") and before in ("*", "+", "?", "}"):
            raise refuse(f"{before + part!r}")
        depth += {"(": 1, ")": -1}.get(part, 0) if not within else 0
        if not within and part in ("^", "$"):
            if depth or (before if part == "^" else after) != "|":
                raise refuse(f"{part!r} in the middle")
        else:
            made.append((part, within))
    return made


def _parts(regex: str) -> Iterator[Part]:
    at, within = 0, ""
    while at < len(regex):
        escape = ESCAPE.match(regex, at)
        part = escape[0] if escape else regex[at]
        if not within and regex.startswith("[^", at):
            part = "[^"
        yield part, within
        if not within and part in ("[", "[^"):
            within = part
        elif part == "]":
            within = ""
        at += len(part)


def _code(part: str) -> int | None:
    """The code point that a part stands for; None for an escape that is not one."""
    escape = ESCAPE.fullmatch(part)
    if escape is None:
        return ord(part) if len(part) == 1 else None
    number = escape[1] or escape[2]
    return int(number, 16) if number else None


def _check_character(part: str, pattern: str) -> None:
    escape = ESCAPE.fullmatch(part)
    if escape is not None and escape[3] is not None and escape[3] not in KNOWN_ESCAPES:
        raise EspalierError(f"pattern {shown(pattern)} has {part!r}, which is not supported")
    code = _code(part)
    if code is not None and (chr(code) in '"\\' or code < ord(" ")):
        raise EspalierError(f"pattern {shown(pattern)} allows {chr(code)!r}, which JSON strings escape")


def _without_space(part: str, within: str, pattern: str) -> str:
    """The part, so that \\S, and \\s in a negated class, leave out all white space."""
    if part == r"\S" and within:
        raise EspalierError(f"pattern {shown(pattern)} has {part!r} in a class, which is not supported")
    if part == r"\S":
        return rf"[^\s{OTHER_SPACE}]"
    return part + OTHER_SPACE if part == r"\s" and within == "[^" else part
