"""What tools and formats make of prompts, parameters and messages, with a template of each family."""

import json

import pytest

from espalier.errors import EspalierError
from espalier.grammar.spec import Grammar
from espalier.inputs import InputProcessor, ModelInfo
from espalier.request import Output, ResolvedParams
from espalier.text import Tokenizer
from espalier.tool_calls.definitions import checked_tools
from espalier.tool_calls.formats import Formats, find_formats
from espalier.tool_calls.message_stream import chat_output
from espalier.tool_calls.plan import ChatPlan
from tests.tool_calls.families import CALLS, FAMILIES, TOOLS

HI = [{"role": "user", "content": "hi"}]
STRICT = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
families = pytest.mark.parametrize("name", FAMILIES)


def inputs_of(name):
    tokenizer = FAMILIES[name].tokenizer()
    return InputProcessor(ModelInfo("m", tokenizer.num_tokens, 10_000, (tokenizer.hf.eos_token_id,)), tokenizer)


def tokens_of(tokenizer, text):
    """A text whose special tokens are tokens."""
    return tokenizer.encode(text, add_special_tokens=False)


@families
@pytest.mark.parametrize("cut", [1, 3, 10_000])
def test_the_parser_sees_the_special_tokens_of_its_format(name, cut):
    """Through the detokenizer, with other special tokens around that stay hidden."""
    family, inputs = FAMILIES[name], inputs_of(name)
    prompt, params, plan = inputs.prepare_conversation(HI, None, tools=TOOLS)
    assert plan._is_in_reasoning(prompt) == family.opens
    tokenizer = inputs.tokenizer
    tokens = [*tokens_of(tokenizer, family.output), tokenizer.hf.eos_token_id]
    sink = tokenizer.text_stream(prompt, visible_ids=params.shown_special_tokens)
    text = ""
    for start in range(0, len(tokens), cut):
        sink.push_tokens(tokens[start : start + cut])
        text += sink.take_text(final=False)
    text += sink.take_text(final=True)
    assert text == family.output
    output = chat_output(plan, prompt, Output(text, tokens, "stop"))
    assert [(call.name, json.loads(call.arguments)) for call in output.message.tool_calls] == CALLS
    assert (output.message.content, output.message.reasoning) == (family.content, family.thoughts)
    assert output.finish_reason == "tool_calls"
    # Without tools, other than those of the reasoning are hidden.
    _, params, plan = inputs.prepare_conversation(HI, None)
    assert {tokenizer.token_name(token) for token in params.shown_special_tokens} == (
        set(plan.formats.reasoning.special_tokens if plan.formats.reasoning else ()) & set(family.special)
    )


def test_samples_have_a_message_each():
    inputs = inputs_of("hermes")
    prompt, _, plan = inputs.prepare_conversation(HI, None, tools=TOOLS)
    first = Output(FAMILIES["hermes"].output, [], "stop")
    choices = [first, Output("<think>\nno", [], "length")]
    output = chat_output(plan, prompt, Output(first.text, [], "stop", choices=choices))
    assert [choice.message.reasoning for choice in output.choices] == ["Which? <b>", "no"]
    assert [choice.finish_reason for choice in output.choices] == ["tool_calls", "length"]


@families
def test_calls_and_their_results_go_back_into_the_prompt(name):
    family, inputs = FAMILIES[name], inputs_of(name)
    _, _, _plan = inputs.prepare_conversation(HI, None, tools=TOOLS)
    id = "aaaabbbbc"
    call = {"id": id, "type": "function", "function": {"name": "get_weather", "arguments": {"city": "<eos>"}}}
    asked = {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "Why?"}
    messages = [*HI, asked, {"role": "tool", "tool_call_id": id, "content": f"{family.special[0]}<eos>"}]
    if "tool_calls" not in family.template:
        with pytest.raises(EspalierError, match="need a chat template that reads them"):
            inputs.prepare_conversation(messages, None, tools=TOOLS)
        messages[1] = {"role": "assistant", "content": "x"}
    prompt, _, _ = inputs.prepare_conversation(messages, None, tools=TOOLS)
    text = inputs.tokenizer.decode(prompt, skip_special_tokens=False)
    assert "<eos>" in text and ("Why?" in text) == (name == "harmony")
    # What messages, tools and calls spell is no special token.
    ids = {inputs.tokenizer.hf.convert_tokens_to_ids(each): each for each in (*family.special, "<eos>")}
    harmless = json.loads(json.dumps(messages).replace("<eos>", "x").replace(family.special[0], "x"))
    expected, _, _ = inputs.prepare_conversation(harmless, None, tools=TOOLS)
    assert [t for t in prompt if t in ids] == [t for t in expected if t in ids]
    spelled = [{"type": "function", "function": {"name": "now", "description": "".join(family.special)}}]
    prompt, _, _ = inputs.prepare_conversation(HI, None, tools=spelled)
    expected, _, _ = inputs.prepare_conversation(HI, None, tools=[{"type": "function", "function": {"name": "now"}}])
    assert [t for t in prompt if t in ids] == [t for t in expected if t in ids]


def test_ids_of_calls_have_the_form_that_the_template_takes():
    for name, family in FAMILIES.items():
        inputs = inputs_of(name)
        prompt, _, plan = inputs.prepare_conversation(HI, None, tools=TOOLS)
        message = chat_output(plan, prompt, Output(family.output, [], "stop")).message
        ids = {call.id for call in message.tool_calls}
        assert len(ids) == 2 and (all(len(id) == 9 for id in ids) or not name.startswith("mistral"))


@pytest.mark.parametrize(
    ("name", "variables", "after", "may_reason"),
    [
        ("hermes", {}, None, True),
        ("hermes", {"enable_thinking": False}, None, False),
        ("hermes, marks as special tokens", {}, "</think>", False),
        ("deepseek-v3", {}, "</think>", False),
        ("deepseek-v3.1", {}, None, False),
        ("mistral", {}, None, False),
        ("llama", {}, None, False),
        ("harmony", {}, None, True),
    ],
)
def test_a_grammar_begins_after_the_reasoning(name, variables, after, may_reason):
    """After its end where the prompt opens it; where the model decides, the grammar has it as a part."""
    inputs = inputs_of(name)

    def grammar(form=None, **options):
        prompt, _, plan = inputs.prepare_conversation(HI, None, chat_template_kwargs=variables, **options)
        return plan.params_with_grammar(ResolvedParams(grammar=form, stop_token_ids=(1,)), prompt).grammar

    assert grammar(tools=TOOLS) is None and grammar() is None
    form = Grammar("json_object", strict=False)
    for options in ({"tools": TOOLS, "tool_choice": "required"}, {"tools": STRICT}, {"tools": TOOLS, "form": form}):
        found = grammar(**options)
        assert (found.kind, found.after, found.strict) == ("structural_tag", after, "form" not in options)
        assert ("any_text" in found.spec) == (may_reason and options != {"tools": STRICT})
    found = grammar(form)
    assert found.after == after and found.strict is False
    assert found.kind == ("structural_tag" if may_reason else "json_object")
    # One that says when it begins is left as it is.
    assert grammar(Grammar("json_object", after="x")) == Grammar("json_object", after="x")


# The end of a prompt inside the reasoning, and an output that ends it.
INSIDE = {
    "hermes": ("<|im_start|>assistant\n<think>\nThe user", " asks.\n</think>\n\n42"),
    "hermes, marks as special tokens": ("<|im_start|>assistant\n<think>\nThe user", " asks.</think>\n\n42"),
    "deepseek-v3": ("<｜User｜>hi<｜Assistant｜><think>\n\nThe user", " asks.\n</think>42"),
    "glm": ("<|im_start|>assistant\n<think>The user", " asks.</think>\n42"),
    "mistral": ("[INST]hi[/INST][THINK]The user", " asks.[/THINK]42"),
    "harmony": (
        "<|start|>user<|message|>hi<|end|><|start|>assistant<|channel|>analysis<|message|>The user",
        " asks.<|end|><|start|>assistant<|channel|>final<|message|>42",
    ),
}


@pytest.mark.parametrize("name", INSIDE)
def test_reasoning_that_the_prompt_began_goes_on(name):
    inputs, (text, output) = inputs_of(name), INSIDE[name]
    prompt = tokens_of(inputs.tokenizer, text)
    for tools in (None, TOOLS):
        plan = ChatPlan(inputs.tokenizer, find_formats(FAMILIES[name].template), checked_tools(tools))
        message = chat_output(plan, prompt, Output(output, [], "stop")).message
        assert (message.content, message.reasoning) == ("42", " asks.")
    # A form begins where the reasoning ends; after it, at once.
    form = ResolvedParams(grammar=Grammar("json_object", strict=False), stop_token_ids=(1,))
    reasoning = find_formats(FAMILIES[name].template).reasoning
    begun = plan.params_with_grammar(form, prompt).grammar
    assert begun.after == reasoning.end_marker and json.dumps(reasoning.answer_marker)[1:-1] in begun.spec
    closed = tokens_of(inputs.tokenizer, text + output)
    found = ChatPlan(inputs.tokenizer, find_formats(FAMILIES[name].template), checked_tools(None)).params_with_grammar(
        form, closed
    )
    assert (found.grammar.kind, found.grammar.after) == ("json_object", None)
    assert chat_output(plan, closed, Output("3.", [], "stop")).message.content == "3."


def test_an_answer_is_continued_inside_its_reasoning():
    inputs = inputs_of("hermes")
    messages = [*HI, {"role": "assistant", "content": "<think>\nThe user"}]
    prompt, _, plan = inputs.prepare_conversation(messages, None, continue_final_message=True)
    message = chat_output(plan, prompt, Output(" asks.</think>42", [], "stop")).message
    assert (message.content, message.reasoning) == ("42", " asks.")


@families
def test_a_mark_that_the_user_wrote_opens_nothing(name):
    family, inputs = FAMILIES[name], inputs_of(name)
    reasoning = find_formats(family.template).reasoning
    if reasoning is None:
        return
    for options in ({}, {"add_generation_prompt": False}):
        said = [{"role": "user", "content": f"What is {reasoning.begin_marker} here?"}]
        prompt, _, plan = inputs.prepare_conversation(said, None, **options)
        assert plan._is_in_reasoning(prompt) == family.opens


def test_without_marks_of_turns_only_the_prompts_end_opens_reasoning():
    """A token that ends or begins all of a text is no mark of a turn."""
    inputs = inputs_of("hermes")
    plan = ChatPlan(inputs.tokenizer, find_formats(FAMILIES["hermes"].template), checked_tools(None))
    for text, is_open in (("Q: <think>? A:", False), ("<eos>Q: <think>? A:", False), ("<eos>Q: ? A: <think>\n", True)):
        assert plan._is_in_reasoning(tokens_of(inputs.tokenizer, text)) == is_open


def test_a_call_that_the_prompt_began_is_a_call():
    inputs = inputs_of("harmony")
    prompt = tokens_of(inputs.tokenizer, '<|start|>assistant<|channel|>commentary to=functions.now <|message|>{"a"')
    plan = ChatPlan(inputs.tokenizer, find_formats(FAMILIES["harmony"].template), checked_tools(TOOLS))
    [call] = chat_output(plan, prompt, Output(": 1}", [], "stop")).message.tool_calls
    assert (call.name, call.arguments) == ("now", '{"a": 1}')


def test_a_model_that_cannot_call_says_what_to_do():
    blind = FAMILIES["hermes"].hf()
    blind.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tools = checked_tools(TOOLS)
    for tokenizer in (Tokenizer(blind), None):
        with pytest.raises(EspalierError, match=r"^tools needs a chat template that reads them.*--chat-template"):
            ChatPlan(tokenizer, Formats(), tools)
        assert not ChatPlan(tokenizer, Formats(), checked_tools(TOOLS, "none")).has_parser
    blind.chat_template = "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(EspalierError, match=r"^tools needs a format of tool calls.*--tool-format \(harmony, glm, "):
        ChatPlan(Tokenizer(blind), find_formats(blind.chat_template), tools)
    assert ChatPlan(Tokenizer(blind), find_formats(blind.chat_template, "hermes"), tools).has_parser
