"""Compares a quantised target or draft with its original, both in the engine, on held-out text.

A model without a tokenizer cannot read that: the text is what the original itself continues random tokens with.

Both read the same tokens and report the 20 likeliest tokens at each position.  Agreement is the share of positions with
the same likeliest token.  KL is computed over the tokens that both report, and all others count as one token.  This is
a lower bound of the KL over the whole vocabulary, and close to it, because the other tokens have little probability.

Accept lengths are those of the tree at every batch, also where an engine would choose plain decoding for its speed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from typing import Any

from espalier.bench.choose import without_table
from espalier.bench.drive import drive, texts
from espalier.errors import EspalierError
from espalier.limits import MAX_LOGPROBS
from espalier.llm import LLM
from espalier.logprobs import TokenLogprob
from espalier.request import SamplingParams

# Lower probabilities count as this one.
MIN_PROBABILITY = 1e-12
# Tokens of a text of the original's own.
OWN_TOKENS = 256

# (prompt, text after it), as token ids.
Texts = list[tuple[list[int], list[int]]]


@dataclass(frozen=True)
class Accuracy:
    """agreement: share of positions with the same likeliest token.  kl: mean, in nats.  perplexity: of the text, by the
    model and by its quantised copy.  accept_length: with the draft, of both; None without a draft.
    is_own_text: whether the original wrote the text.
    """

    positions: int
    agreement: float
    kl: float
    perplexity: tuple[float, float]
    accept_length: tuple[float, float] | None
    is_own_text: bool


@dataclass(frozen=True)
class ModelReports:
    """What one model reports of each text, and its accept length."""

    texts: Texts
    is_own_text: bool
    reports: list[list[TokenLogprob]]
    accept_length: float | None


def compare(
    model: str,
    quantised: str,
    settings: Mapping[str, Any],
    num_texts: int,
    num_tokens: int,
    advance: Callable[[], None],
) -> Accuracy:
    """settings: of both engines, with the draft.  num_tokens: generated from each prompt for the accept length."""
    settings = without_table(settings)
    first = _run(model, settings, num_texts, num_tokens, None)
    advance()
    second = _run(quantised, settings, num_texts, num_tokens, first.texts)
    advance()
    texts_of_both = zip(first.reports, second.reports, strict=True)
    pairs = [pair for ours, theirs in texts_of_both for pair in zip(ours, theirs, strict=True)]
    lengths = None
    if first.accept_length is not None and second.accept_length is not None:
        lengths = (first.accept_length, second.accept_length)
    return Accuracy(
        positions=len(pairs),
        agreement=sum(one.top[0][0] == other.top[0][0] for one, other in pairs) / len(pairs),
        kl=sum(kl_divergence(one.top, other.top) for one, other in pairs) / len(pairs),
        perplexity=(_perplexity([one for one, _ in pairs]), _perplexity([other for _, other in pairs])),
        accept_length=lengths,
        is_own_text=first.is_own_text,
    )


def accept_lengths(
    target: str,
    drafts: tuple[str, str],
    settings: Mapping[str, Any],
    num_texts: int,
    num_tokens: int,
    advance: Callable[[], None],
) -> tuple[float, float]:
    """The accept length of a target with a draft and with its quantised copy, on the same prompts.

    num_tokens: generated from each prompt.
    """
    found = []
    for draft in drafts:
        with LLM(target, draft=draft, **without_table(settings)) as llm:
            found.append(_accept_length(llm, [prompt for prompt, _ in texts(llm, num_texts)], num_tokens))
        advance()
    return found[0], found[1]


def _run(model: str, settings: Mapping[str, Any], num_texts: int, num_tokens: int, given: Texts | None) -> ModelReports:
    with LLM(model, **settings) as llm:
        is_own_text = llm.tokenizer is None
        pairs = given or (_own_texts if is_own_text else texts)(llm, num_texts)
        limit = llm.config.max_context - 1
        whole = [(prompt + reference)[:limit] for prompt, reference in pairs]
        params = SamplingParams(max_tokens=0, prompt_logprobs=MAX_LOGPROBS)
        outputs = llm.generate(whole, params)
        reports = []
        for output, (prompt, _) in zip(outputs, pairs, strict=True):
            if output.error is not None or output.prompt_logprobs is None:
                raise EspalierError(f"{model}: a text failed ({output.error})")
            # Random tokens are no text.
            counted = output.prompt_logprobs[len(prompt) if is_own_text else 0 :]
            reports.append([entry for entry in counted if entry is not None])
        if not llm.config.steps or llm.config.draft is None:
            return ModelReports(pairs, is_own_text, reports, None)
        accept_length = _accept_length(llm, [prompt for prompt, _ in pairs], num_tokens)
        return ModelReports(pairs, is_own_text, reports, accept_length)


def _accept_length(llm: LLM, prompts: Sequence[list[int]], num_tokens: int) -> float:
    greedy = SamplingParams(temperature=0.0, max_tokens=num_tokens, top_k=0, top_p=1.0)
    most = llm.config.max_context - 1 - num_tokens
    return drive(llm.engine, [prompt[:most] for prompt in prompts], greedy).stats.accept_length


def _own_texts(llm: LLM, count: int) -> Texts:
    prompts = [prompt for prompt, _ in texts(llm, count)]
    greedy = SamplingParams(temperature=0.0, max_tokens=OWN_TOKENS, top_k=0, top_p=1.0)
    return [(prompt, output.token_ids) for prompt, output in zip(prompts, llm.generate(prompts, greedy), strict=True)]


def kl_divergence(first: Sequence[tuple[int, float]], second: Sequence[tuple[int, float]]) -> float:
    """KL(first || second) in nats, over the tokens that both report and one token for all others."""
    theirs = dict(second)
    shared = [(exp(logprob), exp(theirs[token])) for token, logprob in first if token in theirs]
    shared.append((1 - sum(p for p, _ in shared), 1 - sum(q for _, q in shared)))
    clipped = [(max(p, MIN_PROBABILITY), max(q, MIN_PROBABILITY)) for p, q in shared]
    return max(sum(p * log(p / q) for p, q in clipped), 0.0)


def _perplexity(entries: Sequence[TokenLogprob]) -> float:
    return exp(-sum(entry.logprob for entry in entries) / len(entries))
