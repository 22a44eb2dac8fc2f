"""Picking a token: a pure function of logits, parameters, seed and position.

A sampled token is the argmax of logits plus noise (Gumbel-max); a greedy token is the argmax of logits.  The noise
depends only on seed, position and token id.  So plain decoding and tree decoding draw the same token, and a test that
speculation is lossless only compares tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from espalier.sampling.logit_processors import DraftedAncestors, SamplingFeatures, SlotSamplingParams, process_logits


class SampledTokens(NamedTuple):
    """tokens: [B, Q] int64, the sampled tokens.  finite: [B, Q] bool, False if a row's best logit is NaN or
    infinite."""

    tokens: Tensor
    finite: Tensor


class Logprobs(NamedTuple):
    """Log-probabilities.  tokens, chosen, ranks: [...], the tokens, their log-probabilities and their ranks (1 is the
    likeliest).  ids, values: [..., n], the likeliest tokens and their log-probabilities."""

    tokens: Tensor
    chosen: Tensor
    ranks: Tensor
    ids: Tensor
    values: Tensor


def pick(
    logits: Tensor,
    params: SlotSamplingParams | None,
    sampling_features: SamplingFeatures,
    positions: Tensor,
    noise: Tensor | None,
    drafted_ancestors: DraftedAncestors | None = None,
) -> SampledTokens:
    """Picks a token from each row of logits [B, Q, V].  positions: [B, Q], the positions of the picked tokens.

    The order of operations: bias, bans and penalties; temperature; top-k; top-p; min-p; argmax(logits / T + noise).
    All steps compute in float32, or in float64 for float64 logits.  Ties go to the lower id.  Temperature 0 is plain
    argmax without filters.  noise: [B, Q, V], None if no row samples.  drafted_ancestors: drafted tokens that count as
    output."""
    if params is not None:
        logits = process_logits(logits, params, sampling_features, positions, drafted_ancestors)
    if params is not None and noise is not None:
        is_greedy = (params.temperature == 0)[:, None, None]
        scaled = divide_by_temperature(logits, params)
        filtered = apply_filters(scaled, params) if sampling_features.filtered else scaled
        logits = torch.where(is_greedy, logits, filtered + noise)
    best = logits.max(-1)
    return SampledTokens(best.indices, best.values.isfinite())


def apply_filters(logits: Tensor, params: SlotSamplingParams) -> Tensor:
    """Returns logits [B, Q, V] with -inf for tokens that top-k, then top-p of the rest, then min-p remove.

    Among equal logits the lower id stays.  At least one token stays.  Probabilities are summed as integers, in units of
    2**-40 of the highest probability, so that the cut does not depend on batch, device or order of summation."""
    sorted_logits, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
    vocab_size = logits.shape[-1]
    rank = torch.arange(vocab_size, device=logits.device)
    is_removed = rank >= params.top_k.masked_fill(params.top_k <= 0, vocab_size)[:, None, None]
    ratio = torch.exp(sorted_logits - sorted_logits[..., :1])
    mass = (ratio * 2.0**40).long().masked_fill_(is_removed, 0)
    cumulative = mass.cumsum(-1)
    top_p = params.top_p.double()[:, None, None]
    enough = (cumulative[..., -1:] * top_p).ceil().long()
    is_removed = is_removed | ((cumulative - mass >= enough) & (top_p < 1))
    is_removed |= ratio < params.min_p.to(ratio.dtype)[:, None, None]
    return torch.empty_like(logits).scatter_(-1, ids, sorted_logits.masked_fill_(is_removed & (rank > 0), -torch.inf))


def divide_by_temperature(logits: Tensor, params: SlotSamplingParams) -> Tensor:
    """Returns logits [B, Q, V] divided by each row's temperature; rows with temperature 0 do not change."""
    return logits / params.temperature.masked_fill(params.temperature == 0, 1.0).to(logits.dtype)[:, None, None]


def scores_with_shared_noise(logits: Tensor, params: SlotSamplingParams, noise: Tensor) -> Tensor:
    """Returns a draft's scores log_softmax(logits / T + g), where g is the noise with which the target samples.

    logits: [B, Q, V], after bias and penalties.  Rows with temperature 0 give log_softmax(logits).  Emitted tokens do
    not depend on these scores."""
    is_greedy = (params.temperature == 0)[:, None, None]
    return torch.log_softmax(torch.where(is_greedy, logits, divide_by_temperature(logits, params) + noise), -1)


def logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> Logprobs:
    """Compute the target's log-probabilities of tokens [...], before temperature and masks.  logits: [..., V].

    num_top: how many of the likeliest tokens to report besides each token."""
    logits = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1)
    values, ids = logits.topk(min(num_top, logits.shape[-1]), -1)
    chosen = logits.gather(-1, tokens[..., None])
    return Logprobs(tokens, chosen[..., 0], 1 + (logits > chosen).sum(-1), ids, values)


def mix_bits(bits: Tensor) -> Tensor:
    """A one-to-one map of 32-bit numbers; every output bit depends on every input bit.  bits: int32, overwritten.

    int32 needs half the memory traffic of int64, and products of int32 wrap around.  A right shift of int32 copies the
    sign bit into the upper bits; the bitwise_and calls clear these copies."""
    bits ^= (bits >> 16).bitwise_and_(0xFFFF)
    bits *= 0x7FEB352D
    bits ^= (bits >> 15).bitwise_and_(0x1FFFF)
    bits *= 0x846CA68B - 2**32
    bits ^= (bits >> 16).bitwise_and_(0xFFFF)
    return bits


def random_bits(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Returns random bits [B, P, vocab] int32, 32 per token id.  seeds: [B], positions: [B, P], both int64."""
    seed_halves = torch.stack((seeds, seeds >> 32)).to(torch.int32)[..., None]
    position = positions.to(torch.int32)
    # Two hashes of each position are computed together: [2, B, P].
    position_hashes = mix_bits(torch.stack((position + (0x9E3779B9 - 2**32), position + (0x85EBCA6B - 2**32))))
    k0, k1 = mix_bits(seed_halves ^ mix_bits(seed_halves.flip(0) ^ position_hashes))
    ids = torch.arange(vocab_size, dtype=torch.int32, device=seeds.device)
    return mix_bits(mix_bits(ids ^ k0[..., None]).add_(k1[..., None]))


def gumbel(seeds: Tensor, positions: Tensor, vocab_size: int, dtype: torch.dtype) -> Tensor:
    """Returns standard Gumbel noise [B, P, vocab] for tokens drawn at positions [B, P] with seeds [B], both int64.

    The noise is -log(-log(u)) with u = ((r >> 9) + 0.5) * 2**-23, from random bits r.  With 24 bits or more, the
    largest u would round to 1.0 in float32.  The noise would then be infinite, and its token would be picked whatever
    its logit is.  In a large vocabulary, this would happen now and then."""
    uniform = ((random_bits(seeds, positions, vocab_size) >> 9) & 0x7FFFFF).to(dtype).add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()
