"""Sets of characters: sorted ranges of code points that do not touch, without surrogates.

\\d, \\w and \\s mean ASCII in some dialects and all of Unicode in others.  So each has two sets: what every dialect
takes, and what some dialect takes.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

LAST = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)

# (first, last) code points.
Ranges = tuple[tuple[int, int], ...]


class Characters(NamedTuple):
    """surely: the characters that every dialect takes; possibly: those that some dialect takes."""

    surely: Ranges
    possibly: Ranges

    def negated(self) -> "Characters":
        return Characters(complement(self.possibly), complement(self.surely))


def exactly(ranges: Iterable[tuple[int, int]]) -> Characters:
    made = complement(complement(union(ranges)))  # without surrogates
    return Characters(made, made)


def union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The characters of any of the ranges."""
    made: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if made and first <= made[-1][1] + 1:
            made[-1] = made[-1][0], max(last, made[-1][1])
        else:
            made.append((first, last))
    return tuple(made)


def complement(ranges: Ranges) -> Ranges:
    """All other characters."""
    at, made = 0, []
    for first, last in union((*ranges, SURROGATES)):
        if at < first:
            made.append((at, first - 1))
        at = last + 1
    return (*made, (at, LAST)) if at <= LAST else tuple(made)


def common(one: Ranges, other: Ranges) -> Ranges:
    """The characters of both."""
    return complement(union((*complement(one), *complement(other))))


def holds(ranges: Ranges, code: int) -> bool:
    at = bisect_right(ranges, (code, LAST)) - 1
    return at >= 0 and code <= ranges[at][1]


def of_text(characters: str) -> Ranges:
    return union((ord(each), ord(each)) for each in characters)


@lru_cache
def _of_python(escape: str) -> Ranges:
    text = "".join(map(chr, (*range(SURROGATES[0]), *range(SURROGATES[1] + 1, LAST + 1))))
    return union((ord(found[0][0]), ord(found[0][-1])) for found in re.finditer(f"{escape}+", text))


@lru_cache
def class_of(escape: str) -> Characters:
    r"""The class \d, \w, \s, \D, \W or \S, given its letter."""
    if escape in "DWS":
        return class_of(escape.lower()).negated()
    ascii_part = {"d": ((48, 57),), "w": ((48, 57), (65, 90), (95, 95), (97, 122)), "s": ((9, 13), (32, 32))}[escape]
    # ECMAScript counts the byte order mark as space.
    others = of_text("\ufeff") if escape == "s" else ()
    return Characters(ascii_part, union((*_of_python("\\" + escape), *others)))


ALL: Ranges = complement(())
# What a JSON string holds without an escape.
PLAIN: Ranges = complement(union(((0, 0x1F), *of_text('"\\'))))
NEWLINE: Ranges = of_text("\n")
# ECMAScript's "." leaves out more than Python's.
NEWLINES: Ranges = of_text("\n\r\u2028\u2029")
