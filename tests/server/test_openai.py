"""What clients ask is honoured: answers are the offline LLM's, field by field, through the clients that people use."""

import asyncio
import http.client
from concurrent.futures import ThreadPoolExecutor

import pytest
from openai import AsyncOpenAI

from espalier import SamplingParams, __version__
from espalier.request import PARAMS_WITH_FLAGS, Output
from tests.pairwise import fewer, in_turn_params, product_params

PROMPT = "def mean(xs):\n    "
MESSAGES = [{"role": "user", "content": "class Stack:\n"}]
GREEDY = {"temperature": 0.0, "max_tokens": 20}
HOUSE = {"return_token_ids": True, "from_draft": True}
EOS = 0
# A token of the greedy answer to PROMPT.
RETURN = 336
OWN = {"top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos", "speculation"}
OWN |= {"max_draft_depth", "include_stop_str_in_output", "skip_special_tokens"}
# Every field of SamplingParams that changes tokens, alone: (field, value, what else the body needs).
FIELDS = [
    ("temperature", 0.3, {"seed": 7}),
    ("top_k", 3, {"temperature": 2.0, "seed": 7}),
    ("top_p", 0.5, {"temperature": 2.0, "seed": 7}),
    ("min_p", 0.3, {"temperature": 2.0, "seed": 7}),
    ("repetition_penalty", 1.6, {}),
    ("presence_penalty", 2.0, {"max_tokens": 40}),
    ("frequency_penalty", 2.0, {"max_tokens": 40}),
    ("seed", 11, {"temperature": 1.0}),
    ("max_tokens", 5, {"stop_token_ids": [RETURN]}),
    ("min_tokens", 18, {"stop_token_ids": [RETURN]}),
    ("stop", ["return"], {}),
    ("stop_token_ids", [RETURN], {}),
    ("ignore_eos", True, {"logit_bias": {EOS: 100.0}}),
    ("speculation", False, {}),
    ("max_draft_depth", 1, {}),
]


def offline(llm, prompt, **params):
    """The offline LLM's output; greedy or with a seed, so it is computed once."""
    key = repr((prompt, sorted(params.items())))
    if key not in _outputs:
        _outputs[key] = llm.generate([prompt], SamplingParams(**params))[0]
    return _outputs[key]


def offline_at_once(llm, wishes):
    """Computes what `offline` is asked for PROMPT later."""
    by_key = {repr((PROMPT, sorted(wish.items()))): wish for wish in wishes}
    outputs = llm.generate([PROMPT] * len(by_key), [SamplingParams(**wish) for wish in by_key.values()])
    _outputs.update(zip(by_key, outputs, strict=True))


_outputs: dict[str, Output] = {}


def complete(client, prompt=PROMPT, extra=None, **fields):
    return client.completions.create(model="bundled", prompt=prompt, extra_body={**HOUSE, **(extra or {})}, **fields)


def ours(fields):
    """What the openai client does not know goes into its extra_body."""
    return {k: v for k, v in fields.items() if k not in OWN}, {k: v for k, v in fields.items() if k in OWN}


def test_a_completion_is_the_offline_llms(client, llm):
    expected = offline(llm, PROMPT, **GREEDY)
    answer = complete(client, **GREEDY)
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason) == (expected.text, expected.finish_reason)
    assert choice.token_ids == expected.token_ids and choice.from_draft == expected.from_draft
    assert answer.usage.completion_tokens == 20
    assert answer.usage.speculation == {
        **expected.speculation.as_dict(),
        "acceptance_by_depth": [list(pair) for pair in expected.speculation.acceptance_by_depth],
    }
    assert list(answer.usage.speculation) == [
        "rounds",
        "drafted",
        "accepted",
        "accept_length",
        "histogram",
        "acceptance_by_depth",
    ]


@pytest.fixture(scope="module")
def answers(client, llm):
    """With each of FIELDS.  All are asked at once, so that they share rounds: the server's, and the offline LLM's."""
    wishes = {field: {**GREEDY, **beside, field: value} for field, value, beside in FIELDS}
    without = [{name: held for name, held in wish.items() if name != field} for field, wish in wishes.items()]
    offline_at_once(llm, [*wishes.values(), *without])
    with ThreadPoolExecutor(4) as pool:
        split = {field: ours(wish) for field, wish in wishes.items()}
        yield {field: pool.submit(complete, client, extra=own, **known) for field, (known, own) in split.items()}


@pytest.mark.parametrize(("field", "value", "beside"), FIELDS, ids=[field for field, _, _ in FIELDS])
def test_each_field_is_honoured_as_offline(answers, llm, field, value, beside):
    fields = {**GREEDY, **beside, field: value}
    answer = answers[field].result()
    expected = offline(llm, PROMPT, **fields)
    [choice] = answer.choices
    assert (choice.text, choice.token_ids, choice.finish_reason) == (
        expected.text,
        expected.token_ids,
        expected.finish_reason,
    )
    assert answer.usage.speculation["rounds"] == expected.speculation.rounds
    # The field says something here: without it the answer, or the way to it, is another.
    without = {name: held for name, held in fields.items() if name != field}
    other = offline(llm, PROMPT, **without)
    assert (other.token_ids, other.speculation.rounds) != (expected.token_ids, expected.speculation.rounds)


def test_every_field_of_sampling_params_is_tried():
    tried = {field for field, _, _ in FIELDS} | {"logit_bias", "logprobs", "prompt_logprobs", "n"}
    tried |= {"include_stop_str_in_output", "skip_special_tokens"}  # of the text alone: below
    # Grammars have fields of their own: tests/server/test_grammars.py.
    assert tried == {field.name for field in PARAMS_WITH_FLAGS}


def test_a_top_k_of_minus_one_keeps_all_tokens(client):
    fields = {"temperature": 2.0, "seed": 7, "max_tokens": 20}
    off, all_kept = (complete(client, extra={"top_k": k}, **fields).choices[0].token_ids for k in (-1, 0))
    assert off == all_kept


def test_a_bias_forbids_a_token(client, llm):
    first = offline(llm, PROMPT, **GREEDY).token_ids[0]
    answer = complete(client, logit_bias={str(first): -10000}, **GREEDY)
    assert first not in answer.choices[0].token_ids
    assert answer.choices[0].token_ids == offline(llm, PROMPT, logit_bias={first: -10000.0}, **GREEDY).token_ids


def test_a_seed_repeats_and_samples_differ(client, llm):
    fields = {"temperature": 1.0, "max_tokens": 16, "seed": 5, "n": 3}
    answer, again = complete(client, **fields), complete(client, **fields)
    expected = offline(llm, PROMPT, **fields)
    assert [c.index for c in answer.choices] == [0, 1, 2]
    assert [c.token_ids for c in answer.choices] == [c.token_ids for c in again.choices]
    assert [c.text for c in answer.choices] == [c.text for c in expected.choices]
    assert len({c.text for c in answer.choices}) > 1
    assert answer.usage.prompt_tokens == expected.usage.prompt_tokens
    assert answer.usage.completion_tokens == sum(len(c.token_ids) for c in expected.choices)


def test_several_prompts_and_token_ids_and_echo(client, llm):
    ids = llm.tokenizer.encode("import os")
    answer = complete(client, prompt=["x = ", "while True:"], echo=True, n=2, **GREEDY)
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert [c.text.startswith("x = ") for c in answer.choices] == [True, True, False, False]
    assert answer.choices[2].text == "while True:" + offline(llm, "while True:", **GREEDY).text
    by_ids = complete(client, prompt=ids, echo=True, **GREEDY)
    assert by_ids.choices[0].text == "import os" + offline(llm, ids, **GREEDY).text


def test_logprobs_are_the_offline_llms(client, llm):
    expected = offline(llm, PROMPT, logprobs=2, **GREEDY).logprobs
    found = complete(client, logprobs=2, **GREEDY).choices[0].logprobs
    assert found.token_logprobs == [entry.logprob for entry in expected]
    assert [len(top) for top in found.top_logprobs] == [2] * 20
    assert "".join(found.tokens)[found.text_offset[5] :].startswith(found.tokens[5])
    prompt = llm.chat_prompt(MESSAGES)
    entries = offline(llm, prompt, logprobs=3, **GREEDY).logprobs
    chat = client.chat.completions.create(
        model="bundled", messages=MESSAGES, logprobs=True, top_logprobs=3, max_completion_tokens=20, temperature=0
    )
    content = chat.choices[0].logprobs.content
    assert [token.logprob for token in content] == [entry.logprob for entry in entries]
    assert [[top.logprob for top in token.top_logprobs] for token in content] == [
        [value for _, value in entry.top] for entry in entries
    ]
    assert bytes(b for token in content for b in token.bytes).decode() == chat.choices[0].message.content


@pytest.mark.parametrize("max_tokens", fewer([0, 1, 7], lambda count: count != 1))
def test_log_likelihoods_as_evaluations_ask_for_them(client, llm, max_tokens):
    """echo with logprobs: OpenAI's legacy form over prompt and output; max_tokens 0 is the prompt alone."""
    # Its end is what the model says.
    text = "def mean(xs):( not"
    ids = llm.tokenizer.encode(text)
    fields = {"temperature": 0.0, "max_tokens": max_tokens, "logprobs": 1}
    expected = offline(llm, text, prompt_logprobs=1, **fields)
    said = [*expected.prompt_logprobs[1:], *expected.logprobs]
    names = [llm.tokenizer.bytes_of(token) for token in [*ids, *expected.token_ids]]
    for prompt in (text, ids, [ids], [text, text]):
        answer = complete(client, prompt=prompt, echo=True, **fields)
        assert answer.usage.completion_tokens == max_tokens * len(answer.choices)
        for choice in answer.choices:
            found = choice.logprobs
            assert (choice.text, choice.token_ids) == (text + expected.text, expected.token_ids)
            assert (choice.finish_reason, len(choice.token_ids)) == ("length", max_tokens)
            assert found.tokens == [name.bytes.decode() for name in names]
            assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
            # How many requests are in a pass moves the last digits.
            assert found.token_logprobs[1:] == pytest.approx([entry.logprob for entry in said], abs=1e-9)
            tops = [list(top.values()) for top in found.top_logprobs[1:]]
            assert [value for [value] in tops] == pytest.approx([entry.top[0][1] for entry in said], abs=1e-9)
            # Whether a token is the likeliest is read off an equality.
            is_best = [[value] == top for value, top in zip(found.token_logprobs[1:], tops, strict=True)]
            assert is_best == [entry.rank == 1 for entry in said] and any(is_best) and not all(is_best)
            ends = [*found.text_offset[1:], len(choice.text)]
            assert [choice.text[a:b] for a, b in zip(found.text_offset, ends, strict=True)] == [
                name.bytes.decode() if name.is_text else "" for name in names
            ]


@pytest.mark.parametrize("max_tokens", fewer([0, 1, 7], lambda count: count != 1))
def test_a_streamed_echo_with_logprobs_is_the_whole_one(client, max_tokens):
    fields = {"echo": True, "logprobs": 2, "max_tokens": max_tokens, "temperature": 0.0}
    [whole] = complete(client, **fields).choices
    chunks = [chunk.choices[0] for chunk in complete(client, stream=True, **fields)]
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert chunks[-1].finish_reason == "length"
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        parts = [getattr(chunk.logprobs, name) for chunk in chunks if chunk.logprobs is not None]
        assert [entry for part in parts for entry in part] == getattr(whole.logprobs, name)


def test_several_samples_echo_the_same(client, llm):
    answer = complete(client, prompt=[PROMPT, "import os"], n=2, echo=True, logprobs=0, max_tokens=3, seed=5)
    lengths = [len(llm.tokenizer.encode(prompt)) for prompt in (PROMPT, PROMPT, "import os", "import os")]
    assert [len(choice.logprobs.tokens) for choice in answer.choices] == [length + 3 for length in lengths]
    for first, second, length in ((0, 1, lengths[0]), (2, 3, lengths[2])):
        one, other = (answer.choices[at].logprobs.token_logprobs for at in (first, second))
        assert one[:length] == other[:length] and one[length:] != other[length:]
    assert len({choice.text for choice in answer.choices}) == 4


def test_prompt_logprobs_have_vllms_form(client, llm):
    prompt = llm.chat_prompt(MESSAGES)
    fields = {"temperature": 0.0, "max_tokens": 2}
    for count in (0, 3):
        expected = offline(llm, prompt, prompt_logprobs=count, **fields).prompt_logprobs
        extra = {"prompt_logprobs": count}
        completion = complete(client, prompt=prompt, n=2, extra=extra, **fields)
        chat = client.chat.completions.create(model="bundled", messages=MESSAGES, extra_body=extra, **fields)
        for found in (*(choice.prompt_logprobs for choice in completion.choices), chat.prompt_logprobs):
            assert found[0] is None and len(found) == len(prompt)
            for each, entry in zip(found[1:], expected[1:], strict=True):
                [own, *_] = each.items()
                assert own[0] == str(entry.token_id)
                assert own[1]["decoded_token"] == llm.tokenizer.bytes_of(entry.token_id).bytes.decode()
                likeliest = {str(token): (value, rank) for rank, (token, value) in enumerate(entry.top, 1)}
                wanted = likeliest | {str(entry.token_id): (entry.logprob, entry.rank)}
                assert set(each) == set(wanted)
                for token, (value, rank) in wanted.items():
                    assert each[token]["rank"] == rank and each[token]["logprob"] == pytest.approx(value, abs=1e-9)
        assert completion.choices[0].logprobs is None


def test_each_sees_as_many_alternatives_as_it_asked_for(client):
    fields = {"echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0.0}
    [choice] = complete(client, extra={"prompt_logprobs": 4}, **fields).choices
    assert {len(top) for top in choice.logprobs.top_logprobs[1:]} == {1}
    assert {len(each) for each in choice.prompt_logprobs[1:]} <= {4, 5}
    [choice] = complete(client, extra={"prompt_logprobs": 0}, **fields).choices
    assert {len(top) for top in choice.logprobs.top_logprobs[1:]} == {1}
    assert {len(each) for each in choice.prompt_logprobs[1:]} == {1}


def test_variables_of_the_chat_template_are_handed_to_it(client, served, llm):
    own = {"chat_template_kwargs": {"bos_token": "import os\n"}}
    expected = llm.chat(MESSAGES, SamplingParams(**GREEDY), **own)
    chat = client.chat.completions.create(model="bundled", messages=MESSAGES, extra_body=own, **GREEDY)
    assert chat.choices[0].message.content == expected.text
    tokens = served.request("/tokenize", {"messages": MESSAGES, **own})[2]["tokens"]
    assert tokens == llm.chat_prompt(MESSAGES, **own) and chat.usage.prompt_tokens == len(tokens)
    assert tokens == [*llm.tokenizer.encode("import os\n")[1:], *llm.chat_prompt(MESSAGES)[1:]]


@pytest.mark.parametrize("options", [{"continue_final_message": True}, {"add_generation_prompt": False}, {}])
def test_an_answer_goes_on_with_the_last_message_where_that_is_asked_for(client, served, llm, options):
    messages = [*MESSAGES, {"role": "assistant", "content": "def push(self"}]
    expected = llm.chat(messages, SamplingParams(**GREEDY), **options)
    chat = client.chat.completions.create(model="bundled", messages=messages, extra_body=options, **GREEDY)
    assert chat.choices[0].message.content == expected.text
    tokens = served.request("/tokenize", {"messages": messages, **options})[2]["tokens"]
    assert tokens == llm.chat_prompt(messages, **options) and chat.usage.prompt_tokens == len(tokens)
    ends = {"continue_final_message": "def push(self", "add_generation_prompt": "<|end|>"}
    text = llm.tokenizer.decode(tokens, skip_special_tokens=False)
    assert text.endswith(ends[next(iter(options))] if options else "<|end|><|assistant|>")


def test_a_chat_streams_what_it_answers_whole(client, llm):
    expected = llm.chat(MESSAGES, SamplingParams(**GREEDY))
    fields = {"model": "bundled", "messages": MESSAGES, **GREEDY}
    assert client.chat.completions.create(**fields).choices[0].message.content == expected.text
    chunks = list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **fields))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected.text
    assert [c.choices[0].finish_reason for c in chunks[:-1]][-1] == expected.finish_reason
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == len(expected.token_ids)
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_holds_every_token_once_and_no_half_of_a_character(client, llm):
    prompt = "# ünïcödé: «日本語» 🙂\nname = '"
    fields = {"temperature": 1.0, "seed": 3, "max_tokens": 40}
    expected = offline(llm, prompt, **fields)
    chunks = list(complete(client, prompt=prompt, stream=True, **fields))
    assert "".join(c.choices[0].text for c in chunks) == expected.text
    assert [token for c in chunks for token in c.choices[0].token_ids] == expected.token_ids
    assert [drafted for c in chunks for drafted in c.choices[0].from_draft] == expected.from_draft


def test_a_stop_string_ends_a_stream_before_itself(client, llm):
    expected = offline(llm, PROMPT, stop=["return"], **GREEDY)
    text = "".join(c.choices[0].text for c in complete(client, stream=True, stop="return", **GREEDY))
    assert text == expected.text and "return" not in text


def over_a_border(llm):
    """Text of the greedy answer that begins in one token and ends in the next, and nowhere before."""
    expected = offline(llm, PROMPT, **GREEDY)
    for i in range(3, len(expected.token_ids)):
        one, two = (llm.tokenizer.decode([token]) for token in expected.token_ids[i - 1 : i + 1])
        if one and two and expected.text.count(one[-1:] + two[:1]) == 1:
            return one[-1:] + two[:1]
    raise AssertionError(expected.text)


ENDS = {
    "a stop string": ({"stop": "return"}, "return"),
    "a stop string of two tokens": ({"stop": None}, None),
    "a stop token": ({"stop_token_ids": [RETURN]}, RETURN),
    "a stop token among stop strings": ({"stop_token_ids": [RETURN], "stop": ["never"]}, RETURN),
    "the model's own end": ({"logit_bias": {EOS: 100.0}}, ""),
    "the limit": ({"logit_bias": {EOS: 100.0}, "ignore_eos": True}, ""),
}


# Of each pair of a text that is kept or not and special tokens that are shown or not, what may go wrong there.
USUAL_ENDS = {
    ("a stop string", True, False),
    ("a stop string of two tokens", False, True),
    ("a stop token", False, False),
    ("a stop token among stop strings", True, True),
    ("the model's own end", True, False),
    ("the model's own end", False, False),
    ("the limit", False, False),
}


@pytest.mark.parametrize(
    ("name", "keep", "skip"),
    fewer(product_params([*ENDS], [False, True], [False, True]), lambda *each: each in USUAL_ENDS),
)
def test_what_ends_the_output_is_said_and_its_text_as_asked_for(client, llm, name, keep, skip):
    ends, reason = ENDS[name]
    if reason is None:
        reason = over_a_border(llm)
        ends = {"stop": reason}
    fields = {**GREEDY, **ends, "include_stop_str_in_output": keep, "skip_special_tokens": skip}
    expected = offline(llm, PROMPT, **fields)
    assert expected.stop_reason == (reason or None)
    if isinstance(reason, str) and reason:
        assert expected.text.endswith(reason) == keep
    shown = "<|endoftext|>" * (not skip) * {"the limit": 20, "the model's own end": int(keep)}.get(name, 0)
    assert expected.text.count("<|endoftext|>") * 13 == len(shown)
    known, own = ours(fields)
    [whole] = complete(client, extra=own, **known).choices
    parts = [chunk.choices[0] for chunk in complete(client, extra=own, stream=True, **known)]
    said = (expected.text, expected.finish_reason, expected.stop_reason)
    assert (whole.text, whole.finish_reason, whole.stop_reason) == said
    assert ("".join(part.text for part in parts), parts[-1].finish_reason, parts[-1].stop_reason) == said
    assert all(part.stop_reason is None for part in parts[:-1])


@pytest.mark.parametrize(("is_chat", "speculation"), in_turn_params([False, True], [True, False]))
def test_a_stream_says_why_it_ended_where_its_last_token_has_no_text(client, llm, is_chat, speculation):
    """Stopped at each of an answer's first tokens in turn: many a stop token comes alone, and is no text."""
    params = SamplingParams(**{**GREEDY, "max_tokens": 8})
    expected = llm.chat(MESSAGES, params) if is_chat else llm.generate([PROMPT], params)[0]
    create = client.chat.completions.create if is_chat else client.completions.create
    asked = {"messages": MESSAGES} if is_chat else {"prompt": PROMPT}
    num_alone = 0
    for token in dict.fromkeys(expected.token_ids):
        own = {"stop_token_ids": [token], "speculation": speculation}
        *before, last = create(model="bundled", stream=True, extra_body=own, **asked, **GREEDY)
        assert last.choices[0].finish_reason == "stop" and last.choices[0].stop_reason == token
        assert all(chunk.choices[0].finish_reason is None for chunk in before)
        num_alone += not (last.choices[0].delta.content if is_chat else last.choices[0].text)
    assert num_alone > 1


def test_a_chat_says_what_ended_it(client, llm):
    text = llm.chat(MESSAGES, SamplingParams(**GREEDY)).text
    fields = {"model": "bundled", "messages": MESSAGES, "stop": text[3:6], **GREEDY}
    own = {"include_stop_str_in_output": True}
    [whole] = client.chat.completions.create(extra_body=own, **fields).choices
    parts = [chunk.choices[0] for chunk in client.chat.completions.create(stream=True, extra_body=own, **fields)]
    until = text[: text.index(text[3:6]) + 3]
    assert (whole.message.content, whole.stop_reason) == (until, text[3:6])
    assert ("".join(part.delta.content or "" for part in parts), parts[-1].stop_reason) == (until, text[3:6])
    assert all(part.stop_reason is None for part in parts[:-1])


def test_every_chunk_has_the_fields_that_are_asked_for(client):
    own = {"extra_body": HOUSE, "stream": True, "max_tokens": 4}
    for chunks in (
        client.chat.completions.create(model="bundled", messages=MESSAGES, **own),
        client.completions.create(model="bundled", prompt=PROMPT, echo=True, **own),
    ):
        parts = [chunk.choices[0] for chunk in chunks]
        assert (parts[0].token_ids, parts[0].from_draft, parts[0].stop_reason) == ([], [], None)
        assert sum(len(part.token_ids) for part in parts) == sum(len(part.from_draft) for part in parts) == 4


def test_an_echo_shows_special_tokens_as_the_answer_does(client):
    for skip, shown in ((True, ""), (False, "<|user|>")):
        answer = complete(client, prompt=[1], echo=True, extra={"skip_special_tokens": skip}, **GREEDY)
        assert answer.choices[0].text.startswith(shown) and ("<|" in answer.choices[0].text) == (not skip)


def test_many_at_once_through_the_async_client(served, llm):
    prompts = [f"def f{i}(x):\n    " for i in range(12)]

    async def ask(client, prompt, stream):
        answer = await client.completions.create(model="bundled", prompt=prompt, stream=stream, **GREEDY)
        return "".join([c.choices[0].text async for c in answer]) if stream else answer.choices[0].text

    async def ask_all():
        async with AsyncOpenAI(base_url=f"{served.base}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, prompt, i % 2 == 0) for i, prompt in enumerate(prompts)))

    assert asyncio.run(ask_all()) == [output.text for output in llm.generate(prompts, SamplingParams(**GREEDY))]


def test_langchain_is_served(served, llm, langchain):
    chat = langchain.ChatOpenAI(
        model="bundled", base_url=f"{served.base}/v1", api_key="none", temperature=0, max_tokens=20
    )
    expected = llm.chat(MESSAGES, SamplingParams(**GREEDY)).text
    assert chat.invoke(MESSAGES[0]["content"]).content == expected
    assert "".join(chunk.content for chunk in chat.stream(MESSAGES[0]["content"])) == expected


@pytest.mark.parametrize("path", ["/health", "/metrics", "/version", "/v1/models", "/v1/models/bundled", "/nowhere"])
def test_head_is_answered_as_get_without_a_body(served, path):
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    answers = []
    for method in ("HEAD", "GET", "HEAD"):
        connection.request(method, path)
        answer = connection.getresponse()
        answers.append((answer.status, answer.headers["content-type"], answer.read()))
    connection.close()
    (status, kind, body), (got, got_kind, _), again = answers
    # What follows on the same connection is read as it should be: no byte of a body was sent.
    assert (status, kind, body) == (got, got_kind, b"") == again
    assert status == (404 if path == "/nowhere" else 200)


def test_the_version_is_the_packages(served):
    assert served.request("/version")[2] == {"version": __version__}


def test_models_are_listed(client):
    [model] = client.models.list().data
    assert (model.id, client.models.retrieve("bundled").id) == ("bundled", "bundled")


def test_text_becomes_tokens_and_back(served, llm):
    status, _, answer = served.request("/tokenize", {"prompt": PROMPT})
    assert (status, answer["tokens"], answer["count"]) == (200, llm.tokenizer.encode(PROMPT), len(answer["tokens"]))
    assert served.request("/detokenize", {"tokens": answer["tokens"]})[2] == {"prompt": PROMPT}
    assert served.request("/tokenize", {"messages": MESSAGES})[2]["tokens"] == llm.chat_prompt(MESSAGES)


def test_a_prediction_changes_how_fast_tokens_come_and_is_in_the_usage(client, llm):
    """Of what was said before: the whole answer, an edited one, and none of it."""
    fields = {"model": "bundled", "messages": MESSAGES, "max_tokens": 24, "temperature": 0}
    plain = client.chat.completions.create(**fields)
    assert plain.usage.completion_tokens_details is None
    text = plain.choices[0].message.content
    said = [text, text[:20] + "!" + text[20:], [{"type": "text", "text": text[:9]}, {"type": "text", "text": text[9:]}]]
    for content in said:
        answer = client.chat.completions.create(**fields, prediction={"type": "content", "content": content})
        assert answer.choices[0].message.content == text
        details = answer.usage.completion_tokens_details
        whole = content if isinstance(content, str) else text
        count = len(llm.tokenizer.encode(whole, False))
        assert details.accepted_prediction_tokens + details.rejected_prediction_tokens == count
        assert details.accepted_prediction_tokens > 0
    chunks = list(
        client.chat.completions.create(
            **fields,
            stream=True,
            stream_options={"include_usage": True},
            prediction={"type": "content", "content": text},
        )
    )
    assert chunks[-1].usage.completion_tokens_details.accepted_prediction_tokens > 0
