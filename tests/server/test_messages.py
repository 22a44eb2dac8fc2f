"""What the error for a wrong body says: the place as the client wrote it, and plain words."""

import json

import pytest

from espalier.server.bodies import BodyLimits, read_body
from espalier.server.errors import ApiError
from espalier.server.openai import ChatRequest, CompletionRequest

CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"lora_name": "x"}, "the body has no 'lora_name'; /openapi.json lists its fields"),
        ({"temprature": 1}, "the body has no 'temprature'; did you mean 'temperature'?"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema: Field required"),
        ({"response_format": "json"}, "response_format: Input should be an object (text, json_object"),
        (
            {"response_format": {"type": "json_object", "json_schema": {}}},
            "response_format has no 'json_schema'; use type",
        ),
        ({"response_format": {"type": "json_object", "ignore": 1}}, "response_format has no 'ignore'; use type"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"foo": 1, "name": "x", "schema": {}}}},
            "response_format.json_schema has no 'foo'; use one of schema, name, ",
        ),
        ({"structured_outputs": {"foo": 1}}, "structured_outputs has no 'foo'; use one of json, "),
        ({"stream_options": 1}, "stream_options: Input should be an object"),
    ],
    ids=str,
)
def test_a_wrong_field_is_named_as_the_client_wrote_it(fields, said):
    with pytest.raises(ApiError) as refused:
        read_body(ChatRequest, "application/json", json.dumps(CHAT | fields).encode(), BodyLimits(16, 64, 1, 64))
    assert refused.value.detail.startswith(said)


@pytest.mark.parametrize(
    ("model", "name", "advice"),
    [
        (CompletionRequest, "messages", "send it to /v1/chat/completions"),
        (ChatRequest, "prompt", "send it to /v1/completions"),
        (ChatRequest, "length_penalty", "/openapi.json lists its fields"),
        (ChatRequest, "chat_template", "use espalier serve --chat-template"),
    ],
)
def test_a_field_of_another_endpoint_names_it(model, name, advice):
    with pytest.raises(ApiError) as refused:
        read_body(model, "application/json", json.dumps({"model": "m", name: "x"}).encode(), BodyLimits(16, 64, 1, 64))
    assert refused.value.detail == f"the body has no '{name}'; {advice}"
