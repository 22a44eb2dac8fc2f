"""A schema is enforced whole or refused by name: what the grammar allows is valid by the jsonschema package."""

import json
import random

import jsonschema
import numpy as np
import pytest
import xgrammar

from espalier.bench.schemas import random_schema
from espalier.errors import EspalierError
from espalier.grammar import Grammar
from espalier.grammar.check import check_grammar
from espalier.grammar.schema import ANNOTATIONS, KEYWORDS, enforceable
from espalier.masking.masker import GrammarMasker, allowed_tokens
from tests.grammar.vocabulary import END, VOCABULARY, bytes_of, compiled

INTEGER = {"type": "integer"}
# Schema, a value that it allows, values that it does not and that xgrammar alone would partly let through.
ENFORCED = [
    ({"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}, {"a": 1}, [{}, {"a": "x"}, {"a": 1.5}]),
    ({"type": "object", "required": ["b"]}, {"b": 2}, [{}, {"c": 2}, 3]),
    ({"required": ["b"]}, {"b": 2}, [{}]),
    ({"properties": {"a": INTEGER}}, {"a": 2}, [{"a": "x"}]),
    ({"type": "object", "required": ["b"], "additionalProperties": INTEGER}, {"b": 2}, [{"b": "x"}, {}]),
    ({"type": "object", "additionalProperties": INTEGER, "minProperties": 1}, {"c": 2}, [{}, {"c": "x"}]),
    ({"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "minProperties": 1}, {"b": 2}, [{}]),
    ({"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "maxProperties": 1}, {"b": 2}, [{"a": 1, "b": 2}]),
    ({"type": "array", "items": INTEGER, "minItems": 1, "maxItems": 2}, [1, 2], [[], [1, 2, 3], ["a"]]),
    ({"type": "array", "minItems": 1}, [{"a": None}], [[]]),
    ({"type": "array", "prefixItems": [INTEGER, {"type": "string"}]}, [1, "a"], [["a"], [1, 2]]),
    ({"items": INTEGER}, [1], [["a"]]),
    ({"maxItems": 1}, [1], [[1, 2]]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, "ab", ["a", "abcd"]),
    ({"maxLength": 2}, "é1", ["abc"]),
    ({"type": "string", "pattern": "^[A-Z]{2}-[0-9]$"}, "AB-1", ["AB-", "xAB-1"]),
    ({"type": "string", "pattern": "^(yes|no)$"}, "yes", ["maybe"]),
    ({"type": "string", "format": "date"}, "2024-01-31", []),
    ({"type": "integer", "minimum": 3, "maximum": 12}, 12, [2, 13, 3.5]),
    ({"type": "integer", "minimum": 2.5}, 3, [2]),
    ({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 5}, 4, [3, 5]),
    ({"type": "integer", "multipleOf": 3, "minimum": 4, "maximum": 9}, 6, [3, 4, 12]),
    ({"type": "number", "minimum": 1.5, "maximum": 3.25}, 2, [1.25, 3.5]),
    ({"minimum": 0}, 1.5, [-1]),
    ({"type": ["integer", "null"], "minimum": 3}, None, [2]),
    ({"type": ["string", "integer"], "maxLength": 1, "minimum": 2}, "a", ["ab", 1]),
    ({"type": "string", "enum": ["a", 1]}, "a", [1]),
    ({"const": {"a": 1}}, {"a": 1}, [{"a": 2}]),
    ({"anyOf": [INTEGER, {"type": "null"}]}, None, ["a"]),
    ({"oneOf": [INTEGER, {"type": "null"}]}, 1, ["a"]),
    (
        {
            "oneOf": [
                {"type": "object", "properties": {"k": {"const": k}, "v": v}, "required": ["k", "v"]}
                for k, v in (("i", INTEGER), ("s", {"type": "boolean"}))
            ]
        },
        {"k": "i", "v": 1},
        [{"k": "s", "v": 1}],
    ),
    ({"allOf": [INTEGER], "description": "x"}, 1, ["a"]),
    ({"$ref": "#/$defs/n", "$defs": {"n": INTEGER}}, 1, ["a"]),
    (
        {"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}}},
        {"n": {"n": {}}},
        [{"n": 1}],
    ),
    ({"type": "object", "properties": {"a": True}}, {"a": [None]}, [1]),
    ({"type": "boolean"}, True, [None]),
    ({}, [1, {"a": None}], []),
]
REFUSED = [
    ({"type": "number", "multipleOf": 0.5}, "multipleOf"),
    ({"type": "integer", "multipleOf": 0.5}, "multipleOf"),
    ({"type": "array", "items": INTEGER, "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "contains": INTEGER}, "contains"),
    ({"type": "object", "patternProperties": {"^x": INTEGER}}, "patternProperties"),
    ({"type": "object", "propertyNames": {"pattern": "^x"}}, "propertyNames"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"type": "object", "additionalProperties": INTEGER, "minProperties": 2}, "minProperties"),
    ({"type": "object", "properties": {"a": INTEGER}, "additionalProperties": INTEGER}, "additionalProperties"),
    ({"type": "object", "properties": {"a": INTEGER}, "additionalProperties": {}}, "additionalProperties"),
    ({"type": "object", "properties": {"a": INTEGER}, "required": ["b"]}, "required"),
    ({"type": "object", "additionalProperties": False, "required": ["b"]}, "required"),
    ({"if": INTEGER, "then": {"minimum": 1}}, "if"),
    ({"not": INTEGER}, "not"),
    ({"oneOf": [INTEGER, {"type": "number"}]}, "oneOf"),
    ({"allOf": [INTEGER, {"minimum": 1}]}, "allOf"),
    ({"anyOf": [INTEGER], "minimum": 1}, "anyOf"),
    ({"$ref": "#/$defs/n", "minimum": 1, "$defs": {"n": INTEGER}}, "$ref"),
    ({"$ref": "http://example.com/schema"}, "$ref"),
    ({"$ref": "#/$defs/none"}, "$ref"),
    ({"$ref": "#"}, "$ref"),
    ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
    ({"type": "string", "format": "phone"}, "phone"),
    ({"type": "string", "format": "date", "maxLength": 3}, "format"),
    ({"type": "string", "pattern": "a", "maxLength": 3}, "pattern"),
    ({"type": "string", "pattern": "^(?!a)b$"}, "lookaround"),
    ({"type": "string", "pattern": '^"$'}, "escape"),
    ({"type": "string", "pattern": "^\\\\$"}, "\\\\"),
    ({"type": "string", "pattern": "^\\x22$"}, "escape"),
    ({"type": "string", "pattern": "^[\\n]$"}, "\\n"),
    ({"type": "string", "pattern": "^a^b$"}, "middle"),
    ({"type": "integer", "maxLength": 3}, "maxLength"),
    ({"type": "strin"}, "strin"),
    ({"minimum": 1, "maxLength": 1}, "type"),
    ({"enum": []}, "enum"),
    ({"type": "array", "items": [INTEGER]}, "items"),
    ({"type": "array", "minItems": 2, "maxItems": 1}, "minItems"),
    ({"nullable": True, "type": "string"}, "nullable"),
    (False, "false"),
    (json.loads('{"items":' * 80 + "{}" + "}" * 80), "levels"),
]


def accepts(schema, value) -> bool:
    grammar = xgrammar.Grammar.from_json_schema(
        enforceable(json.dumps(schema)), any_whitespace=False, strict_mode=False
    )
    # Values of enum and const are written without spaces.
    texts = (json.dumps(value, ensure_ascii=False), json.dumps(value, ensure_ascii=False, separators=(",", ":")))
    return any(xgrammar.testing._is_grammar_accept_string(grammar, text) for text in texts)


@pytest.mark.parametrize(("schema", "valid", "invalid"), ENFORCED, ids=lambda value: json.dumps(value)[:60])
def test_what_a_keyword_forbids_is_not_generated(schema, valid, invalid):
    validator = jsonschema.Draft202012Validator(schema)
    assert accepts(schema, valid) and validator.is_valid(valid)
    assert not any(accepts(schema, value) for value in invalid)


def test_every_keyword_that_is_enforced_has_a_case():
    tried = json.dumps([schema for schema, _, _ in ENFORCED])
    assert all(f'"{name}"' in tried for known in KEYWORDS.values() for name in known)


@pytest.mark.parametrize(("schema", "named"), REFUSED, ids=lambda value: json.dumps(value)[:60])
def test_what_is_not_enforced_is_refused_by_name(schema, named):
    with pytest.raises(EspalierError) as caught:
        check_grammar(Grammar.of_json_schema(json.dumps(schema)))
    assert named.lower() in str(caught.value).lower()
    assert "\n" not in str(caught.value)


def test_a_schema_that_is_not_strict_gets_the_named_properties_alone():
    schema = {"type": "object", "properties": {"a": INTEGER}, "additionalProperties": True}
    made = json.loads(enforceable(json.dumps(schema), strict=False))
    assert made["additionalProperties"] is False


def test_annotations_change_nothing():
    notes = dict.fromkeys(ANNOTATIONS, "x")
    assert enforceable(json.dumps({**INTEGER, **notes})) == enforceable(json.dumps(INTEGER))


@pytest.mark.parametrize("seed", range(40))
def test_a_random_walk_is_valid(seed):
    """Tokens drawn from the masks alone spell a valid value: a model can do no worse."""
    schema, rng = random_schema(seed), random.Random(seed)
    masker = GrammarMasker(compiled(Grammar.of_json_schema(schema)), len(VOCABULARY), (END,), None, bytes_of)
    text = b""
    for _ in range(4000):
        token = int(rng.choice(allowed_tokens(masker.root_mask())))
        if token == END:
            break
        text += VOCABULARY[token]
        masker.push(token)
    assert jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)), text
    assert np.all(masker.root_mask() == 0) or END in allowed_tokens(masker.root_mask())
