"""Multi-head latent attention (MLA) before attention: norm the latent, apply RoPE, and store one row of the KV cache.

K is the whole row, [normed latent, rotated RoPE part].  V is the latent part of the same row (DeepSeek-AI 2024,
arXiv:2405.04434, section 2.1).  Plain torch on every device.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.layers.norm import rms_norm_reference
from espalier.kernels.layers.rope import rotate, write_rows


@dataclass(frozen=True)
class LatentRopeAndNorm:
    """cos, sin: [N, rotary], as in kernels/layers/rope.py:RopeAndNorm.  They rotate the last `rotary` values of a row.

    norm: [size - rotary], weight of the latent's RMS norm, or None; eps: of the norm.
    interleaved: whether the input has the two values of a rotated pair side by side (2i and 2i + 1), as DeepSeek's
    weights do, and not half a row apart (i and i + rotary / 2).  The result always has them half a row apart.
    """

    cos: Tensor
    sin: Tensor
    norm: Tensor | None = None
    eps: float = 0.0
    interleaved: bool = False


def rotate_and_store_latent(
    q: Tensor, latent: Tensor, rope_and_norm: LatentRopeAndNorm, rows: Tensor, plane: Tensor
) -> Tensor:
    """Rotate q [N, heads, size].  Norm and rotate latent [N, 1, size], and store it in rows [N] of plane [R, 1, size].

    Returns the rotated q, a new tensor.  Raises EspalierError if sizes do not agree.
    """
    rotary, size = rope_and_norm.cos.shape[1], plane.shape[2]
    if q.shape[2] != size or latent.shape[1:] != plane.shape[1:] or rotary % 2 or rotary > size:
        raise EspalierError(
            f"a latent layer needs queries and one latent of {size} values per row, of which an even number is "
            f"rotated, but got {list(q.shape)}, {list(latent.shape)} and {rotary}"
        )
    latent_part, q_latent_part = latent[..., : size - rotary], q[..., : size - rotary]
    if rope_and_norm.norm is not None:
        latent_part = rms_norm_reference(latent_part, rope_and_norm.norm, rope_and_norm.eps)
    write_rows((plane,), rows, (torch.cat((latent_part, _rotated(latent, rope_and_norm)), -1),))
    return torch.cat((q_latent_part, _rotated(q, rope_and_norm)), -1)


def _rotated(x: Tensor, rope_and_norm: LatentRopeAndNorm) -> Tensor:
    """The RoPE part of x [N, heads, size], rotated: [N, heads, rotary]."""
    rope_part = x[..., x.shape[-1] - rope_and_norm.cos.shape[1] :]
    if rope_and_norm.interleaved:
        rope_part = rope_part.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return rotate(rope_part, rope_and_norm.cos[:, None], rope_and_norm.sin[:, None])
