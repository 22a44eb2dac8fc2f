"""A latent layer's projections before they meet: norm of the latent, rotation of the rope part, one row written.

K is the whole row, [normed latent, rotated rope part], and V its latent part (DeepSeek-AI 2024, arXiv 2405.04434, 2.1).
In plain torch on every device.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.layers.norm import rms_norm_reference
from espalier.kernels.layers.rope import rotate, write_rows


@dataclass(frozen=True)
class LatentRopeAndNorm:
    """cos, sin: [N, rotary] as in kernels/layers/rope.py:RopeAndNorm; they rotate the last `rotary` values of a row.

    norm: [size - rotary] weight of the latent's RMS norm, with its eps, or None.
    """

    cos: Tensor
    sin: Tensor
    norm: Tensor | None = None
    eps: float = 0.0


def rotate_and_store_latent(
    q: Tensor, latent: Tensor, rope_and_norm: LatentRopeAndNorm, rows: Tensor, plane: Tensor
) -> Tensor:
    """Rotate q [N, heads, size], and norm, rotate and write latent [N, 1, size] to rows [N] of plane [R, 1, size].

    Returns q.  Raises EspalierError where sizes do not agree.
    """
    rotary, size = rope_and_norm.cos.shape[1], plane.shape[2]
    if q.shape[2] != size or latent.shape[1:] != plane.shape[1:] or rotary % 2 or rotary > size:
        raise EspalierError(
            f"a latent layer needs queries and one latent of {size} values a row, an even number of them rotated, and "
            f"is given {list(q.shape)}, {list(latent.shape)} and {rotary}"
        )
    content, q_content = latent[..., : size - rotary], q[..., : size - rotary]
    if rope_and_norm.norm is not None:
        content = rms_norm_reference(content, rope_and_norm.norm, rope_and_norm.eps)
    write_rows((plane,), rows, (torch.cat((content, _turned(latent, rope_and_norm)), -1),))
    return torch.cat((q_content, _turned(q, rope_and_norm)), -1)


def _turned(x: Tensor, rope_and_norm: LatentRopeAndNorm) -> Tensor:
    """The rope part of x [N, heads, size], rotated."""
    return rotate(
        x[..., x.shape[-1] - rope_and_norm.cos.shape[1] :], rope_and_norm.cos[:, None], rope_and_norm.sin[:, None]
    )
