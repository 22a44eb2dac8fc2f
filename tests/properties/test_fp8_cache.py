"""K and V in FP8 under every kind of draft: speculation, prefix hits and the batch change no request's tokens.

The whole product is in test_layouts.py; here are the drafts that it lacks.
"""

from dataclasses import replace

import pytest

from espalier.config import FP8_KV
from espalier.request import Request, SamplingParams
from tests.harness import Setup, prompts, request, run
from tests.properties.block_setup import BlockSetup
from tests.properties.mtp_setup import MTPSetup

SIZES = {"steps": 3, "topk": 3, "num_draft_tokens": 12, "page_size": 3, "max_batch": 3, "max_context": 48}
CACHE = {"kv_dtype": FP8_KV, "draft_kv_dtype": FP8_KV, "chunk_size": 16}
SETUPS: dict[str, Setup] = {
    "block": BlockSetup(**SIZES, **CACHE),
    "edges": BlockSetup(**SIZES, **CACHE, form="dspark"),
    "chain of MTP layers": MTPSetup(**SIZES, **CACHE, form=(3, "chain")),
    # Whose index keys stay as they are.
    "MTP layer of DeepSeek": MTPSetup(**SIZES, **CACHE, family="deepseek_v32"),
    "draft in float64": Setup(**SIZES, **{**CACHE, "draft_kv_dtype": "float64"}),
    "target in float64": Setup(**SIZES, **{**CACHE, "kv_dtype": "float64"}),
}


def traffic() -> list[Request]:
    """The last repeats the first, so its pages are found."""
    drawn = prompts(23, [7, 3, 12])
    return [
        request(i, prompt, SamplingParams(temperature=(0.0, 1.5, 6.0, 0.0)[i], max_tokens=15), seed=50 + i % 3)
        for i, prompt in enumerate([*drawn, drawn[0]])
    ]


@pytest.mark.parametrize(
    "setup",
    # Edges read no rows, and a chain's layers keep what a layer of another form keeps.
    [
        pytest.param(setup, id=name, marks=pytest.mark.full if name in ("edges", "chain of MTP layers") else ())
        for name, setup in SETUPS.items()
    ],
)
def test_tokens_are_those_of_plain_decoding_alone(setup):
    plain = replace(setup.plain(), max_batch=1, prefix_cache=False)
    alone = [run(plain.engine(), [one]).tokens[0] for one in traffic()]
    ran = run(replace(setup, overlap=True).engine(), traffic())
    assert ran.tokens == alone
    assert ran.requests[3].cached_tokens and ran.stats.emitted > ran.stats.rounds


def test_a_scale_of_the_batch_would_be_noticed(monkeypatch):
    """Rows rounded by the largest of a pass: neighbours and siblings change a request's tokens."""
    from espalier.kernels.ops import rope

    nearest = rope.round_to_fp8

    def over_the_pass(values, scale):
        largest = values.abs().amax() / 3
        return (nearest(values / largest, scale).double() * largest).to(rope.torch.float8_e4m3fn)

    monkeypatch.setattr(rope, "round_to_fp8", over_the_pass)
    with pytest.raises(AssertionError):
        test_tokens_are_those_of_plain_decoding_alone(SETUPS["draft in float64"])
