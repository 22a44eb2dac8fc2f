"""Log-probabilities of emitted tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from espalier.kernels.runtime.op import op
from espalier.logprobs import TOP, words


def rows_of(tokens: Tensor, chosen: Tensor, ranks: Tensor, ids: Tensor, values: Tensor) -> Tensor:
    """Join the parts of sampling/pick.py:Logprobs into rows [..., words(n)] of espalier/logprobs.py."""
    head = torch.stack((tokens, ranks, _bits(chosen)), -1)
    return torch.cat((head, torch.stack((ids, _bits(values)), -1).flatten(-2)), -1)


def _bits(values: Tensor) -> Tensor:
    return values.double().view(torch.int64)


def _likeliest(logits: Tensor, count: int) -> Tensor:
    """The ids [N, count] of the largest logits in each row [N, V].  Ids of equal logits are in ascending order.

    It takes half the time of ordered_topk for a vocabulary, but the host waits to read whether topk left equal ids out.
    """
    vocab, taken = logits.shape[1], 2 * count
    values, ids = logits.topk(min(taken, vocab))
    while 0 < taken < vocab and bool((values[:, count - 1] == values[:, -1]).any()):
        taken *= 2
        values, ids = logits.topk(min(taken, vocab))
    ids = ids.sort(-1).values
    order = logits.gather(-1, ids).sort(dim=-1, descending=True, stable=True).indices
    return ids.gather(-1, order[:, :count])


def exact_of(logits: Tensor) -> torch.dtype:
    """The dtype of sums: float32, or float64 for float64."""
    return torch.promote_types(logits.dtype, torch.float32)


@op("espalier.kernels.sampling.logprobs", on="logits")
def write_logprobs(
    ring: Tensor, entry: Tensor, logits: Tensor, rows: Tensor, tokens: Tensor, length: Tensor, num_logprobs: Tensor
) -> None:
    """Write the target's log-probabilities of emitted tokens, before temperature and masks, to entry [1] of the ring.

    ring: [entries, >= B, >= W, words(n)] int64, rows of espalier/logprobs.py, contiguous for each request; n: how
    many of the likeliest tokens a request may ask for at most; logits: [B, D, V]; rows: [B, W] int64, the row of the
    logits that each token was picked from; tokens: [B, W] int64, the first length [B] were emitted; num_logprobs: [B]
    int64, how many of the likeliest tokens each request wants, below 0 for a request without log-probabilities.  Tokens
    of equal logits are in order of their ids.  Words that no request asked for are undefined.
    """
    if not bool((num_logprobs >= 0).any()):
        return
    asked = (torch.arange(tokens.shape[1], device=length.device) < length[:, None]) & (num_logprobs >= 0)[:, None]
    b, w = asked.nonzero(as_tuple=True)
    if not len(b):
        return
    picked = logits[b, rows[b, w]].to(exact_of(logits))
    tokens = tokens[b, w][:, None]
    logp = torch.log_softmax(picked, -1)
    count = min(int(num_logprobs.max()), (ring.shape[3] - TOP) // 2, logits.shape[2])
    ids = _likeliest(picked, count)
    ranks = 1 + (picked > picked.gather(-1, tokens)).sum(-1)
    written = rows_of(tokens[:, 0], logp.gather(-1, tokens)[:, 0], ranks, ids, logp.gather(-1, ids))
    ring[int(entry), b, w, : words(count)] = written
