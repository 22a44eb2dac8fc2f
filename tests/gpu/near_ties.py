"""What two runs may differ by: a first difference where the oracle finds the two tokens as good as tied.

docs/design.md, section 6.  Scores are what the pick compares: shaped logits over the temperature, and the noise.
"""

from collections.abc import Callable, Iterable, Sequence
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
    """A pick as the oracle sees it.  scores: what argmax compares, of all tokens, in logits; order, values: all tokens
    and their shaped logits, the likeliest first; margins: see filter_margins."""

    scores: dict[int, float]
    order: list[int]
    values: list[float]
    margins: list[float]

    @classmethod
    def of(cls, logits: Tensor, request: Request, tokens: Sequence[int]) -> "Drawn":
        shapen = shaped(dict(enumerate(logits.tolist())), request, tokens)
        order = sorted(shapen, key=lambda token: (-shapen[token], token))
        values, t = [shapen[token] for token in order], f32(request.params.temperature)
        if t == 0:
            return cls(shapen, order, values, [-inf] * len(order))
        noise = noise_at(request.seed, len(tokens), len(values))
        scores = {token: value + t * noise[token] for token, value in shapen.items()}
        return cls(scores, order, values, filter_margins(values, request))

    def gap(self, token: int) -> float:
        """What it takes to pick this token: that it is let in, and that each better one is left out or falls behind."""
        mine = self.scores[token]
        better = [at for at, u in enumerate(self.order) if self.scores[u] > mine and self.margins[at] <= 0]
        behind = [min(self.scores[self.order[at]] - mine, self._out(at)) for at in better]
        return max([0.0, self._in(self.order.index(token)), *behind])

    def _in(self, at: int) -> float:
        """What it takes to be let in, at one's own place or at a better one."""
        places = range(at, -1, -1)
        return self._at_best(at, ((place, max(self.margins[place], 0.0)) for place in places))

    def _out(self, at: int) -> float:
        """What it takes to be left out, at one's own place or at a worse one."""
        places = range(at, len(self.order))
        return self._at_best(at, ((place, max(-self.margins[place], 0.0)) for place in places))

    def _at_best(self, at: int, costs: Iterable[tuple[int, float]]) -> float:
        """The least of what moving to a place takes and what it takes there, places coming nearest first."""
        least = inf
        for place, cost in costs:
            move = abs(self.values[at] - self.values[place])
            if move >= least:
                break
            least = min(least, max(move, cost))
        return least


def filter_margins(values: list[float], request: Request) -> list[float]:
    """By how much top-k, top-p and min-p leave out each place of these values (above 0) or let it in (below 0)."""
    p, t = request.params, f32(request.params.temperature)
    k = p.top_k or len(values)
    share = [exp(value) for value in log_softmax(dict(enumerate(value / t for value in values[:k]))).values()]
    margins, before = [], 0.0
    for place, value in enumerate(values):
        outs = [-inf]
        if k < len(values):
            outs.append(values[k - 1] - value if place >= k else values[k] - value)
        if p.top_p < 1 and 0 < place < k:
            outs.append(t * log(before / f32(p.top_p)))
        if p.min_p > 0:
            outs.append(values[0] - value + t * log(f32(p.min_p)))
        # The likeliest stays, whatever the filters say.
        margins.append(max(outs) if place else -inf)
        before += share[place] if place < k else 0.0
    return margins


def oracle(setup: DeviceSetup) -> Logits:
    """float64, on the CPU, in plain torch, over the whole sequence."""
    return lambda _, tokens: setup.reference.scratch(tokens).logits[len(tokens) - 1]


def furthest_logprob(request: Request, logits: Logits, dtype: torch.dtype) -> float:
    """How far a reported log-probability is from the oracle's at most, over the bound that near-ties have."""
    furthest = 0.0
    for at, entry in enumerate(request.logprobs):
        row = logits(request, [*request.prompt, *request.output[:at]]).double().cpu()
        error = abs(float(torch.log_softmax(row, -1)[entry.token_id]) - entry.logprob)
        furthest = max(furthest, error / (ULPS * torch.finfo(dtype).eps * float(row.abs().max())))
    return furthest


def report(name: str, requests: int, tokens: int, ties: list[NearTie]) -> dict[str, Any]:
    """Plain values for the summary."""
    return {"name": name, "requests": requests, "tokens": tokens, "ties": [tie.as_row() for tie in ties]}
