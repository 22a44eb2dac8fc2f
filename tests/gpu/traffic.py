"""Requests for engines on the GPU: every style of sampling, ragged, and a way to see what one says alone."""

from collections.abc import Sequence
from typing import Any

from espalier.engine.engine import Engine
from espalier.request import Request, SamplingParams
from tests.harness import prompts, request
from tests.pages import check_pages

STYLES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 6.0},
    {"temperature": 2.0, "top_k": 3},
    {"temperature": 2.0, "top_p": 0.6},
    {"temperature": 2.0, "min_p": 0.2},
    {"temperature": 0.0, "repetition_penalty": 1.7, "frequency_penalty": 1.1},
    {"temperature": 0.7, "presence_penalty": 1.5},
    {"temperature": 1.0, "logit_bias": {2: 3.0, 5: -100.0, 9: -100.0}},
    {"temperature": 4.0, "min_tokens": 9, "stop_token_ids": [1, 4, 6]},
    {"temperature": 3.0, "speculation": False},
    {"temperature": 6.0, "max_draft_depth": 1},
    {
        "temperature": 2.5,
        "top_k": 9,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition_penalty": 0.8,
        "presence_penalty": -0.4,
        "frequency_penalty": 0.3,
        "logit_bias": {0: 2.0},
        "min_tokens": 4,
        "stop_token_ids": [3],
    },
)


def mixed(count: int, max_tokens: int = 24, seed: int = 13, longest: int = 17, **params: Any) -> list[Request]:
    """`count` requests, the styles in turn, prompts of 2 to 2 + longest tokens, some of them in a cycle."""
    lengths = [2 + 5 * i % longest for i in range(count)]
    return [
        asked(i, prompt[: 2 + i % 3] * 9 if i % 4 == 3 else prompt, max_tokens, **{**STYLES[i % len(STYLES)], **params})
        for i, prompt in enumerate(prompts(seed, lengths))
    ]


def asked(index: int, prompt: Sequence[int], max_tokens: int, **style: Any) -> Request:
    style = {**style, "min_tokens": min(style.get("min_tokens", 0), max_tokens)}
    if style.get("speculation") is False:
        style.pop("max_draft_depth", None)  # these two are refused together
    return request(index, prompt, SamplingParams(max_tokens=max_tokens, **style), seed=7 * index)


def run_staggered(engine: Engine, requests: Sequence[Request], every: int) -> None:
    """One more request every so many steps, so that the batch grows and shrinks; pages are conserved throughout."""
    waiting, step = list(requests), 0
    while waiting or engine.has_work:
        if waiting and step % every == 0:
            engine.add(waiting.pop(0))
        engine.step()
        check_pages(engine)
        step += 1
    engine.close()
