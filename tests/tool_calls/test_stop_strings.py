"""Stop strings are those of the content: never of reasoning, calls or marks, at the same token in engine and API
server."""

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.inputs import make_detokenizer
from espalier.request import Output, OutputChunk, ResolvedParams
from espalier.tool_calls.definitions import checked_tools
from espalier.tool_calls.formats import find_formats
from espalier.tool_calls.message_stream import chat_output
from espalier.tool_calls.parser import message_of
from espalier.tool_calls.plan import ChatPlan
from tests.tool_calls.families import FAMILIES, TOOLS

SAID = "I look.\nThen <I> look: 日本 look."
TOKENIZERS = {name: family.tokenizer() for name, family in FAMILIES.items()}


def planned(name, stop, **params):
    """(plan, prompt, parameters)"""
    tokenizer = TOKENIZERS[name]
    plan = ChatPlan(tokenizer, find_formats(FAMILIES[name].template), checked_tools(TOOLS))
    prompt = tokenizer.encode("<think>\n" if FAMILIES[name].opens else "x", add_special_tokens=False)
    return plan, prompt, plan.params_with_grammar(ResolvedParams(stop=stop, **params), prompt)


def ended(name, prompt, params, tokens):
    """(tokens, finish_reason, stop_reason) as the engine ends a request."""
    sink = make_detokenizer(TOKENIZERS[name], prompt, params)
    for at, token in enumerate(tokens):
        if (stopped := sink.push_token(token)) is not None:
            return tokens[: at + 1], "stop", stopped
    return tokens, "length", None


def read(name, prompt, params, output, places=()):
    """(message, ends) of the API server, from chunks that are cut at these places."""
    stream = make_detokenizer(TOKENIZERS[name], prompt, params)
    tokens, finish, stopped = output
    chunks = [tokens[a:b] for a, b in zip([0, *places], [*places, len(tokens)], strict=True)]
    parts = [OutputChunk("", 0, chunk) for chunk in chunks[:-1]]
    parts.append(OutputChunk("", 0, chunks[-1], finish_reason=finish, stop_reason=stopped))
    deltas = [delta for part in parts for delta in stream.read_deltas(part)]
    return said(deltas), stream.finish_reasons(parts[-1]), stream.num_reasoning_tokens


def said(deltas):
    """(content, reasoning, calls, errors).  Ids are random."""
    message = message_of(deltas)
    calls = [(call.name, call.arguments) for call in message.tool_calls]
    return message.content, message.reasoning, calls, message.errors


def pieces(name, prompt, params, tokens):
    """The content of an output that no stop string ends, by the calls between."""
    found = [""]
    for delta in make_detokenizer(TOKENIZERS[name], prompt, params).read_deltas(
        OutputChunk("", 0, tokens, finish_reason="length")
    ):
        if delta.kind == "call":
            found.append("")
        found[-1] += delta.text * (delta.kind == "content")
    return found


def texts_of(name):
    """Outputs of a family: its own, and one with a broken call."""
    text = FAMILIES[name].output.replace("I look.", SAID)
    return text, text.replace('": 2', '" 2')


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=10)
@given(data=st.data())
def test_a_stop_string_ends_the_content_and_nothing_else(name, data):
    text = data.draw(st.sampled_from(texts_of(name)))
    if data.draw(st.booleans()):
        text = text[: data.draw(st.integers(1, len(text)))]
    start = data.draw(st.integers(0, len(text) - 1))
    stop = text[start : start + data.draw(st.integers(1, 6))]
    tokens = TOKENIZERS[name].encode(text, add_special_tokens=False)
    _, prompt, unended = planned(name, ("\0",))
    free, _, _ = read(name, prompt, unended, (tokens, "length", None))
    plan, prompt, params = planned(name, (stop,), include_stop_str_in_output=data.draw(st.booleans()))
    output = ended(name, prompt, params, tokens)
    (content, reasoning, calls, errors), ends, num_reasoning_tokens = read(name, prompt, params, output)
    expected, found = "", ""
    for piece in pieces(name, prompt, unended, tokens):
        before, found, _ = piece.partition(stop)
        expected += before
        if found:
            break
    assert content == expected + found * params.include_stop_str_in_output
    assert ends == (("stop", stop) if found else ("length", None))
    assert free[1].startswith(reasoning) and (found or (reasoning, calls, errors) == free[1:])
    assert calls == free[2][: len(calls)]
    # However the tokens come, and offline.
    places = sorted(data.draw(st.sets(st.integers(0, len(output[0])), max_size=5)))
    assert read(name, prompt, params, output, places) == (
        (content, reasoning, calls, errors),
        ends,
        num_reasoning_tokens,
    )
    offline = chat_output(
        plan, prompt, Output("", *output), partial(make_detokenizer, TOKENIZERS[name], prompt, params)
    )
    assert (offline.message.content, offline.message.reasoning) == (content, reasoning)


@pytest.mark.parametrize("name", ["hermes", "harmony", "glm"])
@settings(max_examples=10)
@given(data=st.data())
def test_where_it_ends_does_not_depend_on_the_chunks(name, data):
    """With several stop strings, and with tokens before which none counts."""
    text = data.draw(st.sampled_from(texts_of(name)))
    cuts = data.draw(st.lists(st.tuples(st.integers(0, len(text) - 1), st.integers(1, 4)), min_size=1, max_size=4))
    stop = tuple(text[a : a + size] for a, size in cuts)
    _, prompt, params = planned(name, stop, min_tokens=data.draw(st.integers(0, len(text))))
    tokens = TOKENIZERS[name].encode(text, add_special_tokens=False)
    output = ended(name, prompt, params, tokens)
    assert output[1] == "length" or len(output[0]) > params.min_tokens
    expected = read(name, prompt, params, output)
    assert output[2] == expected[1][1] or output[2] is None
    places = sorted(data.draw(st.sets(st.integers(0, len(output[0])), max_size=8)))
    assert read(name, prompt, params, output, places) == expected


def test_a_call_ends_a_piece_of_content():
    """What is before a call and what is after it are no one text."""
    name, text = "hermes", 'one<tool_call>{"name": "now"}</tool_call>two'
    tokens = TOKENIZERS[name].encode(text, add_special_tokens=False)
    for stop, content in (("etw", "onetwo"), ("wo", "onet"), ("ne", "o")):
        _, prompt, params = planned(name, (stop,))
        assert read(name, prompt, params, ended(name, prompt, params, tokens))[0][0] == content
