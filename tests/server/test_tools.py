"""Tool calls and reasoning through OpenAI's clients, whole and streamed, with an engine whose outputs are scripted."""

import asyncio
import json
from contextlib import ExitStack

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from espalier.server import protocol
from espalier.server.protocol import SubmitPrompts, SubmittedPrompt
from tests.server.scripted import answer, scripted
from tests.server.test_refusals import error_of
from tests.tool_calls.families import CALLS, FAMILIES, NOW, TOOLS

HI = [{"role": "user", "content": "hi"}]
ASK = {"model": "bundled", "messages": HI}
STRICT = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]
# From the token that opens the reasoning to the one that ends it.  A token is a character here.
NUM_REASONING = len(">\nWhich? <b>\n</think>")
BROKEN = 'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city" "x"}}\n</tool_call>'


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """A function from a family to (server, scripted engine).  A message that begins with "say " is the output."""
    started = {}

    def running(name="hermes", **options):
        def script(prompt, params):
            said = prompt.rpartition("say:")[2].partition("<|im_end|>")[0]
            return said.replace("\0", "\n") if "say:" in prompt else family.output

        family, key = FAMILIES[name], (name, *options.items())
        if key not in started:
            folder = tmp_path_factory.mktemp("scripted")
            started[key] = stack.enter_context(scripted(folder, family, script, **options))
        return started[key]

    with ExitStack() as stack:
        yield running


def client_of(served):
    return OpenAI(base_url=f"{served.base}/v1", api_key="none", max_retries=0, timeout=60)


def joined(chunks):
    """The message of a stream as clients join it, with its end and its errors.  One choice."""
    message, calls, end, errors = {"content": "", "reasoning_content": ""}, {}, None, []
    for chunk in chunks:
        for choice in chunk.choices:
            delta = choice.delta
            message["content"] += delta.content or ""
            message["reasoning_content"] += getattr(delta, "reasoning_content", None) or ""
            for call in delta.tool_calls or ():
                if call.id is not None:
                    assert call.index not in calls and call.type == "function" and call.function.name
                    calls[call.index] = [call.function.name, ""]
                else:
                    assert call.function.name is None
                calls[call.index][1] += call.function.arguments
            errors += getattr(choice, "tool_call_errors", None) or []
            end = choice.finish_reason or end
    for error in errors:
        calls.pop(error["index"], None)
    return message, [tuple(call) for call in calls.values()], end, [error["message"] for error in errors]


def whole(answer):
    [choice] = answer.choices
    message = choice.message
    said = {"content": message.content or "", "reasoning_content": getattr(message, "reasoning_content", None) or ""}
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    errors = [error["message"] for error in getattr(choice, "tool_call_errors", None) or []]
    return said, calls, choice.finish_reason, errors


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_content_and_reasoning_are_whole_and_streamed(servers, name):
    family, (served, engine) = FAMILIES[name], servers(name)
    with client_of(served) as client:
        answer = client.chat.completions.create(tools=TOOLS, **ASK)
        stream = [*client.chat.completions.create(tools=TOOLS, stream=True, **ASK)]
        plain = whole(client.chat.completions.create(**ASK))
    said, calls, end, errors = whole(answer)
    assert [(called, json.loads(arguments)) for called, arguments in calls] == CALLS
    assert said == {"content": family.content, "reasoning_content": family.thoughts}
    assert (end, errors) == ("tool_calls", []) and (answer.choices[0].message.content is None) == (not family.content)
    assert joined(stream) == (said, calls, end, errors)
    assert engine.submitted[-3].grammar is None
    # Without tools their text is the answer.
    assert plain[1:3] == ([], "stop") and ("get_weather" in plain[0]["content"] or name == "harmony")
    assert plain[0]["reasoning_content"] == family.thoughts


@pytest.mark.parametrize("fields", [{}, {"stop": ["never"]}, {"logprobs": None, "n": 2}])
def test_reasoning_is_counted_and_may_be_left_out(servers, fields):
    family, (served, _) = FAMILIES["hermes"], servers()
    ask = {**ASK, **fields}
    with client_of(served) as client:
        answer = client.chat.completions.create(**ask)
        without = client.chat.completions.create(extra_body={"include_reasoning": False}, **ask)
        stream = [*client.chat.completions.create(extra_body={"include_reasoning": False}, stream=True, **ask)]
    assert {choice.message.reasoning_content for choice in answer.choices} == {family.thoughts}
    for each in (answer, without):
        count = each.usage.completion_tokens_details.reasoning_tokens
        assert count == NUM_REASONING * fields.get("n", 1)
    assert not hasattr(without.choices[0].message, "reasoning_content")
    assert "Which?" not in str([chunk.choices for chunk in stream])
    # What is left out makes no chunks.
    bare = [chunk for chunk in stream for choice in chunk.choices if not choice.delta.model_dump(exclude_none=True)]
    assert all(chunk.choices[0].finish_reason for chunk in bare)


def test_the_count_of_reasoning_does_not_depend_on_the_parts(servers):
    counts = set()
    for size in (1, 2, 7, 1000):
        served, _ = servers(size=size)
        with client_of(served) as client:
            counts.add(client.chat.completions.create(**ASK).usage.completion_tokens_details.reasoning_tokens)
    assert len(counts) == 1


def said(text):
    return {"model": "bundled", "messages": [{"role": "user", "content": f"say:{text}".replace("\n", "\0")}]}


def test_a_broken_call_is_content_with_a_reason(servers):
    served, _ = servers()
    for text, ask, end in ((BROKEN, {}, "stop"), (BROKEN.replace('"city" "x"', ""), {"max_tokens": 40}, "length")):
        with client_of(served) as client:
            answer = client.chat.completions.create(tools=TOOLS, **said(text), **ask)
            stream = [*client.chat.completions.create(tools=TOOLS, stream=True, **said(text), **ask)]
        message, calls, found, errors = whole(answer)
        assert calls == [] and found == end and len(errors) == 1
        assert message["content"] == f"I look.{text[8 : ask.get('max_tokens', 1000)]}"
        assert joined(stream) == (message, calls, found, errors)


# A family's output, a stop string of its reasoning, calls or marks, and one of its content with what comes before it.
STOPS = [
    ("hermes", "<think>\nQuestion: which?\n</think>\n\nThe answer.", "\n\n", "ans", "The "),
    ("hermes", FAMILIES["hermes"].output, "</tool_call>", "look", "I "),
    (
        "harmony",
        "<|channel|>analysis<|message|>Sure.<|end|><|start|>assistant<|channel|>final<|message|>The answer.",
        "final",
        "swe",
        "The an",
    ),
]


@pytest.mark.parametrize(("name", "text", "hidden", "shown", "content"), STOPS)
def test_a_stop_string_is_one_of_the_content(servers, name, text, hidden, shown, content):
    served, engine = servers(name)
    ask = {"model": "bundled", "tools": TOOLS, "messages": said(text)["messages"]}
    ask |= {"messages": HI} if text == FAMILIES[name].output else {}
    with client_of(served) as client:
        free = client.chat.completions.create(**ask)
        beside = client.chat.completions.create(stop=[hidden], **ask)
        assert whole(beside) == whole(free) and beside.usage == free.usage
        cut = client.chat.completions.create(stop=[hidden, shown], **ask)
        stream = [*client.chat.completions.create(stop=[hidden, shown], stream=True, **ask)]
        response = client.responses.create(
            model="bundled", input=ask["messages"], tools=FLAT, extra_body={"stop": [shown]}
        )
    message, calls, end, errors = whole(cut)
    assert (message["content"], calls, end, errors) == (content, [], "stop", [])
    assert cut.choices[0].stop_reason == shown and message["reasoning_content"] == whole(free)[0]["reasoning_content"]
    assert cut.usage.completion_tokens == response.usage.output_tokens < free.usage.completion_tokens
    assert joined(stream) == whole(cut) and (response.output_text, response.status) == (content, "completed")
    # How it is read goes to the engine process and is the same there.
    [submitted] = protocol.decode_to_engine(
        protocol.encode(SubmitPrompts([SubmittedPrompt("a", [1], engine.submitted[-1], 0, True)]))
    ).prompts
    assert submitted.params.output_form == engine.submitted[-1].output_form is not None


def test_a_forced_call_has_a_grammar(servers):
    served, engine = servers()
    named = {"type": "function", "function": {"name": "now"}}
    asked = [
        ({"tool_choice": "required", "tools": TOOLS}, ["get_weather", "now"]),
        ({"tool_choice": named, "tools": TOOLS}, ["now"]),
        ({"tools": STRICT}, ["get_weather"]),
        ({"tools": TOOLS, "parallel_tool_calls": False}, ["get_weather", "now"]),
    ]
    with client_of(served) as client:
        for fields, names in asked:
            client.chat.completions.create(**fields, **ASK)
            grammar = engine.submitted[-1].grammar
            assert grammar.kind == "structural_tag"
            assert [name for name in ("get_weather", "now") if f'\\"name\\": \\"{name}\\"' in grammar.spec] == names
            assert ("</think>" in grammar.spec) == ("tool_choice" in fields)
        # A template that switches reasoning off.
        off = {"chat_template_kwargs": {"enable_thinking": False}}
        client.chat.completions.create(tool_choice="required", tools=TOOLS, extra_body=off, **ASK)
        assert "</think>" not in engine.submitted[-1].grammar.spec
        for fields in ({"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}, {"tool_choice": "auto"}):
            client.chat.completions.create(**fields, **ASK)
            assert engine.submitted[-1].grammar is None


UNENFORCEABLE = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"not": {}}}}, "strict": True},
}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [NOW, NOW]}, "tools", "is the name of an earlier tool"),
        ({"tools": [{"type": "web_search"}]}, "tools", "is not supported; use"),
        ({"tools": [UNENFORCEABLE]}, "tools", "'not' is not supported"),
        ({"tools": [UNENFORCEABLE], "response_format": {"type": "json_object"}}, "tools", "'not' is not supported"),
        ({"tools": [UNENFORCEABLE], "guided_json": {"not": {}}}, "guided_json", "'not' is not supported"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "tool_choice: Input should be 'none', 'auto' or 'req"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "'g' is not"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls", "Input should be a valid boolean"),
        ({"functions": [NOW["function"]]}, "functions", "OpenAI replaced it by tools; use tools"),
    ],
)
def test_tools_that_are_wrong_are_refused(servers, fields, param, words):
    error = error_of(servers()[0].request("/v1/chat/completions", {**ASK, **fields}))
    assert error["param"] == param and words in error["message"]


def test_results_of_tools_go_into_the_prompt(servers):
    served, _ = servers()
    called = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"a": [1]}'}}
    history = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [called], "reasoning_content": "hidden"},
        {"role": "tool", "tool_call_id": "c1", "content": "say:noon<|im_end|>"},
    ]
    with client_of(served) as client:
        answer = client.chat.completions.create(model="bundled", messages=history, tools=TOOLS)
    assert answer.choices[0].message.content == "noon"


def test_the_async_client_reads_many_at_once(servers):
    served, _ = servers()

    async def ask_all():
        async with AsyncOpenAI(base_url=f"{served.base}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(client.chat.completions.create(tools=TOOLS, **ASK) for _ in range(6)))

    for each in asyncio.run(ask_all()):
        assert [(name, json.loads(arguments)) for name, arguments in whole(each)[1]] == CALLS


@pytest.fixture(scope="module")
def caller(tmp_path_factory):
    """A model that calls its first tool, and answers with text to a result."""
    with scripted(tmp_path_factory.mktemp("caller"), FAMILIES["hermes"], answer) as (served, _):
        yield served


def test_a_langchain_agent_calls_a_tool_and_answers(caller, langchain):
    def get_weather(city: str) -> str:
        """The weather of a city."""
        return f"sun in {city}"

    chat = langchain.ChatOpenAI(model="bundled", base_url=f"{caller.base}/v1", api_key="none", max_retries=0)
    agent, messages = chat.bind_tools([get_weather]), [("user", "The weather?")]
    asked = agent.invoke(messages)
    [call] = asked.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "x"})
    streamed = None
    for chunk in agent.stream(messages):
        streamed = chunk if streamed is None else streamed + chunk
    assert [(each["name"], each["args"]) for each in streamed.tool_calls] == [("get_weather", {"city": "x"})]
    result = {"role": "tool", "tool_call_id": call["id"], "content": get_weather(**call["args"])}
    assert agent.invoke([*messages, asked, result]).content == "def f(): pass"


# The Responses API

OUTPUT = FAMILIES["hermes"]


def items_of(response):
    """(type, text or call) of each item."""
    found = []
    for item in response.output:
        if item.type == "function_call":
            found.append((item.type, item.name, json.loads(item.arguments), item.status))
        else:
            found.append((item.type, "".join(part.text for part in item.content)))
    return found


def test_a_response_has_items_whole_and_streamed(servers):
    served, _ = servers()
    expected = [("reasoning", OUTPUT.thoughts), ("message", OUTPUT.content)]
    expected += [("function_call", name, arguments, "completed") for name, arguments in CALLS]
    with client_of(served) as client:
        ask = {"model": "bundled", "input": "hi", "tools": FLAT, "instructions": "Be short.", "metadata": {"a": "b"}}
        response = client.responses.create(**ask)
        events = [*client.responses.create(stream=True, **ask)]
    assert items_of(response) == expected and response.output_text == OUTPUT.content
    assert (response.status, response.metadata, response.instructions) == ("completed", {"a": "b"}, "Be short.")
    usage = response.usage
    assert usage.output_tokens_details.reasoning_tokens == NUM_REASONING
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:2] == ["created", "in_progress"] and kinds[-1] == "completed"
    assert items_of(events[-1].response) == expected
    grown = {}
    for event in events:
        if event.type.endswith(".delta"):
            grown[event.item_id] = grown.get(event.item_id, "") + event.delta
    done = {event.item.id: event.item for event in events if event.type == "response.output_item.done"}
    for item in events[-1].response.output:
        text = item.arguments if item.type == "function_call" else item.content[0].text
        assert grown[item.id] == text and done[item.id] == item
    order = [kind for i, kind in enumerate(kinds) if not kind.endswith("delta") or kinds[i - 1] != kind]
    text = ["output_item.added", "content_part.added", "{}.delta", "{}.done", "content_part.done", "output_item.done"]
    call = ["output_item.added", *(f"function_call_arguments.{end}" for end in ("delta", "done")), "output_item.done"]
    named = [each.format(name) for name in ("reasoning_text", "output_text") for each in text]
    assert order == ["created", "in_progress", *named, *call, *call, "completed"]


def test_a_broken_call_of_a_response_has_a_reason(servers):
    served, _ = servers()
    ask = {"model": "bundled", "tools": FLAT, "input": said(BROKEN)["messages"][0]["content"]}
    with client_of(served) as client:
        response = client.responses.create(**ask)
        *_, last = client.responses.create(stream=True, **ask)
        [error] = client.chat.completions.create(tools=TOOLS, **said(BROKEN)).choices[0].tool_call_errors
    assert response.tool_call_errors == last.response.tool_call_errors == [error]


def test_the_items_of_a_response_go_back_in(servers):
    served, _ = servers()
    with client_of(served) as client:
        first = client.responses.create(model="bundled", input="hi", tools=FLAT)
        calls = [item for item in first.output if item.type == "function_call"]
        results = [
            {"type": "function_call_output", "call_id": c.call_id, "output": "say:noon<|im_end|>"} for c in calls
        ]
        history = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}, *first.output, *results]
        second = client.responses.create(model="bundled", input=history, tools=FLAT)
        # With the fields that are null.
        dumped = [history[0], *(item.model_dump() for item in first.output), *results]
        third = client.responses.create(model="bundled", input=dumped, tools=FLAT)
        assert second.output_text == third.output_text == "noon"
        # An answer that was cut short says so.
        cut = client.responses.create(model="bundled", input="say:abcdefgh", max_output_tokens=3)
        assert (cut.status, cut.incomplete_details.reason, cut.output_text) == (
            "incomplete",
            "max_output_tokens",
            "abc",
        )
        assert cut.output[0].status == "incomplete"
        events = [*client.responses.create(model="bundled", input="say:abcdefgh", max_output_tokens=3, stream=True)]
        assert events[-1].type == "response.incomplete"
        broken = client.responses.create(model="bundled", input=f"say:{BROKEN}".replace("\n", "\0"), tools=FLAT)
    assert [item.type for item in broken.output] == ["message", "function_call", "message"]
    assert broken.output[1].status == "incomplete"
    assert "".join(i.content[0].text for i in broken.output if i.type == "message") == BROKEN.replace(".\n", ".")


def test_a_response_is_forced_and_formed_as_a_chat_is(servers):
    served, engine = servers()
    with client_of(served) as client:
        choice = {"type": "function", "name": "now"}
        client.responses.create(model="bundled", input="hi", tools=FLAT, tool_choice=choice)
        assert (
            engine.submitted[-1].grammar.kind == "structural_tag"
            and "get_weather" not in engine.submitted[-1].grammar.spec
        )
        client.responses.create(model="bundled", input="hi", temperature=0.5, extra_body={"top_k": 3})
        assert (engine.submitted[-1].temperature, engine.submitted[-1].top_k) == (0.5, 3)


RESPONSE = {"model": "bundled", "input": "hi"}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the whole conversation each time"),
        ({"conversation": "c"}, "conversation", "stores nothing"),
        ({"background": True}, "background", "stores nothing"),
        ({"truncation": "auto"}, "truncation", "send a shorter input"),
        ({"tools": [{"type": "web_search"}]}, "tools", "tools[0].type='web_search' is not supported; use 'function'"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools", "tools[0].function.name='a b'"),
        (
            {"input": [{"type": "item_reference", "id": "x"}]},
            "input",
            "input[0].type='item_reference' is not supported",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "only text parts"),
        ({"input": [{"role": "user", "content": "x", "rol": 1}]}, "input", "input[0] has no 'rol'"),
        ({"input": [{"role": "user"}]}, "input", "input[0].content is missing; a message item needs it"),
        ({"input": [{"role": "king", "content": "x"}]}, "input", "input[0].role='king' is not supported; use user, "),
        ({"input": []}, "input", "input: List should have at least 1 item"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text", "text.format.schema: Field required"),
        ({"top_logprobs": 2}, "top_logprobs", "top_logprobs needs include"),
        ({"include": ["message.output_text.logprobs"]}, "include", "is not supported where reasoning or tool calls"),
        ({"max_tokens": 3}, "max_tokens", "use max_output_tokens"),
        ({"messages": HI}, "messages", "use input"),
        ({"response_format": {"type": "json_object"}}, "response_format", "use text.format"),
        ({"modalities": ["audio"]}, "modalities", "this server supports only text"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens=0 is not supported"),
        ({"max_output_tokens": 10**6}, "max_output_tokens", "max_output_tokens=1000000 is more than fits"),
    ],
)
def test_a_response_that_cannot_be_made_is_refused(servers, fields, param, words):
    error = error_of(servers()[0].request("/v1/responses", {**RESPONSE, **fields}))
    assert error["param"] == param and words in error["message"] and "\n" not in error["message"]


def test_a_response_has_log_probabilities_where_all_is_text(client):
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 4, "temperature": 0}
    response = client.responses.create(model="bundled", input="def f(x):", **fields)
    [item] = response.output
    assert len(item.content[0].logprobs) == 4 and len(item.content[0].logprobs[0].top_logprobs) == 2
    events = [*client.responses.create(model="bundled", input="def f(x):", stream=True, **fields)]
    assert events[-1].response.output[0].content == item.content
    chat = {"messages": [{"role": "user", "content": "def f(x):"}], "temperature": 0, "max_tokens": 4}
    whole = client.chat.completions.create(model="bundled", **chat)
    assert whole.choices[0].message.content == response.output_text
    assert not hasattr(whole.choices[0].message, "reasoning_content") and whole.choices[0].message.tool_calls is None


def test_the_bundled_model_says_that_it_calls_no_tools(client):
    with pytest.raises(openai.BadRequestError, match="tools needs a chat template that reads them"):
        client.chat.completions.create(tools=TOOLS, **ASK)
    # Where they may not be called they have no effect, and the header says so.
    asked = {"model": "bundled", "input": "hi", "tools": FLAT, "tool_choice": "none", "max_output_tokens": 1}
    answer = client.responses.with_raw_response.create(user="me", **asked)
    assert answer.headers["x-espalier-no-effect"] == "user, tools"
