"""The items of a response's input become the messages of a chat."""

import pytest

from espalier.errors import EspalierError
from espalier.server.openai import SAMPLING_FIELDS
from espalier.server.responses import SHARED_FIELDS, ResponsesRequest, messages_of
from tests.server.test_openai import FIELDS


def call(id, name="f"):
    return {"type": "function_call", "call_id": id, "name": name, "arguments": "{}"}


def called(id, name="f"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": "{}"}}


def thought(text, **more):
    return {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
        **more,
    }


def said(text):
    return {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": text, "annotations": []}],
    }


def output(id, text):
    return {"type": "function_call_output", "call_id": id, "output": text}


HI = {"role": "user", "content": "hi"}
ASSISTANT = {"role": "assistant", "content": None}
INPUTS = {
    "text": ("hi", [HI]),
    "parts": (
        [{"role": "user", "content": [{"type": "input_text", "text": "h"}, {"type": "input_text", "text": "i"}]}],
        [HI],
    ),
    "one answer": (
        [
            HI,
            thought("t"),
            said("a"),
            call("1"),
            call("2", "g"),
            output("1", "x"),
            output("2", [{"type": "input_text", "text": "y"}]),
        ],
        [
            HI,
            {
                "role": "assistant",
                "content": "a",
                "reasoning_content": "t",
                "tool_calls": [called("1"), called("2", "g")],
            },
            {"role": "tool", "tool_call_id": "1", "content": "x", "name": "f"},
            {"role": "tool", "tool_call_id": "2", "content": "y", "name": "g"},
        ],
    ),
    "two answers": (
        [said("a"), said("b"), thought("t"), call("1"), said("c")],
        [
            {"role": "assistant", "content": "a"},
            {"role": "assistant", "content": "b"},
            {**ASSISTANT, "reasoning_content": "t", "tool_calls": [called("1")]},
            {"role": "assistant", "content": "c"},
        ],
    ),
    "a summary": (
        [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]}, said("a")],
        [{"role": "assistant", "content": "a", "reasoning_content": "s"}],
    ),
    "a result of another's call": ([output("9", "x")], [{"role": "tool", "tool_call_id": "9", "content": "x"}]),
}


@pytest.mark.parametrize("name", INPUTS)
def test_items_of_one_answer_are_one_message(name):
    given, messages = INPUTS[name]
    assert messages_of(given, None) == messages
    assert messages_of(given, "Be short.") == [{"role": "system", "content": "Be short."}, *messages]


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ({"content": "x"}, r"input\[0\].type=None is not supported; use message, function_call, "),
        ({"type": []}, r"input\[0\].type=\[\] is not supported; use message, function_call, "),
        (
            {"type": "function_call", "call_id": "1", "name": "f"},
            r"input\[0\].arguments is missing; a function_call item",
        ),
        ({**call("1"), "name": 1}, r"input\[0\].name=1 is not supported; use text"),
        ({**HI, "mood": "glad"}, r"input\[0\] has no 'mood'"),
        ({**HI, "content": 1}, r"input\[0\].content=1 is not supported; use text or a list of text parts"),
        ({**HI, "content": [{"type": "refusal", "refusal": "no"}]}, r"input\[0\].content\[0\]=.* only text parts"),
        (output("1", [{"type": "input_image"}]), r"input\[0\].output\[0\]=.* only text parts"),
    ],
)
def test_an_item_that_is_wrong_is_named(item, words):
    with pytest.raises(EspalierError, match=f"^{words}"):
        messages_of([item], None)


def test_a_response_asks_for_what_a_chat_asks_for():
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
    named = {"type": "function", "name": "f"}
    fields = {"tools": [tool], "tool_choice": named, "parallel_tool_calls": False, "stream": True, "priority": -1}
    fields |= {"max_output_tokens": 3, "top_k": 2, "temperature": 0.5, "seed": 1, "text": {"format": {"type": "text"}}}
    fields |= {"reasoning": {"effort": "low", "summary": "auto"}, "top_logprobs": 2}
    fields |= {"include": ["message.output_text.logprobs", "reasoning.encrypted_content"]}
    body = ResponsesRequest(model="m", input="hi", **fields)
    chat = body.as_chat_request()
    assert chat.checked_request_tools().schemas == {"f": {"type": "object"}} and chat.checked_request_tools().is_named
    params = chat.params()
    assert (params.max_tokens, params.top_k, params.temperature, params.seed, params.logprobs) == (3, 2, 0.5, 1, 2)
    assert (chat.stream, chat.parallel_tool_calls, chat.reasoning_effort, chat.priority) == (True, False, "low", -1)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"text": {"format": {"type": "json_object"}}}, "text"),
        ({"tools": [{"type": "function", "name": "f", "parameters": {}}]}, "tools"),
        ({}, None),
    ],
)
def test_a_grammar_that_fails_late_is_named_by_its_field_here(fields, name):
    assert ResponsesRequest(model="m", input="hi", **fields).as_chat_request().grammar_field == name


def test_every_sampling_parameter_that_both_have_is_the_chats():
    values = {name: value for name, value, _ in FIELDS if name in SHARED_FIELDS} | {"logit_bias": {"5": 1.0}}
    values |= {"include_stop_str_in_output": True, "skip_special_tokens": False}
    assert set(values) == set(SHARED_FIELDS) & set(SAMPLING_FIELDS)
    for name, value in values.items():
        params = ResponsesRequest(model="m", input="hi", **{name: value}).as_chat_request().params()
        assert getattr(params, name) == ({5: 1.0} if name == "logit_bias" else value)
