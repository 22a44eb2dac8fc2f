"""The public face over a tiny model: order, samples, streams, aborts, errors.  Which tokens is for tests/properties."""

import gc
import logging
import shutil
import signal
import threading
import weakref
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from espalier import LLM, EspalierError, Grammar, SamplingParams, SpeculationConfig
from espalier.config import EngineConfig
from espalier.llm import prepare_engine
from espalier.request import Output
from espalier.speculate.drafters.registry import low_acceptance_advice
from espalier.startup import load
from tests.checkpoints import edit_config
from tests.harness import VOCAB, directories
from tests.pages import check_pages

LETTERS = [*"abcdefghijklmno", "<s>"]
SETTINGS = {
    "dtype": "float64",
    "max_batch": 4,
    "max_context": 64,
    "speculation": SpeculationConfig(steps=3, topk=2, num_draft_tokens=8),
}
TOOL = {"type": "function", "function": {"name": "f"}}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """A tiny target with a tokenizer of letters, and its draft."""
    target, draft = directories()
    copy = tmp_path_factory.mktemp("lettered") / "target"
    shutil.copytree(target, copy)
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(LETTERS)}, merges=[]))
    backend.decoder = decoders.Fuse()
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{{ 'o' if add_generation_prompt }}"
    tokenizer.save_pretrained(copy)
    return copy, draft


@pytest.fixture(scope="module")
def llm(paths):
    target, draft = paths
    with LLM(model=target, draft=draft, **SETTINGS) as llm:
        yield llm


def letters(tokens):
    return "".join(LETTERS[token] for token in tokens if token < 15)


def test_an_error_of_the_start_keeps_no_model(monkeypatch):
    """Whoever handles it may try again, in the memory that the model had."""
    loaded = []

    def assemble_engine(made, *args, **kwargs):
        loaded.append(weakref.ref(made.target))
        try:
            raise MemoryError
        except MemoryError:
            raise EspalierError("it does not fit") from None

    monkeypatch.setattr(load, "assemble_engine", assemble_engine)
    with pytest.raises(EspalierError, match="it does not fit") as caught:
        LLM(model=directories()[0], max_context=64)
    gc.collect()
    assert loaded[0]() is None and caught.value.__context__ is not None


def test_outputs_come_in_the_order_of_prompts_and_say_what_happened(llm):
    prompts = ["abc", "dddd", "e"]
    outputs = llm.generate(prompts, GREEDY)
    alone = [llm.generate(prompt, GREEDY)[0] for prompt in prompts]
    assert [o.token_ids for o in outputs] == [o.token_ids for o in alone]
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.finish_reason == "length"
        assert output.text == letters(output.token_ids)
        assert len(output.token_ids) == len(output.from_draft) == 12
        assert (output.usage.prompt_tokens, output.usage.completion_tokens) == (len(prompt), 12)
        assert sum(output.from_draft) == output.speculation.accepted
        assert output.speculation.emitted == 11
        assert output.choices == []
        assert output.logprobs is None


@pytest.mark.parametrize("prompts", ["abc", ["abc"], [0, 1, 2], [[0, 1, 2]]])
def test_a_prompt_is_text_or_tokens_one_or_several(llm, prompts):
    [output] = llm.generate(prompts, GREEDY)
    assert output.token_ids == llm.generate(["abc"], GREEDY)[0].token_ids


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("sampling_params", "use params"),
        ("temperature", "put it into SamplingParams"),
        ("max_new_tokens", r"use SamplingParams\(max_tokens=...\)"),
        ("use_tqdm", r"\(use on_chunk\); leave it out"),
        ("parms", "did you mean 'params'"),
    ],
)
def test_an_unknown_keyword_of_a_call_is_refused_with_the_right_one(llm, name, advice):
    for call in (llm.generate, llm.stream):
        with pytest.raises(EspalierError, match=f"LLM.{call.__name__} has no '{name}'; .*{advice}"):
            call("abc", **{name: 1})


def test_what_takes_chunks_is_a_function(llm):
    """vLLM's third argument is use_tqdm."""
    for call in (llm.generate, lambda _, *more: llm.chat([{"role": "user", "content": "abc"}], *more)):
        with pytest.raises(EspalierError, match="on_chunk=False is not supported; use a function"):
            call("abc", GREEDY, False)


@pytest.mark.parametrize(
    ("owner", "name"),
    [("SamplingParams", name) for name in ("temperature", "max_tokens", "n", "grammar")]
    + [("SpeculationConfig", name) for name in ("steps", "sources", "algorithm")],
)
def test_a_setting_of_a_request_or_of_speculation_says_where_it_belongs(owner, name):
    with pytest.raises(EspalierError, match=f"^LLM has no '{name}'; pass it in {owner}$"):
        LLM(**{name: 1})


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("max_contxt", "did you mean 'max_context'"),
        ("max_model_len", "use max_context"),
        ("foo", "use one of model, draft, .*, seed$"),
    ],
)
def test_an_unknown_setting_is_one_of_what_was_called(name, advice):
    with pytest.raises(EspalierError, match=f"^LLM has no '{name}'; {advice}"):
        LLM(**{name: 1})


def test_no_prompts_give_no_outputs(llm):
    assert llm.generate([], GREEDY) == []


def test_params_may_be_one_for_each(llm):
    outputs = llm.generate(["abc", "abc"], [GREEDY, SamplingParams(temperature=0.0, max_tokens=3)])
    assert [len(o.token_ids) for o in outputs] == [12, 3]
    with pytest.raises(EspalierError, match="1 SamplingParams for 2 prompts"):
        llm.generate(["abc", "abc"], [GREEDY])


def test_opting_out_gives_the_same_tokens_and_none_from_the_draft(llm):
    tree, plain = llm.generate(
        ["abc", "abc"], [GREEDY, SamplingParams(temperature=0.0, max_tokens=12, speculation=False)]
    )
    assert tree.token_ids == plain.token_ids
    assert not any(plain.from_draft)
    assert any(tree.from_draft)


def test_a_stop_string_of_a_chat_ends_its_content(llm):
    """Where a message is read from the output; its text is all that the model wrote."""
    said = [{"role": "user", "content": "abc"}]
    free = llm.chat(said, GREEDY, reasoning_format="think")
    stop = free.message.content[4:6]
    cut = llm.chat(said, replace(GREEDY, stop=stop, n=2), reasoning_format="think")
    for each in (cut, *cut.choices):
        assert each.message.content == free.message.content.partition(stop)[0]
        assert (each.finish_reason, each.stop_reason, each.text) == ("stop", stop, letters(each.token_ids))
    assert len(cut.token_ids) < len(free.token_ids)


def test_requests_without_a_seed_differ_and_the_engines_seed_repeats_them(paths):
    target, draft = paths
    sampled = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)

    def texts(**settings):
        with LLM(model=target, draft=draft, **SETTINGS, **settings) as llm:
            return [tuple(each.token_ids) for each in llm.generate(["abc"] * 3, sampled)]

    free, other, fixed, again = texts(), texts(), texts(seed=5), texts(seed=5)
    assert len({*free, *other}) == 6
    assert fixed == again and len(set(fixed)) == 3


def test_samples_differ_share_the_prompt_and_do_not_depend_on_n(llm):
    params = {"temperature": 1.0, "seed": 5, "max_tokens": 12}
    prompt = "abcdefghijklmnoabcdefghijklmno"
    [several] = llm.generate(prompt, SamplingParams(n=3, **params))
    [one] = llm.generate(prompt, SamplingParams(**params))
    assert len(several.choices) == 3
    assert several.choices[0].token_ids == several.token_ids == one.token_ids
    assert len({tuple(choice.token_ids) for choice in several.choices}) == 3
    assert all(choice.usage.cached_tokens > 0 for choice in several.choices[1:])


def test_a_prompt_is_scored_once_however_many_continue_it(llm):
    prompt = "abcdefghijklmnoabcdefghijklmno"
    params = {"temperature": 1.0, "seed": 5, "max_tokens": 3, "prompt_logprobs": 2}
    [one] = llm.generate(prompt, SamplingParams(**params))
    [several] = llm.generate(prompt, SamplingParams(n=3, **params))
    assert one.prompt_logprobs is not None and one.prompt_logprobs[0] is None
    assert [entry.token_id for entry in one.prompt_logprobs[1:]] == llm.tokenizer.encode(prompt)[1:]
    assert [entry.rank for entry in several.prompt_logprobs[1:]] == [entry.rank for entry in one.prompt_logprobs[1:]]
    assert [choice.prompt_logprobs for choice in several.choices] == [several.prompt_logprobs, None, None]
    assert llm.generate(prompt, SamplingParams(max_tokens=3))[0].prompt_logprobs is None


def test_samples_of_a_prompt_that_is_only_scored_are_empty(llm):
    [scored] = llm.generate("abcdefghijklmno", SamplingParams(n=2, max_tokens=0, prompt_logprobs=0))
    assert [(each.token_ids, each.finish_reason, each.error) for each in scored.choices] == [([], "length", None)] * 2
    assert [choice.prompt_logprobs is None for choice in scored.choices] == [False, True]


def test_a_seed_gives_the_same_text_again_and_no_seed_another(llm):
    seeded = SamplingParams(temperature=1.0, seed=9, max_tokens=12)
    assert llm.generate("ab", seeded)[0].text == llm.generate("ab", seeded)[0].text
    free = SamplingParams(temperature=1.0, max_tokens=12)
    assert llm.generate("ab", free)[0].text != llm.generate("ab", free)[0].text


def test_logprobs_are_given_where_asked_for(llm):
    asked, other = llm.generate(["abc", "abc"], [SamplingParams(temperature=0.0, max_tokens=6, logprobs=2), GREEDY])
    assert [entry.token_id for entry in asked.logprobs] == asked.token_ids
    for entry in asked.logprobs:
        assert len(entry.top) == 2
        assert entry.top[0] == (entry.token_id, entry.logprob)
    assert other.logprobs is None


def test_a_stop_string_ends_the_text_before_it(llm):
    [free] = llm.generate("abc", GREEDY)
    stop = free.text[4:6]
    [stopped] = llm.generate("abc", SamplingParams(temperature=0.0, max_tokens=12, stop=stop))
    assert stopped.finish_reason == "stop"
    assert stopped.text == free.text[: free.text.index(stop)]


def test_a_stop_string_that_is_kept_ends_the_text_streamed_too(llm):
    [free] = llm.generate("abc", GREEDY)
    stop = free.text[4:6]
    # What comes after it in the same round is no part of the text either.
    params = replace(GREEDY, stop=[stop, "<s>"], include_stop_str_in_output=True)
    [kept] = llm.generate("abc", params)
    assert (kept.finish_reason, kept.stop_reason) == ("stop", stop)
    assert kept.text == free.text[: free.text.index(stop) + 2]
    pieces = list(llm.stream("abc", params))
    assert "".join(piece.text for piece in pieces) == kept.text
    assert [piece.stop_reason for piece in pieces] == [None] * (len(pieces) - 1) + [stop]


def test_a_stop_token_is_the_reason_and_text_where_that_is_asked_for(llm):
    [free] = llm.generate("abc", GREEDY)
    token = free.token_ids[4]
    before = free.text[: free.token_ids.index(token)]
    for keep in (False, True):
        params = replace(GREEDY, stop_token_ids=[token], include_stop_str_in_output=keep)
        [ended] = llm.generate("abc", params)
        assert (ended.finish_reason, ended.stop_reason) == ("stop", token)
        assert ended.text == before + letters([token]) * keep
    # Also where the same token completes a stop string.
    [both] = llm.generate("abc", replace(params, stop=letters([token])))
    assert (both.text, both.stop_reason) == (before + letters([token]), letters([token]))
    assert free.stop_reason is None


def test_special_tokens_are_text_where_they_are_not_skipped(llm):
    forced = replace(GREEDY, max_tokens=3, logit_bias={LETTERS.index("<s>"): 10_000.0})
    assert llm.generate("abc", forced)[0].text == ""
    shown = replace(forced, skip_special_tokens=False)
    assert llm.generate("abc", shown)[0].text == "<s>" * 3
    # One that is text can be a stop string.
    [stopped] = llm.generate("abc", replace(shown, stop="<s><s>", include_stop_str_in_output=True))
    assert (stopped.text, stopped.stop_reason, len(stopped.token_ids)) == ("<s>" * 2, "<s><s>", 2)


def test_pieces_add_up_to_the_output(llm):
    [output] = llm.generate("abc", GREEDY)
    pieces = list(llm.stream("abc", GREEDY))
    assert [token for piece in pieces for token in piece.token_ids] == output.token_ids
    assert "".join(piece.text for piece in pieces) == output.text
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]


def test_streams_may_run_side_by_side(llm):
    one, other = llm.stream("abc", GREEDY), llm.stream("de", GREEDY)
    tokens = {0: [], 1: []}
    for pair in zip(one, other, strict=False):
        for i, piece in enumerate(pair):
            tokens[i] += piece.token_ids
    tokens[0] += [token for piece in one for token in piece.token_ids]
    tokens[1] += [token for piece in other for token in piece.token_ids]
    expected = [output.token_ids for output in llm.generate(["abc", "de"], GREEDY)]
    # zip may have taken a last piece of `one` that no piece of `other` went with.
    assert tokens[0] == expected[0][: len(tokens[0])]
    assert tokens[1] == expected[1]


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_that_others_bring_to_its_end_hands_out_all_of_it(llm, n):
    params = replace(GREEDY, n=n)
    expected = list(llm.stream("abc", params))
    stream = llm.stream("abc", params)
    pieces = [next(stream)]
    llm.generate("de", replace(GREEDY, max_tokens=40))
    pieces += stream
    for i in range(n):
        own = [piece for piece in pieces if piece.index == i]
        assert own == [replace(p, request_id=own[0].request_id) for p in expected if p.index == i]
    assert not llm.engine.has_work


def test_leaving_a_stream_early_aborts_its_request(llm):
    stream = llm.stream("abc", GREEDY)
    next(stream)
    stream.close()
    assert not llm.engine.has_work
    assert llm.engine.scheduler.running == []
    check_pages(llm.engine)


def test_a_stream_that_nobody_reads_queues_nothing(llm):
    llm.stream("abc", GREEDY)
    assert not llm.engine.has_work


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_aborts_what_is_in_flight_and_the_next_call_goes_on(llm):
    expected = llm.generate(["abc", "d"], GREEDY)

    def press(_piece):
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as caught:
        llm.generate(["abc", "d"], GREEDY, press)
    # Also while somebody keeps the error with its frames, as a notebook does.
    assert caught.tb is not None and not llm.engine.has_work
    check_pages(llm.engine)
    assert [o.token_ids for o in llm.generate(["abc", "d"], GREEDY)] == [o.token_ids for o in expected]


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_within_a_step_waits_for_its_end(llm, monkeypatch):
    step = llm.engine.step
    ended = []

    def interrupted():
        signal.raise_signal(signal.SIGINT)
        pieces = step()
        ended.append(True)
        monkeypatch.setattr(llm.engine, "step", step)
        return pieces

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("abc", GREEDY)
    assert ended == [True]
    assert not llm.engine.has_work


BAD = [
    ([], "empty"),
    ([VOCAB], f"={VOCAB}"),
    ([0] * 64, "64 tokens"),
    (7, "prompt 1 is 7"),
    (b"abc", "prompt 1 is b'abc'"),
    ("a\ud800", "a lone surrogate .*character 1"),
]


@pytest.mark.parametrize(("bad", "named"), BAD, ids=[named for _, named in BAD])
def test_a_bad_prompt_among_many_is_named_before_anything_starts(llm, bad, named):
    with pytest.raises(EspalierError, match=named) as refused:
        llm.generate([[0, 1], bad], GREEDY)
    assert "prompt 1" in str(refused.value)
    assert not llm.engine.has_work


def test_a_prompt_that_can_never_fit_the_pages_is_named_and_nothing_stays(paths):
    target, draft = paths
    with LLM(model=target, draft=draft, **{**SETTINGS, "num_pages": 3, "page_size": 8}) as llm:
        with pytest.raises(EspalierError, match=r"prompt 1 of 2: .*can never fit"):
            llm.generate(["ab", "a" * 40], GREEDY)
        assert not llm.engine.has_work
        assert llm.generate("ab", SamplingParams(temperature=0.0, max_tokens=4))[0].finish_reason == "length"


def test_bad_parameters_are_refused_before_anything_starts(llm):
    with pytest.raises(EspalierError, match=f"stop_token_ids entry={VOCAB}"):
        llm.generate("abc", SamplingParams(stop_token_ids=[VOCAB]))
    with pytest.raises(
        EspalierError,
        match=r"prompt 1 of 2: max_tokens=62 is more than fits .* maximum context length is 64 tokens for prompt and "
        r"output \(the engine's max_context\); use at most 61, or leave it out, or raise max_context "
        r"\(the model has 4096 positions\)$",
    ):
        llm.generate([[1, 2], [1, 2, 3]], SamplingParams(max_tokens=62))
    assert not llm.engine.has_work


def test_a_larger_max_context_is_advised_only_where_the_model_has_more_positions(paths):
    inputs = prepare_engine(EngineConfig(model=paths[0], max_context=4096)).inputs
    whose = r"is 4096 tokens for prompt and output \(it has no more positions\)"
    with pytest.raises(EspalierError, match=rf"{whose}; shorten the prompt to 4095 tokens$"):
        inputs.prompt_tokens([1] * 4096)
    with pytest.raises(EspalierError, match=rf"{whose}; shorten the prompt to 4095 tokens$"):
        inputs.prompt_tokens("a" * 4096)
    with pytest.raises(EspalierError, match=rf"{whose}; use at most 4094, or leave it out$"):
        inputs.require_room([1, 2], SamplingParams(max_tokens=4095))


def test_a_limit_that_the_model_sets_is_cut_to_the_context(llm, monkeypatch):
    model_info = replace(llm.inputs.model_info, generation_config={"max_new_tokens": 999})
    monkeypatch.setattr(llm.inputs, "model_info", model_info)
    [output] = llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0, ignore_eos=True))
    assert len(output.token_ids) == 61 and output.finish_reason == "length"


@pytest.mark.parametrize(
    "prompt", [b"abc", bytearray(b"abc"), torch.zeros(99, 99)], ids=["bytes", "bytearray", "tensor"]
)
def test_what_is_no_prompt_is_one_line(llm, prompt):
    for call in (llm.generate, llm.stream):
        with pytest.raises(EspalierError, match="use text") as refused:
            call(prompt, GREEDY)
        assert ("as .tolist() returns" in str(refused.value)) == isinstance(prompt, torch.Tensor)
        assert "\n" not in str(refused.value) and len(str(refused.value)) < 300


@pytest.mark.parametrize("prompts", [["a", "b"], [[1], [2]]])
def test_a_stream_takes_one_prompt(llm, prompts):
    with pytest.raises(EspalierError, match=r"takes one prompt; for several use LLM.generate"):
        llm.stream(prompts, GREEDY)


def test_an_end_token_outside_the_vocabulary_is_left_out_with_one_warning(paths, tmp_path, caplog):
    path = tmp_path / "target"
    shutil.copytree(paths[0], path)
    edit_config(path, eos_token_id=[3, VOCAB])
    (path / "generation_config.json").write_text('{"eos_token_id": [-1, 5]}')
    with LLM(model=path, speculation=None, max_context=64) as llm:
        assert llm.generate("abc", SamplingParams(max_tokens=2))[0].error is None
        assert llm.inputs.resolve(SamplingParams()).stop_token_ids == (5, 3)
    [warned] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert f"eos_token_id -1, {VOCAB} is outside the vocabulary" in warned


def test_a_conversation_goes_through_the_chat_template(llm):
    output = llm.chat([{"role": "user", "content": "ab"}, {"role": "user", "content": "c"}], GREEDY)
    expected = llm.generate("abco", GREEDY)[0]
    assert output.token_ids == expected.token_ids
    # Nothing is read from it: its template is of no family.
    assert output.message.content == output.text == expected.text
    assert not (output.message.reasoning or output.message.tool_calls)
    thinking = llm.chat([{"role": "user", "content": "abc"}], GREEDY, reasoning_format="think")
    assert thinking.message.content == expected.text
    with pytest.raises(EspalierError, match=r"^tools needs a chat template that reads them"):
        llm.chat([{"role": "user", "content": "abc"}], GREEDY, tools=[TOOL])


def test_calls_and_reasoning_are_read_offline_as_from_the_server(llm, monkeypatch):
    """With an engine that says what such a model would."""
    asked, said = [], "<think>Which?</think>" + '<tool_call>{"name": "f"}</tool_call>'

    def generate(prompts, params, on_chunk):
        asked.append(params)
        return [Output(said, [], "stop", choices=[Output(said, [], "stop"), Output("<think>a", [], "length")])]

    monkeypatch.setattr(llm, "generate", generate)
    monkeypatch.setattr(llm.tokenizer.hf, "chat_template", "{% if tools %}{{ messages[0].content }}{% endif %}")
    options = {"tools": [TOOL], "tool_choice": "required", "tool_format": "hermes", "reasoning_format": "think"}
    ending = SamplingParams(temperature=0.0, stop_token_ids=[1])
    output = llm.chat([{"role": "user", "content": "abc"}], ending, **options)
    [call] = output.message.tool_calls
    assert (call.name, call.arguments, output.message.reasoning) == ("f", "{}", "Which?")
    assert [each.finish_reason for each in (output, *output.choices)] == ["tool_calls", "tool_calls", "length"]
    assert (asked[0].grammar.kind, asked[0].temperature) == ("structural_tag", 0)
    with pytest.raises(EspalierError, match=r"^LLM.chat has no 'tool_choce'; did you mean 'tool_choice'"):
        llm.chat([{"role": "user", "content": "abc"}], GREEDY, tool_choce="none")
    for wrong, words in ({"tool_format": "x"}, "tool_format='x'"), ({"tool_choice": "x"}, "tool_choice='x'"):
        with pytest.raises(EspalierError, match=rf"^{words} is not supported"):
            llm.chat([{"role": "user", "content": "abc"}], GREEDY, **{**options, **wrong})


@pytest.mark.parametrize(
    ("messages", "said"),
    [("ab", "^messages='ab' is not supported"), (["ab"], "^messages=.* use a list"), ("\ud800", "messages="),
     ([{"role": "user", "content": "\ud800"}], "a lone surrogate"), ([{"content": "a"}], "^message 0 has role=None"),
     ([{"role": "user", "content": "a"}, {"role": "user"}], "^message 1 has no content; give text, or None"),
     ([{"role": "user", "content": 5}], "^message 0 has content=5; give"),
     ([{"role": "user", "content": ["a"]}], "^message 0 has the part 'a'; only text is supported"),
     ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "^message 0 has the part .*image_url"),
     (None, "^messages=None is not supported"), (5, "^messages=5"),
     (iter([{"role": "user"}]), "^messages=.* use a list")],
)  # fmt: skip
def test_what_is_no_conversation_is_one_line(llm, messages, said):
    with pytest.raises(EspalierError, match=said):
        llm.chat(messages, GREEDY)


def test_text_parts_are_joined_and_what_is_no_parameters_is_refused(llm):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    ids = [llm.chat_prompt([{"role": "user", "content": content}]) for content in (parts, "ab")]
    assert ids[0] == ids[1]
    for params in ({"temperature": 0}, "x", [GREEDY]):
        with pytest.raises(EspalierError, match=r"^params=.* use SamplingParams"):
            llm.chat([{"role": "user", "content": "ab"}], params)


def test_a_directory_without_a_tokenizer_takes_tokens_and_refuses_text():
    target, _ = directories()
    with LLM(model=target, speculation=None, max_context=64) as llm:
        [output] = llm.generate([[0, 1, 2]], GREEDY)
        assert (len(output.token_ids), output.text) == (12, "")
        with pytest.raises(EspalierError, match="give token ids"):
            llm.generate("abc", GREEDY)
        with pytest.raises(EspalierError, match="a conversation needs a tokenizer"):
            llm.chat([{"role": "user", "content": "ab"}])
        with pytest.raises(EspalierError, match="stop_token_ids"):
            llm.generate([[0]], SamplingParams(stop="a"))
        with pytest.raises(EspalierError, match="skip_special_tokens=False needs text"):
            llm.generate([[0]], SamplingParams(skip_special_tokens=False))


def test_a_closed_llm_says_so(paths):
    target, _ = paths
    llm = LLM(model=target, speculation=None, max_context=64)
    assert repr(llm) == f"<LLM {target}: plain decoding; float32 on cpu>"
    llm.close()
    llm.close()
    assert repr(llm).endswith("on cpu, closed>")
    with pytest.raises(EspalierError, match="closed"):
        llm.generate("abc")


def test_closing_ends_the_threads_that_make_masks(paths):
    def mask_threads():
        return {thread for thread in threading.enumerate() if thread.name.startswith("espalier-masks")}

    target, draft = paths
    # Of an LLM that other tests share.
    others = mask_threads()
    with LLM(model=target, draft=draft, **SETTINGS) as llm:
        params = SamplingParams(max_tokens=4, stop_token_ids=[15], grammar=Grammar.of_choices(["abba", "cab"]))
        llm.generate(["a", "b"], params)
        threads = mask_threads() - others
        assert threads
    # They are told to end, and nobody waits for it.
    for thread in threads:
        thread.join(timeout=60)
    assert not mask_threads() - others


@pytest.mark.parametrize("overlap", [False, True], ids=["lockstep", "overlap"])
def test_streams_that_a_closed_llm_leaves_behind_can_be_let_go_of_and_say_so(paths, overlap):
    target, draft = paths
    with LLM(model=target, draft=draft, **SETTINGS, overlap=overlap) as llm:
        streams = [llm.stream("abc", GREEDY) for _ in range(3)]
        for stream in streams:
            next(stream)
    streams[0].close()
    for stream in streams[1:]:
        with pytest.raises(EspalierError, match="closed; make a new one"):
            list(stream)


@pytest.mark.parametrize("overlap", [False, True], ids=["lockstep", "overlap"])
def test_a_stream_whose_engine_stopped_under_another_says_so(paths, overlap, monkeypatch):
    target, draft = paths
    with LLM(model=target, draft=draft, **SETTINGS, overlap=overlap) as llm:
        streams = [llm.stream("abc", GREEDY) for _ in range(2)]
        for stream in streams:
            next(stream)

        def launch(launch_input):
            raise MemoryError("no memory is left")

        monkeypatch.setattr(llm.engine.executor, "launch", launch)
        with pytest.raises(MemoryError):
            list(streams[0])
        last = list(streams[1])[-1]
        assert last.finish_reason == "abort" and "MemoryError: no memory is left" in last.error


def test_acceptance_that_stays_near_nothing_is_warned_of_once(llm, monkeypatch, caplog):
    totals = type(llm.engine.totals)()
    monkeypatch.setattr("espalier.engine.engine.Engine.totals", totals)
    for _ in range(300):
        totals.add(1, 0, 7, 3)
    monkeypatch.setattr(llm, "_has_warned", False)
    with caplog.at_level(logging.WARNING, "espalier"):
        llm.generate("abc", GREEDY)
        llm.generate("abc", GREEDY)
    warned = [record for record in caplog.records if "accept length is 1.00" in record.getMessage()]
    assert len(warned) == 1


@pytest.mark.parametrize(
    ("algorithm", "checks"),
    [
        ("block", "check the target layers that it reads (target_layer_ids name their outputs"),
        ("eagle3", "check eagle_aux_hidden_state_layer_ids"),
        ("mtp", "check mtp_form"),
        ("ngram", "use a trained draft"),
    ],
)
def test_the_alarm_names_the_checks_to_make(algorithm, checks):
    assert checks in low_acceptance_advice(algorithm)


def test_the_resolved_configuration_is_logged_once_and_whole(paths, caplog):
    target, draft = paths
    with caplog.at_level(logging.INFO, "espalier"), LLM(model=target, draft=draft, **SETTINGS) as llm:
        logged = [record.getMessage() for record in caplog.records if "resolved configuration" in record.getMessage()]
    assert len(logged) == 1
    assert llm.config.as_text() in logged[0]
