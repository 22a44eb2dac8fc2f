"""The judge of first differences, itself judged: it needs no GPU, and everything on the GPU rests on it."""

from math import inf

import pytest
import torch

from espalier.request import SamplingParams
from tests.gpu.near_ties import Drawn, first_difference, judge, judged
from tests.harness import VOCAB, request
from tests.oracles.plain_sampling import plain_pick

STYLES = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 2.0, "top_k": 3},
    {"temperature": 2.0, "top_p": 0.6},
    {"temperature": 2.0, "min_p": 0.2},
    {"temperature": 2.5, "top_k": 9, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.4, "logit_bias": {3: 1.5}},
]
TOKENS = [3, 1, 4, 1, 5]


def drawn_logits(seed: int) -> torch.Tensor:
    return 3 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("style", STYLES, ids=str)
def test_only_the_oracles_own_pick_has_no_gap(style):
    for seed in range(40):
        asked, logits = request(0, TOKENS[:2], SamplingParams(**style), seed=seed), drawn_logits(seed)
        drawn = Drawn.of(logits, asked, TOKENS)
        gaps = {token: drawn.gap(token) for token in range(VOCAB)}
        assert [token for token, gap in gaps.items() if gap == 0] == [plain_pick(logits, asked, TOKENS)]


@pytest.mark.parametrize("style", STYLES, ids=str)
def test_a_change_of_the_gap_and_a_little_more_makes_it_the_pick_and_a_smaller_does_not(style):
    """A gap is a lower bound of the change between two logits that it takes: half of it on each, no pick changes."""
    for seed in range(40):
        asked, logits = request(0, TOKENS[:2], SamplingParams(**style), seed=seed), drawn_logits(seed)
        drawn, best = Drawn.of(logits, asked, TOKENS), plain_pick(logits, asked, TOKENS)
        nearest = min(drawn.gap(token) for token in range(VOCAB) if token != best)
        moved = torch.rand(VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 0.5
        scale = 0.49 / max(asked.params.repetition_penalty, 1.0)
        assert plain_pick(logits + 2 * scale * nearest * moved, asked, TOKENS) == best


def test_a_tie_is_explained_and_any_other_difference_is_not():
    asked, logits = request(0, [1], SamplingParams(temperature=0.0)), torch.zeros(VOCAB)
    logits[4], logits[7], logits[2] = 5.0, 5.0 - 1e-6, 4.99
    tie = judge(asked, [1], 4, 7, logits, torch.float32)
    assert tie.is_explained and 0 < tie.gap < 2e-6
    assert not judge(asked, [1], 4, 2, logits, torch.float32).is_explained
    assert not judge(asked, [1], 7, 2, logits, torch.float32).is_explained
    assert judge(asked, [1], 4, 2, logits, torch.bfloat16).is_explained


def test_tied_places_are_told_apart_by_no_filter():
    """Two tokens tie; top-p keeps the first of them and cuts the second, or, with the next rounding, the other way."""
    asked = request(0, [1], SamplingParams(temperature=1.0, top_p=0.4))
    logits = torch.full((VOCAB,), -9.0, dtype=torch.float64)
    logits[4], logits[7], logits[2] = 5.0, 5.0 - 1e-6, 3.0
    drawn = Drawn.of(logits, asked, [1])
    assert [token for token, margin in zip(drawn.order, drawn.margins, strict=True) if margin <= 0] == [4]
    assert drawn._out(0) < 1e-5 and drawn._in(1) < 1e-5
    assert drawn._in(2) > 0.1


def test_outputs_of_other_lengths_differ_and_nothing_explains_it():
    asked = request(0, [1], SamplingParams(temperature=0.0))
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2, 3], [1, 4, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    ended = judged(asked, [1, 2], [1, 2, 3], lambda *_: torch.zeros(VOCAB), torch.bfloat16)
    assert ended is not None and ended.gap == inf and not ended.is_explained
