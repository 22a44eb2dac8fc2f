"""Rewrites the keywords of one JSON value for xgrammar: lengths, formats, bounds, enums.

A bound on a string's length is divided among the parts of its regex that have variable lengths.  So the result may
allow fewer texts than the regex and the bound, but never more.
"""

import json
import math
from collections.abc import Iterable
from fractions import Fraction
from itertools import permutations
from math import inf
from typing import Any

from espalier.errors import EspalierError, shown
from espalier.grammar.formats import ANNOTATION_FORMATS, FORMATS, INTEGER_BOUNDS, node_of_format
from espalier.grammar.regex import MAX_STATES, pattern_node
from espalier.grammar.regex_tree import (
    EMPTY_TEXT,
    JSON_CHARACTERS,
    NO_TEXT,
    Alt,
    Chars,
    Node,
    Repeat,
    Seq,
    alt,
    num_states,
    regex_of,
    repeat,
    seq,
)

# If a repeated part of variable length must become shorter, each repetition gets this many characters.
CHARS_PER_REPETITION = 10


def limit_length(node: Node, minimum: int, maximum: int | None) -> Node:
    """Returns a node for texts of `node` with `minimum` to `maximum` characters, or NO_TEXT.  node: without anchors."""
    if maximum is not None:
        node = _with_max_length(node, maximum)
    return node if node == NO_TEXT else _with_min_length(node, minimum)


def length_bounds(node: Node) -> tuple[int, float]:
    """Returns the (fewest, most) characters of a node's texts; infinity for no upper bound."""
    if isinstance(node, Chars):
        return 1, 1
    if isinstance(node, Seq):
        bounds = [length_bounds(part) for part in node.parts]
        return sum(low for low, _ in bounds), sum(high for _, high in bounds)
    if isinstance(node, Alt):
        bounds = [length_bounds(branch) for branch in node.branches]
        return min(low for low, _ in bounds), max(high for _, high in bounds)
    assert isinstance(node, Repeat)
    low, high = length_bounds(node.repeated)
    return low * node.minimum, high * (inf if node.maximum is None else node.maximum) if high else 0


def _with_max_length(node: Node, maximum: int) -> Node:
    """Returns the node without some texts, so that no text is longer than `maximum` characters."""
    low, high = length_bounds(node)
    if high <= maximum:
        return node
    if low > maximum or isinstance(node, Chars):
        return NO_TEXT
    if isinstance(node, Alt):
        return alt([_with_max_length(branch, maximum) for branch in node.branches])
    if isinstance(node, Seq):
        return _limit_parts(node.parts, maximum - low)
    assert isinstance(node, Repeat)
    low, high = length_bounds(node.repeated)
    if low == high:
        return repeat(node.repeated, node.minimum, maximum // low)
    limit = maximum // max(low, 1) if node.maximum is None else min(node.maximum, maximum // max(low, 1))
    # Short and long parts get the same count, because xgrammar would misread an alternation of several repetitions.
    size = int(min(high, max(low, CHARS_PER_REPETITION)))
    times = max(node.minimum, min(limit, maximum // size or 1))
    return repeat(_with_max_length(node.repeated, maximum // times), node.minimum, times) if times else EMPTY_TEXT


def _limit_parts(parts: tuple[Node, ...], spare_chars: int) -> Node:
    """Limits a sequence's length to the sum of its parts' least lengths, plus `spare_chars`."""
    limited_parts = []
    bounds = [length_bounds(part) for part in parts]
    for i, (part, (low, high)) in enumerate(zip(parts, bounds, strict=True)):
        # The part gets an equal share of the spare characters, or a larger one if later parts cannot use theirs.
        later_spans = [above - below for below, above in bounds[i + 1 :] if above > below]
        share = max(
            spare_chars // (1 + len(later_spans)), spare_chars - sum(later_spans) if inf not in later_spans else 0
        )
        limited_parts.append(_with_max_length(part, low + int(share)) if high > low + share else part)
        spare_chars -= int(min(length_bounds(limited_parts[-1])[1], low + share)) - low
    return seq(limited_parts)


def _with_min_length(node: Node, minimum: int) -> Node:
    """Returns a node for the texts of at least `minimum` characters, or for some of these texts."""
    low, high = length_bounds(node)
    if low >= minimum:
        return node
    if high < minimum:
        return NO_TEXT
    if isinstance(node, Alt):
        return alt([_with_min_length(branch, minimum) for branch in node.branches])
    if isinstance(node, Seq):
        return _extend_parts(node.parts, minimum - low)
    assert isinstance(node, Repeat)
    part, (low, high) = node.repeated, length_bounds(node.repeated)
    if low == high:
        return repeat(part, -(-minimum // low), node.maximum)
    if low:
        times = -(-minimum // low)
        if node.maximum is None or times <= node.maximum:
            return repeat(part, times, node.maximum)
    times = node.minimum if node.maximum is None else node.maximum
    times = max(times, 1)
    return repeat(_with_min_length(part, -(-minimum // times)), times, node.maximum)


def _extend_parts(parts: tuple[Node, ...], missing_chars: int) -> Node:
    """Raises a sequence's least length by `missing_chars`.  The parts with the widest bounds become longer first."""
    extended_parts = list(parts)
    for i in sorted(range(len(parts)), key=lambda i: length_bounds(parts[i])[0] - length_bounds(parts[i])[1]):
        low, high = length_bounds(parts[i])
        added_chars = int(min(missing_chars, high - low))
        extended_parts[i] = _with_min_length(parts[i], low + added_chars) if added_chars else parts[i]
        missing_chars -= added_chars
    return seq(extended_parts)


# xgrammar ignores a larger multipleOf, and any multipleOf with exactly one bound.
MAX_MULTIPLE_OF = 1024
# The most values in a generated enum, for multiples between two bounds, or arrays with unique items.
MAX_ENUM_SIZE = 4096
# xgrammar generates bounded numbers with at most six decimals.
DECIMAL_UNITS = 10**6


def check_count_keywords(rules: dict[str, Any], path: str) -> None:
    """Checks minLength, maxItems and so on, and converts them to int.  A minimum must not be above its maximum."""
    for noun in ("Length", "Items", "Properties"):
        least, most = (rules.get(f"{side}{noun}") for side in ("min", "max"))
        for side, count in (("min", least), ("max", most)):
            is_whole = (
                isinstance(count, int | float) and not isinstance(count, bool) and count >= 0 and count == int(count)
            )
            if count is not None and not is_whole:
                raise schema_error(path, f"'{side}{noun}' is {shown(count)}", "use a whole number, 0 or more")
            if count is not None:
                rules[f"{side}{noun}"] = int(count)
        if least is not None and most is not None and least > most:
            raise schema_error(path, f"'min{noun}' is above 'max{noun}'", "lower it")


def string_rules(rules: dict[str, Any], path: str) -> dict[str, Any]:
    """Returns a string schema with one pattern for all `rules`.  The allowed texts need no escapes in JSON."""
    if "format" in rules and rules["format"] in ANNOTATION_FORMATS["string"]:
        del rules["format"]
    if not rules:
        return {"type": "string"}
    if "pattern" in rules and "format" in rules:
        raise schema_error(path, "'format' beside 'pattern' is not supported", "put both into one 'pattern'")
    node: Any = Repeat(Chars(JSON_CHARACTERS), 0, None)
    if "format" in rules:
        if rules["format"] not in FORMATS:
            names = ", ".join(sorted(FORMATS))
            raise schema_error(path, f"format {shown(rules['format'])} is not supported", f"use one of {names}")
        node = node_of_format(rules["format"], is_short="maxLength" in rules)
    elif "pattern" in rules:
        try:
            node = pattern_node(rules["pattern"])
        except EspalierError as error:
            raise schema_error(path, str(error), "rewrite the pattern") from None
    node = limit_length(node, rules.get("minLength", 0), rules.get("maxLength"))
    if node == NO_TEXT:
        keyword = next(name for name in ("pattern", "format") if name in rules)
        raise schema_error(path, f"{keyword!r} allows no text of this length", "change 'minLength' or 'maxLength'")
    if num_states(node) > MAX_STATES:
        raise schema_error(path, f"a length of more than {MAX_STATES} is not supported", "lower it, or leave it out")
    return {"type": "string", "pattern": regex_of(node)}


def number_rules(rules: dict[str, Any], type_name: str, path: str) -> dict[str, Any]:
    """Returns the schema of a number or an integer from its keywords `rules`.  An integer's bounds are rounded."""
    number_schema: dict[str, Any] = {}
    rules = _apply_integer_format(rules, type_name, path)
    for rule, value in rules.items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise schema_error(path, f"{rule!r} is {shown(value)}", "use a number")
        if type_name == "integer":
            if rule == "multipleOf" and (value != int(value) or value <= 0):
                raise schema_error(path, f"'multipleOf' {shown(value)} is not supported", "use a whole number above 0")
            rounds_up = rule in ("minimum", "exclusiveMaximum")
            value = math.ceil(value) if rounds_up else math.floor(value)
        number_schema[rule] = value
    if "multipleOf" in number_schema:
        return _multiples_schema(number_schema, path)
    unit = 1 if type_name == "integer" else DECIMAL_UNITS
    least, most = _bounds_in_units(number_schema, unit)
    if least is not None and most is not None and least > most:
        noun = "integer" if type_name == "integer" else "number with 6 decimals"
        raise schema_error(path, f"the bounds allow no {noun}", "widen them")
    return {"type": type_name, **number_schema}


def _apply_integer_format(rules: dict[str, Any], type_name: str, path: str) -> dict[str, Any]:
    """Returns `rules` without `format`.  An integer's format becomes bounds.  path: the JSON pointer, for errors."""
    other_rules = {rule: value for rule, value in rules.items() if rule != "format"}
    if "format" not in rules or rules["format"] in ANNOTATION_FORMATS[type_name]:
        return other_rules
    if type_name != "integer" or rules["format"] not in INTEGER_BOUNDS:
        bounded = INTEGER_BOUNDS.keys() if type_name == "integer" else set()
        names = ", ".join(sorted(ANNOTATION_FORMATS[type_name] | bounded))
        raise schema_error(
            path, f"format {shown(rules['format'])} of type {type_name!r} is not supported", f"use one of {names}"
        )
    least, most = INTEGER_BOUNDS[rules["format"]]
    numeric_rules = {rule: value for rule, value in other_rules.items() if isinstance(value, int | float)}
    return {
        **other_rules,
        **({"minimum": least} if numeric_rules.get("minimum", least) <= least else {}),
        **({"maximum": most} if numeric_rules.get("maximum", most) >= most else {}),
    }


def is_known_format(type_name: str, format: Any) -> bool:
    """Whether `format` is supported for values of this type."""
    names = {
        *(FORMATS if type_name == "string" else INTEGER_BOUNDS if type_name == "integer" else ()),
        *ANNOTATION_FORMATS.get(type_name, ()),
    }
    return isinstance(format, str) and format in names


def list_values(schema: dict[str, Any]) -> list[Any] | None:
    """Returns all values of an enforceable schema without $ref; None if there are too many or they cannot be listed."""
    if "enum" in schema or schema.get("type") in ("boolean", "null"):
        return schema.get("enum") or ([True, False] if schema["type"] == "boolean" else [None])
    if schema.get("type") != "integer":
        return None
    least, most = _bounds_in_units(schema, 1)
    if least is None or most is None or most - least >= MAX_ENUM_SIZE:
        return None
    return list(range(least, most + 1))


def list_unique_arrays(allowed_items: Iterable[Any], minimum: int, maximum: int | None, path: str) -> dict[str, Any]:
    """Returns an enum of the arrays with `minimum` to `maximum` different items.  Raises EspalierError if there are too
    many arrays."""
    values = list({json.dumps(_json_equality_key(item), sort_keys=True): item for item in allowed_items}.values())
    maximum = len(values) if maximum is None else min(maximum, len(values))
    if minimum > maximum:
        raise schema_error(path, f"'minItems' is {minimum}, and 'uniqueItems' allows {maximum}", "lower it")
    count = sum(math.perm(len(values), size) for size in range(minimum, maximum + 1))
    if count > MAX_ENUM_SIZE:
        raise schema_error(
            path,
            f"'uniqueItems' with {count} possible arrays is not supported",
            f"use fewer values or a lower 'maxItems', for {MAX_ENUM_SIZE} arrays at most",
        )
    return {"enum": [list(array) for size in range(minimum, maximum + 1) for array in permutations(values, size)]}


def _json_equality_key(value: Any) -> Any:
    """Returns a key that is the same for values that JSON Schema calls equal, such as 1.0 and 1, but not 1 and True."""
    if isinstance(value, list):
        return [_json_equality_key(item) for item in value]
    if isinstance(value, dict):
        return {name: _json_equality_key(item) for name, item in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _bounds_in_units(bounds: dict[str, Any], denominator: int) -> tuple[int | None, int | None]:
    """Returns the (least, greatest) value that `bounds` allow, in units of 1/denominator; None for a missing bound."""
    least = [math.ceil(_bound_in_units(bounds, "minimum", denominator))] if "minimum" in bounds else []
    most = [math.floor(_bound_in_units(bounds, "maximum", denominator))] if "maximum" in bounds else []
    if "exclusiveMinimum" in bounds:
        least.append(math.floor(_bound_in_units(bounds, "exclusiveMinimum", denominator)) + 1)
    if "exclusiveMaximum" in bounds:
        most.append(math.ceil(_bound_in_units(bounds, "exclusiveMaximum", denominator)) - 1)
    return max(least, default=None), min(most, default=None)


def _bound_in_units(bounds: dict[str, Any], keyword: str, denominator: int) -> Fraction:
    """Returns a bound in units of 1/denominator, from the bound's decimal text, because a binary float is not exact."""
    return Fraction(repr(bounds[keyword])) * denominator


def _multiples_schema(rules: dict[str, Any], path: str) -> dict[str, Any]:
    """Returns the schema of integers whose keywords `rules` have multipleOf.  Bounded integers become an enum."""
    step = rules["multipleOf"]
    least, most = _bounds_in_units(rules, 1)
    if least is None and most is None:
        if step > MAX_MULTIPLE_OF:
            raise schema_error(
                path, f"'multipleOf' {step} is not supported", f"use {MAX_MULTIPLE_OF} at most, or give bounds"
            )
        return {"type": "integer", "multipleOf": step}
    if least is None or most is None:
        raise schema_error(
            path, "'multipleOf' with one bound is not supported", "give 'minimum' and 'maximum', or neither"
        )
    first = -(-least // step) * step
    count = (most - first) // step + 1
    if count < 1:
        raise schema_error(path, "the bounds allow no multiple", "widen them")
    if count > MAX_ENUM_SIZE:
        raise schema_error(
            path,
            f"'multipleOf' with {count} multiples between its bounds is not supported",
            f"use bounds with {MAX_ENUM_SIZE} at most",
        )
    return {"enum": [first + i * step for i in range(count)]}


def schema_error(path: str, problem: str, remedy: str) -> EspalierError:
    """path: the JSON pointer of a subschema.  problem: what is wrong with it.  remedy: what the user can do."""
    return EspalierError(f"the JSON schema at {shown(path)}: {problem}; {remedy}")
