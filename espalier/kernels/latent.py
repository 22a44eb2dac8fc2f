"""A latent layer's projections before they meet: norm of the latent, rotation of the rope part, one row written.

K is the whole row, [normed latent, rotated rope part], and V its latent part (DeepSeek-AI 2024, arXiv 2405.04434, 2.1).
In plain torch on every device.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.norm import rms_norm_reference
from espalier.kernels.rope import rotate, write_rows


@dataclass(frozen=True)
class LatentTurn:
    """cos, sin: [N, rotary] as in kernels/rope.py:Turn; they rotate the last `rotary` values of a row.

    norm: [size - rotary] weight of the latent's RMS norm, with its eps, or None.
    """

    cos: Tensor
    sin: Tensor
    norm: Tensor | None = None
    eps: float = 0.0


def rotate_and_store_latent(q: Tensor, latent: Tensor, turn: LatentTurn, rows: Tensor, plane: Tensor) -> Tensor:
    """Rotate q [N, heads, size], and norm, rotate and write latent [N, 1, size] to rows [N] of plane [R, 1, size].

    Returns q.  Raises EspalierError where sizes do not agree.
    """
    rotary, size = turn.cos.shape[1], plane.shape[2]
    if q.shape[2] != size or latent.shape[1:] != plane.shape[1:] or rotary % 2 or rotary > size:
        raise EspalierError(
            f"a latent layer needs queries and one latent of {size} values a row, an even number of them rotated, and "
            f"is given {list(q.shape)}, {list(latent.shape)} and {rotary}"
        )
    content, q_content = latent[..., : size - rotary], q[..., : size - rotary]
    if turn.norm is not None:
        content = rms_norm_reference(content, turn.norm, turn.eps)
    write_rows((plane,), rows, (torch.cat((content, _turned(latent, turn)), -1),))
    return torch.cat((q_content, _turned(q, turn)), -1)


def _turned(x: Tensor, turn: LatentTurn) -> Tensor:
    """The rope part of x [N, heads, size], rotated."""
    return rotate(x[..., x.shape[-1] - turn.cos.shape[1] :], turn.cos[:, None], turn.sin[:, None])
