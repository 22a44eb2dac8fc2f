"""Compiling: once for each grammar, refused with the reason, and given up where it takes too long."""

import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest
import xgrammar

from espalier import LLM, EspalierError, Grammar, SamplingParams
from espalier.cores import LOW_PRIORITY
from espalier.grammar import schema as of_schema
from espalier.masking import compile as of_compile
from espalier.masking import trial as of_trial
from espalier.masking.compile import CompilerBusy, GrammarCompiler, compile_with_xgrammar, token_bytes
from espalier.masking.masker import allowed_tokens
from espalier.masking.trial import MAX_TRIAL_S, try_masks
from espalier.sampling.mask import mask_words
from espalier.startup.checkpoints import BUNDLED_FILES
from espalier.text import TokenBytes, load_tokenizer
from tests.tool_calls.families import FAMILIES

REASONS = [
    (Grammar("regex", "(a"), "'\\(' that is not closed at position 0"),
    (Grammar("ebnf", "root ="), "cannot be compiled"),
    (Grammar("ebnf", 'root ::= root "a"'), "rule 'root' allows no finite text"),
    (Grammar("ebnf", 'root ::= "a" | "b" b\nb ::= [x] b{1,3}'), "rule 'b' allows no finite text"),
    (Grammar("structural_tag", '{"format": {"type": "grammar", "grammar": "root ::= [a] root"}}'), "no finite text"),
    (Grammar("ebnf", r'root ::= "\ud800"'), r"ud800' at position 10, which is half of a surrogate pair"),
    (Grammar("ebnf", r"root ::= [\xdfff]"), "half of a surrogate pair"),
    (Grammar("ebnf", r'root ::= "\U00110000"'), "no character"),
    (Grammar("ebnf", 'root ::= "{9999999999}" [{9999999999}] "a"{4294967298}'), r"\{4294967298\}' at position 42; use"),
    (Grammar("ebnf", 'root ::= "a"{2, 4294967298}'), "use counts of 2147483647 at most"),
    (Grammar("structural_tag", "[]"), "object"),
    (Grammar("structural_tag", '{"structures": [{}], "triggers": []}'), "begin"),
]


@pytest.fixture(scope="module")
def llm():
    with LLM(max_batch=4, max_context=256) as llm:
        yield llm


@pytest.fixture
def compiler(llm):
    return GrammarCompiler(llm.tokenizer, llm.inputs.model_info.vocab_size)


def test_equal_grammars_are_compiled_once(compiler):
    first, again = (compiler.submit(Grammar("regex", "[ab]+")) for _ in range(2))
    assert first is again and first.result() is compiler.compile(Grammar("regex", "[ab]+", after="</think>"))
    assert compiler.compile(Grammar("regex", "[ab]*")) is not first.result()


FIELDS = [
    {"type": "string", "minLength": 1, "maxLength": 20},
    {"type": "string", "pattern": "^(ab|a)*c?$"},
    {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    {"type": "integer", "minimum": -5, "maximum": 120},
    {"enum": ["a", "ab", None, 1]},
    {"type": "string", "format": "date"},
    {"enum": [{"type": "string", "pattern": "a value"}]},
    {"$ref": "#/$defs/string0"},
]


def object_of(fields: list[dict[str, Any]]) -> Grammar:
    names = [f"f{i}" for i in range(len(fields))]
    properties = dict(zip(names, fields, strict=True))
    schema = {"type": "object", "properties": properties, "required": names[::2]}
    return Grammar.of_json_schema(schema | {"$defs": {"string0": {"type": "integer"}}})


def test_strings_that_come_again_have_the_masks_that_they_have_alone(compiler, monkeypatch):
    made, _ = compiler._compiler(False)
    for seed in range(6):
        rng = random.Random(seed)
        grammar = object_of(rng.choices(FIELDS, k=5))
        shared = compile_with_xgrammar(made, grammar)
        with monkeypatch.context() as patch:
            patch.setattr(of_schema, "_deduplicate_patterns", lambda made: None)
            alone = compile_with_xgrammar(made, grammar)
        matchers = [xgrammar.GrammarMatcher(each) for each in (shared, alone)]
        masks = np.zeros((2, mask_words(compiler.vocab_size)), dtype=np.int32)
        while not matchers[0].is_completed():
            for i, matcher in enumerate(matchers):
                matcher.fill_next_token_bitmask(masks, i)
            assert (masks[0] == masks[1]).all()
            token = rng.choice(allowed_tokens(masks[0]))
            assert all(matcher.accept_token(int(token)) for matcher in matchers)


def test_strings_of_one_length_are_compiled_once(compiler):
    """Ten took ten times as long as one: with a large vocabulary longer than a request waits."""
    string = {"type": "string", "maxLength": 50}
    sizes = [compile_with_xgrammar(compiler._compiler(False)[0], object_of([string] * times)) for times in (1, 10)]
    assert sizes[1].memory_size_bytes < 2 * sizes[0].memory_size_bytes


def test_compiling_does_not_meet_the_thread_that_decodes(llm):
    tokenizer = load_tokenizer(BUNDLED_FILES / "target", llm.inputs.model_info.vocab_size)
    tokens, compiled = iter(range(tokenizer.num_tokens)), threading.Event()
    for token in islice(tokens, tokenizer.num_tokens // 2):
        tokenizer.bytes_of(token)

    def decode():
        while not compiled.wait(1e-4):
            tokenizer.bytes_of(next(tokens, 0))

    decoding = threading.Thread(target=decode)
    decoding.start()
    try:
        GrammarCompiler(tokenizer, tokenizer.num_tokens).compile(Grammar("regex", "a+"))
    finally:
        compiled.set()
        decoding.join()


class Spelling:
    """Of a tokenizer, what a compiler reads.  The last token has no text."""

    pieces = (b"!", b"a", b"b", b"</s>", b"")
    num_tokens = len(pieces)

    def bytes_of(self, token: int) -> TokenBytes:
        return TokenBytes(self.pieces[token], token < self.num_tokens - 1)


@pytest.mark.parametrize("pieces", [("!",), ("a", "!", "b"), ("</s>", "!")], ids="".join)
def test_every_token_that_has_text_can_be_spelled(pieces):
    """Also the first, and one that looks like the end of another model's text."""
    end, compiler = Spelling.num_tokens - 1, GrammarCompiler(Spelling(), Spelling.num_tokens)
    masker = compiler.compile(Grammar.of_choices(["".join(pieces)])).masker((end,))
    for token in (*(Spelling.pieces.index(piece.encode()) for piece in pieces), end):
        assert token in allowed_tokens(masker.root_mask())
        masker.push(token)


@pytest.mark.parametrize(("grammar", "reason"), REASONS, ids=lambda value: str(value)[:40])
def test_the_reason_is_one_line(compiler, grammar, reason):
    with pytest.raises(EspalierError, match=reason) as caught:
        compiler.compile(grammar)
    assert "\n" not in str(caught.value) and "/project" not in str(caught.value)


@pytest.fixture
def go_on(monkeypatch):
    """Until it is set, a grammar whose text begins with "slow" is not compiled."""
    event, compile_with_xgrammar = threading.Event(), of_compile.compile_with_xgrammar

    def slow(made, grammar):
        if grammar.spec.startswith("slow"):
            event.wait(60)
        return compile_with_xgrammar(made, grammar)

    monkeypatch.setattr(of_compile, "compile_with_xgrammar", slow)
    yield event
    event.set()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of threads")
def test_one_leaves_the_cores_to_running_streams(compiler, monkeypatch):
    seen, made = [], of_compile.compile_with_xgrammar
    monkeypatch.setattr(
        of_compile,
        "compile_with_xgrammar",
        lambda *given: (seen.append(os.getpriority(os.PRIO_PROCESS, 0)), made(*given))[1],
    )
    compiler.compile(Grammar("regex", "a"))
    assert min(seen) >= LOW_PRIORITY > os.getpriority(os.PRIO_PROCESS, 0)


def join_compilations():
    for thread in threading.enumerate():
        if thread.name == "espalier-grammar":
            thread.join(60)


def test_one_that_takes_too_long_is_given_up_and_hangs_nothing(compiler, go_on):
    compiler.compile(Grammar("regex", "a"))
    compiler.wait_s = 0.2
    given_up = [compiler.submit(Grammar("regex", f"slow{i}")) for i in range(of_compile.MAX_RUNNING_COMPILATIONS)]
    waiting = compiler.submit(Grammar("regex", "slowest"))
    for future in given_up:
        with pytest.raises(CompilerBusy, match=r"0\.2 s"):
            future.result(timeout=60)
    with pytest.raises(CompilerBusy, match="retry later"):
        waiting.result(timeout=10)
    with pytest.raises(CompilerBusy, match="retry later"):
        compiler.compile(Grammar("regex", "other"))
    assert compiler.compile(Grammar("regex", "a")), "what was compiled before is still served"
    go_on.set()
    join_compilations()
    compiler.wait_s = 60
    assert compiler.num_given_up == 0 and compiler.compile(Grammar("regex", "other"))
    assert compiler.compile(Grammar("regex", "slow0")), "it was slow once, and is known now"
    assert compiler.compile(Grammar("regex", "slowest")), "it was refused while it waited, and compiles now"


def test_one_that_does_not_end_is_refused_for_good_until_it_ends(compiler, go_on):
    """First a retry may help: the machine may be loaded.  Later it does not, and the error says so."""
    compiler.compile(Grammar("regex", "a"))
    compiler.wait_s, compiler.time_limit_s = 0.05, 0.4
    slow, end = Grammar("regex", "slow"), time.monotonic() + 60
    with pytest.raises(CompilerBusy, match="retry later"):
        compiler.compile(slow)
    while isinstance(error := compiler.submit(slow).exception(), CompilerBusy) and time.monotonic() < end:
        time.sleep(0.01)
    assert "more than 0.4 s" in str(error) and "retry" not in str(error)
    go_on.set()
    join_compilations()
    assert compiler.compile(slow)


def test_one_that_ended_after_it_was_given_up_is_not_refused(compiler, go_on):
    compiler.wait_s, compiler.time_limit_s = 0.05, 0.4
    slow = Grammar("regex", "slow")
    with pytest.raises(CompilerBusy):
        compiler.compile(slow)
    go_on.set()
    join_compilations()
    time.sleep(0.5)  # beyond the limit
    assert compiler.compile(slow)


def test_a_grammar_that_holds_too_much_is_refused(compiler, monkeypatch):
    monkeypatch.setattr(of_compile, "MAX_GRAMMAR_BYTES", 10)
    with pytest.raises(EspalierError, match="MiB"):
        compiler.compile(Grammar("regex", "[ab]+"))


def test_the_oldest_is_dropped(compiler, monkeypatch):
    monkeypatch.setattr(of_compile, "MAX_KEPT_GRAMMARS", 2)
    first = compiler.submit(Grammar("regex", "a"))
    first.result()
    for text in "bc":
        compiler.compile(Grammar("regex", text))
    assert compiler.submit(Grammar("regex", "a")) is not first


# What goes together with a grammar, and what does not

CHOICE = Grammar.of_choices(["yes", "no", "perhaps not"])


def say(llm, **params):
    return llm.generate(
        ["Answer: "], SamplingParams(**{"temperature": 0.0, "max_tokens": 40, "grammar": CHOICE, **params})
    )[0]


@pytest.mark.parametrize("speculation", [True, pytest.param(False, marks=pytest.mark.full)])
def test_combinations(llm, speculation):
    both = {"speculation": speculation}
    assert say(llm, **both).text in ("yes", "no", "perhaps not")
    assert say(llm, stop="ap", grammar=Grammar("regex", "perhaps"), **both).text == "perh"
    ends_inside = say(llm, max_tokens=1, grammar=Grammar("regex", "[0-9]{20}"), **both)
    assert ends_inside.finish_reason == "length" and len(ends_inside.token_ids) == 1
    banned = dict.fromkeys(llm.tokenizer.encode("yes no perhaps"), -100.0)
    assert say(llm, logit_bias=banned, **both).text in ("yes", "no", "perhaps not")
    sampled = say(llm, n=3, temperature=2.0, seed=1, **both)
    assert all(each.text in ("yes", "no", "perhaps not") for each in sampled.choices)


def test_logprobs_are_those_before_the_mask(llm):
    free = say(llm, grammar=None, logprobs=3, max_tokens=1).logprobs[0]
    masked = say(llm, logprobs=3, max_tokens=1).logprobs[0]
    assert masked.top == free.top


def test_the_output_is_free_up_to_the_marker(llm):
    after = Grammar.of_choices(["yes", "no"], after="\n")
    output = say(llm, grammar=after, max_tokens=200, temperature=1.0, seed=5)
    before, marker, answer = output.text.partition("\n")
    assert before and marker
    assert output.finish_reason == "length" or answer.lstrip() in ("yes", "no")


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"ignore_eos": True}, "ignore_eos"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"grammar": "yes|no"}, "espalier.Grammar"),
    ],
)
def test_what_does_not_go_together_is_refused(llm, params, says):
    with pytest.raises(EspalierError, match=says):
        say(llm, **params)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"kind": "xml"}, "kind"),
        ({}, "kind '' is not supported; use one of json_object, json_schema, regex"),
        ({"kind": "regex", "spec": 3}, "spec"),
        ({"kind": "regex", "spec": "a" * 100_000}, "characters"),
        ({"kind": "regex", "spec": "a", "strict": 1}, "strict"),
        ({"kind": "regex", "spec": "a", "after": ""}, "after"),
        ({"kind": "regex", "text": "a"}, "text"),
    ],
)
def test_a_grammar_checks_its_fields(fields, says):
    with pytest.raises(EspalierError, match=says):
        Grammar(**fields)


def test_a_model_without_tokenizer_refuses_grammars():
    params = SamplingParams(grammar=CHOICE).resolve({}, (1,))
    with pytest.raises(EspalierError, match="tokenizer"):
        params.validate(16, has_tokenizer=False)


def test_only_structural_tags_spell_special_tokens():
    """In any other grammar a special token would be allowed where its name is, and the text would lack it."""
    tokenizer = FAMILIES["hermes"].tokenizer()
    [token] = tokenizer.special_ids({"<|im_end|>"})
    assert token_bytes(tokenizer, token + 2, False)[token] == b""
    assert token_bytes(tokenizer, token + 2, True)[token] == b"<|im_end|>"
    compiler = GrammarCompiler(tokenizer, tokenizer.num_tokens)
    node = {"type": "structural_tag", "format": {"type": "const_string", "value": "<|im_end|>"}}
    for grammar, allowed in (
        (Grammar.of_choices(["<|im_end|>"]), False),
        (Grammar("structural_tag", json.dumps(node)), True),
    ):
        mask = compiler.compile(grammar).masker((tokenizer.num_tokens - 1,)).root_mask()
        assert (token in allowed_tokens(mask)) == allowed


def test_a_trial_with_a_large_vocabulary_takes_a_small_part_of_its_time():
    """Where nearly every token may come, the trial must not list them all."""
    vocabulary = [b"", *(f"{number:x}".encode() for number in range(150_000))]
    info = xgrammar.TokenizerInfo(vocabulary, xgrammar.VocabType.RAW, stop_token_ids=[])
    form = compile_with_xgrammar(xgrammar.GrammarCompiler(info, max_threads=1), Grammar("regex", "[0-9a-f]*"))
    begun = time.thread_time()
    try_masks(form, np.array([len(each) for each in vocabulary]))
    assert time.thread_time() - begun < MAX_TRIAL_S / 2


@pytest.mark.parametrize("slow", [1, 2])
def test_a_call_that_is_slow_once_refuses_no_grammar(monkeypatch, slow):
    """Every mask and every token takes the system a second when it is timed first; twice in a row is the grammar's."""
    before: list[str] = []

    def time_of(call: Callable[..., Any], *arguments: Any) -> float:
        call(*arguments)
        before.append(call.__name__)
        in_a_row = next((i for i, name in enumerate(reversed(before)) if name != call.__name__), len(before))
        return 1.0 if in_a_row <= slow else 0.0

    monkeypatch.setattr(of_trial, "_cpu_seconds_of", time_of)
    info = xgrammar.TokenizerInfo([b"", b"a", b"b"], xgrammar.VocabType.RAW, stop_token_ids=[])
    form = compile_with_xgrammar(xgrammar.GrammarCompiler(info, max_threads=1), Grammar("regex", "[ab]{9}"))
    if slow == 1:
        try_masks(form, np.array([0, 1, 1]))
    else:
        with pytest.raises(EspalierError, match="too ambiguous"):
            try_masks(form, np.array([0, 1, 1]))
