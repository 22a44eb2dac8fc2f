"""K and V in FP8 (E4M3): a layer's scales, and the rounding.

Only the kernels that write staging round (kernels/layers/rope.py, latent.py).  Staging and pages hold the same bytes: a
commit copies them, and attention converts them.  K's scale is multiplied into the softmax scale and V's into the
result, so attention multiplies no row by a scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.kernels.layers.quantised import FP8, FP8_MAX
from espalier.kernels.runtime.launch import require


@dataclass(frozen=True)
class KVScales:
    """k, v: [kv_heads] float32.  A stored value times the scale of its head is K or V.  dtype: the model's.

    Scales are constants of a layer.  Scales computed from a batch or from a request's tokens would make a row depend on
    more than the tokens before it: a prefix hit or a tree would change the output.  A latent row is both K and V, so
    its two scales are the same tensor.
    """

    k: Tensor
    v: Tensor
    dtype: torch.dtype

    @classmethod
    def ones(cls, kv_heads: int, dtype: torch.dtype, device: torch.device) -> KVScales:
        one = torch.ones(kv_heads, device=device)
        return cls(one, one, dtype)


def require_rows(name: str, rows: Tensor, shape: tuple[int, ...], scales: KVScales | None, like: Tensor) -> None:
    """Check on the host rows [.., kv_heads, size] of staging or pages: FP8 with scales, else of the dtype of `like`.

    name: of the rows in the error text.  Raises EspalierError.
    """
    require(name, rows, shape, like.dtype if scales is None else FP8, like)
    if scales is not None:
        require(f"{name}: scales of k", scales.k, (shape[-2],), torch.float32, like)
        require(f"{name}: scales of v", scales.v, (shape[-2],), torch.float32, like)


def times_k_scale(q: Tensor, scales: KVScales) -> Tensor:
    """q [.., heads, size] for products with stored keys."""
    return q * _of_queries(scales.k, q)


def times_v_scale(out: Tensor, scales: KVScales) -> Tensor:
    """The weighted sum of V, from that of the stored values, out [.., heads, size]."""
    return out * _of_queries(scales.v, out)


def _of_queries(scale: Tensor, values: Tensor) -> Tensor:
    """The scale of each query head: [heads, 1]."""
    return scale.to(values.dtype).repeat_interleave(values.shape[-2] // len(scale))[:, None]


def rounded(values: Tensor, scale: Tensor) -> Tensor:
    """values [N, heads, size] divided by the scale [heads] of their head, in FP8, rounded to nearest, ties to even.

    Quotients past ±448 become ±448; infinite ones become NaN.
    """
    exact = torch.promote_types(values.dtype, torch.float32)
    quotient = values.to(exact) / scale.to(exact)[:, None]
    return torch.where(quotient.isfinite(), quotient.clamp(-FP8_MAX, FP8_MAX), torch.nan).to(FP8)
