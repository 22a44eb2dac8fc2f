"""Refuses schemas and grammars with a part that no finite text can match, such as a rule that always needs itself.
The output of such a part would run to its token limit."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from espalier.errors import EspalierError, shown
from espalier.grammar.regex_tree import LAST_CODE_POINT, SURROGATES
from espalier.grammar.schema_values import schema_error

# Matches an escape of xgrammar's EBNF, in which \x reads all hex digits that follow.
EBNF_ESCAPE_PATTERN = re.compile(r"\\(?:x([0-9A-Fa-f]+)|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)", re.DOTALL)
# Matches a text, a class, a comment or a repetition of xgrammar's EBNF.  Groups 1 and 2: the repetition's counts.
EBNF_COUNTS_PATTERN = re.compile(
    r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*|\{\s*([0-9]+)\s*(?:,\s*([0-9]*)\s*)?\}', re.DOTALL
)
# The largest count of a repetition.  xgrammar reads larger counts modulo 2**32.
MAX_EBNF_COUNT = 2**31 - 1
# xgrammar's numbers of expression kinds, in the JSON form of a parsed grammar.
RULE_KIND, SEQUENCE_KIND, CHOICES_KIND, REPEAT_KIND = 4, 5, 6, 8


def require_finite_values(schemas_by_place: Mapping[str, Any]) -> None:
    """Raises EspalierError if a schema or subschema has no finite value.  The error names the innermost such place.

    schemas_by_place: JSON pointer -> the schema there, rewritten by schema.py.  Every $ref is one of the pointers."""
    finite_places = _names_with_finite_text(schemas_by_place, _has_finite_value, _references)
    # The innermost place is first, because the user must change the schema there.
    endless = sorted(schemas_by_place.keys() - finite_places, key=lambda place: (-place.count("/"), place))
    if endless:
        problem = "no value ends: the schema always needs itself again, or more entries than it allows"
        raise schema_error(endless[0], problem, "make a reference optional, give it another branch, or lower a minimum")


def _names_with_finite_text(
    parts: Mapping[Any, Any], is_finite: Callable[[Any, set[Any]], bool], requires: Callable[[Any], Iterable[Any]]
) -> set[Any]:
    """Returns the names of the parts (subschemas or rules) with a finite text.  is_finite(part, finite_names):
    whether the part has a finite text if the parts `finite_names` have.  requires(part): the names in the part."""
    dependent_names: dict[Any, list[Any]] = {}
    for name, part in parts.items():
        for needed in requires(part):
            dependent_names.setdefault(needed, []).append(name)
    finite_names: set[Any] = set()
    untried_names = list(parts)
    while untried_names:
        name = untried_names.pop()
        if name not in finite_names and is_finite(parts[name], finite_names):
            finite_names.add(name)
            untried_names += dependent_names.get(name, ())
    return finite_names


def _references(schema: Any) -> Iterator[str]:
    """Yields the $ref of a schema and of its subschemas."""
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"]
        for name, value in schema.items():
            if name not in ("enum", "$defs", "definitions"):
                yield from _references(value)
    elif isinstance(schema, list):
        for item in schema:
            yield from _references(item)


def _has_finite_value(schema: Any, finite_places: set[str]) -> bool:
    """Whether the schema has a value of finite length.  finite_places: the references to schemas that have one."""
    if not isinstance(schema, dict):
        return True
    if "$ref" in schema:
        return schema["$ref"] in finite_places
    if "anyOf" in schema:
        return any(_has_finite_value(branch, finite_places) for branch in schema["anyOf"])
    if schema.get("type") == "array":
        first = schema.get("prefixItems", [])
        needs_more = schema.get("minItems", 0) > len(first)
        return all(_has_finite_value(item, finite_places) for item in first) and (
            not needs_more or _has_finite_value(schema["items"], finite_places)
        )
    if schema.get("type") == "object":
        return _has_finite_object(schema, finite_places)
    return True


def _has_finite_object(schema: dict[str, Any], finite_places: set[str]) -> bool:
    """Whether an object schema has a value of finite length.  finite_places: see _has_finite_value."""
    properties = schema.get("properties", {})
    if not properties:
        return not schema.get("minProperties") or _has_finite_value(schema.get("additionalProperties"), finite_places)
    finite_names = {name for name, value in properties.items() if _has_finite_value(value, finite_places)}
    return finite_names >= set(schema.get("required", ())) and len(finite_names) >= schema.get("minProperties", 0)


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
    """Raises EspalierError if no finite text matches a reachable rule of the grammar, and RuntimeError for a syntax
    error that xgrammar finds."""
    import xgrammar

    for name in _endless_rules(json.loads(xgrammar.Grammar.from_ebnf(ebnf).serialize_json())):
        raise EspalierError(f"the grammar's rule {shown(name)} allows no finite text; give it a branch that ends")


def _endless_rules(parsed_grammar: dict[str, Any]) -> list[str]:
    """Returns the names of the reachable rules without a finite text.  parsed_grammar: xgrammar's JSON form."""
    data, starts = parsed_grammar["grammar_expr_data"], parsed_grammar["grammar_expr_indptr"]
    expressions = [(data[at], data[at + 2 : at + 2 + data[at + 1]]) for at in starts]
    bodies = {i: rule[1] for i, rule in enumerate(parsed_grammar["rules"])}

    def has_finite_text(body: int, finite_rules: set[int]) -> bool:
        """Whether an expression matches a finite text.  body: its index.  finite_rules: the rules known to do so."""
        kind, contents = expressions[body]
        if kind == RULE_KIND:
            return contents[0] in finite_rules
        if kind == REPEAT_KIND:
            return contents[0] in finite_rules or contents[1] == 0
        if kind in (SEQUENCE_KIND, CHOICES_KIND):
            are_finite = (has_finite_text(part, finite_rules) for part in contents)
            return all(are_finite) if kind == SEQUENCE_KIND else any(are_finite)
        return True

    finite_rules = _names_with_finite_text(bodies, has_finite_text, lambda body: _rules_in(body, expressions))
    reached_rules, new_rules = set(), {parsed_grammar["root_rule_id"]}
    while new_rules:
        reached_rules |= new_rules
        new_rules = {rule for rule_id in new_rules for rule in _rules_in(bodies[rule_id], expressions)} - reached_rules
    return [parsed_grammar["rules"][i][0] for i in sorted(reached_rules - finite_rules)]


def _rules_in(body: int, expressions: list[tuple[int, list[int]]]) -> set[int]:
    """Returns the indices of the rules in an expression.  body: its index in `expressions`, pairs (kind, contents)."""
    kind, contents = expressions[body]
    if kind in (RULE_KIND, REPEAT_KIND):
        return {contents[0]}
    return (
        set().union(*(_rules_in(part, expressions) for part in contents))
        if kind in (SEQUENCE_KIND, CHOICES_KIND)
        else set()
    )
