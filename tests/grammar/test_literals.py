"""Texts that a grammar is given come out as they are: all of Unicode, control characters before hex digits."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from espalier.grammar import Grammar
from tests.grammar.vocabulary import compiled, language

# Letters that an escape could swallow, and all others.
CHARACTERS = st.sampled_from('\n\t\x00\x01\x1f\x7f\x85"\\/09afAFxu{}é\u2028\ufeff\U0001f600') | st.characters(
    exclude_categories=["Cs"]
)
TEXTS = st.text(CHARACTERS, min_size=1, max_size=5)
LISTS = st.lists(TEXTS, min_size=1, max_size=3, unique=True)


def texts_of(grammar: Grammar) -> list[str]:
    return sorted(text.decode() for text in language(compiled(grammar)))


def tag(part: dict) -> Grammar:
    return Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": part}))


@example(["0", "00"])
@given(LISTS)
def test_choices_are_exactly_those_given(texts):
    assert texts_of(Grammar.of_choices(texts)) == sorted(texts)


@given(TEXTS, TEXTS, TEXTS)
def test_the_texts_of_tags_are_exactly_those_given(begin, inside, end):
    part = {"type": "tag", "begin": begin, "content": {"type": "const_string", "value": inside}, "end": end}
    assert texts_of(tag(part)) == [begin + inside + end]


@given(LISTS)
def test_values_of_enum_and_const_are_exactly_those_given(texts):
    nested = {"anyOf": [{"const": {texts[0]: texts}}, {"enum": texts}]}
    for schema in ({"enum": texts}, {"anyOf": [{"const": text} for text in texts]}, nested):
        expected = [*texts, {texts[0]: texts}] if schema is nested else texts
        for grammar in (Grammar.of_json_schema(schema), tag({"type": "json_schema", "json_schema": schema})):
            found = [json.loads(text) for text in texts_of(grammar)]
            assert sorted(found, key=repr) == sorted(expected, key=repr)


@given(LISTS)
def test_names_of_properties_are_exactly_those_given(texts):
    schema = {"type": "object", "properties": {text: {"type": "null"} for text in texts}, "required": texts}
    assert [json.loads(text) for text in texts_of(Grammar.of_json_schema(schema))] == [dict.fromkeys(texts)]


@pytest.mark.full
@settings(max_examples=2000)
@given(LISTS)
def test_many_choices_are_exactly_those_given(texts):
    assert texts_of(Grammar.of_choices(texts)) == sorted(texts)
