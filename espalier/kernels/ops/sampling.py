"""Log-probabilities of emitted tokens."""

import torch
from torch import Tensor

from espalier.kernels.runtime.op import op
from espalier.logprobs import TOP, row_words


def pack_logprob_rows(
    tokens: Tensor, token_logprobs: Tensor, ranks: Tensor, top_ids: Tensor, top_logprobs: Tensor
) -> Tensor:
    """Returns rows [..., row_words(n)] int64 in the layout of espalier/logprobs.py.  Arguments: the fields of
    sampling/pick.py:Logprobs, with n likeliest tokens."""
    head = torch.stack((tokens, ranks, _float64_bits(token_logprobs)), -1)
    return torch.cat((head, torch.stack((top_ids, _float64_bits(top_logprobs)), -1).flatten(-2)), -1)


def _float64_bits(values: Tensor) -> Tensor:
    return values.double().view(torch.int64)


def _top_ids(logits: Tensor, k: int) -> Tensor:
    """Returns the ids [N, k] of the largest logits of each row [N, V]; ids of equal logits are in ascending order.

    For a vocabulary, this takes half the time of ordered_topk.  But the host must wait for the values, because more
    logits must be read if the last logit read equals the k-th."""
    vocab, num_read = logits.shape[1], 2 * k
    values, ids = logits.topk(min(num_read, vocab))
    while 0 < num_read < vocab and bool((values[:, k - 1] == values[:, -1]).any()):
        num_read *= 2
        values, ids = logits.topk(min(num_read, vocab))
    ids = ids.sort(-1).values
    order = logits.gather(-1, ids).sort(dim=-1, descending=True, stable=True).indices
    return ids.gather(-1, order[:, :k])


def accumulation_dtype(logits: Tensor) -> torch.dtype:
    """Returns the dtype of sums over these logits: float32, or float64 for float64."""
    return torch.promote_types(logits.dtype, torch.float32)


@op("espalier.kernels.sampling.logprobs", tensor="logits")
def write_logprobs(
    ring: Tensor, entry: Tensor, logits: Tensor, rows: Tensor, tokens: Tensor, length: Tensor, num_logprobs: Tensor
) -> None:
    """Write the target's log-probabilities of emitted tokens to one entry of the ring.

    Neither temperature nor masks are applied.  entry: [1] int64, the entry's index.  ring: [entries, >= B, >= W,
    row_words(n)] int64, rows in the layout of espalier/logprobs.py, contiguous for a request.  n: how many likeliest
    tokens a request may ask for.  logits: [B, D, V].  rows: [B, W] int64, the row of the logits from which each token
    was sampled.  tokens: [B, W] int64.  length: [B] int64, how many of a request's tokens were emitted.
    num_logprobs: [B] int64, the number of likeliest tokens that each request wants; below 0 for a request without
    log-probabilities.  Tokens of equal logits are in order of ids."""
    if not bool((num_logprobs >= 0).any()):
        return
    is_wanted = (torch.arange(tokens.shape[1], device=length.device) < length[:, None]) & (num_logprobs >= 0)[:, None]
    b, w = is_wanted.nonzero(as_tuple=True)
    if not len(b):
        return
    row_logits = logits[b, rows[b, w]].to(accumulation_dtype(logits))
    tokens = tokens[b, w][:, None]
    logp = torch.log_softmax(row_logits, -1)
    num_top = min(int(num_logprobs.max()), (ring.shape[3] - TOP) // 2, logits.shape[2])
    ids = _top_ids(row_logits, num_top)
    ranks = 1 + (row_logits > row_logits.gather(-1, tokens)).sum(-1)
    packed_rows = pack_logprob_rows(tokens[:, 0], logp.gather(-1, tokens)[:, 0], ranks, ids, logp.gather(-1, ids))
    ring[int(entry), b, w, : row_words(num_top)] = packed_rows
