"""What is not honoured is refused by name, in OpenAI's shape, and the page of fields says so."""

import gzip
import http.client
import json
import re
import socket
import time
from collections import Counter

import openai
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from pydantic import ValidationError

from espalier.server.bodies import BodyLimits, read_body
from espalier.server.errors import ApiError
from espalier.server.http1 import MAX_HEAD_BYTES, MAX_LINE_BYTES
from espalier.server.openai import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from espalier.server.responses import ResponsesRequest
from scripts.make_server_fields import PAGE, field_rows, with_tables
from tests.properties.summary import ASKED

HI = [{"role": "user", "content": "hi"}]
IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
CHAT = {"model": "bundled", "messages": HI, "max_tokens": 2}
TEXT = {"model": "bundled", "prompt": "hi", "max_tokens": 2}
RESPONSE = {"model": "bundled", "input": "hi", "max_output_tokens": 2}
LONG = "a " * 200_000
SAID_LONG = [{"role": "user", "content": LONG}]
PREDICTED = {"type": "content", "content": "x"}
# A value of each refused field that clients send when they mean it.
MEANT = {
    "response_format": {"type": "json_object"},
    "functions": [{"name": "f"}],
    "function_call": {"name": "f"},
    "modalities": ["audio"],
    "audio": {"voice": "alloy", "format": "wav"},
    "web_search_options": {},
    "best_of": 2,
    "suffix": "end",
    "truncation": "auto",
    "previous_response_id": "resp_1",
    "conversation": "conv_1",
    "prompt": {"id": "p"},
    "background": True,
    "max_tool_calls": 3,
    "max_tokens": 2,
    "messages": HI,
}
NEUTRAL = {
    "tools": [],
    "tool_choice": "none",
    "modalities": ["text"],
}


def refused_fields(model):
    return [name for name, verdict, _ in field_rows(model) if verdict == "refused"]


def error_of(answer, status=400):
    got, headers, body = answer
    assert got == status, body
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code", "request_id"}
    assert body["error"]["request_id"] == headers["x-request-id"]
    return body["error"]


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [("/v1/chat/completions", CHAT, name) for name in refused_fields(ChatRequest)]
    + [("/v1/completions", TEXT, name) for name in refused_fields(CompletionRequest)]
    + [("/v1/responses", RESPONSE, name) for name in refused_fields(ResponsesRequest)],
)
def test_a_refused_field_is_named_and_why(served, path, body, name):
    error = error_of(served.request(path, {**body, name: MEANT[name]}))
    assert error["param"] == name and error["message"].startswith(f"{name} is not supported")
    assert served.request(path, {**body, name: None})[0] == 200


def test_neutral_values_of_refused_fields_are_served(served):
    assert served.request("/v1/chat/completions", {**CHAT, **NEUTRAL, "user": "me", "metadata": {"a": "b"}})[0] == 200
    for depth in (0, None):
        assert served.request("/v1/completions", {**TEXT, "speculation": False, "max_draft_depth": depth})[0] == 200


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/completions", {**TEXT, "temprature": 1}, "did you mean 'temperature'?"),
        ("/v1/completions", {**TEXT, "temperature": -1}, "temperature=-1"),
        ("/v1/completions", {**TEXT, "temperature": "1"}, "temperature: Input should be a valid number"),
        ("/v1/completions", {**TEXT, "n": True}, "n: Input should be a valid integer"),
        ("/v1/completions", {**TEXT, "top_k": -1.0}, "top_k: Input should be a valid integer"),
        ("/v1/completions", {**TEXT, "seed": 1.0}, "seed: Input should be a valid integer"),
        ("/v1/completions", {**TEXT, "stop_token_ids": [1, True]}, "stop_token_ids.1: Input should be a valid integer"),
        ("/v1/completions", {**TEXT, "prompt": [1.0]}, "prompt"),
        ("/v1/completions", {**TEXT, "n": 100}, "the server holds 16 at most"),
        ("/v1/completions", {**TEXT, "max_tokens": 0}, "max_tokens=0"),
        ("/v1/completions", {**TEXT, "logit_bias": {"x": 1}}, "logit_bias"),
        ("/v1/completions", {**TEXT, "logit_bias": {"99999999": 1}}, "logit_bias token=99999999"),
        *(
            ("/v1/completions", {**TEXT, "logit_bias": {"5": 1, key: 2}}, "is no whole number")
            for key in ("05", " 5", "+5", "5_0", "٥", "5.0", "-0")
        ),
        ("/v1/completions", {**TEXT, "stop": [""]}, "use strings of one character or more"),
        ("/v1/completions", {**TEXT, "prompt": []}, "prompt=[]"),
        ("/v1/completions", {**TEXT, "prediction": "x"}, "prediction"),
        ("/v1/chat/completions", {**CHAT, "prediction": "x"}, "prediction"),
        ("/v1/chat/completions", {**CHAT, "prediction": {"type": "content"}}, "prediction.content"),
        ("/v1/chat/completions", {**CHAT, "prediction": {"type": "diff", "content": "x"}}, "prediction.type"),
        (
            "/v1/chat/completions",
            {**CHAT, "prediction": {"type": "content", "content": "a " * 9000}},
            "a prediction of",
        ),
        ("/v1/completions", {**TEXT, "prompt": [[]]}, "the prompt is empty"),
        ("/v1/completions", {**TEXT, "prompt": [10**7]}, "prompt token id=10000000"),
        ("/v1/completions", {**TEXT, "prompt": "x " * 2000}, "the prompt is too long: it has"),
        ("/v1/completions", {**TEXT, "min_tokens": 600, "max_tokens": None}, "min_tokens=600"),
        ("/v1/completions", {**TEXT, "echo": True, "max_tokens": 0}, "max_tokens=0"),
        ("/v1/completions", {**TEXT, "prompt_logprobs": 21}, "prompt_logprobs=21 is not supported"),
        ("/v1/completions", {**TEXT, "prompt_logprobs": -1}, "prompt_logprobs=-1 is not supported"),
        ("/v1/completions", {**TEXT, "prompt_logprobs": 1, "stream": True}, "prompt_logprobs are not streamed"),
        (
            "/v1/completions",
            {**TEXT, "echo": True, "logprobs": 1, "n": 2, "stream": True},
            "echo with logprobs and stream needs n=1",
        ),
        ("/v1/completions", {**TEXT, "stream_options": {"include_usage": True}}, "stream_options needs stream=true"),
        ("/v1/completions", {**TEXT, "max_draft_depth": 3, "speculation": False}, "max_draft_depth excludes specul"),
        ("/v1/responses", {**RESPONSE, "max_draft_depth": 3, "speculation": False}, "leave one of them out"),
        ("/v1/chat/completions", {**CHAT, "prediction": PREDICTED, "speculation": False}, "prediction excludes specul"),
        ("/v1/chat/completions", {**CHAT, "prediction": PREDICTED, "max_draft_depth": 0}, "excludes max_draft_depth=0"),
        ("/v1/completions", {**TEXT, "prompt": "\ud800"}, "a lone surrogate"),
        ("/v1/chat/completions", {**CHAT, "top_logprobs": 2}, "top_logprobs needs logprobs=true"),
        ("/v1/chat/completions", {**CHAT, "max_completion_tokens": 3}, "are the same limit but differ"),
        ("/v1/chat/completions", {**CHAT, "messages": []}, "messages"),
        ("/v1/chat/completions", {**CHAT, "messages": [{"role": "function", "content": "x"}]}, "messages.0.role"),
        (
            "/v1/chat/completions",
            {**CHAT, "messages": [{"role": "tool", "content": "x"}]},
            "roles are system, user and",
        ),
        (
            "/v1/chat/completions",
            {**CHAT, "messages": [CALLED]},
            "messages with tool_calls need a chat template that reads them",
        ),
        (
            "/v1/chat/completions",
            {**CHAT, "messages": [{**CALLED, "reasoning": "a", "reasoning_content": "b"}]},
            "are the same text but differ",
        ),
        ("/v1/chat/completions", {**CHAT, "tools": [FUNCTION]}, "tools needs a chat template that reads them"),
        ("/v1/completions", {**TEXT, "max_completion_tokens": 3}, "are the same limit but differ"),
        ("/v1/completions", {**TEXT, "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("/v1/completions", {**TEXT, "keep_alve": "5m"}, "did you mean 'keep_alive'?"),
        *(
            (
                "/v1/chat/completions",
                {**CHAT, "chat_template_kwargs": {name: 1}},
                f"entry='{name}' is set by the engine",
            )
            for name in ("messages", "documents", "tokenize", "chat_template", "conversation")
        ),
        (
            "/v1/chat/completions",
            {**CHAT, "chat_template_kwargs": {"add_generation_prompt": False}},
            "entry='add_generation_prompt' is not a template variable here; set the field",
        ),
        ("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {"for": 1}}, "'for' is not read by"),
        ("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {"thinking": True}}, "'thinking' is not read by"),
        ("/v1/chat/completions", {**CHAT, "chat_template_kwargs": []}, "chat_template_kwargs: Input should be"),
        ("/tokenize", {"prompt": "x", "chat_template_kwargs": {}}, "chat_template_kwargs needs messages"),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": False}, "add_generation_prompt needs messages"),
        (
            "/v1/chat/completions",
            {**CHAT, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message excludes add_generation_prompt",
        ),
        ("/v1/chat/completions", b"{", "the body is not JSON (Expecting property name enclosed in double quotes: char"),
        ("/v1/completions", b'{"model": "bund', "(Unterminated string starting at: character 10); send a JSON object"),
        ("/v1/completions", b"\xff\xff{}", "the body cannot be read as JSON: it is not UTF-8"),
        ("/v1/completions", b"[" * 100_000, "it is nested too deeply, or a number has thousands of digits; send a"),
        (
            "/v1/completions",
            b'{"seed": 1' + b"0" * 5000 + b"}",
            "or a number has thousands of digits; send a JSON object",
        ),
        ("/v1/completions", {"prompt": "x"}, "model: Field required (a name from /v1/models)"),
        ("/v1/completions", {**TEXT, "prompt": None}, "prompt: Input should be a valid string (text or token ids, one"),
        ("/v1/completions", {**TEXT, "prompt": [1, None]}, "prompt.1 is of another kind than prompt.0; send a text,"),
        ("/v1/completions", {**TEXT, "prompt": ["a", [1]]}, "texts, token ids, or lists of token ids"),
        ("/v1/completions", {**TEXT, "prompt": [True]}, "prompt.0: Input should be a valid integer (text or token"),
        (
            "/v1/completions",
            {**TEXT, "response_format": {}},
            "response_format: type is missing; give one (text, json_",
        ),
        (
            "/v1/completions",
            {**TEXT, "response_format": {"type": "xml"}},
            "response_format: type='xml' is not supported; use one of 'text', 'json_object', 'json_schema', 'str",
        ),
        ("/v1/completions", {**TEXT, "prompt": [[1], [True]]}, "prompt.1.0: Input should be a valid integer"),
        ("/v1/completions", {**TEXT, "stop": ["x", 1]}, "stop.1: Input should be a valid string (text that ends the"),
        (
            "/v1/chat/completions",
            {**CHAT, "messages": [HI[0], {"role": "user"}]},
            "messages.1: content is missing; give",
        ),
        (
            "/v1/chat/completions",
            {**CHAT, "messages": [IMAGE]},
            "messages.0.content.0.type: Input should be 'text' (this server",
        ),
        (
            "/v1/chat/completions",
            {**CHAT, "messages": [{**HI[0], "rol": 1}]},
            "messages.0 has no 'rol'; did you mean 'role'",
        ),
        (
            "/v1/completions",
            {**TEXT, "stream_options": {"x": 1}},
            "stream_options has no 'x'; use one of include_usage,",
        ),
        ("/v1/chat/completions", {**CHAT, "max_tokens": None, "max_completion_tokens": 0}, "max_completion_tokens=0"),
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 21}, "top_logprobs=21 is not supported"),
        (
            "/v1/chat/completions",
            {**CHAT, "max_tokens": 4096},
            "max_tokens=4096 is more than fits after the prompt of",
        ),
        ("/v1/completions", {**TEXT, "max_tokens": 4096}, "this model's maximum context length is"),
        ("/tokenize", {}, "send either prompt or messages"),
        ("/detokenize", {"tokens": [-1]}, "tokens entry=-1"),
    ],
)
def test_bad_values_are_refused_in_one_line(served, path, body, words):
    error = error_of(served.request(path, body))
    message = error["message"]
    assert words in message and "\n" not in message
    # A message that begins with a field that was sent is about this field.
    begin = re.split(r"[^a-z_]", message)[0]
    assert error["param"] == begin or isinstance(body, bytes) or begin not in body


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", TEXT),
        ("/v1/chat/completions", CHAT),
        ("/v1/responses", RESPONSE),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [5]}),
    ],
)
def test_a_parameter_in_the_query_of_a_post_is_refused_by_name(served, path, body):
    for query, name in (("stream=true", "stream"), ("stream", "stream"), ("api-version=1&x%0A=", "x\n")):
        error = error_of(served.request(f"{path}?{query}", body))
        assert (error["message"], error["param"]) == (f"the query has no {name!r}; send it in the body", name)
    assert "api-version 2 times" in error_of(served.request(f"{path}?api-version=1&api-version=2", body))["message"]
    # Azure's clients send it with every request.
    assert served.request(f"{path}?api-version=2024-10-21", body)[0] == served.request(f"{path}?", body)[0] == 200


@pytest.mark.parametrize(
    ("positions", "said"),
    [(64, "shorten the prompt to 63 tokens"), (128, "or raise max_context (the model has 128 positions)")],
)
def test_a_larger_max_context_is_advised_only_where_the_model_has_more_positions(positions, said):
    data = json.dumps({"model": "m", "prompt": [1] * 64}).encode()
    with pytest.raises(ApiError) as refused:
        read_body(CompletionRequest, "application/json", data, BodyLimits(16, 64, 1, 64, positions))
    assert refused.value.detail.endswith(said)


def test_a_server_knows_the_positions_of_its_model(served):
    for prompt in ("x " * 4000, [1] * 4000):
        error = error_of(served.request("/v1/completions", {**TEXT, "prompt": prompt}))
        assert error["message"].endswith("or raise max_context (the model has 4096 positions)")


def test_a_prompt_that_is_too_long_is_refused_and_not_warned_of(served):
    error = error_of(served.request("/v1/completions", {**TEXT, "prompt": "x " * 4000}))
    assert "the prompt is too long: it has" in error["message"]
    assert "indexing errors" not in served.log.read_text()


def test_a_body_that_is_wrong_everywhere_is_one_error():
    wrong = (
        (CompletionRequest, {**TEXT, "prompt": [True] * 1000}),
        (ChatRequest, {**CHAT, "messages": [{}] * 1000}),
        (DetokenizeRequest, {"tokens": [0.5] * 1000}),
        (CompletionRequest, {**TEXT, "stop": [0] * 1000}),
        (CompletionRequest, {**TEXT, "stop_token_ids": ["x"] * 1000}),
        (CompletionRequest, {**TEXT, "logit_bias": {str(i): "x" for i in range(1000)}}),
        (CompletionRequest, {**TEXT, **{f"wrong_{i}": 0 for i in range(1000)}}),
        (ChatRequest, {**CHAT, "metadata": {str(i): 0 for i in range(1000)}}),
        (ChatRequest, {**CHAT, "chat_template_kwargs": {str(i): 0 for i in range(1000)}}),
        (ChatRequest, {**CHAT, "modalities": ["x"] * 1000}),
        (ChatRequest, {**CHAT, "messages": [{"role": "user", "content": [0] * 1000}]}),
    )
    for model, body in wrong:
        with pytest.raises(ValidationError) as caught:
            model.model_validate(body)
        assert caught.value.error_count() < 10


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": ["", *(["x" * 7] * 300_000)]},
        {"stop": [0] * 500_000},
        {"logit_bias": dict.fromkeys(map(str, range(70_000)), "x")},
        {"logit_bias": dict.fromkeys(map(str, range(70_000)), 0)},
        {"x" * 10**6: 0},
        dict.fromkeys(map("wrong_{}".format, range(70_000)), 0),
        {"model": "x" * 10**6},
    ],
    ids=lambda fields: next(iter(fields))[:12],
)
def test_the_answer_to_a_large_and_wrong_body_is_small(served, fields):
    status, _, body = served.request("/v1/completions", {**TEXT, **fields})
    assert status in (400, 404) and len(str(body)) < 2000


@pytest.mark.parametrize("kind", ["application/json", "application/x-www-form-urlencoded"])
@pytest.mark.parametrize("body", [b"", b"[]", b"null", b'"x"', b"{x", b"a=1"])
def test_a_body_that_is_no_object_is_told_what_to_send(served, kind, body):
    status, _, answer = served.request("/v1/completions", body, method="POST", content_type=kind)
    assert status == 400 and answer["error"]["message"].endswith("with content-type application/json")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("application/x-www-form-urlencoded", "content-type application/x-www-form-urlencoded is not supported; "),
        ("text/plain; charset=utf-8", "content-type text/plain; charset=utf-8 is not supported; "),
        ("", "the body has no content-type; "),
    ],
)
def test_json_of_another_content_type_is_told_so(kind, said):
    with pytest.raises(ApiError) as refused:
        read_body(TokenizeRequest, kind, b'{"prompt": "x"}', BodyLimits(16, 64, 1, 64))
    assert refused.value.detail == f"{said}send a JSON object with content-type application/json"


AS_JSON_READS = {
    "UTF-16": '{"prompt": "é"}'.encode("utf-16"),
    "byte order mark": '\ufeff{"prompt": "é"}'.encode(),
    "escapes": rb'{"prompt": "\ud83c\udf33\u0000\/"}',
    "large number": b'{"prompt": "x", "chat_template_kwargs": {"a": [1e400, -0, 1.0, %d]}}' % 10**40,
    "no number": b'{"prompt": "x", "chat_template_kwargs": {"a": NaN}}',
}


@pytest.mark.parametrize("data", AS_JSON_READS.values(), ids=AS_JSON_READS)
def test_a_body_is_what_json_reads_in_it(data):
    body = read_body(TokenizeRequest, "application/json", data, BodyLimits(16, 64, 1, 64))
    expected = json.loads(data)
    assert body.model_fields_set == expected.keys()
    # repr tells -0 from -0.0, and a NaN equals itself.
    assert repr([getattr(body, name) for name in expected]) == repr(list(expected.values()))


def test_a_lone_surrogate_is_refused_by_name():
    with pytest.raises(ApiError, match="lone surrogate"):
        read_body(TokenizeRequest, "application/json", rb'{"prompt": "\ud800"}', BodyLimits(16, 64, 1, 64))


@pytest.mark.parametrize(
    "extra",
    [
        '"seed": 2',
        '"s\\u0065ed" :2',
        '"logit_bias": {"1": 1, "seed": 1, "seed": 2}',
        '"logit_bias": [1, [{"seed": 1, "seed": 2}]]',
        '"user": "a: b", "seed": 2',
    ],
)
def test_a_name_that_comes_twice_in_an_object_is_refused(extra):
    """Which of the two is meant?"""
    with pytest.raises(ApiError, match="'seed' comes twice in one object") as refused:
        data = f'{{"model": "m", "prompt": "x", "seed": 1, {extra}}}'
        read_body(CompletionRequest, "application/json", data.encode(), BodyLimits(16, 64, 1, 64))
    assert refused.value.status_code == 400


def test_a_name_may_come_again_in_another_object_or_in_a_text():
    data = b'{"model": "m", "prompt": "\\"seed\\": 1", "seed": 1, "stream_options": {"include_usage": true}}'
    assert read_body(CompletionRequest, "application/json", data, BodyLimits(16, 64, 1, 64)).seed == 1


def test_a_compressed_body_is_told_so(served):
    error = error_of(served.request("/v1/completions", gzip.compress(b"{}"), content_encoding="gzip"))
    assert error["message"] == "content-encoding 'gzip' is not supported; send the body uncompressed"


def test_a_body_nested_too_deep_is_refused():
    nested = []
    for _ in range(5000):
        nested = [nested]
    with pytest.raises(ValidationError, match="nested too deep"):
        CompletionRequest.model_validate({**TEXT, "user": nested})


@pytest.mark.parametrize("depth", [1, 300, 420, 600, 900])
def test_template_variables_may_be_nested_as_deep_as_a_body(depth, served):
    """At each depth they are refused as what they are: this template does not read them."""
    nested = '{"a":' * depth + "1" + "}" * depth
    body = f'{{"model": "bundled", "messages": [{{"role": "user", "content": "x"}}], "chat_template_kwargs": {nested}}}'
    error_of(served.request("/v1/chat/completions", body.encode()))


def test_a_stream_that_is_refused_has_the_status_of_its_error(served):
    assert error_of(served.request("/v1/completions", {**TEXT, "stream": True, "min_tokens": 600, "max_tokens": None}))


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/responses/resp_1", "/v1/audio/speech", "/v1/fine_tuning/jobs"])
def test_openais_other_endpoints_are_refused_by_name(served, path):
    error = error_of(served.request(path, {"input": "x"}), 404)
    assert error["message"].startswith(f"OpenAI's {path} is not supported: ")


def test_paths_methods_models_and_sizes(served):
    assert "/v1/models" in error_of(served.request("/nowhere"), 404)["message"]
    assert served.request("/v1/completions")[1]["allow"] == "POST"
    for path, body in (("/v1/completions", TEXT), ("/v1/models", None), ("/health", None)):
        message = error_of(served.request(f"{path}/", body), 404)["message"]
        assert message == f"{path}/ is not served; use {path}, without the slash at the end"
    wrong_bases = {"/models": "/v1/models", "/v1/v1/completions": "/v1/completions", "/v1/tokenize": "/tokenize"}
    for path, meant in wrong_bases.items():
        assert f"{path} is not served; use {meant}, and" in error_of(served.request(path, {}), 404)["message"]
    assert "the server does not store completions" in error_of(served.request("/v1/chat/completions/x"), 404)["message"]
    assert error_of(served.request("/v1/completions"), 405)
    assert served.request("/health", {})[1]["allow"] == "GET, HEAD"
    assert error_of(served.request("/v1/completions", {**TEXT, "model": "x"}), 404)["code"] == "model_not_found"
    assert error_of(served.request("/v1/completions", b"x" * (4 * 2**20 + 1)), 413)


@pytest.mark.parametrize("of_body", ["", "content-length: 9\r\n", "transfer-encoding: chunked\r\n"])
def test_who_asks_for_a_websocket_is_told_what_to_use(served, of_body):
    with socket.create_connection(("127.0.0.1", served.port), 20) as connection:
        upgrade = "connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
        upgrade += "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
        connection.sendall(f"GET /v1/realtime HTTP/1.1\r\nhost: x\r\n{upgrade}{of_body}\r\n".encode())
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert answer.status == 404 and "use /v1/chat/completions with stream" in answer.read().decode()


CHUNKED = b"POST /%s HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
UNREADABLE = {
    "another protocol": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "a line that is none": b"HELLO\r\n\r\n",
    "a version that is none": b"GET /health HTTP/x\r\n\r\n",
    "a header that is none": b"GET /health HTTP/1.1\r\nhost: x\r\nnone\r\n\r\n",
    "two lengths": b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\n",
    "a chunk that is none": CHUNKED % b"tokenize" + b"zz\r\n",
}


def answers(sent, port, pause=0.0):
    """What comes for what is sent, to the connection's end: (status, headers, body) of each answer."""
    with socket.create_connection(("127.0.0.1", port), 20) as connection:
        for part in sent:
            connection.sendall(part)
            time.sleep(pause)
        came = b"".join(iter(lambda: connection.recv(2**16), b""))
    found = []
    while came:
        head, _, rest = came.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        size = int(headers["content-length"])
        found.append((int(first.split()[1]), headers, json.loads(rest[:size])))
        came = rest[size:]
    return found


@pytest.mark.parametrize("sent", UNREADABLE.values(), ids=UNREADABLE)
def test_what_is_no_http_is_refused_as_all_else_is(served, sent):
    [answer] = answers([sent], served.port)
    error = error_of(answer)
    assert "send plain HTTP/1.1 (http://, not https://)" in error["message"]
    assert answer[1]["connection"] == "close" and answer[1]["content-type"] == "application/json"
    served.until(lambda: f"[{error['request_id']}] refused HTTP from 127.0.0.1 port" in served.log.read_text())


# What comes first, and the line that is repeated behind it until it is too much.
ENDLESS = {
    "lines": (b"GET /version HTTP/1.1\r\nhost: x\r\n", b"x: y\r\n"),
    "line": (b"GET /version HTTP/1.1\r\nx: ", b"y"),
    "path": (b"GET /", b"y"),
    "trailer": (CHUNKED % b"tokenize" + b"0\r\n", b"x: y\r\n"),
}


@pytest.mark.parametrize("start,line", ENDLESS.values(), ids=ENDLESS)
def test_a_head_or_trailer_without_end_is_refused(served, start, line):
    [answer] = answers([start, line * (MAX_HEAD_BYTES // len(line) + 1)], served.port, 0.1)
    limit = MAX_HEAD_BYTES if start.count(b"\r\n\r\n") == 0 else MAX_LINE_BYTES
    assert f"larger than {limit} bytes" in error_of(answer, 431)["message"]
    assert answer[1]["connection"] == "close"


def test_who_still_sends_when_it_is_refused_reads_why(served):
    """Megabytes behind what was refused would reset the connection, and the error would be lost."""
    sent = CHUNKED % b"tokenize" + b"1\r\na\r\n" * 17_000 + bytes(3 * 2**20)
    [answer] = answers([sent], served.port)
    assert "send larger ones" in error_of(answer)["message"]


def test_who_leaves_in_the_midst_of_a_body_is_no_defect(served):
    head = b"POST /tokenize HTTP/1.1\r\nhost: x\r\nx-request-id: left-early\r\ncontent-type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", served.port), 20) as connection:
        connection.sendall(head + b"content-length: 9\r\n\r\n{")
    served.until(lambda: "[left-early] POST /tokenize 499" in served.log.read_text())


def test_what_is_no_http_after_a_request_has_an_id_of_its_own(served):
    asked = b"GET /version HTTP/1.1\r\nhost: x\r\nx-request-id: first-%d\r\n\r\n"
    for number, sent in enumerate(([asked % 0 + b"HELLO\r\n\r\n"], [asked % 1, b"HELLO\r\n\r\n"])):
        *first, refused = answers(sent, served.port, 0.2)
        # What comes in one piece may be found unreadable before the first of it is answered.
        assert [answer[0] for answer in first] == [200] or (number == 0 and not first)
        assert error_of(refused)["request_id"].startswith("req-")
        served.until(lambda name=f"[first-{number}] GET /version": name in served.log.read_text())


def test_a_body_that_goes_wrong_after_its_answer_brings_no_other(served):
    [(status, _, _)] = answers([CHUNKED % b"nowhere", b"zz\r\n"], served.port, 0.2)
    assert status == 404
    assert served.request("/health")[0] == 200 and "Fatal error" not in served.log.read_text()


@pytest.mark.parametrize("pause", [0.0, 0.1])
def test_a_request_that_offers_another_protocol_is_served_with_its_body(served, pause):
    """As the HttpClient of the JDK does, with what is pipelined behind it."""
    body = b'{"prompt": "x"}'
    head = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n" % len(body)
    head += b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAB\r\n\r\n"
    last = b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    first, second = answers([head, body + last], served.port, pause)
    assert (first[0], first[2]["count"], second[0]) == (200, 2, 200)


def test_a_body_without_a_length_is_counted_as_it_comes(served):
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    parts = (b"x" * 2**20 for _ in range(5))
    connection.request("POST", "/tokenize", parts, {"content-type": "application/json"}, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


def test_the_openai_client_reads_the_error(client):
    with pytest.raises(openai.BadRequestError, match=r"top_p=2\.0 is not supported") as caught:
        client.chat.completions.create(top_p=2, **CHAT)
    assert (caught.value.param, caught.value.type) == ("top_p", "invalid_request_error")


@pytest.mark.parametrize(
    ("path", "body", "line"),
    [
        ("/v1/completions", {**TEXT, "temperature": -1}, "temperature=-1.0 is not supported"),
        ("/v1/completions", {**TEXT, "prompt": LONG}, r"the prompt is too long: .* 400000 char.* \[field 'prompt'\]"),
        ("/v1/chat/completions", {**CHAT, "messages": SAID_LONG}, r"the prompt is too long: .* \[field 'messages'\]"),
        ("/v1/completions", {**TEXT, "max_tokens": "9"}, r"max_tokens: .* \[field 'max_tokens'\]"),
        ("/v1/completions", b"{", "the body is not JSON"),
        ("/v1/completions", {**TEXT, "a\nline": 1}, r"the body has no .* \[field 'a\\nline'\]"),
        ("/v1/completions", {**TEXT, "model": "other"}, r"this server has no model 'other'.* \[field 'model'\]"),
        ("/nowhere", {}, "/nowhere is not served"),
        ("/v1/completions", b" " * 5_000_000, "the body is larger than 4194304 bytes"),
    ],
)
def test_the_log_says_why_a_request_failed(served, path, body, line):
    status, headers, _ = served.request(path, body)
    written = rf"(?m)\[{headers['x-request-id']}\] POST {path} {status} [\d.]+ s: {line}"
    served.until(lambda: re.search(written, served.log.read_text()))


def test_a_request_id_is_in_header_error_and_log(served):
    _, headers, body = served.request("/v1/completions", {}, x_request_id="mine-42")
    assert (headers["x-request-id"], body["error"]["request_id"]) == ("mine-42", "mine-42")
    served.until(lambda: "[mine-42]" in served.log.read_text())
    assert served.request("/nowhere%0Aa-line-of-its-own")[0] == 404
    served.until(lambda: "GET /nowhere%0Aa-line-of-its-own 404" in served.log.read_text())
    longest = ("aZ0_.:-" * 19)[:128]
    assert served.request("/health", x_request_id=longest)[1]["x-request-id"] == longest
    for other in ("no good", f"{longest}x", "a/b"):
        assert served.request("/health", x_request_id=other)[1]["x-request-id"].startswith("req-")


def test_the_page_of_fields_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == with_tables(PAGE.read_text(encoding="utf-8")), (
        "run: python scripts/make_server_fields.py"
    )


OPERATIONS = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"),
    ("GET", "/health"),
    ("GET", "/version"),
]
# The field that keeps an answer short, by operation.
LIMITS = {
    "/v1/completions": "max_tokens",
    "/v1/chat/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
}


@pytest.fixture(scope="module")
def schema(served):
    """schemathesis takes half a second to import: the worker that needs it does."""
    import schemathesis

    return schemathesis.openapi.from_url(f"{served.base}/openapi.json")


@pytest.fixture(scope="module")
def checks():
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        negative_data_rejection,
        response_schema_conformance,
        status_code_conformance,
        unsupported_method,
    )

    return (
        not_a_server_error,
        status_code_conformance,
        content_type_conformance,
        response_schema_conformance,
        negative_data_rejection,
        unsupported_method,
    )


@pytest.mark.parametrize(("method", "path"), OPERATIONS, ids=[path for _, path in OPERATIONS])
@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_schemathesis_finds_nothing(schema, checks, method, path, mode, put_on_record):
    """Bodies within the schema and outside it; those that generate are kept short."""
    from schemathesis import GenerationMode

    operation = schema[path][method]
    if mode == "negative" and method == "GET":
        pytest.skip("nothing in its path or body can be wrong")
    asked, statuses = 0, Counter()

    @settings(max_examples=10, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=GenerationMode(mode)))
    def ask(case):
        nonlocal asked
        asked += 1
        if mode == "positive":
            _steer(path, case.body, asked)
        limit = LIMITS.get(path)
        if limit is not None and isinstance(case.body, dict) and _is_long(case.body.get(limit)):
            case.body[limit] = 2
        response = case.call(timeout=60)
        statuses[response.status_code] += 1
        case.validate_response(response, checks=checks)

    ask()
    if mode == "positive" and path in TEXTS:
        assert statuses[200] >= 5, statuses
    put_on_record(ASKED, asked)


def test_every_operation_is_asked(schema):
    paths = schema.raw_schema["paths"]
    found = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    assert found == {*OPERATIONS, ("GET", "/metrics")}


# What each operation must be sent.
TEXTS = {
    "/v1/completions": {"prompt": "def f(x):"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/responses": {"input": "hello"},
    "/tokenize": {"prompt": "def f(x):"},
    "/detokenize": {"tokens": [5, 6]},
}


def _steer(path, body, asked):
    """Of four bodies within the schema, three get a text that can be read and keep two of the other fields: almost
    every body with many random fields contradicts itself."""
    if path not in TEXTS or not asked % 4:
        return
    others = sorted(body.keys() - {"prompt", "messages", "input", "tokens", "model"})
    kept = {name: body[name] for name in (others[asked % len(others) :] + others)[:2]} if others else {}
    body.clear()
    body.update(kept, model="bundled", **TEXTS[path])


def _is_long(limit):
    return limit is None or (isinstance(limit, int) and not isinstance(limit, bool) and limit > 2)
