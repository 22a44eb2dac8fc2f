"""Picking a token: a pure function of logits, parameters, seed and position.

Greedy and sampled are one thing, the argmax of logits plus noise (Gumbel-max), so that plain decoding and a tree draw
the same token and losslessness is an equality.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from espalier.sampling.logit_processors import Above, SamplingNeeds, SamplingRows, shape


class SampledTokens(NamedTuple):
    """tokens [B, Q] int64; finite [B, Q]: the row held no NaN and something to pick."""

    tokens: Tensor
    finite: Tensor


class Logprobs(NamedTuple):
    """tokens, their log-probabilities `chosen` and ranks (1: the likeliest), [...] each; the likeliest ids [..., n] and
    their values."""

    tokens: Tensor
    chosen: Tensor
    ranks: Tensor
    ids: Tensor
    values: Tensor


def pick(
    logits: Tensor,
    rows: SamplingRows | None,
    needs: SamplingNeeds,
    positions: Tensor,
    noise: Tensor | None,
    above: Above | None = None,
) -> SampledTokens:
    """The token at each row of logits [B, Q, V], drawn at positions [B, Q].

    Bias, bans and penalties; temperature; top-k; top-p; min-p; then argmax(logits / T + noise), float32 (float64
    stays), ties to the lower id.  Temperature 0 is argmax and no filter touches it.  noise: [B, Q, V], None where
    nothing is sampled; above: drafted tokens that count as output.
    """
    if rows is not None:
        logits = shape(logits, rows, needs, positions, above)
    if rows is not None and noise is not None:
        greedy = (rows.temperature == 0)[:, None, None]
        scaled = over_temperature(logits, rows)
        kept = filtered(scaled, rows) if needs.filtered else scaled
        logits = torch.where(greedy, logits, kept + noise)
    best = logits.max(-1)
    return SampledTokens(best.indices, best.values.isfinite())


def filtered(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Logits [B, Q, V] with what top-k, then top-p of the rest, then min-p leave out at -inf.

    Equals keep the lower id; one token always stays.  Shares are summed as integers, in units of 2**-40 of the
    likeliest token's, so that no batch, device or order of summation moves the cut.
    """
    ordered, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
    vocab = logits.shape[-1]
    rank = torch.arange(vocab, device=logits.device)
    out = rank >= rows.top_k.masked_fill(rows.top_k <= 0, vocab)[:, None, None]
    share = torch.exp(ordered - ordered[..., :1])
    mass = (share * 2.0**40).long().masked_fill_(out, 0)
    up_to = mass.cumsum(-1)
    top_p = rows.top_p.double()[:, None, None]
    enough = (up_to[..., -1:] * top_p).ceil().long()
    out = out | ((up_to - mass >= enough) & (top_p < 1))
    out |= share < rows.min_p.to(share.dtype)[:, None, None]
    return torch.empty_like(logits).scatter_(-1, ids, ordered.masked_fill_(out & (rank > 0), -torch.inf))


def over_temperature(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Logits [B, Q, V] over each row's temperature; rows of temperature 0 as they are."""
    return logits / rows.temperature.masked_fill(rows.temperature == 0, 1.0).to(logits.dtype)[:, None, None]


def coupled_scores(logits: Tensor, rows: SamplingRows, noise: Tensor, tau: float = 1.0) -> Tensor:
    """Scores of a draft's children that know the noise the target will draw with: log_softmax((logits / T + g) / tau).

    logits [B, Q, V], already shaped; rows of temperature 0 give log_softmax(logits).  What is emitted does not depend
    on it.
    """
    greedy = (rows.temperature == 0)[:, None, None]
    noisy = (over_temperature(logits, rows) + noise) / tau
    return torch.log_softmax(torch.where(greedy, logits, noisy), -1)


def logprobs(logits: Tensor, tokens: Tensor, count: int) -> Logprobs:
    """The target's own log-probabilities, before temperature and masks, of tokens [...] by logits [..., V].

    count: of the likeliest tokens to name beside each.
    """
    logits = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1)
    values, ids = logits.topk(min(count, logits.shape[-1]), -1)
    chosen = logits.gather(-1, tokens[..., None])
    return Logprobs(tokens, chosen[..., 0], 1 + (logits > chosen).sum(-1), ids, values)
