"""Several models behind one server: each request goes to the API server of its model."""

import pytest
from starlette.testclient import TestClient

from espalier.errors import EspalierError
from espalier.server.api import ApiOptions, make_app
from espalier.server.bodies import BodyLimits
from espalier.server.frontend import FrontendOptions, ModelFrontend, MultiModelFrontend
from espalier.server.metrics import Metrics
from tests.server.scripted import ScriptedClient
from tests.tool_calls.families import FAMILIES


@pytest.fixture(scope="module")
def frontends(tmp_path_factory):
    folder, tokenizer = tmp_path_factory.mktemp("model"), FAMILIES["hermes"].tokenizer()
    tokenizer.hf.save_pretrained(folder)
    engines = [ScriptedClient(folder, tokenizer, lambda *_, text=text: text, 3) for text in ("one", "two")]
    metrics = Metrics(engines)
    return [
        ModelFrontend(each, FrontendOptions(names), metrics)
        for each, names in zip(engines, (("first", "alias"), ("second",)), strict=True)
    ]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (lambda: FrontendOptions(("a", "b", "a")), "--served-model-name has 'a' 2 times; give each value once"),
        (lambda: ApiOptions(cors_origins=["http://x"] * 3), "--cors-origin has 'http://x' 3 times"),
    ],
)
def test_a_value_that_comes_twice_is_refused(options, says):
    with pytest.raises(EspalierError, match=says):
        options()


def test_each_model_has_its_front(frontends):
    server = MultiModelFrontend(frontends, frontends[0].metrics)
    client = TestClient(make_app(server, ApiOptions())[0])
    assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["first", "alias", "second"]
    assert client.get("/v1/models/second").status_code == 200 and client.get("/v1/models/third").status_code == 404
    said = {}
    for name in server.names:
        ask = {"model": name, "messages": [{"role": "user", "content": "hi"}]}
        said[name] = client.post("/v1/chat/completions", json=ask).json()["choices"][0]["message"]["content"]
        assert client.post("/tokenize", json={"model": name, "prompt": "x"}).status_code == 200
    assert said == {"first": "one", "alias": "one", "second": "two"}
    missing = client.post("/v1/completions", json={"model": "third", "prompt": "x"})
    assert missing.status_code == 404 and "use first, alias, second" in missing.json()["error"]["message"]
    unnamed = client.post("/tokenize", json={"prompt": "x"})
    assert unnamed.status_code == 400 and unnamed.json()["error"]["param"] == "model"
    assert client.get("/health").json() == {"status": "ok", "why": ""}
    frontends[1].engines.state, frontends[1].engines.unavailable_reason = "gone", "it is dead"
    try:
        health = client.get("/health")
    finally:
        frontends[1].engines.state, frontends[1].engines.unavailable_reason = "ready", ""
    assert (health.status_code, health.json()) == (503, {"status": "gone", "why": "it is dead"})


def test_a_body_is_held_to_the_longest_context_and_its_model_has_those_positions(frontends, monkeypatch):
    monkeypatch.setattr(frontends[0].body_reader, "limits", BodyLimits(9, 64, 1, 1, 64))
    monkeypatch.setattr(frontends[1].body_reader, "limits", BodyLimits(8, 32, 2, 2, 128))
    assert MultiModelFrontend(frontends, frontends[0].metrics).body_reader.limits == BodyLimits(9, 64, 2, 2, 64)


def test_a_defect_of_an_endpoint_is_an_error_of_openais_form(frontends, monkeypatch, caplog):
    monkeypatch.setattr(frontends[0].metrics, "exposition_text", lambda: 1 / 0)
    answer = TestClient(make_app(frontends[0], ApiOptions())[0]).get("/metrics")
    assert answer.status_code == 500 and answer.json()["error"]["type"] == "server_error"
    assert answer.json()["error"]["request_id"] == answer.headers["x-request-id"]
    assert any(record.exc_info and record.getMessage() == "GET /metrics failed" for record in caplog.records)


def test_a_name_stands_for_one_model(frontends):
    with pytest.raises(EspalierError, match="two models are served as 'first'"):
        MultiModelFrontend([frontends[0], frontends[0]], frontends[0].metrics)
