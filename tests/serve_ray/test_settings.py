"""What `args` of a Serve config file mean, and what is refused of them."""

from types import SimpleNamespace

import pytest

import espalier.chat
from espalier.errors import EspalierError
from espalier.serve_ray.build import (
    MODEL_OPTIONS,
    SERVICE_OPTIONS,
    ReplicaOptions,
    _deployment_name,
    parse_replicas,
    parse_service,
)
from espalier.serve_ray.replica_chooser import OpenTokensPolicy


def test_the_names_are_the_flags_of_the_server():
    service = parse_service(
        {
            "model": "bundled",
            "served_model_name": "code",
            "max_batch": 4,
            "speculation": {"steps": 3},
            "replicas": "1:4",
            "tokens_per_replica": 99,
            "max_queue": 7,
            "request_timeout": 0,
            "body_timeout": 5,
            "engine_timeout": 9,
            "api_key": "k",
            "cors_origin": "http://x",
            "fronts": 2,
            "log_level": "debug",
        }
    )
    [model] = service.models
    assert model.settings == {"model": "bundled", "max_batch": 4, "speculation": {"steps": 3}}
    assert model.replicas == ReplicaOptions(1, 4, 99) and model.replicas.is_autoscaled
    assert (
        model.frontend.names == ("code",) and model.frontend.max_queue == 7 and model.frontend.request_timeout_s is None
    )
    assert model.client.engine_timeout_s == 9 and model.client.log_level == "debug"
    assert (service.api.api_key, service.api.cors_origins, service.api.body_timeout_s) == ("k", ("http://x",), 5)
    assert service.num_api_servers == 2


@pytest.mark.parametrize("name", [*SERVICE_OPTIONS, *MODEL_OPTIONS])
def test_an_option_that_is_null_is_not_given(name):
    args = {"model": "bundled"}
    assert parse_service({**args, name: None}) == parse_service(args)


def test_what_stands_beside_the_models_holds_for_each():
    service = parse_service({"device": "cpu", "models": [{"model": "bundled"}, {"model": "b/c", "device": "cuda"}]})
    assert [model.settings["device"] for model in service.models] == ["cpu", "cuda"]
    assert [model.frontend.names for model in service.models] == [("bundled",), ("b/c",)]
    assert [_deployment_name(model, 2) for model in service.models] == ["engine-bundled", "engine-b-c"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({}, "model is missing"),
        ({"models": []}, "use a list of objects"),
        ({"model": "bundled", "replcas": 2}, "did you mean 'replicas'"),
        ({"model": "bundled", "replicas": 0}, "use a whole number, 1 or more, or MIN:MAX"),
        ({"model": "bundled", "replicas": "4:2"}, "MIN:MAX"),
        ({"model": "bundled", "max_batch": 0}, "max_batch=0 is not supported"),
        ({"model": "bundled", "speculation": {"stepps": 3}}, "did you mean 'steps'"),
        ({"model": "bundled", "device": "cuda:1"}, "Ray chooses each one's GPU"),
        ({"model": "bundled", "log_level": "loud"}, "use debug, info"),
        ({"model": "bundled", "fronts": 0}, "fronts=0"),
        ({"model": "bundled", "tokens_per_replica": 0}, "tokens_per_replica=0"),
        ({"model": "bundled", "tool_format": "x"}, "'x'"),
        ({"model": "bundled", "chat_template": "/no/file"}, "chat_template cannot be read"),
        ({"model": "bundled", "chat_template": espalier.chat.__file__}, "is no Jinja template"),
        ({"models": [{"model": "bundled", "api_key": "k"}]}, "put it beside `models`"),
        # Without a limit nobody would notice an engine that is gone.
        ({"model": "bundled", "engine_timeout": 0}, "engine_timeout=0 is not supported; use seconds, 1 or more"),
        ({"model": "bundled", "request_timeout": -1}, "request_timeout=-1"),
        ({"models": [{"model": "bundled", "max_queue": "5"}]}, "max_queue='5' is not supported; use a whole number"),
        ({"model": "bundled", "drain_timeout": "x"}, "drain_timeout='x'"),
        ({"model": "bundled", "allow_special_tokens_in_messages": "no"}, "use True or False"),
        ({"model": "bundled", "api_key": ""}, "api_key is empty"),
        ({"model": "bundled", "served_model_name": 5}, "use a text or a list of texts"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(args, says):
    with pytest.raises(EspalierError) as caught:
        parse_service(args)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_number_of_replicas():
    assert parse_replicas(3) == parse_replicas("3") == ReplicaOptions(3, 3) and not parse_replicas(3).is_autoscaled
    assert parse_replicas("2:8") == ReplicaOptions(2, 8)
    with pytest.raises(EspalierError, match="whole number, 1 or more, or MIN:MAX"):
        parse_replicas("1_0")


def test_replicas_follow_the_open_tokens():
    def context(**queued):
        return SimpleNamespace(target_num_replicas=3, aggregated_metrics={"open_tokens": queued} if queued else {})

    policy = OpenTokensPolicy(tokens_per_replica=200)
    assert policy(context(a=100.0, b=300.0)) == (2.0, {})
    assert policy(context(a=0.0)) == (0.0, {})
    # Nothing is known yet: stay.
    assert policy(context()) == (3, {})
