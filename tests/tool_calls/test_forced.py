"""The grammar of forced calls: xgrammar takes it, and what it allows is what the parser reads."""

import json
import random

import jsonschema
import pytest
import xgrammar

from espalier.errors import EspalierError
from espalier.grammar.spec import Grammar
from espalier.grammar.tag import check_grammar
from espalier.masking.compile import compile_with_xgrammar
from espalier.tool_calls.definitions import checked_tools
from espalier.tool_calls.formats import REASONING_FORMATS, TOOL_FORMATS, Formats
from espalier.tool_calls.parser import OutputParser, message_of
from espalier.tool_calls.plan import output_grammar
from lab.bench.schemas import random_schema
from tests.grammar.vocabulary import PIECES, compiler_of, random_text

BOUNDED = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


def tool(name, parameters=None, **more):
    return {"type": "function", "function": {"name": name, "parameters": parameters or BOUNDED, **more}}


TOOLS = [tool("get_weather"), tool("now", {"type": "object", "properties": {}, "additionalProperties": False})]
ARGUMENTS = '{"city": "Paris", "days": 2}'
# As the parser's tests have them, without spaces that the grammar does not have.
CODER = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter><parameter=days>2</parameter>\n</function>"
)
GLM = "<arg_key>city</arg_key><arg_value>Paris</arg_value><arg_key>days</arg_key><arg_value>2</arg_value>"
SEP, END = "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
CALL, OPEN, CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
ONE = {
    "hermes": f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>',
    "qwen-coder": f"{CODER}\n</tool_call>",
    "llama": f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}',
    "mistral-list": f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {ARGUMENTS}}}]',
    "mistral": f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}",
    "deepseek-v3": f"{OPEN}{CALL}function{SEP}get_weather\n```json\n{ARGUMENTS}\n```{END}{CLOSE}",
    "deepseek-v3.1": f"{OPEN}{CALL}get_weather{SEP}{ARGUMENTS}{END}{CLOSE}",
    "glm": f"<tool_call>get_weather\n{GLM}</tool_call>",
    "harmony": f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}",
}
TWO = {
    "hermes": f"{ONE['hermes']}\n{ONE['hermes']}",
    "qwen-coder": f"{ONE['qwen-coder']}\n{ONE['qwen-coder']}",
    "llama": f"{ONE['llama']}; {ONE['llama']}",
    "mistral-list": f"{ONE['mistral-list'][:-1]}, {ONE['llama'].replace('parameters', 'arguments')}]",
    "mistral": ONE["mistral"] * 2,
    "deepseek-v3": f"{ONE['deepseek-v3'].removesuffix(CLOSE)}\n{ONE['deepseek-v3'].removeprefix(OPEN)}",
    "deepseek-v3.1": ONE["deepseek-v3.1"].removesuffix(CLOSE) + ONE["deepseek-v3.1"].removeprefix(OPEN),
    "glm": f"{ONE['glm']}\n{ONE['glm']}",
}
formats = pytest.mark.parametrize("name", ONE)


@pytest.fixture(scope="module")
def allows():
    """Whether a grammar allows a text, and ends with it."""
    info = xgrammar.TokenizerInfo([bytes([byte]) for byte in range(256)] + [b"</s>"], stop_token_ids=[256])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)

    def ask(grammar, text):
        assert grammar.kind == "structural_tag"
        matcher = xgrammar.GrammarMatcher(
            compiler.compile_structural_tag(grammar.spec), terminate_without_stop_token=True
        )
        return matcher.accept_string(text) and matcher.is_terminated()

    return ask


def grammar_of(name, tools=TOOLS, choice="required", parallel=None, answer=None, after=None):
    return output_grammar(checked_tools(tools, choice, parallel), TOOL_FORMATS[name], answer, after=after)


def read(name, text):
    parser = OutputParser(Formats(TOOL_FORMATS[name]), checked_tools(TOOLS).schemas)
    return message_of(parser.feed(text) + parser.finish())


@formats
def test_a_forced_call_is_what_the_parser_reads(allows, name):
    forced = grammar_of(name)
    assert allows(forced, ONE[name])
    [call] = read(name, ONE[name]).tool_calls
    assert (call.name, json.loads(call.arguments)) == ("get_weather", json.loads(ARGUMENTS))
    # Neither text, nor another name, nor arguments of another form.
    for wrong in (
        "Paris",
        f" {ONE[name]}",
        ONE[name].replace("get_weather", "other"),
        ONE[name].replace("days", "weeks"),
    ):
        assert not allows(forced, wrong)


# Whole characters: all of ASCII that is text, and those of the marks.
CHARACTERS = sorted({*map(chr, range(32, 127)), *"\né", *"".join(ONE.values())})
TEXTS = [*(text.encode() for text in dict.fromkeys([*CHARACTERS, *PIECES, "</", "</parameter>"])), b""]


@formats
def test_all_that_a_forced_call_allows_is_read_and_valid(name):
    """Arguments of random schemas, with texts that may hold marks and white space."""
    compiler, reasoning = compiler_of(TEXTS), REASONING_FORMATS["harmony"] if name == "harmony" else None
    for seed in range(6):
        schema = random_schema(seed)
        # Between tags a random text without a bound would hardly end.
        is_bounded = seed % 2 or TOOL_FORMATS[name].syntax.arguments_style != "json"
        schema["properties"]["text"] = {"type": "string", **({"maxLength": 9} if is_bounded else {})}
        tools = checked_tools([tool("now", schema)], "required", False)
        forced = output_grammar(tools, TOOL_FORMATS[name], None)
        check_grammar(forced)
        text = random_text(compile_with_xgrammar(compiler, forced), random.Random(seed), TEXTS).decode()
        parser = OutputParser(Formats(TOOL_FORMATS[name], reasoning), tools.schemas)
        message = message_of(parser.feed(text) + parser.finish())
        [call] = message.tool_calls
        assert not message.errors and not message.content
        assert jsonschema.Draft202012Validator(schema).is_valid(json.loads(call.arguments)), text


@formats
def test_several_calls_are_allowed_unless_they_are_not(allows, name):
    if name not in TWO:
        assert TOOL_FORMATS[name].call_ends_output
        return
    assert len(read(name, TWO[name]).tool_calls) == 2
    assert allows(grammar_of(name), TWO[name])
    assert not allows(grammar_of(name, parallel=False), TWO[name])
    assert allows(grammar_of(name, parallel=False), ONE[name])


@formats
def test_a_named_tool_is_the_only_one(allows, name):
    named = grammar_of(name, choice={"type": "function", "function": {"name": "now"}})
    assert not allows(named, ONE[name])
    if name in TWO:
        weather = grammar_of(name, choice={"type": "function", "function": {"name": "get_weather"}})
        assert allows(weather, ONE[name]) and not allows(weather, TWO[name])
    assert json.loads(named.spec)["type"] == "structural_tag" and "get_weather" not in named.spec


@formats
def test_a_free_answer_has_a_grammar_only_where_one_is_asked_for(allows, name):
    assert grammar_of(name, choice="auto") is None
    strict = grammar_of(name, [tool("get_weather", strict=True)], "auto")
    assert allows(strict, "I look." + ONE[name]) or name == "llama"
    assert not allows(strict, "I look." + ONE[name].replace("days", "weeks"))
    # A tool that is not strict may get any arguments.
    both = grammar_of(name, [tool("get_weather"), tool("now", strict=True)], "auto")
    assert json.loads(both.spec)["format"]["type"] == "triggered_tags" and '"city"' not in both.spec.partition("now")[0]
    if not TOOL_FORMATS[name].call_ends_output:
        single = grammar_of(name, choice="auto", parallel=False)
        assert not allows(single, TWO[name]) and 'stop_after_first": true' in single.spec


def test_the_arguments_of_a_tool_that_is_not_strict_are_any_object(allows):
    free = grammar_of("hermes", [tool("get_weather", strict=False)])
    assert allows(free, ONE["hermes"].replace("days", "weeks"))
    assert not allows(free, ONE["hermes"].replace(ARGUMENTS, "[1]"))


def test_an_answer_has_its_form_or_is_a_call(allows):
    forms = {
        Grammar.of_json_schema(
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        ): '{"a": 1}',
        Grammar("json_object"): '{"b": 1}',
        Grammar("regex", "[0-9]+"): "12",
        Grammar("ebnf", 'root ::= "yes" | "no"'): "no",
        Grammar.of_choices(["left", "right"]): "left",
    }
    for form, text in forms.items():
        either = grammar_of("hermes", choice="auto", answer=form)
        assert allows(either, text) and allows(either, ONE["hermes"]) and not allows(either, "neither")
        with pytest.raises(EspalierError, match=r"^tool_choice with response_format"):
            grammar_of("hermes", answer=form)
    assert grammar_of("hermes", after="</think>").after == "</think>"


def test_an_answer_may_be_a_structural_tag_of_either_spelling(allows):
    content = {"type": "integer"}
    parts = {"type": "tag", "begin": "<n>", "content": {"type": "json_schema", "json_schema": content}, "end": "</n>"}
    for tag in (
        {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<n"], "tags": [parts]}},
        {"structures": [{"begin": "<n>", "schema": content, "end": "</n>"}], "triggers": ["<n"]},
    ):
        either = grammar_of("hermes", choice="auto", answer=Grammar("structural_tag", json.dumps(tag)))
        assert allows(either, "So: <n>5</n>.") and allows(either, ONE["hermes"]) and not allows(either, "<n>a</n>")


@formats
def test_a_model_that_may_reason_first_is_still_forced(allows, name):
    reasoning = REASONING_FORMATS["harmony" if name == "harmony" else "think"]
    tools = checked_tools(TOOLS, "required")
    forced = output_grammar(tools, TOOL_FORMATS[name], None, reasoning)
    thoughts = f"{reasoning.begin_marker}Which?{reasoning.end_marker}"
    assert forced.after is None and allows(forced, ONE[name]) and allows(forced, thoughts + ONE[name])
    assert not allows(forced, f"{thoughts}Paris") and not allows(forced, thoughts + thoughts + ONE[name])
    parser = OutputParser(Formats(TOOL_FORMATS[name], reasoning), tools.schemas)
    message = message_of(parser.feed(thoughts + ONE[name]) + parser.finish())
    assert (message.reasoning, len(message.tool_calls)) == ("Which?", 1)
    either = output_grammar(checked_tools(TOOLS), TOOL_FORMATS[name], Grammar("regex", "[0-9]+"), reasoning)
    for text in ("12", ONE[name]):
        opening = reasoning.answer_marker if text == "12" else ""
        assert allows(either, opening + text) and allows(either, thoughts + opening + text)
    alone = output_grammar(checked_tools(None), None, Grammar("regex", "[0-9]+"), reasoning)
    assert allows(alone, f"{thoughts}{reasoning.answer_marker}12") and not allows(alone, thoughts + ONE[name])
