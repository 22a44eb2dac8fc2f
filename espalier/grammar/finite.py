"""Refuses schemas and grammars with a part that has no finite text: the output would run to its token limit."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from espalier.errors import EspalierError, shown
from espalier.grammar.regex_tree import LAST_CODE_POINT, SURROGATES
from espalier.grammar.schema_values import schema_error

# Matches an escape of xgrammar's EBNF.  There, \x reads all hex digits that follow.
EBNF_ESCAPE_PATTERN = re.compile(r"\\(?:x([0-9A-Fa-f]+)|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)", re.DOTALL)
# Matches a text, a class, a comment or a repetition of xgrammar's EBNF.  Groups 1 and 2: the repetition's counts.
EBNF_COUNTS_PATTERN = re.compile(
    r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*|\{\s*([0-9]+)\s*(?:,\s*([0-9]*)\s*)?\}', re.DOTALL
)
# xgrammar reads larger counts modulo 2**32.
MAX_EBNF_COUNT = 2**31 - 1
# xgrammar's numbers of expression kinds, in the JSON form of a parsed grammar.
RULE_KIND, SEQUENCE_KIND, CHOICES_KIND, REPEAT_KIND = 4, 5, 6, 8


def require_finite_values(schema: Mapping[str, Any]) -> None:
    """Refuse a schema with a part that has no finite value.  Raises EspalierError, which names the innermost part.

    schema: the enforceable schema and its parts, by place (JSON pointer).  Every reference refers to such a place."""
    ends = _least_fixpoint(schema, _can_end, _references)
    # The innermost place first: the user must change the schema there.
    endless = sorted(schema.keys() - ends, key=lambda place: (-place.count("/"), place))
    if endless:
        what = "no value ends: the schema always needs itself again, or more entries than it allows"
        raise schema_error(endless[0], what, "make a reference optional, give it another branch, or lower a minimum")


def _least_fixpoint(
    parts: Mapping[Any, Any], is_finite: Callable[[Any, set[Any]], bool], requires: Callable[[Any], Iterable[Any]]
) -> set[Any]:
    """Returns the names of the parts that have a finite text.  is_finite(part, finite_names): whether a part has one if
    the parts `finite_names` have one.  requires(part): the names that the part refers to."""
    waiting: dict[Any, list[Any]] = {}
    for name, part in parts.items():
        for needed in requires(part):
            waiting.setdefault(needed, []).append(name)
    finite: set[Any] = set()
    to_try = list(parts)
    while to_try:
        name = to_try.pop()
        if name not in finite and is_finite(parts[name], finite):
            finite.add(name)
            to_try += waiting.get(name, ())
    return finite


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"]
        for name, value in schema.items():
            if name not in ("enum", "$defs", "definitions"):
                yield from _references(value)
    elif isinstance(schema, list):
        for item in schema:
            yield from _references(item)


def _can_end(schema: Any, finite: set[str]) -> bool:
    if not isinstance(schema, dict):
        return True
    if "$ref" in schema:
        return schema["$ref"] in finite
    if "anyOf" in schema:
        return any(_can_end(branch, finite) for branch in schema["anyOf"])
    if schema.get("type") == "array":
        first = schema.get("prefixItems", [])
        needs_more = schema.get("minItems", 0) > len(first)
        return all(_can_end(item, finite) for item in first) and (not needs_more or _can_end(schema["items"], finite))
    if schema.get("type") == "object":
        return _object_can_end(schema, finite)
    return True


def _object_can_end(schema: dict[str, Any], finite: set[str]) -> bool:
    properties = schema.get("properties", {})
    if not properties:
        return not schema.get("minProperties") or _can_end(schema.get("additionalProperties"), finite)
    ending = {name for name, value in properties.items() if _can_end(value, finite)}
    return ending >= set(schema.get("required", ())) and len(ending) >= schema.get("minProperties", 0)


def check_ebnf(ebnf: str) -> str:
    """Returns the grammar unchanged.  Raises EspalierError for an escape that stands for no character, and for a count
    that xgrammar cannot represent."""
    for escape in EBNF_ESCAPE_PATTERN.finditer(ebnf):
        digits = escape[1] or escape[2] or escape[3]
        if digits and ((code := int(digits, 16)) > LAST_CODE_POINT or SURROGATES[0] <= code <= SURROGATES[1]):
            what = "half of a surrogate pair" if code <= LAST_CODE_POINT else "no character"
            raise EspalierError(
                f"the grammar has {escape[0]!r} at position {escape.start()}, which is {what}; write the character, "
                r"or \U and its 8 hex digits"
            )
    for found in EBNF_COUNTS_PATTERN.finditer(ebnf):
        for digits in filter(None, found.groups()):
            if len(digits.lstrip("0")) > 10 or int(digits) > MAX_EBNF_COUNT:
                raise EspalierError(
                    f"the grammar has the repetition {shown(found[0])} at position {found.start()}; use counts of "
                    f"{MAX_EBNF_COUNT} at most"
                )
    return ebnf


def require_finite_rules(ebnf: str) -> None:
    """Refuse a grammar with a reachable rule that no finite text matches.  Raises EspalierError.  xgrammar parses the
    grammar, and raises RuntimeError for a syntax error."""
    import xgrammar

    for name in _endless_rules(json.loads(xgrammar.Grammar.from_ebnf(ebnf).serialize_json())):
        raise EspalierError(f"the grammar's rule {shown(name)} allows no finite text; give it a branch that ends")


def _endless_rules(parsed_grammar: dict[str, Any]) -> list[str]:
    """Returns the names of the reachable rules without finite text.  parsed_grammar: xgrammar's JSON."""
    data, starts = parsed_grammar["grammar_expr_data"], parsed_grammar["grammar_expr_indptr"]
    expressions = [(data[at], data[at + 2 : at + 2 + data[at + 1]]) for at in starts]
    bodies = {i: rule[1] for i, rule in enumerate(parsed_grammar["rules"])}

    def ends(body: int, finite_rules: set[int]) -> bool:
        kind, contents = expressions[body]
        if kind == RULE_KIND:
            return contents[0] in finite_rules
        if kind == REPEAT_KIND:
            return contents[0] in finite_rules or contents[1] == 0
        if kind in (SEQUENCE_KIND, CHOICES_KIND):
            rule_id = (ends(part, finite_rules) for part in contents)
            return all(rule_id) if kind == SEQUENCE_KIND else any(rule_id)
        return True

    finite_rules = _least_fixpoint(bodies, ends, lambda body: _rules_in(body, expressions))
    reached_rules, new_rules = set(), {parsed_grammar["root_rule_id"]}
    while new_rules:
        reached_rules |= new_rules
        new_rules = {rule for rule_id in new_rules for rule in _rules_in(bodies[rule_id], expressions)} - reached_rules
    return [parsed_grammar["rules"][i][0] for i in sorted(reached_rules - finite_rules)]


def _rules_in(body: int, expressions: list[tuple[int, list[int]]]) -> set[int]:
    kind, contents = expressions[body]
    if kind in (RULE_KIND, REPEAT_KIND):
        return {contents[0]}
    return (
        set().union(*(_rules_in(part, expressions) for part in contents))
        if kind in (SEQUENCE_KIND, CHOICES_KIND)
        else set()
    )
