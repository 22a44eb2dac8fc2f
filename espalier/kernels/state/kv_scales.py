"""K and V in FP8 (E4M3): a layer's scales, and the rounding.

Only the kernels that write staged rows round them (kernels/layers/rope.py, latent.py).  A commit copies bytes from
staging to pages, and attention converts the FP8 values.  K's scale is multiplied into the softmax scale, and V's
scale into the result, so attention multiplies no row by a scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.kernels.layers.quantised import FP8, FP8_MAX
from espalier.kernels.runtime.launch import require


@dataclass(frozen=True)
class KVScales:
    """The scales of a layer's FP8 rows.  k, v: [kv_heads] float32; dtype: the model's dtype.

    A stored value times the scale of its head is K or V.  Scales are constants of a layer.  If scales were computed
    from a batch or a request, a row would depend on more than the tokens before it, and a hit in the prefix cache would
    change the output.  A latent row is both K and V, so its two scales are the same tensor.
    """

    k: Tensor
    v: Tensor
    dtype: torch.dtype

    @classmethod
    def ones(cls, kv_heads: int, dtype: torch.dtype, device: torch.device) -> KVScales:
        """Returns scales 1 for all heads.  dtype: the model's dtype."""
        one = torch.ones(kv_heads, device=device)
        return cls(one, one, dtype)


def require_kv_rows(
    name: str, rows: Tensor, shape: tuple[int, ...], scales: KVScales | None, same_device: Tensor
) -> None:
    """Check rows [.., kv_heads, size] on the host.  With scales, the rows must be FP8; else they must have the dtype of
    `same_device`.
    name: the name of the rows in errors.  Raises EspalierError."""
    require(name, rows, shape, same_device.dtype if scales is None else FP8, same_device)
    if scales is not None:
        require(f"{name}: scales of k", scales.k, (shape[-2],), torch.float32, same_device)
        require(f"{name}: scales of v", scales.v, (shape[-2],), torch.float32, same_device)


def times_k_scale(q: Tensor, scales: KVScales) -> Tensor:
    """Multiply q [.., heads, size] by K's scale, for products with stored keys."""
    return q * _per_query_head(scales.k, q)


def times_v_scale(out: Tensor, scales: KVScales) -> Tensor:
    """Multiply out [.., heads, size], a weighted sum of stored values, by V's scale."""
    return out * _per_query_head(scales.v, out)


def _per_query_head(scale: Tensor, values: Tensor) -> Tensor:
    """Returns [heads, 1]: the scale of each query head."""
    return scale.to(values.dtype).repeat_interleave(values.shape[-2] // len(scale))[:, None]


def round_to_fp8(values: Tensor, scale: Tensor) -> Tensor:
    """Returns values [N, heads, size] / scale [heads] in FP8, rounded to nearest, ties to even.
    Quotients beyond ±448 become ±448; infinite quotients become NaN."""
    exact = torch.promote_types(values.dtype, torch.float32)
    quotient = values.to(exact) / scale.to(exact)[:, None]
    return torch.where(quotient.isfinite(), quotient.clamp(-FP8_MAX, FP8_MAX), torch.nan).to(FP8)
