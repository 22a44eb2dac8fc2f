"""Rewrites a JSON schema into one that xgrammar enforces completely.  Errors name keyword and place.

xgrammar ignores some keywords, and enforces others only in part, so that it would allow invalid values.  Such a keyword
is refused, or rewritten into other keywords.  The new schema may allow fewer values than the user's schema (only
named properties in objects, strings without escapes), never more.  tests/grammar/test_schema.py checks allowed values
with the jsonschema package.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Any

from espalier.errors import EspalierError, shown
from espalier.grammar.finite import require_finite_values
from espalier.grammar.schema_values import (
    check_count_keywords,
    is_known_format,
    list_unique_arrays,
    list_values,
    number_rules,
    schema_error,
    string_rules,
)
from espalier.grammar.spec import read_json

MAX_DEPTH = 64
ANNOTATION_KEYWORDS = frozenset(
    "title description default examples $comment deprecated readOnly writeOnly $schema $id discriminator "
    "contentMediaType contentEncoding contentSchema".split()
)
DEFINITION_KEYWORDS = frozenset(("$defs", "definitions"))
NUMERIC_KEYWORDS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "format"))
# JSON type -> the keywords that this module enforces.
KEYWORDS_OF: Mapping[str, frozenset[str]] = {
    "object": frozenset(("properties", "required", "additionalProperties", "minProperties", "maxProperties")),
    "array": frozenset(("items", "prefixItems", "minItems", "maxItems", "uniqueItems")),
    "string": frozenset(("minLength", "maxLength", "pattern", "format")),
    "integer": NUMERIC_KEYWORDS,
    "number": NUMERIC_KEYWORDS - {"multipleOf"},
    "boolean": frozenset(),
    "null": frozenset(),
}
COMBINATORS = ("$ref", "enum", "const", "anyOf", "oneOf", "allOf")
IS_OF_TYPE: Mapping[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "integer": lambda value: isinstance(value, int | float) and not isinstance(value, bool) and value == int(value),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
}


def enforceable_schema(text: str, strict: bool = True) -> str:
    """Returns a schema that xgrammar enforces, as JSON text.  All its values are valid under the schema `text`.

    strict: whether objects with unnamed properties are refused.  Raises EspalierError with the keyword and its place.
    """
    schema = read_json("JSON schema", text)
    rewriter = _SchemaRewriter(schema, strict)
    rewritten = rewriter.rewrite(schema, "#", 0)
    rewriter.check_references()
    rewriter.check_disjoint()
    require_finite_values(rewriter.rewritten_schemas)
    _deduplicate_patterns(rewritten)
    return json.dumps(rewritten)


def _deduplicate_patterns(schema: dict[str, Any]) -> None:
    """Replaces equal string patterns by references to one definition, so that xgrammar compiles the pattern once."""
    string_schemas = [
        part for part in _subschemas(schema) if part.keys() == {"type", "pattern"} and isinstance(part["pattern"], str)
    ]
    num_uses = Counter(part["pattern"] for part in string_schemas)
    old_defs = schema.get("$defs", {})
    new_names = (name for i in count() if (name := f"string{i}") not in old_defs)
    names = {pattern: next(new_names) for pattern in num_uses if num_uses[pattern] > 1}
    for part in string_schemas:
        # An object that occurs twice in the schema was replaced when it came first.  It has no pattern then.
        if (pattern := part.get("pattern")) in names:
            part.clear()
            part["$ref"] = f"#/$defs/{names[pattern]}"
    if names:
        schema["$defs"] = old_defs | {name: {"type": "string", "pattern": regex} for regex, name in names.items()}


def _subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Yields all objects inside an enforceable schema, except the values of enums."""
    if isinstance(schema, dict) and not isinstance(schema.get("enum"), list):
        yield schema
        schema = list(schema.values())
    if isinstance(schema, list):
        for item in schema:
            yield from _subschemas(item)


class _SchemaRewriter:
    """Rewrites a schema and its subschemas.  rules: the keywords of a subschema.  path: its JSON pointer.
    depth: the number of schemas around it.  name, value: a keyword and its value."""

    def __init__(self, root: Any, strict: bool):
        self.root_schema = root
        self.strict = strict
        self.original_schemas: dict[str, Any] = {}
        # The enforceable schemas by place (JSON pointer).
        self.rewritten_schemas: dict[str, Any] = {}
        # $ref -> all values of the schema that it refers to; None if the values cannot be listed.
        self.values_of_reference: dict[str, list[Any] | None] = {}
        self.reference_targets: dict[str, str] = {}
        # The schemas of each oneOf, by the oneOf's place.
        self.one_of_schemas: dict[str, list[Any]] = {}

    def rewrite(self, schema: Any, path: str, depth: int) -> Any:
        """Returns the enforceable form of a schema.  path: the schema's JSON pointer."""
        if depth > MAX_DEPTH:
            raise EspalierError(f"the JSON schema is nested more than {MAX_DEPTH} levels deep; flatten it")
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise schema_error(path, f"{shown(schema)} allows no value", "use an object or true")
        if "$id" in schema and path != "#":
            raise schema_error(
                path, "'$id' inside a schema is not supported: it changes what '$ref' means", "leave it out"
            )
        self.original_schemas[path] = schema
        rules = {name: value for name, value in schema.items() if name not in ANNOTATION_KEYWORDS | DEFINITION_KEYWORDS}
        if rules.get("uniqueItems") is False:  # the default
            del rules["uniqueItems"]
        rewritten = self.rewritten_schemas[path] = self._rewritten_rules(rules, path, depth)
        for name in DEFINITION_KEYWORDS & schema.keys():
            rewritten = {**rewritten, name: self._rewritten_schemas(schema[name], f"{path}/{name}", depth)}
        return rewritten

    def _rewritten_rules(self, rules: dict[str, Any], path: str, depth: int) -> dict[str, Any]:
        combinators = [name for name in COMBINATORS if name in rules]
        if not combinators:
            return self._rewritten_types(rules, path, depth)
        name = combinators[0]
        others = sorted(rules.keys() - {name} - ({"type"} if name in ("enum", "const") else set()))
        if others:
            raise schema_error(path, f"{name!r} beside {others[0]!r} is not supported", f"put them into one {name!r}")
        if name in ("enum", "const"):
            return self._rewritten_values(rules, name, path)
        if name == "$ref":
            return self._rewritten_reference(rules[name], path)
        branches = self._rewritten_branches(rules[name], name, path, depth)
        if name == "allOf" and len(branches) > 1:
            raise schema_error(path, "'allOf' with several schemas is not supported", "merge them into one")
        if name == "oneOf":
            self.one_of_schemas[path] = rules[name]
        return branches[0] if len(branches) == 1 else {"anyOf": branches}

    def _rewritten_branches(self, value: Any, name: str, path: str, depth: int) -> list[Any]:
        if not isinstance(value, list) or not value:
            raise schema_error(path, f"{name!r} is {shown(value)}", "use a list of schemas")
        return [self.rewrite(branch, f"{path}/{name}/{i}", depth + 1) for i, branch in enumerate(value)]

    def _rewritten_schemas(self, value: Any, path: str, depth: int) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise schema_error(path, f"{shown(value)} is no object", "use an object of schemas")
        return {
            name: self.rewrite(schema, f"{path}/{_pointer_part(name)}", depth + 1) for name, schema in value.items()
        }

    def _rewritten_values(self, rules: dict[str, Any], name: str, path: str) -> dict[str, Any]:
        """Returns the enforceable form of the keyword `name`, enum or const.  Values that are not of the schema's type
        are removed, because xgrammar ignores the type beside these keywords."""
        values = rules[name] if name == "enum" else [rules[name]]
        if not isinstance(values, list):
            raise schema_error(path, f"'enum' is {shown(values)}", "use a list of values")
        if "type" in rules:
            types = self._checked_types(rules["type"], path)
            values = [value for value in values if any(IS_OF_TYPE[name_of_type](value) for name_of_type in types)]
        if not values:
            raise schema_error(path, f"{name!r} allows no value", "add a value of the type")
        return {"enum": values}

    def _rewritten_reference(self, target: Any, path: str) -> dict[str, Any]:
        if not isinstance(target, str) or not target.startswith("#"):
            raise schema_error(path, f"'$ref' to {shown(target)} is not supported", "refer to '#/$defs/...'")
        self.reference_targets[path] = target
        return {"$ref": target}

    def check_references(self) -> None:
        """Raises EspalierError if a reference leads to no rewritten schema, or back to itself."""
        for place, target in self.reference_targets.items():
            if target not in self.original_schemas:
                raise schema_error(place, f"'$ref' finds no schema at {shown(target)}", "refer to '#/$defs/...'")
            passed_places = {place}
            while target in self.reference_targets:
                if target in passed_places:
                    raise schema_error(place, "'$ref' leads back to itself", "refer to a schema with a type")
                passed_places.add(target)
                target = self.reference_targets[target]

    def check_disjoint(self) -> None:
        """Raises EspalierError if a value may match two schemas of a oneOf.  Two schemas must have different types, or
        a required property with different constant texts.  Call check_references first."""
        for place, branches in self.one_of_schemas.items():
            schemas = [self._resolve_references(branch) for branch in branches]
            if not all(self._are_disjoint(schemas[i], schemas[j]) for i in range(len(schemas)) for j in range(i)):
                raise schema_error(
                    place, "'oneOf' is not supported where two of its schemas may allow the same value", "use 'anyOf'"
                )

    # One type

    def _rewritten_types(self, rules: dict[str, Any], path: str, depth: int) -> dict[str, Any]:
        """Returns the enforceable form of a subschema without COMBINATORS, for all its types."""
        for name in rules:
            if name != "type" and not any(name in keywords for keywords in KEYWORDS_OF.values()):
                raise schema_error(path, f"{name!r} is not supported", "leave it out, and check its rule on the output")
        if "type" not in rules:
            rules = {"type": self._infer_type(rules, path), **rules} if rules else {}
        if not rules:
            return {}
        types = self._checked_types(rules.pop("type"), path)
        for name in rules:
            if not any(name in KEYWORDS_OF[type_name] for type_name in types):
                raise schema_error(path, f"{name!r} is not supported with type {shown(types)}", "leave it out")
        schemas = [self._rewritten_type(type_name, rules, path, depth, len(types) > 1) for type_name in types]
        return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}

    def _infer_type(self, rules: dict[str, Any], path: str) -> str:
        """Returns the type that has all these keywords.  JSON Schema itself would also allow values of other types."""
        types = [type_name for type_name, keywords in KEYWORDS_OF.items() if rules.keys() <= keywords]
        numeric_types = [type_name for type_name in types if type_name in ("integer", "number")]
        if "format" in rules:
            types = [type_name for type_name in types if is_known_format(type_name, rules["format"])] or ["string"]
            numeric_types = [type_name for type_name in numeric_types if type_name in types]
        if numeric_types:
            return numeric_types[-1]
        if len(types) != 1:
            raise schema_error(path, f"{min(rules)!r} needs a type", 'add "type"')
        return types[0]

    def _checked_types(self, value: Any, path: str) -> list[str]:
        types = value if isinstance(value, list) else [value]
        if not types or not all(isinstance(type_name, str) and type_name in KEYWORDS_OF for type_name in types):
            raise schema_error(path, f"type {shown(value)} is not supported", f"use one of {', '.join(KEYWORDS_OF)}")
        return types

    def _rewritten_type(
        self, type_name: str, rules: dict[str, Any], path: str, depth: int, has_other_types: bool
    ) -> dict[str, Any]:
        """Returns the enforceable form of a subschema for one of its types.  has_other_types: whether it has more."""
        rules_of_type = {rule: value for rule, value in rules.items() if rule in KEYWORDS_OF[type_name]}
        if has_other_types and type_name != "string" and not is_known_format(type_name, rules_of_type.get("format")):
            rules_of_type.pop("format", None)
        if type_name not in ("integer", "number"):
            check_count_keywords(rules_of_type, path)
        if type_name == "object":
            return self._rewritten_object(rules_of_type, path, depth)
        if type_name == "array":
            return self._rewritten_array(rules_of_type, path, depth)
        if type_name == "string":
            return string_rules(rules_of_type, path)
        return number_rules(rules_of_type, type_name, path)

    def _rewritten_object(self, rules: dict[str, Any], path: str, depth: int) -> dict[str, Any]:
        properties = self._rewritten_schemas(rules.pop("properties", {}), f"{path}/properties", depth)
        required = rules.pop("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise schema_error(path, f"'required' is {shown(required)}", "use a list of names")
        extra_schema = rules.pop("additionalProperties", None)
        is_closed = extra_schema is False or (extra_schema is None and bool(properties))
        allows_extra = extra_schema is not None and extra_schema is not False
        if allows_extra:
            extra_schema = self.rewrite(extra_schema, f"{path}/additionalProperties", depth + 1)
        for name in required:
            if name not in properties:
                if is_closed:
                    raise schema_error(
                        path, f"'required' names {name!r}, which is no property", "add it to 'properties'"
                    )
                properties[name] = {} if extra_schema is None else extra_schema
        if not properties and not is_closed:
            if rules.get("minProperties", 0) > 1:
                # xgrammar may generate the same name twice, which JSON parsers count as one property.
                raise schema_error(path, "'minProperties' above 1 needs named properties", "leave it out")
            return {"type": "object", "additionalProperties": True if extra_schema is None else extra_schema, **rules}
        if allows_extra and self.strict and "properties" in self.original_schemas[path]:
            # xgrammar would allow a named property again with any value, if its name is written with an escape.
            raise schema_error(
                path,
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

    def _rewritten_array(self, rules: dict[str, Any], path: str, depth: int) -> dict[str, Any]:
        rewritten = {name: value for name, value in rules.items() if name in ("minItems", "maxItems")}
        items = rules.get("items")
        if "prefixItems" in rules:
            rewritten["prefixItems"] = self._rewritten_branches(rules["prefixItems"], "prefixItems", path, depth)
            items = False if items is None else items
        if isinstance(items, list):
            raise schema_error(path, "'items' as a list is not supported", "use 'prefixItems'")
        rewritten["items"] = (
            False if items is False else self.rewrite({} if items is None else items, f"{path}/items", depth + 1)
        )
        if "uniqueItems" in rules and rewritten.get("maxItems", 2) > 1:
            return self._rewritten_unique_array(rules["uniqueItems"], rewritten, path, depth)
        return {"type": "array", **rewritten}

    def _rewritten_unique_array(
        self, unique_items: Any, array_schema: dict[str, Any], path: str, depth: int
    ) -> dict[str, Any]:
        """Returns an enum of the arrays without equal items.  Raises EspalierError for items with too many values."""
        if unique_items is not True:
            raise schema_error(path, f"'uniqueItems' is {shown(unique_items)}", "use true or false")
        values = None if "prefixItems" in array_schema else self._all_values(array_schema["items"], depth)
        if values is None:
            raise schema_error(
                path,
                "'uniqueItems' is not supported for items without a list of values",
                "give 'items' an enum, or leave 'uniqueItems' out (in pydantic a list for a set) and drop equal items",
            )
        return list_unique_arrays(values, array_schema.get("minItems", 0), array_schema.get("maxItems"), path)

    def _all_values(self, schema: Any, depth: int) -> list[Any] | None:
        """Returns all values of an enforceable schema; None if they cannot be listed."""
        if not isinstance(schema, dict) or depth > MAX_DEPTH:
            return None
        if "$ref" in schema:
            place = schema["$ref"]
            if place not in self.values_of_reference:
                self.values_of_reference[place] = None  # ends the recursion of a schema that refers to itself
                target = self._schema_at(place)
                if target is not None:
                    self.values_of_reference[place] = self._all_values(
                        self.rewrite(target, place, depth + 1), depth + 1
                    )
            return self.values_of_reference[place]
        if "anyOf" in schema:
            lists = [self._all_values(branch, depth + 1) for branch in schema["anyOf"]]
            return None if None in lists else [value for values in lists if values for value in values]
        return list_values(schema)

    def _resolve_references(self, schema: Any) -> dict[str, Any]:
        """Follows $ref from schema to schema, and returns the last schema; {} if a reference leads to none."""
        for _ in range(MAX_DEPTH):
            if isinstance(schema, dict) and isinstance(schema.get("$ref"), str):
                schema = self._schema_at(schema["$ref"])
        return schema if isinstance(schema, dict) else {}

    def _schema_at(self, pointer: str) -> Any:
        value = self.root_schema
        for part in pointer.split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            value = value.get(part) if isinstance(value, dict) else None
        return value

    def _are_disjoint(self, first_schema: dict[str, Any], second_schema: dict[str, Any]) -> bool:
        """Whether types, or texts of a required property, show that no value is valid under both schemas."""
        types = [self._type_set(schema) for schema in (first_schema, second_schema)]
        if types[0] and types[1] and not types[0] & types[1]:
            return True
        if types != [{"object"}, {"object"}]:
            return False
        for name in set(first_schema.get("required", ())) & set(second_schema.get("required", ())):
            first_texts, second_texts = (
                _constant_texts(schema.get("properties", {}).get(name)) for schema in (first_schema, second_schema)
            )
            if first_texts and second_texts and not first_texts & second_texts:
                return True
        return False

    @staticmethod
    def _type_set(schema: dict[str, Any]) -> set[str]:
        """Returns the types that a schema names, and "integer" beside "number"."""
        named = schema.get("type")
        types = set(named if isinstance(named, list) else [named]) if named else set()
        return types | {"integer"} if "number" in types else types


def _constant_texts(schema: Any) -> set[str]:
    """Returns the texts that a property may have; empty if the property may have other values."""
    if not isinstance(schema, dict):
        return set()
    values = [schema["const"]] if "const" in schema else schema.get("enum", [])
    return set(values) if all(isinstance(value, str) for value in values) else set()


def _pointer_part(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
