"""Turns a JSON schema into one that xgrammar enforces completely, or refuses it, naming the keyword and its place.

xgrammar ignores some keywords and enforces others only in part.  tests/grammar/test_schema.py compares each keyword
with the jsonschema package.  A keyword that would let an invalid value through is refused, or rewritten into others.
A schema may become narrower (closed objects, strings without escapes), never wider.
"""

import json
import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from espalier.errors import EspalierError, shown
from espalier.grammar.json_text import read_json
from espalier.grammar.pattern import enforceable_pattern, of_length

MAX_DEPTH = 64
# xgrammar ignores a larger multipleOf, and any multipleOf with exactly one bound.
MAX_MULTIPLE = 1024
# Multiples between two bounds, which become an enum.
MAX_MULTIPLES = 4096
# xgrammar writes a number with bounds in at most six decimals.
PLACES = 10**6
ANNOTATIONS = frozenset(
    "title description default examples $comment deprecated readOnly writeOnly $schema $id discriminator "
    "contentMediaType contentEncoding".split()
)
DEFINITIONS = frozenset(("$defs", "definitions"))
STRING_FORMATS = frozenset(
    "date time date-time duration email hostname ipv4 ipv6 uuid uri uri-reference uri-template json-pointer "
    "relative-json-pointer".split()
)
NUMERIC = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
# The keywords that are enforced for each type.
KEYWORDS: Mapping[str, frozenset[str]] = {
    "object": frozenset(("properties", "required", "additionalProperties", "minProperties", "maxProperties")),
    "array": frozenset(("items", "prefixItems", "minItems", "maxItems")),
    "string": frozenset(("minLength", "maxLength", "pattern", "format")),
    "integer": NUMERIC,
    "number": NUMERIC - {"multipleOf"},
    "boolean": frozenset(),
    "null": frozenset(),
}
COMBINING = ("$ref", "enum", "const", "anyOf", "oneOf", "allOf")
IS_TYPE: Mapping[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "integer": lambda value: isinstance(value, int | float) and not isinstance(value, bool) and value == int(value),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
}


def enforceable(text: str, strict: bool = True) -> str:
    """The JSON text of a schema that xgrammar enforces, and whose values are all valid under the schema `text`.

    strict: see Grammar.strict.  Raises EspalierError naming the keyword and its place.
    """
    schema = read_json("JSON schema", text)
    walk = _Walk(schema, strict)
    made = walk.schema(schema, "#", 0)
    walk.check_references()
    walk.check_disjoint()
    return json.dumps(made)


class _Walk:
    def __init__(self, root: Any, strict: bool):
        self.root = root
        self.strict = strict
        self.seen: dict[str, Any] = {}
        self.references: dict[str, str] = {}
        # The schemas of each oneOf, by its place.
        self.alternatives: dict[str, list[Any]] = {}

    def schema(self, schema: Any, place: str, depth: int) -> Any:
        """The enforceable form of the schema at `place`, a JSON pointer."""
        if depth > MAX_DEPTH:
            raise EspalierError(f"the JSON schema is nested more than {MAX_DEPTH} levels deep; flatten it")
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise _refused(place, f"{shown(schema)} allows no value", "use an object or true")
        if "$id" in schema and place != "#":
            raise _refused(
                place, "'$id' inside a schema is not supported: it changes what '$ref' means", "leave it out"
            )
        self.seen[place] = schema
        rules = {name: value for name, value in schema.items() if name not in ANNOTATIONS | DEFINITIONS}
        if rules.get("uniqueItems") is False:  # the default
            del rules["uniqueItems"]
        made = self._rules(rules, place, depth)
        for name in DEFINITIONS & schema.keys():
            made = {**made, name: self._each(schema[name], f"{place}/{name}", depth)}
        return made

    def _rules(self, rules: dict[str, Any], place: str, depth: int) -> dict[str, Any]:
        combining = [name for name in COMBINING if name in rules]
        if not combining:
            return self._typed(rules, place, depth)
        name = combining[0]
        beside = sorted(rules.keys() - {name} - ({"type"} if name in ("enum", "const") else set()))
        if beside:
            raise _refused(place, f"{name!r} beside {beside[0]!r} is not supported", f"put them into one {name!r}")
        if name in ("enum", "const"):
            return self._values(rules, name, place)
        if name == "$ref":
            return self._reference(rules[name], place)
        branches = self._branches(rules[name], name, place, depth)
        if name == "allOf" and len(branches) > 1:
            raise _refused(place, "'allOf' with several schemas is not supported", "merge them into one")
        if name == "oneOf":
            self.alternatives[place] = rules[name]
        return branches[0] if len(branches) == 1 else {"anyOf": branches}

    def _branches(self, value: Any, name: str, place: str, depth: int) -> list[Any]:
        if not isinstance(value, list) or not value:
            raise _refused(place, f"{name!r} is {shown(value)}", "use a list of schemas")
        return [self.schema(each, f"{place}/{name}/{i}", depth + 1) for i, each in enumerate(value)]

    def _each(self, value: Any, place: str, depth: int) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise _refused(place, f"{shown(value)} is no object", "use an object of schemas")
        return {name: self.schema(each, f"{place}/{_escaped(name)}", depth + 1) for name, each in value.items()}

    def _values(self, rules: dict[str, Any], name: str, place: str) -> dict[str, Any]:
        """enum and const.  xgrammar ignores a type beside them, so values of other types are left out here."""
        values = rules[name] if name == "enum" else [rules[name]]
        if not isinstance(values, list):
            raise _refused(place, f"'enum' is {shown(values)}", "use a list of values")
        if "type" in rules:
            types = self._types(rules["type"], place)
            values = [value for value in values if any(IS_TYPE[each](value) for each in types)]
        if not values:
            raise _refused(place, f"{name!r} allows no value", "add a value of the type")
        return {"enum": values}

    def _reference(self, target: Any, place: str) -> dict[str, Any]:
        if not isinstance(target, str) or not target.startswith("#"):
            raise _refused(place, f"'$ref' to {shown(target)} is not supported", "refer to '#/$defs/...'")
        self.references[place] = target
        return {"$ref": target}

    def check_references(self) -> None:
        """Every target must be a schema that was read, or its keywords would not have been checked."""
        for place, target in self.references.items():
            if target not in self.seen:
                raise _refused(place, f"'$ref' finds no schema at {shown(target)}", "refer to '#/$defs/...'")
            passed = {place}
            while target in self.references:
                if target in passed:
                    raise _refused(place, "'$ref' leads back to itself", "refer to a schema with a type")
                passed.add(target)
                target = self.references[target]

    def check_disjoint(self) -> None:
        """No value may be valid under two schemas of a oneOf: their types differ, or the texts of a property that both
        require.  References must have been checked."""
        for place, branches in self.alternatives.items():
            kinds = [self._kinds(branch) for branch in branches]
            if not all(self._differ(kinds[i], kinds[j]) for i in range(len(kinds)) for j in range(i)):
                raise _refused(
                    place, "'oneOf' is not supported where two of its schemas may allow the same value", "use 'anyOf'"
                )

    # One type

    def _typed(self, rules: dict[str, Any], place: str, depth: int) -> dict[str, Any]:
        for name in rules:
            if name != "type" and not any(name in known for known in KEYWORDS.values()):
                raise _refused(place, f"{name!r} is not supported", "leave it out, and check its rule on the output")
        if "type" not in rules:
            rules = {"type": self._inferred(rules, place), **rules} if rules else {}
        if not rules:
            return {}
        types = self._types(rules.pop("type"), place)
        for name in rules:
            if not any(name in KEYWORDS[each] for each in types):
                raise _refused(place, f"{name!r} is not supported with type {shown(types)}", "leave it out")
        made = [self._of_type(each, rules, place, depth) for each in types]
        return made[0] if len(made) == 1 else {"anyOf": made}

    def _inferred(self, rules: dict[str, Any], place: str) -> str:
        """The type that the keywords apply to.  A schema without a type would allow any value of the other types."""
        fitting = [each for each, known in KEYWORDS.items() if rules.keys() <= known]
        numeric = [each for each in fitting if each in ("integer", "number")]
        if numeric:
            return numeric[-1]
        if len(fitting) != 1:
            raise _refused(place, f"{min(rules)!r} needs a type", 'add "type"')
        return fitting[0]

    def _types(self, value: Any, place: str) -> list[str]:
        types = value if isinstance(value, list) else [value]
        if not types or not all(isinstance(each, str) and each in KEYWORDS for each in types):
            raise _refused(place, f"type {shown(value)} is not supported", f"use one of {', '.join(KEYWORDS)}")
        return types

    def _of_type(self, name: str, rules: dict[str, Any], place: str, depth: int) -> dict[str, Any]:
        own = {rule: value for rule, value in rules.items() if rule in KEYWORDS[name]}
        if name not in ("integer", "number"):
            _check_counts(own, place)
        if name == "object":
            return self._object(own, place, depth)
        if name == "array":
            return self._array(own, place, depth)
        if name == "string":
            return _string(own, place)
        return _number(own, name, place)

    def _object(self, rules: dict[str, Any], place: str, depth: int) -> dict[str, Any]:
        properties = self._each(rules.pop("properties", {}), f"{place}/properties", depth)
        required = rules.pop("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise _refused(place, f"'required' is {shown(required)}", "use a list of names")
        extra = rules.pop("additionalProperties", None)
        closed = extra is False or (extra is None and bool(properties))
        opens = extra is not None and extra is not False
        if opens:
            extra = self.schema(extra, f"{place}/additionalProperties", depth + 1)
        for name in required:
            if name not in properties:
                if closed:
                    raise _refused(place, f"'required' names {name!r}, which is no property", "add it to 'properties'")
                properties[name] = {} if extra is None else extra
        if not properties and not closed:
            if rules.get("minProperties", 0) > 1:
                # The output may repeat a name, which then counts once.
                raise _refused(place, "'minProperties' above 1 needs named properties", "leave it out")
            return {"type": "object", "additionalProperties": True if extra is None else extra, **rules}
        if opens and self.strict and "properties" in self.seen[place]:
            # xgrammar would allow a property's name again, written with an escape, and then with any value.
            raise _refused(
                place,
                "'additionalProperties' beside 'properties' is not supported",
                "use false, or strict=false to generate only the named properties",
            )
        return {
            "type": "object",
            "properties": properties,
            "required": list(required),
            "additionalProperties": False,
            **rules,
        }

    def _array(self, rules: dict[str, Any], place: str, depth: int) -> dict[str, Any]:
        made = {name: value for name, value in rules.items() if name in ("minItems", "maxItems")}
        items = rules.get("items")
        if "prefixItems" in rules:
            made["prefixItems"] = self._branches(rules["prefixItems"], "prefixItems", place, depth)
            items = False if items is None else items
        if isinstance(items, list):
            raise _refused(place, "'items' as a list is not supported", "use 'prefixItems'")
        made["items"] = (
            False if items is False else self.schema({} if items is None else items, f"{place}/items", depth + 1)
        )
        return {"type": "array", **made}

    def _kinds(self, schema: Any) -> dict[str, Any]:
        """The schema behind references; {} where it is none."""
        for _ in range(MAX_DEPTH):
            if isinstance(schema, dict) and isinstance(schema.get("$ref"), str):
                schema = self._at(schema["$ref"])
        return schema if isinstance(schema, dict) else {}

    def _at(self, pointer: str) -> Any:
        value = self.root
        for part in pointer.split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            value = value.get(part) if isinstance(value, dict) else None
        return value

    def _differ(self, one: dict[str, Any], other: dict[str, Any]) -> bool:
        types = [self._type_set(each) for each in (one, other)]
        if types[0] and types[1] and not types[0] & types[1]:
            return True
        if types != [{"object"}, {"object"}]:
            return False
        for name in set(one.get("required", ())) & set(other.get("required", ())):
            first, second = (_constants(each.get("properties", {}).get(name)) for each in (one, other))
            if first and second and not first & second:
                return True
        return False

    @staticmethod
    def _type_set(schema: dict[str, Any]) -> set[str]:
        named = schema.get("type")
        types = set(named if isinstance(named, list) else [named]) if named else set()
        return types | {"integer"} if "number" in types else types


def _constants(schema: Any) -> set[str]:
    """The constant texts that a property may have; empty if it is not limited to constant texts."""
    if not isinstance(schema, dict):
        return set()
    values = [schema["const"]] if "const" in schema else schema.get("enum", [])
    return set(values) if all(isinstance(value, str) for value in values) else set()


def _check_counts(rules: dict[str, Any], place: str) -> None:
    """minLength, maxItems and the like: whole numbers, of which the least is not above the most."""
    for what in ("Length", "Items", "Properties"):
        least, most = (rules.get(f"{side}{what}") for side in ("min", "max"))
        for side, count in (("min", least), ("max", most)):
            whole = (
                isinstance(count, int | float) and not isinstance(count, bool) and count >= 0 and count == int(count)
            )
            if count is not None and not whole:
                raise _refused(place, f"'{side}{what}' is {shown(count)}", "use a whole number, 0 or more")
            if count is not None:
                rules[f"{side}{what}"] = int(count)
        if least is not None and most is not None and least > most:
            raise _refused(place, f"'min{what}' is above 'max{what}'", "lower it")


def _string(rules: dict[str, Any], place: str) -> dict[str, Any]:
    if len(named := [name for name in ("pattern", "format") if name in rules]) and len(rules) > 1:
        other = min(rules.keys() - {named[0]})
        raise _refused(place, f"{named[0]!r} beside {other!r} is not supported", "put both into one 'pattern'")
    if "format" in rules and rules["format"] not in STRING_FORMATS:
        known = ", ".join(sorted(STRING_FORMATS))
        raise _refused(place, f"format {shown(rules['format'])} is not supported", f"use one of {known}")
    if "pattern" in rules:
        try:
            rules = {"pattern": enforceable_pattern(rules["pattern"])}
        except EspalierError as error:
            raise _refused(place, str(error), "rewrite the pattern") from None
    if "minLength" in rules or "maxLength" in rules:
        rules = {"pattern": of_length(rules.get("minLength", 0), rules.get("maxLength"))}
    return {"type": "string", **rules}


def _number(rules: dict[str, Any], name: str, place: str) -> dict[str, Any]:
    """A number or an integer, whose bounds are then integers."""
    made: dict[str, Any] = {}
    for rule, value in rules.items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise _refused(place, f"{rule!r} is {shown(value)}", "use a number")
        if name == "integer":
            if rule == "multipleOf" and (value != int(value) or value <= 0):
                raise _refused(place, f"'multipleOf' {shown(value)} is not supported", "use a whole number above 0")
            up = rule in ("minimum", "exclusiveMaximum")
            value = math.ceil(value) if up else math.floor(value)
        made[rule] = value
    if "multipleOf" in made:
        return _multiples(made, place)
    unit = 1 if name == "integer" else PLACES
    least, most = _first_and_last(made, unit)
    if least is not None and most is not None and least > most:
        what = "integer" if name == "integer" else "number with 6 decimals"
        raise _refused(place, f"the bounds allow no {what}", "widen them")
    return {"type": name, **made}


def _first_and_last(bounds: dict[str, Any], unit: int) -> tuple[int | None, int | None]:
    """The first and the last multiple of 1 / unit that the bounds allow, times unit; None without a bound."""
    least = [math.ceil(_times(bounds, "minimum", unit))] if "minimum" in bounds else []
    most = [math.floor(_times(bounds, "maximum", unit))] if "maximum" in bounds else []
    if "exclusiveMinimum" in bounds:
        least.append(math.floor(_times(bounds, "exclusiveMinimum", unit)) + 1)
    if "exclusiveMaximum" in bounds:
        most.append(math.ceil(_times(bounds, "exclusiveMaximum", unit)) - 1)
    return max(least, default=None), min(most, default=None)


def _times(bounds: dict[str, Any], rule: str, unit: int) -> Fraction:
    """A bound as it was written, not as a binary fraction, times unit."""
    return Fraction(repr(bounds[rule])) * unit


def _multiples(rules: dict[str, Any], place: str) -> dict[str, Any]:
    """Integers of which each is a multiple: listed, if they have bounds."""
    step = rules["multipleOf"]
    least, most = _first_and_last(rules, 1)
    if least is None and most is None:
        if step > MAX_MULTIPLE:
            raise _refused(
                place, f"'multipleOf' {step} is not supported", f"use {MAX_MULTIPLE} at most, or give bounds"
            )
        return {"type": "integer", "multipleOf": step}
    if least is None or most is None:
        raise _refused(
            place, "'multipleOf' with one bound is not supported", "give 'minimum' and 'maximum', or neither"
        )
    first = -(-least // step) * step
    count = (most - first) // step + 1
    if count < 1:
        raise _refused(place, "the bounds allow no multiple", "widen them")
    if count > MAX_MULTIPLES:
        raise _refused(
            place,
            f"'multipleOf' with {count} multiples between its bounds is not supported",
            f"use bounds with {MAX_MULTIPLES} at most",
        )
    return {"enum": [first + i * step for i in range(count)]}


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _refused(place: str, what: str, remedy: str) -> EspalierError:
    return EspalierError(f"the JSON schema at {shown(place)}: {what}; {remedy}")
