"""Forms of the output over HTTP: every client's spelling is the offline Grammar, and errors say what to do."""

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import openai
import pytest
import zmq

from espalier import Grammar, SamplingParams
from espalier.masking import compile as of_compile
from espalier.request import Output
from espalier.server import protocol
from espalier.server.protocol import AbortPrompt, PromptRefused, StartEngine, StepOutput, SubmitPrompts, SubmittedPrompt
from espalier.server.worker import EngineWorker

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"enum": ["small", "large"]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
TEXT = json.dumps(SCHEMA)
# Allows more properties than it names.
OPEN = {**SCHEMA, "additionalProperties": True}
CHOICES = ["yes", "no", "perhaps"]
EBNF = 'root ::= "<" [a-c]+ ">"'
TAG = {
    "type": "structural_tag",
    "format": {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"},
}
AS_SCHEMA = Grammar("json_schema", TEXT, strict=False)
SPELLINGS = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, AS_SCHEMA),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}},
        Grammar("json_schema", TEXT),
    ),
    ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": TAG}, Grammar("structural_tag", json.dumps(TAG), strict=False)),
    ({"structured_outputs": {"json": SCHEMA}}, AS_SCHEMA),
    ({"structured_outputs": {"json": TEXT}}, AS_SCHEMA),
    ({"structured_outputs": {"regex": "[ab]{3}"}}, Grammar("regex", "[ab]{3}")),
    ({"structured_outputs": {"choice": CHOICES}}, Grammar.of_choices(CHOICES)),
    ({"structured_outputs": {"grammar": EBNF}}, Grammar("ebnf", EBNF)),
    ({"structured_outputs": {"json_object": True}}, Grammar("json_object")),
    ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, Grammar("structural_tag", json.dumps(TAG))),
    ({"guided_json": SCHEMA}, AS_SCHEMA),
    ({"guided_regex": "[ab]{3}"}, Grammar("regex", "[ab]{3}")),
    ({"guided_choice": CHOICES}, Grammar.of_choices(CHOICES)),
    ({"guided_grammar": EBNF}, Grammar("ebnf", EBNF)),
    ({"json_schema": TEXT}, AS_SCHEMA),
    ({"regex": "[ab]{3}"}, Grammar("regex", "[ab]{3}")),
    ({"ebnf": EBNF}, Grammar("ebnf", EBNF)),
    ({"structural_tag": json.dumps(TAG)}, Grammar("structural_tag", json.dumps(TAG))),
]
REFUSED = [
    ({"regex": "a", "ebnf": EBNF}, "only one"),
    ({"response_format": {"type": "json_object"}, "guided_choice": CHOICES}, "only one"),
    ({"structured_outputs": {"regex": "a", "choice": CHOICES}}, "exactly one"),
    ({"structured_outputs": {}}, "exactly one"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"guided_json": {"type": "array", "items": {}, "uniqueItems": True}}, "uniqueItems"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": OPEN, "strict": True}}}, "additionalProp"),
    ({"json_schema": "{"}, "cannot be read"),
    ({"regex": "(a"}, "not closed at position 0"),
    ({"ebnf": "root ="}, "cannot be compiled"),
    ({"guided_choice": []}, "choices"),
    ({"regex": ""}, "empty"),
    ({"regex": "a", "ignore_eos": True}, "ignore_eos"),
    ({"regex": "a", "min_tokens": 2}, "min_tokens"),
    ({"regex": "x" * 70_000}, "characters"),
]


def ask(client, body, prompt="A record: ", **fields):
    fields = {"max_tokens": 60, "temperature": 0.0, **fields}
    return client.completions.create(model="bundled", prompt=prompt, extra_body=body, **fields)


def limit_of(grammar):
    """What a schema allows ends, and is read as a whole; of the others a beginning tells one from another."""
    return 60 if grammar is not None and grammar.kind == "json_schema" else 16


@pytest.fixture(scope="module")
def offline(llm) -> dict[str, Output]:
    """The offline outputs, by grammar: several spellings mean the same one."""
    grammars = list({repr(grammar): grammar for _, grammar in SPELLINGS}.values())
    wishes = [SamplingParams(max_tokens=limit_of(each), temperature=0.0, grammar=each) for each in grammars]
    outputs = llm.generate(["A record: "] * len(wishes), wishes)
    return {repr(grammar): output for grammar, output in zip(grammars, outputs, strict=True)}


@pytest.fixture(scope="module")
def answers(client):
    """Of every spelling, by its number.  All are asked at once, so that they share the server's rounds."""
    with ThreadPoolExecutor(4) as pool:
        yield [pool.submit(ask, client, body, max_tokens=limit_of(grammar)) for body, grammar in SPELLINGS]


@pytest.mark.parametrize("number", range(len(SPELLINGS)), ids=[str(body)[:50] for body, _ in SPELLINGS])
def test_each_spelling_is_the_offline_grammar(offline, answers, number):
    grammar = SPELLINGS[number][1]
    expected = offline[repr(grammar)]
    [choice] = answers[number].result().choices
    assert (choice.text, choice.finish_reason) == (expected.text, expected.finish_reason)
    if grammar is not None and grammar.kind == "json_schema":
        assert jsonschema.Draft202012Validator(SCHEMA).is_valid(json.loads(choice.text))


@pytest.mark.parametrize(("body", "says"), REFUSED, ids=lambda value: str(value)[:50])
def test_what_is_refused_says_why(client, body, says):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, body)
    assert says in caught.value.body["message"] and "\n" not in caught.value.body["message"]
    assert caught.value.body["param"] and caught.value.body["param"].partition(".")[0] in {*body, *says.split()}


BAD_SCHEMA = {"type": "object", "properties": {"a": {"not": {}}}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/chat/completions", {"response_format": {"type": "json_schema", "json_schema": {"schema": BAD_SCHEMA}}}),
        ("/chat/completions", {"guided_json": BAD_SCHEMA}),
        ("/responses", {"text": {"format": {"type": "json_schema", "name": "x", "schema": BAD_SCHEMA}}}),
    ],
)
def test_a_refused_schema_names_its_field(client, path, body):
    asked = {"model": "bundled", "input" if path == "/responses" else "messages": [{"role": "user", "content": "hi"}]}
    with pytest.raises(openai.BadRequestError, match="'not' is not supported") as caught:
        client.post(path, body={**asked, **body}, cast_to=object)
    assert caught.value.body["param"] == next(iter(body))


def test_a_stream_and_samples_of_a_chat(client):
    asked = {"model": "bundled", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 60, "seed": 3, "n": 2}
    form = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
    whole = client.chat.completions.create(**asked, response_format=form)
    texts = ["", ""]
    for chunk in client.chat.completions.create(**asked, response_format=form, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    for choice in whole.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)


def test_a_grammar_that_compiles_blocks_nobody(llm, monkeypatch):
    """Others are answered while it compiles; an abort drops it; at last it is answered, or refused with the reason."""
    go_on, compile_with_xgrammar = threading.Event(), of_compile.compile_with_xgrammar

    def slow(compiler, grammar):
        assert go_on.wait(60)
        return compile_with_xgrammar(compiler, grammar)

    monkeypatch.setattr(of_compile, "compile_with_xgrammar", slow)
    with zmq.Context() as context, context.socket(zmq.PAIR) as frontend, context.socket(zmq.PAIR) as socket:
        frontend.bind("inproc://grammars")
        socket.connect("inproc://grammars")
        worker = EngineWorker(socket, llm, StartEngine({}, 0.05, "info", False), os.getppid())

        def submit(name, grammar=None):
            params = SamplingParams(temperature=0.0, max_tokens=8, grammar=grammar)
            resolved = params.resolve({}, llm.inputs.model_info.eos_token_ids)
            frontend.send(protocol.encode(SubmitPrompts([SubmittedPrompt(name, [1, 2, 3], resolved, 0, True)])))

        def ended():
            """Names that have ended, as far as the API server has been told."""
            found = []
            while frontend.poll(0):
                message = protocol.decode_from_engine(frontend.recv())
                if isinstance(message, PromptRefused):
                    found.append(message.name)
                elif isinstance(message, StepOutput):
                    found += [part.name for part in message.parts if part.output.finish_reason is not None]
            return found

        def turn_until(*names):
            left = set(names)
            while left:
                worker._receive_messages()
                worker._send(llm.step() if llm.engine.has_work else [])
                left -= (told := set(ended()))
                assert told <= set(names)

        submit("slow", Grammar("regex", "[xy]{1,3}"))
        submit("dropped", Grammar("regex", "[xz]{1,3}"))
        submit("wrong", Grammar("regex", "(x"))
        submit("free")
        turn_until("free")
        assert worker.compiling_prompts.keys() == {"slow", "dropped", "wrong"}
        frontend.send(protocol.encode(AbortPrompt("dropped")))
        go_on.set()
        turn_until("slow", "wrong")
        assert not worker.compiling_prompts and not worker.running_prompts
