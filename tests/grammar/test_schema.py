"""A schema is enforced whole or refused by name: what the grammar allows is valid by the jsonschema package."""

import json
import random
from typing import Any

import jsonschema
import pytest
import xgrammar

from espalier.errors import EspalierError
from espalier.grammar import Grammar, tag
from espalier.grammar.schema import ANNOTATION_KEYWORDS, KEYWORDS_OF, enforceable_schema
from espalier.grammar.tag import check_grammar
from lab.bench.schemas import random_schema
from tests.grammar.vocabulary import TooLong, compiled, random_text

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
    ({"type": "array", "minItems": 1, "uniqueItems": False}, [{"a": None}], [[]]),
    ({"type": "array", "items": {"enum": ["a", "b", 1]}, "uniqueItems": True}, ["b", 1], [["a", "a"], ["b", "a", "b"]]),
    ({"items": {"type": "boolean"}, "uniqueItems": True, "minItems": 1}, [False, True], [[True, True], []]),
    (
        {"items": {"$ref": "#/$defs/n"}, "uniqueItems": True, "maxItems": 2, "$defs": {"n": {"enum": [1, 1.0, True]}}},
        [True, 1],
        [[1, 1]],
    ),
    ({"items": {"type": "integer", "minimum": 1, "exclusiveMaximum": 4}, "uniqueItems": True}, [3, 1], [[2, 2], [4]]),
    ({"type": "array", "items": {}, "uniqueItems": True, "maxItems": 1}, ["a"], [[1, 2]]),
    ({"type": "array", "prefixItems": [INTEGER, {"type": "string"}]}, [1, "a"], [["a"], [1, 2]]),
    ({"items": INTEGER}, [1], [["a"]]),
    ({"maxItems": 1}, [1], [[1, 2]]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, "ab", ["a", "abcd"]),
    ({"maxLength": 2}, "é1", ["abc"]),
    ({"type": "string", "pattern": "^[A-Z]{2}-[0-9]$"}, "AB-1", ["AB-", "xAB-1"]),
    ({"type": "string", "pattern": "^(yes|no)$"}, "yes", ["maybe"]),
    ({"type": "string", "pattern": "^yes$|^no$"}, "no", ["maybe", "yesno"]),
    ({"type": "string", "pattern": "abc"}, "xabcé", ["ab"]),
    ({"type": "string", "pattern": "^https://"}, "https://a", ["http://a"]),
    ({"type": "string", "pattern": "^[a-z]+$", "minLength": 2, "maxLength": 3}, "abc", ["a", "abcd", "A1"]),
    ({"type": ["string", "null"], "format": "date"}, None, ["2023-02-29"]),
    ({"format": "date"}, "2024-02-29", ["2023-02-29", 1]),
    ({"format": "int32"}, 2**31 - 1, [2**31, "a"]),
    ({"type": "string", "pattern": r"^\S$"}, "é", [" ", "\u2003", "\ufeff"]),
    ({"type": "string", "pattern": r"^[^\s@]$"}, "é", ["@", "\u2003", "\u3000"]),
    ({"type": "string", "pattern": "^[ -~]{1,3}$"}, "a b", ["é"]),
    ({"type": "string", "format": "date"}, "2024-01-31", []),
    ({"type": "integer", "minimum": 3, "maximum": 12}, 12, [2, 13, 3.5]),
    ({"type": "integer", "minimum": 2.5}, 3, [2]),
    ({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 5}, 4, [3, 5]),
    ({"type": "integer", "multipleOf": 3, "minimum": 4, "maximum": 9}, 6, [3, 4, 12]),
    ({"type": "integer", "multipleOf": 1024}, 2048, [1025, 2]),
    ({"type": "integer", "multipleOf": 5000, "minimum": -1, "exclusiveMaximum": 10000}, 5000, [-5000, 5001, 10000]),
    ({"type": "number", "minimum": 1.5, "maximum": 3.25}, 2, [1.25, 3.5]),
    ({"type": "number", "minimum": 0.1, "maximum": 0.1}, 0.1, [0.2, 0]),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, 0.5, [0, 0.0, -0.5]),
    ({"type": "integer", "enum": [1.0, 2.5, True]}, 1, [2.5, True]),
    ({"enum": [2**63 - 1, -(2**63), 0.1]}, 2**63 - 1, [2**63 - 2]),
    ({"const": "\U0001f600/\u0001"}, "\U0001f600/\u0001", ["\U0001f600"]),
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
    ({"type": "integer", "multipleOf": 1025}, "multipleOf"),
    ({"type": "integer", "multipleOf": 3, "minimum": 1}, "multipleOf"),
    ({"type": "integer", "multipleOf": 2, "minimum": 0, "maximum": 1_000_000}, "multipleOf"),
    ({"type": "integer", "multipleOf": 10, "minimum": 1, "maximum": 9}, "bounds"),
    ({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 4}, "bounds"),
    ({"type": "number", "minimum": 1e-7, "maximum": 2e-7}, "bounds"),
    ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1e-6}, "bounds"),
    ({"type": "string", "maxLength": 10**400}, "64 bits"),
    ({"type": "number", "minimum": 10**400}, "64 bits"),
    ({"enum": [10**30]}, "64 bits"),
    ({"enum": [float("inf")]}, "Infinity"),
    ({"enum": ["\ud800"]}, "surrogate"),
    ({"type": "object", "properties": {"\ud800": INTEGER}}, "surrogate"),
    ({"type": "array", "items": INTEGER, "uniqueItems": True}, "drop equal items"),
    ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "items": {"enum": list(range(8))}, "uniqueItems": True}, "possible arrays"),
    ({"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "minItems": 3}, "minItems"),
    ({"type": "array", "uniqueItems": "yes"}, "uniqueItems"),
    *[
        ({**schema, "$defs": {"n": endless}}, "no value ends")
        for schema in ({"$ref": "#/$defs/n"}, {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}})
        for endless in (
            {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]},
            {"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 1},
            {"type": "array", "prefixItems": [{"$ref": "#/$defs/n"}]},
            {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 2}]},
            {"type": "object", "additionalProperties": {"$ref": "#/$defs/n"}, "minProperties": 1},
        )
    ],
    ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "at '#/properties/a'"),
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
    ({"oneOf": [{"$ref": "#/$defs/a"}, INTEGER], "$defs": {"a": {"type": "object", "required": 5}}}, "required"),
    ({"oneOf": [{"$ref": "#/$defs/a"}, INTEGER], "$defs": {"a": {"type": [{}]}}}, "type"),
    ({"properties": {"a": {"$id": "x", "$ref": "#/$defs/n"}}, "$defs": {"n": INTEGER}}, "$id"),
    ({"allOf": [INTEGER, {"minimum": 1}]}, "allOf"),
    ({"anyOf": [INTEGER], "minimum": 1}, "anyOf"),
    ({"$ref": "#/$defs/n", "minimum": 1, "$defs": {"n": INTEGER}}, "$ref"),
    ({"$ref": "http://example.com/schema"}, "$ref"),
    ({"$ref": "#/$defs/none"}, "$ref"),
    ({"$ref": "#"}, "$ref"),
    ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
    ({"type": "string", "format": "phone"}, "phone"),
    ({"type": "string", "format": "date", "maxLength": 3}, "'format' allows no text of this length"),
    ({"type": "string", "format": "date", "pattern": "a"}, "'format' beside 'pattern'"),
    ({"type": "integer", "format": "int128"}, "int128"),
    ({"type": "number", "format": "date"}, "date"),
    ({"type": "string", "pattern": "^a{4}$", "maxLength": 3}, "'pattern' allows no text of this length"),
    ({"type": "string", "maxLength": 200_000}, "length of more than"),
    ({"type": "string", "pattern": "^(?!a)b$"}, "lookaround"),
    ({"type": "string", "pattern": '^"$'}, "escape"),
    ({"type": "string", "pattern": "^\\\\$"}, "\\\\"),
    ({"type": "string", "pattern": "^\\x22$"}, "escape"),
    ({"type": "string", "pattern": "^[\\n]$"}, "\\n"),
    ({"type": "string", "pattern": "^a^b$"}, "middle"),
    ({"type": "string", "pattern": r"^\ud83d\ude00$"}, "surrogate"),
    ({"type": "string", "pattern": "^a{1,3}+$"}, "}+"),
    ({"type": "string", "pattern": "^[^]a]$"}, "[^]"),
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
        enforceable_schema(json.dumps(schema)), any_whitespace=False, strict_mode=False
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
    assert all(f'"{name}"' in tried for known in KEYWORDS_OF.values() for name in known)


@pytest.mark.parametrize(("schema", "named"), REFUSED, ids=lambda value: json.dumps(value)[:60])
def test_what_is_not_enforced_is_refused_by_name(schema, named):
    with pytest.raises(EspalierError) as caught:
        check_grammar(Grammar.of_json_schema(json.dumps(schema)))
    assert named.lower() in str(caught.value).lower()
    assert "\n" not in str(caught.value)


def test_a_grammar_is_checked_once(monkeypatch):
    checked = []
    monkeypatch.setitem(tag.REWRITE_BY_KIND, "choice", checked.append)
    for _ in range(2):
        check_grammar(Grammar.of_choices(["checked", "once"]))
    assert len(checked) == 1
    check_grammar.cache_clear()


def test_a_number_too_large_for_a_float_is_refused():
    with pytest.raises(EspalierError, match="'1e400' is too large"):
        check_grammar(Grammar.of_json_schema('{"type": "string", "maxLength": 1e400}'))


@pytest.mark.parametrize("seed", range(60))
def test_bounds_hold_to_the_last_place(seed):
    """Of any size, and of more places than xgrammar writes: what is generated is within them, or they are refused."""
    rng = random.Random(seed)
    least = rng.uniform(-10, 10) * 10.0 ** rng.randint(-9, 9)
    most = least + rng.uniform(0, 5) * 10.0 ** rng.randint(-9, 9)
    names = rng.choice(("minimum", "exclusiveMinimum")), rng.choice(("maximum", "exclusiveMaximum"))
    schema = {"type": "number", **dict(zip(names, (least, most), strict=True))}
    try:
        form = compiled(Grammar.of_json_schema(schema))
    except EspalierError:
        return
    for walk in range(6):
        text = random_text(form, random.Random(walk))
        assert jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)), text


UNIQUE = {"type": "array", "uniqueItems": True}


@pytest.mark.parametrize(
    ("tag", "named"),
    [
        ({"format": {"type": "qwen_xml_parameter", "json_schema": UNIQUE}}, "uniqueItems"),
        ({"structures": [{"begin": "<a>", "schema": UNIQUE, "end": ""}], "triggers": ["<a"]}, "uniqueItems"),
        ({"structures": [], "triggers": [], "format": {"type": "any_text"}}, "has no 'format'"),
        ({"format": {"type": "any_text"}, "triggers": []}, "has no 'triggers'"),
        ({"type": "structural_tag"}, 'needs "format"'),
        ({"structures": [{"begin": "<a>"}]}, '"triggers"'),
        ({"format": json.loads('{"a":' * 80 + "1" + "}" * 80)}, "levels"),
    ],
)
def test_a_structural_tag_that_is_not_enforced_is_refused(tag, named):
    with pytest.raises(EspalierError, match=named):
        check_grammar(Grammar("structural_tag", json.dumps(tag)))


@pytest.mark.parametrize("fields", [{"spec": "\ud800"}, {"spec": "a", "after": "\ud800"}])
def test_half_of_a_surrogate_pair_is_refused(fields):
    with pytest.raises(EspalierError, match="surrogate"):
        Grammar("regex", **fields)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", '{"type": "string", "type": "integer"}'),
        ("structural_tag", '{"format": {"type": "json_schema", "json_schema": {"type": "string", "type": "null"}}}'),
    ],
)
def test_a_keyword_that_comes_twice_is_refused(kind, text):
    with pytest.raises(EspalierError, match="'type' comes twice in one object"):
        check_grammar(Grammar(kind, text))


def test_a_schema_that_is_not_strict_gets_the_named_properties_alone():
    schema = {"type": "object", "properties": {"a": INTEGER}, "additionalProperties": True}
    made = json.loads(enforceable_schema(json.dumps(schema), strict=False))
    assert made["additionalProperties"] is False


def test_annotations_change_nothing():
    notes = dict.fromkeys(ANNOTATION_KEYWORDS, "x")
    assert enforceable_schema(json.dumps({**INTEGER, **notes})) == enforceable_schema(json.dumps(INTEGER))


UNICODE = "aé€😀中\u2028\x7f~ 0"
PATTERNS = ("^{0}.$", "{0}", "^[^{0}]+$", "^({0}|[{0}-\\U0010ffff]{{2}}){{1,3}}$", "^\\W{0}?\\S*$", "^.{{0,5}}{0}\\D")


def wild(value: Any, rng: random.Random) -> Any:
    """The schema with other strings: patterns and literals of all of Unicode, formats, sets."""
    if isinstance(value, list):
        return [wild(each, rng) for each in value]
    if not isinstance(value, dict):
        return value
    if value.get("type") == "string":
        letter = rng.choice(UNICODE)
        pattern = rng.choice(PATTERNS).format(letter)
        texts = {letter + rng.choice('\n"\\\x00/b1') for _ in range(3)}
        return rng.choice(
            (
                value,
                {"type": "string", "pattern": pattern},
                {"type": "string", "pattern": pattern, "minLength": 2, "maxLength": 9},
                {"type": "string", "format": rng.choice(("date", "ipv4", "email", "json-pointer")), "maxLength": 30},
                {"enum": sorted(texts)},
                {"type": "array", "items": {"enum": sorted(texts)}, "uniqueItems": True},
            )
        )
    return {name: wild(each, rng) for name, each in value.items()}


def is_valid_output(schema: Any, seed: int, in_tag: bool) -> bool:
    """Whether a random walk is valid; False if it did not end."""
    grammar = Grammar.of_json_schema(schema)
    if in_tag:
        part = {"type": "json_schema", "json_schema": schema}
        grammar = Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": part}))
    try:
        text = random_text(compiled(grammar), random.Random(seed), most=1000, often=f'"{UNICODE}'.encode())
    except TooLong:
        return False
    assert jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)), text
    return True


@pytest.mark.parametrize("seed", range(40))
def test_a_random_walk_is_valid(seed):
    """Tokens drawn from the masks alone spell a valid value: a model can do no worse."""
    assert is_valid_output(random_schema(seed), seed, in_tag=False)


def test_random_walks_of_all_of_unicode_are_valid():
    ended = [is_valid_output(wild(random_schema(seed), random.Random(seed)), seed, seed % 2 > 0) for seed in range(60)]
    assert sum(ended) > 40


@pytest.mark.full
def test_many_random_walks_of_all_of_unicode_are_valid():
    for seed in range(1000, 3000):
        is_valid_output(wild(random_schema(seed), random.Random(seed)), seed, seed % 2 > 0)
