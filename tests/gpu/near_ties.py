"""What two runs may differ by: a first difference where the oracle finds the two tokens as good as tied.

docs/design.md, section 6.  Scores are what the pick compares: shaped logits over the temperature, and the noise.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, inf, log
from typing import Any

import torch
from torch import Tensor

from espalier.request import Request
from tests.gpu.engines import DeviceSetup
from tests.oracles.plain_sampling import f32, log_softmax, noise_at, shaped

# Units in the last place of the largest logit: what a sum over one layer's terms may lose, and every layer adds.
ULPS = 64
# Logits [V] after prompt and output so far.
Logits = Callable[[Request, Sequence[int]], Tensor]


@dataclass(frozen=True)
class NearTie:
    """request, position: of the token; one, other: the tokens; gap, bound: in units of logits."""

    request: str
    position: int
    one: int
    other: int
    gap: float
    bound: float

    @property
    def is_explained(self) -> bool:
        return self.gap < self.bound

    def as_row(self) -> tuple[str, ...]:
        state = "near-tie" if self.is_explained else "UNEXPLAINED"
        numbers = (f"{value:.3g}" for value in (self.gap, self.bound))
        return self.request, str(self.position), str(self.one), str(self.other), *numbers, state


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Where two outputs part; where one ends in the other, at that end."""
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return i
    return None if len(one) == len(other) else min(len(one), len(other))


def judged(
    request: Request, one: Sequence[int], other: Sequence[int], logits: Logits, dtype: torch.dtype
) -> NearTie | None:
    """The first difference of two outputs of a request under teacher forcing, None where there is none."""
    at = first_difference(one, other)
    if at is None:
        return None
    tokens = [*request.prompt, *one[:at]]
    if at == min(len(one), len(other)):
        return NearTie(request.id, len(tokens), -1, -1, inf, 0.0)
    return judge(request, tokens, one[at], other[at], logits(request, tokens), dtype)


def judge(request: Request, tokens: Sequence[int], one: int, other: int, logits: Tensor, dtype: torch.dtype) -> NearTie:
    """The gap is what must change between two logits for the one token to be picked, or the other, if that is more."""
    logits = logits.double().cpu()
    drawn = Drawn.of(logits, request, tokens)
    gap = max(drawn.gap(one), drawn.gap(other))
    bound = ULPS * torch.finfo(dtype).eps * float(logits.abs().max())
    return NearTie(request.id, len(tokens), one, other, gap, bound)


@dataclass(frozen=True)
class Drawn:
    """A pick as the oracle sees it.  scores: what argmax compares, of all tokens; margins: how much a logit must change
    against another for the token to be let in by the filters (above 0), or to be left out (below 0); both in logits."""

    scores: dict[int, float]
    margins: dict[int, float]

    @classmethod
    def of(cls, logits: Tensor, request: Request, tokens: Sequence[int]) -> "Drawn":
        values = shaped(dict(enumerate(logits.tolist())), request, tokens)
        t = f32(request.params.temperature)
        if t == 0:
            return cls(values, dict.fromkeys(values, -inf))
        noise = noise_at(request.seed, len(tokens), len(values))
        return cls(
            {token: value + t * noise[token] for token, value in values.items()}, filter_margins(values, request)
        )

    def gap(self, token: int) -> float:
        """What it takes to pick this token: that it is let in, and that each better one is left out or falls behind."""
        mine = self.scores[token]
        better = [u for u, score in self.scores.items() if score > mine and self.margins[u] <= 0]
        return max([0.0, self.margins[token], *(min(self.scores[u] - mine, -self.margins[u]) for u in better)])


def filter_margins(values: dict[int, float], request: Request) -> dict[int, float]:
    """By how much top-k, top-p and min-p leave each token out (above 0) or let it in (below 0), in logits."""
    p, t = request.params, f32(request.params.temperature)
    order = sorted(values, key=lambda token: (-values[token], token))
    k = p.top_k or len(order)
    share = {token: exp(value) for token, value in log_softmax({u: values[u] / t for u in order[:k]}).items()}
    margins, before = {}, 0.0
    for rank, token in enumerate(order):
        outs = [-inf]
        if k < len(order):
            outs.append(values[order[k - 1]] - values[token] if rank >= k else values[order[k]] - values[token])
        if p.top_p < 1 and rank < k and before > 0:
            outs.append(t * log(before / f32(p.top_p)))
        if p.min_p > 0:
            outs.append(values[order[0]] - values[token] + t * log(f32(p.min_p)))
        # The likeliest stays, whatever the filters say.
        margins[token] = max(outs) if rank else -inf
        before += share.get(token, 0.0)
    return margins


def oracle(setup: DeviceSetup) -> Logits:
    """float64, on the CPU, in plain torch, over the whole sequence."""
    return lambda _, tokens: setup.reference.scratch(tokens).logits[len(tokens) - 1]


def report(name: str, requests: int, tokens: int, ties: list[NearTie]) -> dict[str, Any]:
    """Plain values for the summary."""
    return {"name": name, "requests": requests, "tokens": tokens, "ties": [tie.as_row() for tie in ties]}
