"""How one token is picked, in plain loops: the oracle of sampling/ and of the draft's coupled scores.

Parameters are rounded to float32 first, as the slot table holds them; all else is float64.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from espalier.request import Request
from espalier.sampling.pick import gumbel

Values = dict[int, float]


def plain_pick(logits: Tensor, request: Request, tokens: Sequence[int]) -> int:
    """The token after `tokens` (prompt and output): logits [V], the target's."""
    values = shaped(dict(enumerate(logits.tolist())), request, tokens)
    if request.params.temperature > 0:
        noise = noise_at(request.seed, len(tokens), len(values))
        values = {token: value + noise[token] for token, value in kept(values, request).items()}
    return min(values, key=lambda token: (-values[token], token))


def plain_law(logits: Tensor, request: Request, tokens: Sequence[int]) -> Values:
    """The probabilities that plain_pick draws by, over all seeds."""
    values = kept(shaped(dict(enumerate(logits.tolist())), request, tokens), request)
    return {token: math.exp(value) for token, value in log_softmax(values).items()}


def draft_scores(
    logits: Tensor, ids: Iterable[int], request: Request, tokens: Sequence[int], ahead: int = 0
) -> dict[int, np.float32]:
    """Log-probabilities of the children of `tokens`: logits [draft vocabulary], ids the target tokens that they stand
    for; ahead: unknown tokens between `tokens` and the children.

    At a temperature the noise that the target will draw with counts in (design, section 6); filters do not.
    """
    values = shaped(dict(zip(ids, logits.tolist(), strict=True)), request, tokens, ahead)
    if request.params.temperature > 0:
        noise = noise_at(request.seed, len(tokens) + ahead, max(values) + 1)
        temperature = f32(request.params.temperature)
        values = {token: value / temperature + noise[token] for token, value in values.items()}
    return {token: np.float32(value) for token, value in log_softmax(values).items()}


def shaped(values: Values, request: Request, tokens: Sequence[int], ahead: int = 0) -> Values:
    """Bias, bans of early stops, penalties, for the token at position len(tokens) + ahead."""
    p, prompt = request.params, request.prompt
    output, seen = Counter(tokens[len(prompt) :]), set(tokens)
    early = len(tokens) + ahead < len(prompt) + p.min_tokens
    repetition, frequency, presence = map(f32, (p.repetition_penalty, p.frequency_penalty, p.presence_penalty))
    changed = {}
    for token, value in values.items():
        if token in p.logit_bias:
            value += f32(p.logit_bias[token])
        if early and token in request.stop_ids:
            value = -math.inf
        if token in seen:
            value = value / repetition if value > 0 else value * repetition
        value -= frequency * output[token] + presence * (token in output)
        changed[token] = value
    return changed


def kept(values: Values, request: Request) -> Values:
    """Over temperature, and what top-k, then top-p, then min-p leave of it: one token at least."""
    p = request.params
    temperature = f32(p.temperature)
    values = {token: value / temperature for token, value in values.items()}
    order = sorted(values, key=lambda token: (-values[token], token))
    order = order[: p.top_k or len(order)]
    share = {token: math.exp(value) for token, value in log_softmax({t: values[t] for t in order}).items()}
    before = 0.0
    remaining: list[int] = []
    for token in order:
        inside = p.top_p == 1 or before < f32(p.top_p)
        if not remaining or (inside and share[token] >= f32(p.min_p) * share[order[0]]):
            remaining.append(token)
        before += share[token]
    return {token: values[token] for token in remaining}


def log_softmax(values: Values) -> Values:
    highest = max(values.values())
    total = highest + math.log(sum(math.exp(value - highest) for value in values.values()))
    return {token: value - total for token, value in values.items()}


@lru_cache(maxsize=4096)
def noise_at(seed: int, position: int, vocab: int) -> list[float]:
    return gumbel(torch.tensor([seed]), torch.tensor([[position]]), vocab, torch.float64)[0, 0].tolist()


def f32(value: float) -> float:
    return float(np.float32(value))
