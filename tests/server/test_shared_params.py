"""Parameters that the bodies of many requests share."""

from types import SimpleNamespace

import pytest

from espalier.errors import EspalierError
from espalier.request import ResolvedParams, SamplingParams
from espalier.server.frontend import MAX_CACHED_PARAMS, ModelFrontend
from espalier.server.openai import CompletionRequest


def test_bodies_with_equal_values_share_their_parameters():
    def params(**fields):
        return CompletionRequest.model_validate({"model": "m", "prompt": "x", **fields}).params()

    one = params(temperature=1, top_p=0.5, max_tokens=8)
    assert params(max_tokens=8, top_p=0.5, temperature=1.0) is one
    assert one == SamplingParams(temperature=1.0, top_p=0.5, max_tokens=8)
    assert params(temperature=0.5, top_p=1.0, max_tokens=8) == SamplingParams(temperature=0.5, top_p=1.0, max_tokens=8)
    # What may be long, or may not be hashed, is not kept.
    assert params(stop="a") == params(stop="a") and params(stop="a") is not params(stop="a")
    assert params(stop_token_ids=[1]) == SamplingParams(stop_token_ids=[1])
    for _ in range(2):
        with pytest.raises(EspalierError, match=r"top_p=1\.5"):
            params(top_p=1.5)


def test_an_object_that_many_bodies_share_is_resolved_once(monkeypatch):
    frontend, asked = ModelFrontend.__new__(ModelFrontend), []
    frontend._resolved_params = {}
    frontend.inputs = SimpleNamespace(resolve=lambda params: asked.append(params) or ResolvedParams(seed=params.seed))
    one, other = SamplingParams(seed=1), SamplingParams(seed=2)
    assert [frontend.resolve(params).seed for params in (one, other, one, SamplingParams(seed=1))] == [1, 2, 1, 1]
    assert len(asked) == 3
    # The memory has an end, and an object whose place in memory is used again is another one.
    for seed in range(1000):
        assert frontend.resolve(SamplingParams(seed=seed)).seed == seed
    assert len(frontend._resolved_params) <= MAX_CACHED_PARAMS
