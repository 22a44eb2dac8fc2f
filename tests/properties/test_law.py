"""Sampled output follows the target's exact law: a chi-square test over every continuation of three tokens, under a
tree."""

from collections import Counter
from functools import cache
from itertools import product
from math import prod
from typing import Any

import pytest
import torch

from espalier.request import SamplingParams
from tests.harness import VOCAB, Setup, request, run
from tests.oracles.plain_sampling import plain_law
from tests.pairwise import fewer
from tests.properties.layouts import reference_of

TREE = Setup(steps=3, topk=4, num_draft_tokens=20, max_batch=64, max_context=16, chunk_size=1024)
SAMPLES = 800
TOKENS = 3
# Seeds are fixed, so this passes or fails for good; one run in a thousand would fail at first sight.
LEAST = 1e-3
# Two tokens over and over, made likely, so that n-grams are found and sometimes right.
PROMPT = [3, 14, 3, 14, 3, 14]
BIAS = {3: 3.0, 14: 3.0}
STYLES: dict[str, dict[str, Any]] = {
    "sampled": {"temperature": 0.8},
    "filtered": {"temperature": 1.3, "top_k": 7, "top_p": 0.9, "min_p": 0.05},
    "penalised": {"temperature": 1.0, "presence_penalty": 1.0, "repetition_penalty": 1.2},
}


USUAL = (("sampled", "eagle3"), ("filtered", "eagle3"), ("penalised", "ngram"))


def dataset_of_flags(style: dict[str, Any]) -> SamplingParams:
    return SamplingParams(max_tokens=TOKENS, logit_bias=BIAS, **style)


@cache
def logits_after(path: tuple[int, ...]) -> torch.Tensor:
    """[V], the target's behind the prompt and a continuation."""
    tokens = [*PROMPT, *path]
    return reference_of(TREE.plain()).scratch(tokens).logits[len(tokens) - 1]


def law(style: dict[str, Any]) -> dict[tuple[int, ...], float]:
    """The probability of every continuation, a token at a time."""
    asked = request(0, PROMPT, dataset_of_flags(style))
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(TOKENS):
        found = {
            (*path, token): share * p
            for path, share in found.items()
            for token, p in plain_law(logits_after(path), asked, [*PROMPT, *path]).items()
        }
    return found


def chance(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """How likely counts at least as far off as these are under the law.  Continuations expected less than 5 times are
    one."""
    total = sum(counts.values())
    common = [path for path, share in expected.items() if share * total >= 5]
    pairs = [(counts[path], expected[path] * total) for path in common]
    rest = total - sum(observed for observed, _ in pairs), total - sum(due for _, due in pairs)
    pairs += [rest] if rest[1] > 1e-9 * total else []
    statistic = sum((observed - due) ** 2 / due for observed, due in pairs)
    freedom = torch.tensor((len(pairs) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


@pytest.mark.parametrize(
    ("style", "algorithm"), fewer(product(STYLES, ("eagle3", "ngram")), lambda *cell: cell in USUAL)
)
def test_samples_follow_the_law(style, algorithm):
    setup = Setup(**{**TREE.__dict__, "algorithm": algorithm})
    requests = [request(i, PROMPT, dataset_of_flags(STYLES[style]), seed=i * 2**33 + i) for i in range(SAMPLES)]
    ran = run(setup.engine(), requests, check=False)
    counts = Counter(tuple(tokens) for tokens in ran.tokens)
    assert ran.stats.accepted > SAMPLES / 100, "the tree took no part"
    expected = law(STYLES[style])
    assert set(counts) <= set(expected) and chance(counts, expected) > LEAST
    # The statistic can tell: a temperature off by a fifth is another law.
    warmer = {**STYLES[style], "temperature": STYLES[style]["temperature"] * 1.2}
    assert chance(counts, law(warmer)) < LEAST


def test_the_law_adds_up():
    paths = list(product(range(VOCAB), repeat=TOKENS))
    expected = law(STYLES["sampled"])
    assert set(expected) == set(paths) and sum(expected.values()) == pytest.approx(1)
    assert prod(expected[path] > 0 for path in paths)
