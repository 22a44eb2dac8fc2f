"""Checks grammars of all kinds.  Rewrites choices, and structural tags (grammars that begin at trigger strings)."""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from espalier.errors import EspalierError, shown
from espalier.grammar.finite import check_ebnf
from espalier.grammar.regex import ebnf_of_regex
from espalier.grammar.schema import enforceable_schema
from espalier.grammar.spec import Grammar, read_json

MAX_DEPTH = 64
# The types of parts with a JSON schema.  qwen_xml_parameter is xgrammar's older name for a style of json_schema.
SCHEMA_TYPES = ("json_schema", "qwen_xml_parameter")


def rewrite_tag_for_xgrammar(text: str, strict: bool) -> str:
    """Returns a structural tag in xgrammar's form, with JSON schemas and regexes that xgrammar enforces completely.

    text: {"type": "structural_tag", "format": ...}, or SGLang's {"structures": [...], "triggers": [...]}.
    Raises EspalierError."""
    return json.dumps({"type": "structural_tag", "format": _enforceable_part(format_of_tag(text), strict, 0)})


def format_of_tag(text: str) -> Any:
    """Returns the "format" object of a structural tag, also for SGLang's form of the tag.  Raises EspalierError."""
    tag = read_json("structural tag", text)
    if not isinstance(tag, dict):
        raise EspalierError(f"structural tag {shown(tag)} is not supported; use an object")
    known_fields = {"structures", "triggers"} if "structures" in tag else {"format"}
    if unknown_fields := sorted(tag.keys() - known_fields - {"type"}):
        raise EspalierError(f"a structural tag with {min(known_fields)!r} has no {unknown_fields[0]!r}; leave it out")
    if "structures" in tag:
        return _format_of_structures(tag)
    if "format" not in tag:
        raise EspalierError('a structural tag needs "format", or "structures" and "triggers"')
    return tag["format"]


def _format_of_structures(tag: dict[str, Any]) -> dict[str, Any]:
    try:
        tags = [
            {
                "type": "tag",
                "begin": structure["begin"],
                "content": {"type": "json_schema", "json_schema": structure.get("schema", {})},
                "end": structure["end"],
            }
            for structure in tag["structures"]
        ]
        return {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}
    except (KeyError, TypeError, AttributeError):
        raise EspalierError(
            'a structural tag needs "structures", each with "begin", "schema" and "end", and "triggers"'
        ) from None


def _enforceable_part(value: Any, strict: bool, depth: int) -> Any:
    """Returns `value`, a part of a structural tag, with its schemas and regexes rewritten for xgrammar."""
    if depth > MAX_DEPTH:
        raise EspalierError(f"the structural tag is nested more than {MAX_DEPTH} levels deep; flatten it")
    if isinstance(value, list):
        return [_enforceable_part(item, strict, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get("type") in SCHEMA_TYPES and "json_schema" in value:
        schema = json.loads(enforceable_schema(json.dumps(value["json_schema"]), strict))
        return {**value, "json_schema": schema}
    if value.get("type") == "regex" and isinstance(value.get("pattern"), str):
        return {"type": "grammar", "grammar": ebnf_of_regex(value["pattern"])}
    if value.get("type") == "grammar" and isinstance(value.get("grammar"), str):
        check_ebnf(value["grammar"])
    return {name: _enforceable_part(item, strict, depth + 1) for name, item in value.items()}


def ebnf_parts(value: Any) -> Iterator[str]:
    """Yields the EBNF grammars inside a structural tag.  value: a part of the tag in xgrammar's form."""
    if isinstance(value, dict) and value.get("type") == "grammar" and isinstance(value.get("grammar"), str):
        yield value["grammar"]
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from ebnf_parts(item)


MAX_CHOICES = 4096


def ebnf_of_choices(choices_json: str) -> str:
    """Returns a grammar in xgrammar's EBNF for exactly the texts in a JSON array.  Raises EspalierError."""
    choices = read_json("list of choices", choices_json)
    if not isinstance(choices, list) or not choices or not all(isinstance(text, str) and text for text in choices):
        raise EspalierError(f"choices {shown(choices)} are not supported; use a list of non-empty strings")
    if len(choices) > MAX_CHOICES:
        raise EspalierError(f"{len(choices)} choices are not supported; use {MAX_CHOICES} at most")
    return "root ::= " + " | ".join(_ebnf_literal(text) for text in choices)


def _ebnf_literal(text: str) -> str:
    """Returns the string literal of xgrammar's EBNF that matches exactly `text`."""
    # In xgrammar, \u reads four hex digits, but \x would read all hex digits that follow.
    special = {'"': '\\"', "\\": "\\\\"}
    return '"' + "".join(special.get(c, c if c >= " " else f"\\u{ord(c):04x}") for c in text) + '"'


# By kind of grammar: a function that returns the text for xgrammar, or raises EspalierError.
REWRITE_BY_KIND: Mapping[str, Callable[[Grammar], str]] = {
    "json_object": lambda grammar: '{"type": "object"}',
    "json_schema": lambda grammar: enforceable_schema(grammar.spec, grammar.strict),
    "structural_tag": lambda grammar: rewrite_tag_for_xgrammar(grammar.spec, grammar.strict),
    "regex": lambda grammar: ebnf_of_regex(grammar.spec),
    "ebnf": lambda grammar: check_ebnf(grammar.spec),
    "choice": lambda grammar: ebnf_of_choices(grammar.spec),
}


# Cached, because servers get the same grammars repeatedly, and checking a large grammar takes many milliseconds.
@lru_cache(256)
def check_grammar(grammar: Grammar) -> None:
    """Raises EspalierError with the reason if xgrammar cannot enforce the grammar."""
    if not grammar.spec and grammar.kind != "json_object":
        raise EspalierError(f"a grammar of kind {grammar.kind!r} is empty; give its text")
    REWRITE_BY_KIND[grammar.kind](grammar)
