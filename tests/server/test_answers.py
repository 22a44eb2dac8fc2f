"""Log-probabilities as OpenAI's clients read them, where tokens are no characters."""

import json

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from espalier.logprobs import TokenLogprob
from espalier.request import OutputChunk, ResolvedParams
from espalier.server.chat_responses import ChatResponseBuilder
from espalier.server.openai import ChatRequest, CompletionRequest
from espalier.server.protocol import OutputPart
from espalier.server.response_builders import TEXT_PLACEHOLDER, CompletionResponseBuilder, sse_event
from espalier.text import Tokenizer
from espalier.tool_calls.definitions import RequestTools
from espalier.tool_calls.formats import Formats
from espalier.tool_calls.plan import ChatPlan
from tests.pairwise import pairwise_params

TEXT = "na\u00efve \u65e5\u672c \U0001f642 x"


def byte_level():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>"))


def sentencepiece():
    pieces = ["<unk>", "\u2581", "\u2581x", "x", "n", "a", "v", "e", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocab=vocab, merges=[("\u2581", "x")], byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    strip = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(strip)
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>"))


def new_answer(kind, body, params, prompt, tokenizer):
    if kind is ChatResponseBuilder:
        return kind("id", body, params, prompt, ChatPlan(tokenizer, Formats(), RequestTools()))
    return kind("id", body, params, [prompt], tokenizer)


def answered(kind, body, tokenizer, entries, finish_reason="stop", prompt=(), **params):
    whole, answer = (new_answer(kind, body, ResolvedParams(**params), list(prompt), tokenizer) for _ in range(2))
    tokens = [entry.token_id for entry in entries]
    chunks = []
    for i, (token, entry) in enumerate(zip(tokens, entries, strict=True)):
        last = finish_reason if i == len(tokens) - 1 else None
        piece = OutputChunk("x.0", token_ids=[token], from_draft=[False], logprobs=[entry], finish_reason=last)
        chunks.append(answer.make_chunk(*answer.add_output(0, OutputPart("x", piece))))
        whole.add_output(0, OutputPart("x", piece))
    return whole.full_response()["choices"][0], [chunk["choices"][0] for chunk in chunks]


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_bytes_add_up_and_offsets_stay_where_characters_span_tokens(make):
    tokenizer = make()
    tokens = tokenizer.encode(TEXT)
    assert len(tokens) > len(TEXT)
    assert b"".join(tokenizer.bytes_of(token).bytes for token in tokens).decode() == TEXT
    end = tokenizer.hf.eos_token_id
    entries = [TokenLogprob(token, -1.0, [], 1) for token in [*tokens, end]]
    text, chunks = answered(
        CompletionResponseBuilder, CompletionRequest(model="m", prompt="", logprobs=0), tokenizer, entries
    )
    assert text["text"] == TEXT
    found = text["logprobs"]
    at, taken = [], b""
    for token in tokens:
        # Of a character whose first byte has come, and not its last, each token has the place.
        at.append(len(taken.decode(errors="ignore")))
        taken += tokenizer.bytes_of(token).bytes
    assert found["text_offset"] == [*at, len(TEXT)] and found["tokens"][-1] == "<end>"
    assert found["tokens"][2:4] == ["bytes:\\xc3", "bytes:\\xaf"]
    assert [offset for chunk in chunks for offset in chunk["logprobs"]["text_offset"]] == found["text_offset"]

    chat = ChatRequest(model="m", messages=[{"role": "user", "content": "x"}], logprobs=True)
    content = answered(ChatResponseBuilder, chat, tokenizer, entries)[0]["logprobs"]["content"]
    assert bytes(byte for token in content[:-1] for byte in token["bytes"]).decode() == TEXT
    assert content[-1]["bytes"] == list(b"<end>")
    assert json.loads(json.dumps(content)) == content


def test_offsets_count_special_tokens_where_they_are_text():
    tokenizer = byte_level()
    tokens = [*tokenizer.encode("x"), tokenizer.hf.eos_token_id, *tokenizer.encode("xx")]
    entries = [TokenLogprob(token, -1.0, [], 1) for token in tokens]
    body = CompletionRequest(model="m", prompt="", logprobs=0)
    for skip, text, at in ((True, "xxx", [0, 1, 1, 2]), (False, "x<end>xx", [0, 1, 6, 7])):
        answer = answered(CompletionResponseBuilder, body, tokenizer, entries, "length", skip_special_tokens=skip)[0]
        assert (answer["text"], answer["logprobs"]["text_offset"]) == (text, at)


def metaspace():
    backend = Backend(models.BPE(vocab={piece: i for i, piece in enumerate(["\u2581", "x", "\u00e9"])}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(prepend_scheme="never"), decoders.Metaspace()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>"))


@pytest.mark.parametrize("make", [byte_level, sentencepiece, metaspace])
def test_bytes_are_those_that_tokens_add_to_a_text_added_ones_too(make):
    tokenizer = make()
    # The second and third are pieces of a decoder's own: what they add is not how they are written.
    tokenizer.hf.add_tokens(["<think>", "\u00e9", "\u2581\u2581", "  "])
    tokenizer = Tokenizer(tokenizer.hf)
    first = tokenizer.hf.convert_tokens_to_ids("x")
    for token in range(tokenizer.num_tokens):
        part = tokenizer.bytes_of(token)
        text = tokenizer.decode([first, token]).removeprefix("x")
        assert (part.bytes.decode(errors="replace") if part.is_text else "") == text, token


@pytest.mark.parametrize(
    ("skip", "before", "text", "make"),
    pairwise_params(
        [True, False],
        [[], ["<end>"], ["<end>"] * 8, ["x"], ["x", *["<end>"] * 8], ["\u2581"]],
        ["x nx", " x", "   x", "\u65e5x", "<end> x<end> x"],
        [byte_level, sentencepiece, metaspace],
    ),
)
def test_offsets_are_places_of_the_text_whatever_it_follows(make, text, before, skip):
    # Where nothing comes before, special tokens being nothing, these decoders leave out a leading space.
    tokenizer = make()
    prompt = [token for token in map(tokenizer.hf.convert_tokens_to_ids, before) if token is not None]
    entries = [TokenLogprob(token, -1.0, [], 1) for token in tokenizer.encode(text)]
    body = CompletionRequest(model="m", prompt="", logprobs=0)
    lengths = []
    for count in range(1, len(entries) + 1):
        found, chunks = answered(
            CompletionResponseBuilder,
            body,
            tokenizer,
            entries[:count],
            "length",
            prompt=prompt,
            skip_special_tokens=skip,
        )
        # A character that is not whole has a mark in the text; its tokens have its place.
        lengths.append(len(found["text"].rstrip("\ufffd")))
    assert found["logprobs"]["text_offset"] == [0, *lengths[:-1]]
    assert [at for chunk in chunks for at in chunk["logprobs"]["text_offset"]] == [0, *lengths[:-1]]


@pytest.mark.parametrize("text", ["x nx", " x", "   x", "\u65e5x", "<end> x<end> x"])
@pytest.mark.parametrize("make", [byte_level, sentencepiece, metaspace])
def test_offsets_of_an_echo_are_places_of_the_prompts_text_too(make, text):
    tokenizer = make()
    tokens = tokenizer.encode(text)
    for cut in range(1, len(tokens)):
        prompt, said = tokens[:cut], tokens[cut:]
        body = CompletionRequest(model="m", prompt=prompt, echo=True, logprobs=0)
        of_body = body, ResolvedParams(), [prompt], tokenizer, [tokenizer.decode(prompt)]
        answer, streamed = CompletionResponseBuilder("id", *of_body), CompletionResponseBuilder("id", *of_body)
        known = [None, *(TokenLogprob(token, -2.0, [], 1) for token in prompt[1:])]
        own = [TokenLogprob(token, -1.0, [], 1) for token in said]
        whole = OutputChunk("x.0", token_ids=said, logprobs=own, prompt_logprobs=known, finish_reason="length")
        chunk = streamed.make_chunk(*streamed.add_output(0, OutputPart("x", whole)))["choices"][0]
        answer.add_output(0, OutputPart("x", whole))
        [found] = answer.full_response()["choices"]
        assert (chunk["text"], chunk["logprobs"]) == (found["text"], found["logprobs"])
        assert found["logprobs"]["token_logprobs"] == [None, *[-2.0] * (cut - 1), *[-1.0] * len(said)]
        # A character that is not whole has a mark in the text; its tokens have its place.
        lengths = [len(tokenizer.decode(tokens[:count]).rstrip("\ufffd")) for count in range(len(tokens))]
        assert found["logprobs"]["text_offset"] == lengths


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize(
    ("sent", "tokens", "at"),
    [("<end>x<end>x", "exex", [0, 5, 6, 11]), ("x<end>", "exe", [0, 0, 1]), ("<end>", "ee", [0, 5])],
)
def test_offsets_of_an_echo_count_the_special_tokens_that_the_client_wrote(sent, tokens, at, skip):
    tokenizer = byte_level()
    ids = {"e": tokenizer.hf.eos_token_id, "x": tokenizer.hf.convert_tokens_to_ids("x")}
    prompt = [ids[name] for name in tokens]
    body = CompletionRequest(model="m", prompt=sent, echo=True, logprobs=0)
    builder = CompletionResponseBuilder(
        "id", body, ResolvedParams(skip_special_tokens=skip), [prompt], tokenizer, [sent]
    )
    known = [None, *(TokenLogprob(token, -2.0, [], 1) for token in prompt[1:])]
    own = [TokenLogprob(ids["x"], -1.0, [], 1)]
    chunk = OutputChunk("x.0", 0, [ids["x"]], "x", logprobs=own, prompt_logprobs=known, finish_reason="length")
    builder.add_output(0, OutputPart("x", chunk))
    [found] = builder.full_response()["choices"]
    assert (found["text"], found["logprobs"]["text_offset"]) == (f"{sent}x", [*at, len(sent)])


def test_tokens_that_read_alike_stay_apart():
    tokenizer = sentencepiece()
    parts = [tokenizer.hf.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in (0x78, 0xE6, 0xE7)]
    same, spaced = tokenizer.hf.convert_tokens_to_ids("x"), tokenizer.hf.convert_tokens_to_ids("\u2581x")
    top = [(token, -float(i)) for i, token in enumerate([same, *parts, spaced])]
    body = CompletionRequest(model="m", prompt="", logprobs=5)
    [found] = answered(CompletionResponseBuilder, body, tokenizer, [TokenLogprob(same, 0.0, top, 1)])[0]["logprobs"][
        "top_logprobs"
    ]
    assert found == {"x": 0, f"token_id:{parts[0]}": -1, "bytes:\\xe6": -2, "bytes:\\xe7": -3, " x": -4}


def test_a_token_is_looked_up_once(monkeypatch):
    tokenizer, asked = byte_level(), []
    monkeypatch.setattr(
        tokenizer, "_token_bytes", lambda token: asked.append(token) or Tokenizer._token_bytes(tokenizer, token)
    )
    assert tokenizer.bytes_of(5) == tokenizer.bytes_of(5) and asked == [5]


def test_every_token_of_the_bundled_model_reads_as_its_bytes(llm):
    tokenizer = llm.tokenizer
    for token in range(tokenizer.num_tokens):
        assert tokenizer.bytes_of(token).bytes.decode(errors="replace") == tokenizer.token_name(token)


MESSAGES = [{"role": "user", "content": "x"}]
ODD_TEXTS = [
    "",
    'a "quote" \\ and \\u0000',
    "lines\n\r\t",
    "\u2028\u2029\x85",
    "\x00\x1f\x7f",
    TEXT_PLACEHOLDER,
    "\ufffd\ue000",
    "日本\U0001f642",
]


@pytest.mark.parametrize("options", [None, {"include_usage": True}, {"continuous_usage_stats": True}], ids=str)
@pytest.mark.parametrize("kind", [CompletionResponseBuilder, ChatResponseBuilder])
def test_events_are_the_general_encoders_bytes(kind, options):
    fields = {"model": TEXT_PLACEHOLDER, "stream": True, "stream_options": options}
    body = (
        CompletionRequest(prompt="", **fields)
        if kind is CompletionResponseBuilder
        else ChatRequest(messages=MESSAGES, **fields)
    )
    # With a stop string the text comes from the engine process, so any text can be given.
    answer, general = (new_answer(kind, body, ResolvedParams(stop=("never",), n=2), [1], None) for _ in range(2))
    general.common_fields = answer.common_fields
    for index in (1, 0):
        for i, text in enumerate((*ODD_TEXTS, "", "end")):
            ends = i == len(ODD_TEXTS) + 1
            piece = OutputChunk("x.0", index, [i, i], text, [False, True], finish_reason="stop" if ends else None)
            chunk = general.make_chunk(*general.add_output(0, OutputPart("x", piece)))
            assert answer.add_output_as_event(0, OutputPart("x", piece)) == (
                b"" if chunk is None else sse_event(chunk)
            ), text
            assert (chunk is None) == (text == "")
