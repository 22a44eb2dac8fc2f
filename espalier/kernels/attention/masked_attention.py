"""Grouped-query attention with its log-sum-exp in plain torch: the reference of every attention kernel."""

import torch
from torch import Tensor

from espalier.kernels.state.kv_scales import KVScales, times_k_scale, times_v_scale


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, scales: KVScales | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of q [B, Q, heads, k_size] over k, v [B, R, kv_heads, size] where mask [B, Q, R] is true.

    scales: of k and v in FP8.
    Returns out [B, Q, heads, v_size] in q's dtype and lse [B, Q, heads], natural log, in float32 (float64 for float64).
    A query that sees no rows gets zeros and lse -inf.
    """
    heads, kv_heads = q.shape[2], k.shape[2]
    exact = torch.promote_types(q.dtype, torch.float32)
    queries = q.to(exact) if scales is None else times_k_scale(q.to(exact), scales)
    grouped = queries.unflatten(2, (kv_heads, heads // kv_heads))
    scores = torch.einsum("bqhgd,brhd->bqhgr", grouped, k.to(exact)) * scale
    scores = scores.masked_fill(~mask[:, :, None, None, :], -torch.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0)[..., None])
    out = torch.einsum("bqhgr,brhd->bqhgd", weights, v.to(exact))
    out = out.flatten(2, 3) if scales is None else times_v_scale(out.flatten(2, 3), scales)
    return out.to(q.dtype), lse.flatten(2, 3)


def with_sink(out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """out [..., heads, v_size] after the sink of each head has joined the softmax: a logit [heads] without a value.

    lse [..., heads]: natural log, of the rows alone.  The rows keep the share exp(lse) / (exp(lse) + exp(sink)).
    """
    finite = lse.masked_fill(lse == -torch.inf, 0)
    return (out * torch.sigmoid(finite - sink.to(lse.dtype))[..., None]).to(out.dtype)
