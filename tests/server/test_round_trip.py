"""What the server gives, the server takes: every answer goes back in as history, whole or as a client joined it."""

import json
import random

import pytest

from tests.server.scripted import scripted
from tests.tool_calls.families import FAMILIES, TOOLS

# Families whose small template here shows earlier calls.
NAMES = [name for name, family in FAMILIES.items() if "tool_calls" in family.template]
FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]
HI = {"role": "user", "content": "hi"}
# Half of a surrogate pair, as an escape in JSON.
HALF = r"\ud83d"
NUM_CUTS = 1
# Half a character in a call, a call that is no JSON, and arguments that are no object.
BROKEN = (("日本", HALF), ('": 2', '" 2'), ("{}", "[1]"))


def written(family, chance, broken):
    """(output, token limit): whole, with these of BROKEN, and cut."""
    text = family.output
    yield text, None
    for replaced in broken:
        yield text.replace(*replaced), None
    for _ in range(NUM_CUTS):
        yield text, chance.randrange(1, len(text))


def events(text):
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def message_of(chunks):
    """The assistant's message as a client joins it from a stream.  Calls that broke stay, as most clients keep them."""
    message, calls = {"role": "assistant", "content": ""}, {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        for name in ("content", "reasoning_content"):
            if choice["delta"].get(name):
                message[name] = message.get(name, "") + choice["delta"][name]
        for part in choice["delta"].get("tool_calls", ()):
            call = calls.setdefault(part["index"], {**part, "function": {**part["function"], "arguments": ""}})
            call["function"]["arguments"] += part["function"]["arguments"]
    return {**message, "tool_calls": list(calls.values())} if calls else message


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        *((name, BROKEN[i % 3 : i % 3 + 1]) for i, name in enumerate(NAMES)),
        *(pytest.param(name, BROKEN, marks=pytest.mark.full) for name in NAMES),
    ],
)
def test_every_answer_goes_back_in(name, broken, tmp_path):
    family, chance, out = FAMILIES[name], random.Random(name), {}

    def taken(path, body):
        status, _, answer = served.request(path, {"model": "bundled", **body})
        assert status == 200, (out, answer)
        return answer

    def chat(limit, **beside):
        ask = {"messages": [HI], "tools": TOOLS, **beside}
        whole = taken("/v1/chat/completions", {**ask, "max_tokens": limit})["choices"][0]["message"]
        stream = taken("/v1/chat/completions", {**ask, "max_tokens": limit, "stream": True})
        for message in (whole, message_of(events(stream))):
            # As openai's client dumps it.
            dumped = {"refusal": None, "annotations": None, "audio": None, "function_call": None, **message}
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": "x"} for call in message.get("tool_calls", ())
            ]
            taken("/v1/chat/completions", {**ask, "messages": [HI, dumped, *results, HI], "max_tokens": 1})
            taken("/tokenize", {"messages": [HI, dumped, *results, HI]})

    def respond(limit, **beside):
        ask = {"input": [HI], "tools": FLAT, **beside}
        whole = taken("/v1/responses", {**ask, "max_output_tokens": limit})["output"]
        stream = events(taken("/v1/responses", {**ask, "max_output_tokens": limit, "stream": True}))
        done = [event["item"] for event in stream if event["type"] == "response.output_item.done"]
        assert [item["type"] for item in whole] == [item["type"] for item in done]
        for items in (whole, done, stream[-1]["response"]["output"]):
            results = [
                {"type": "function_call_output", "call_id": item["call_id"], "output": "x"}
                for item in items
                if item["type"] == "function_call"
            ]
            taken("/v1/responses", {**ask, "input": [HI, *items, *results, HI], "max_output_tokens": 1})

    with scripted(tmp_path, family, lambda prompt, params: out["text"]) as (served, _):
        for out["text"], limit in written(family, chance, broken):
            chat(limit)
            respond(limit)
        # Without tools, where nothing is read from the text but the reasoning.
        out["text"] = family.output
        chat(None, tool_choice="none")
        respond(None, tool_choice="none")


def test_a_call_that_was_cut_off_is_shown_once(tmp_path):
    """As the content that the answer had; where a client dropped that, its name and arguments are content."""
    family = FAMILIES["hermes"]
    seen = []
    cut = {"id": "a", "type": "function", "function": {"name": "now", "arguments": '{"ci'}}
    item = {"type": "function_call", "call_id": "a", "name": "now", "arguments": '{"ci', "status": "incomplete"}
    text = '<tool_call>\n{"name": "now", "arguments": {"ci'
    told = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}

    def script(prompt, params):
        seen.append(prompt)
        return "x"

    with scripted(tmp_path, family, script) as (served, _):
        for content in (None, text):
            message = {"role": "assistant", "content": content, "tool_calls": [cut]}
            body = {"model": "bundled", "messages": [HI, message, HI]}
            assert served.request("/v1/chat/completions", body)[0] == 200
        for items in ([item], [item, told]):
            body = {"model": "bundled", "input": [HI, *items, HI]}
            assert served.request("/v1/responses", body)[0] == 200
    assert [prompt.count('{"ci') for prompt in seen] == [1, 1, 1, 1]
    assert ["now {" in prompt for prompt in seen] == [True, False, True, False]
