"""Attention over two disjoint sets of keys, made one by their log-sum-exps (Ye et al. 2025, FlashInfer, 2.2)."""

import torch
from torch import Tensor


def merge(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], sink: Tensor | None = None) -> Tensor:
    """out [..., heads, v_size] of the union of the keys of a and b, each (out, lse [..., heads] natural log).

    sink: [heads], an extra logit a head that takes weight and gives no value.  Either lse may be -inf; both with no
    sink give zeros.
    """
    (out_a, lse_a), (out_b, lse_b) = a, b
    lse = torch.logaddexp(lse_a, lse_b)
    if sink is not None:
        lse = torch.logaddexp(lse, sink.to(lse.dtype))
    finite = lse.masked_fill(lse == -torch.inf, 0)
    weighted = out_a * torch.exp(lse_a - finite)[..., None] + out_b * torch.exp(lse_b - finite)[..., None]
    return weighted.to(out_a.dtype)
