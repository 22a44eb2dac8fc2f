"""Tool calls and reasoning are read alike wherever the text is cut, and no text of the model is lost."""

import json
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.errors import EspalierError
from espalier.tool_calls.definitions import checked_tools
from espalier.tool_calls.formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    Formats,
    deepseek,
    find_formats,
    llama,
    mistral,
    tagged,
)
from espalier.tool_calls.parser import OutputParser, message_of
from espalier.tool_calls.reader import Markers
from tests.tool_calls.families import CALLS, FAMILIES, TOOLS

SCHEMAS = checked_tools(TOOLS).schemas
families = pytest.mark.parametrize("name", FAMILIES)


def read(family, text, parts, schemas=SCHEMAS):
    """The message of a text that comes in these parts, and all deltas.  Ids are numbers."""
    formats = find_formats(family.template, family.tools, family.reasoning or "none")
    ids = iter(map(str, range(1000)))
    if formats.tools is not None:
        formats = replace(formats, tools=replace(formats.tools, make_call_id=lambda: next(ids)))
    parser = OutputParser(formats, schemas, formats.reasoning.begin_marker * family.opens if formats.reasoning else "")
    deltas = [delta for part in parts for delta in parser.feed(part)] + parser.finish()
    assert "".join(parts) == text
    return message_of(deltas), deltas


def cuts(text, chance):
    places = sorted(chance.sample(range(len(text) + 1), chance.randrange(min(len(text), 12) + 1)))
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


@families
def test_an_output_has_its_calls_its_content_and_its_reasoning(name):
    family = FAMILIES[name]
    message, deltas = read(family, family.output, [family.output])
    assert [(call.name, json.loads(call.arguments)) for call in message.tool_calls] == CALLS
    assert (message.content, message.reasoning, message.errors) == (family.content, family.thoughts, [])
    # The name comes once, before the arguments.
    for index in range(len(CALLS)):
        kinds = [delta.kind for delta in deltas if delta.index == index]
        assert kinds[0] == "call" and kinds[-1] == "called" and set(kinds[1:-1]) == {"arguments"}


@families
def test_an_output_is_read_alike_wherever_it_is_cut_and_a_call_that_is_broken_off_is_content_with_a_reason(name):
    """The whole output, and each beginning of it: an output that ends too early.  Nothing of the text is lost, and a
    call that is shown is whole."""
    family, chance = FAMILIES[name], random.Random(name)
    for end in range(len(family.output) + 1):
        text = family.output[:end]
        expected, _ = read(family, text, [text])
        message, deltas = read(family, text, list(text))
        assert message == expected
        if end % 10 == 0 or end == len(family.output):
            for _ in range(2):
                assert read(family, text, cuts(text, chance))[0] == expected
        for call in message.tool_calls:
            assert isinstance(json.loads(call.arguments), dict)
        assert len(message.tool_calls) + len(message.errors) >= sum(delta.kind == "call" for delta in deltas)
        if message.errors:
            assert message.errors[-1] in ("the output ends inside the tool call", "the tool call has no arguments") or (
                "is missing" in message.errors[-1] or "which is not in tools" in message.errors[-1]
            )
            # It ends with all that was written of the call.
            assert text.endswith(message.content[len(family.content) :])


@families
def test_arguments_come_while_they_are_written(name):
    family = FAMILIES[name]
    if name == "hermes, marks as special tokens":
        # There the name comes last.
        return
    _, deltas = read(family, family.output, list(family.output))
    first = [delta.text for delta in deltas if delta.kind == "arguments" and delta.index == 0]
    assert len(first) > 10 and json.loads("".join(first)) == CALLS[0][1]


WRONG = {
    "hermes": [
        '<tool_call>\n{"name": "get_weather", "arguments": {"city" "x"}}\n</tool_call>',
        '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "now", "name": "now"}</tool_call>',
        '<tool_call>\n{"name": "now", "arguments": {}, "arguments": {}}</tool_call>',
        '<tool_call>\n{"name": 3}</tool_call>',
        '<tool_call>\n{"name": "now", "arguments": [1]}</tool_call>',
        '<tool_call>\n{"name": "now", "arguments": {"x": NaN}}</tool_call>',
        '<tool_call>\n{"name": "now"} and</tool_call>',
        "<tool_call>\nnow()</tool_call>",
        '<tool_call>\n{"name": "now", "arguments": ' + '{"a":' * 5000 + "1" + "}" * 5000 + "}</tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>{}</tool_call>",
    ],
    "qwen-coder": [
        "<tool_call>\n<function=get_weather>\n<parameter=days>\ntwo\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=other>\n</function>\n</tool_call>",
        "<tool_call>\n<function=now>\nno</function>\n</tool_call>",
        "<tool_call>\nnow</tool_call>",
        "<tool_call>\n<function=" + "x" * 1000 + ">",
    ],
    "llama": ['{"name": "other", "parameters": {}}', '{"a": 1}', "{", '<|python_tag|>brave_search.call(query="x")'],
    "mistral-list": ['[TOOL_CALLS] [{"name": "other"}]', '[TOOL_CALLS] [{"name": "now"} x]', "[TOOL_CALLS] []"],
    "mistral": ["[TOOL_CALLS]other[ARGS]{}", "[TOOL_CALLS]now[ARGS][1]", "[TOOL_CALLS]" + "x" * 1000],
    "deepseek-v3": [
        "</think><｜tool▁calls▁begin｜>now",
        "</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>code<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>",
        "</think><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n{}<｜tool▁call▁end｜>",
    ],
    "deepseek-v3.1": ["<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>other<｜tool▁sep｜>{}<｜tool▁call▁end｜>"],
    "glm": [
        "<tool_call>other</tool_call>",
        "<tool_call>now\n<arg_key>a</arg_key>no</tool_call>",
        "<tool_call>get_weather<arg_key>days</arg_key><arg_value>x</arg_value></tool_call>",
        "<tool_call>" + "x" * 1000,
    ],
    "harmony": [
        "<|channel|>commentary to=functions.other <|constrain|>json<|message|>{}<|call|>",
        "<|channel|>commentary to=python code<|message|>print(1)<|call|>",
        "<|channel|>commentary to=functions.now json<|message|>{} and<|call|>",
    ],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in WRONG.items() for text in texts])
def test_a_misspelled_call_is_content_with_a_reason(name, text):
    family = FAMILIES[name]
    message, _deltas = read(family, text, [text])
    assert not message.tool_calls and len(message.errors) == 1
    said = text.removeprefix("</think>")
    # After a harmony call, the mark of its end is no text.
    assert message.content == (said.removesuffix("<|call|>") if name == "harmony" else said)
    assert read(family, text, list(text))[0] == message
    # A later call is still read.
    if name in ("hermes", "glm", "qwen-coder") and "</tool_call>" in text:
        last = family.output[family.output.rindex("<tool_call>") :]
        message, _ = read(family, text + last, [text + last])
        assert [call.name for call in message.tool_calls] == ["now"] and message.content == text


LEFT_OUT = [
    ("qwen-coder", "I look.\n<function=now>\n</function>", ("I look.", "")),
    ("harmony", "<|channel|>analysis<|message|>hm<|channel|>final<|message|>x", ("x", "hm")),
    ("harmony", "<|channel|>analysis<|message|>hm<|start|>assistant<|channel|>final<|message|>x", ("x", "hm")),
]


@pytest.mark.parametrize(("name", "text", "parts"), LEFT_OUT)
def test_a_mark_that_models_leave_out_is_not_needed(name, text, parts):
    message, _ = read(FAMILIES[name], text, list(text))
    assert (message.content, message.reasoning, message.errors) == (*parts, [])
    assert [call.name for call in message.tool_calls] == ["now"] * ("now" in text)


@pytest.mark.parametrize("behind", ["", ";", "; ", "; and text", "; <b>", ";<|python_tag|>", '; {"name": "now"}; x'])
def test_what_stands_behind_a_call_is_content(behind):
    """Of Llama's calls, where "; " is between two."""
    text = '{"name": "now", "parameters": {}}' + behind
    message, _ = read(FAMILIES["llama"], text, list(text))
    assert message == read(FAMILIES["llama"], text, [text])[0]
    if "{" in behind:
        assert (len(message.tool_calls), message.content, message.errors) == (2, "; x", [])
    else:
        assert (len(message.tool_calls), message.content) == (1, behind)


@pytest.mark.parametrize("escape", [r"\ud800", r"\\ud800"])
def test_half_of_a_surrogate_pair_stays_an_escape(escape):
    """In arguments that are written as a text.  A server could not send it otherwise."""
    text = rf'<tool_call>{{"name": "now", "arguments": "{{\"a\": \"日{escape}\"}}"}}</tool_call>'
    [call] = read(FAMILIES["hermes"], text, list(text))[0].tool_calls
    assert json.loads(call.arguments) == {"a": "日\ud800"} and call.arguments.isascii()


@families
def test_characters_that_are_held_back_are_not_searched_again(name, monkeypatch):
    """A model that writes newlines without end must not keep the server busy with them."""
    family, searched = FAMILIES[name], []
    text = "</think>x" * family.opens + "x" + "\n" * 300
    made = Markers.__init__

    class Counting:
        def __init__(self, pattern):
            self.pattern = pattern

        def search(self, text, start=0):
            searched.append(len(text) - start)
            return self.pattern.search(text, start)

    def counting(self, *texts, **how):
        made(self, *texts, **how)
        self.pattern = Counting(self.pattern)

    for formats in (deepseek, llama, mistral, tagged):
        for marks in (each for each in vars(formats).values() if isinstance(each, Markers)):
            monkeypatch.setattr(marks, "pattern", Counting(marks.pattern))
    monkeypatch.setattr(Markers, "__init__", counting)
    read(family, text, list(text))
    assert sum(searched) < 40 * len(text)


MARKS = sorted({mark for each in TOOL_FORMATS.values() for mark in each.special_tokens})
PIECES = [
    *MARKS,
    *("<think>", "</think>", "[THINK]", "[/THINK]", "<function=", "<parameter=", "</parameter>", "</function>"),
    *(
        '{"name": "now"',
        '"get_weather"',
        '"arguments": ',
        '{"name": "',
        "{}",
        "{",
        "}",
        "[",
        "]",
        ",",
        ";",
        ":",
        '"',
        "\\",
    ),
    *(
        "now",
        "get_weather",
        ">",
        "\n",
        " ",
        "x",
        "```json\n",
        "\n```",
        "function",
        " to=functions.now",
        "analysis",
        "1",
        "日",
    ),
]


@families
@settings(max_examples=settings.default.max_examples // 4)
@given(data=st.data())
def test_any_text_is_read_alike_wherever_it_is_cut(name, data):
    family = FAMILIES[name]
    text = "".join(data.draw(st.lists(st.sampled_from(PIECES), max_size=14)))
    expected, _ = read(family, text, [text])
    assert read(family, text, list(text))[0] == expected
    places = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=5)))
    parts = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    assert read(family, text, parts)[0] == expected
    # Every word of the model is somewhere.
    shown = expected.content + expected.reasoning + "".join(c.name + c.arguments for c in expected.tool_calls)
    assert shown.count("日") == text.count("日") or name in ("harmony", "mistral") or "<function=" in text


@families
def test_without_tools_a_call_is_content(name):
    family = FAMILIES[name]
    if family.tools == "harmony":
        return
    message, _ = read(family, family.output, list(family.output), {})
    assert not message.tool_calls and not message.errors
    assert "get_weather" in message.content and message.reasoning == family.thoughts


@families
def test_a_template_has_its_familys_formats(name):
    family = FAMILIES[name]
    formats = find_formats(family.template)
    assert formats.tools.name == family.tools
    assert (formats.reasoning and formats.reasoning.name) == family.reasoning


def test_every_format_has_a_family():
    assert {each.tools for each in FAMILIES.values()} == set(TOOL_FORMATS)
    assert {each.reasoning for each in FAMILIES.values()} - {None} == set(REASONING_FORMATS)


def test_a_format_is_named_or_left_out():
    assert find_formats("no signs") == Formats()
    assert find_formats(FAMILIES["hermes"].template, "none", "none") == Formats()
    assert find_formats("no signs", "hermes", "think").tools.name == "hermes"
    # One format reads both.
    for names in (("harmony", "auto"), ("auto", "harmony")):
        assert find_formats("no signs", *names) == find_formats(FAMILIES["harmony"].template)
    with pytest.raises(EspalierError, match=r"^tool_format='qwen' is not supported; use auto, none, deepseek-v3, deep"):
        find_formats("", "qwen")
    with pytest.raises(
        EspalierError, match=r"^reasoning_format='r1' is not supported; use auto, none, harmony, mistral"
    ):
        find_formats("", "auto", "r1")
    with pytest.raises(EspalierError, match="needs reasoning_format='harmony'"):
        find_formats("", "harmony", "think")
    with pytest.raises(EspalierError, match="with tool_format='llama' is not supported"):
        find_formats("", "llama", "harmony")


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, " 2 ", " 2 "),
        ({"enum": ["C", "F"]}, "\n  C ", "C"),
        ({"type": "string", "const": "C"}, "C\n", "C"),
        ({"type": "string", "pattern": "^C$"}, " C\n", "C"),
        ({"type": "string", "maxLength": 2}, "CF \n", "CF"),
        ({"type": "string", "maxLength": 2}, "C ", "C "),
        ({"type": "integer"}, " 2\n", 2),
        ({"type": "number"}, "2", 2),
        ({"type": "number"}, "2.5", 2.5),
        ({"type": "integer"}, "2.0", 2.0),
        ({"type": "boolean"}, "True", True),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": ["string", "null"]}, "2", "2"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "2", 2),
        ({"anyOf": [{"type": "string"}, {}]}, "x", "x"),
        ({"$ref": "#/$defs/X"}, '{"a": 1}', {"a": 1}),
        ({"$ref": "#/$defs/texts"}, " C\n", "C"),
        ({"$ref": "#/$defs/loop"}, "x", "x"),
        ({"anyOf": [{"enum": ["C"]}, {"type": "integer"}]}, " C\n", "C"),
        ({}, "x y", "x y"),
        ({"type": 5}, "x", "x"),
        ({"type": {"x": 1}}, "2", 2),
        ({"type": "array"}, "[1, 2]", [1, 2]),
        ({"type": "array"}, "x", None),
        ({"type": "boolean"}, "yes", None),
        ({"type": "integer"}, "NaN", None),
    ],
)
@pytest.mark.parametrize("name", ["qwen-coder", "glm"])
def test_a_value_between_tags_has_the_type_of_its_schema(name, schema, text, value):
    defined = {"texts": {"oneOf": [{"enum": ["C"]}, {"const": "F"}]}, "loop": {"$ref": "#/$defs/loop"}}
    schemas = {"f": {"type": "object", "properties": {"a": schema}, "$defs": defined}}
    written = {
        "qwen-coder": f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>",
        "glm": f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>",
    }[name]
    message, _ = read(FAMILIES[name], written, list(written), schemas)
    if value is None and text != "None":
        assert message.errors == [f"the argument 'a' of the tool call is not of type {schema['type']}"]
    else:
        [call] = message.tool_calls
        assert json.loads(call.arguments) == {"a": value}
        assert type(json.loads(call.arguments)["a"]) is type(value)
