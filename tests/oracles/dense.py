"""Attention over one whole sequence at once, in the plainest words: the oracle for whatever keeps K/V in pieces."""

import torch
from torch import Tensor

from espalier.cache.geometry import LayerGeometry
from espalier.kernels.rope import Turn


def heads_of(qkv: Tensor, turn: Turn, g: LayerGeometry) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [B, Q, heads, size] of a layer's projections, in their dtype, q and k normed and rotated."""
    q, k, v = qkv.split((g.heads, g.kv_heads, g.kv_heads), 2)
    cos, sin = (table.view(*qkv.shape[:2], 1, qkv.shape[3]) for table in (turn.cos, turn.sin))

    def turned(x: Tensor, norm: Tensor | None) -> Tensor:
        if norm is not None:
            x = x / (x.pow(2).mean(-1, keepdim=True) + turn.eps).sqrt() * norm
        return (x * cos + x.roll(x.shape[-1] // 2, -1) * sin).to(qkv.dtype)

    return turned(q, turn.q_norm), turned(k, turn.k_norm), v


class DenseAttend:
    """An `attend` whose tokens see each other as a causal sequence, within each layer's window.

    geometry: one entry a layer.  mask: bool [B, Q, Q], true where row may see column, instead of the causal one (the
    window then applies to the distance between columns all the same, unless apply_window is off). `keys` and `values`
    keep what each layer was given: [B, Q, kv_heads, size].
    """

    def __init__(
        self, geometry: tuple[LayerGeometry, ...], mask: Tensor | None = None, apply_window: bool = True
    ) -> None:
        self.geometry = geometry
        self.mask = mask
        self.apply_window = apply_window
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def __call__(self, layer: int, qkv: Tensor, turn: Turn) -> Tensor:
        layout = self.geometry[layer]
        q, k, v = heads_of(qkv, turn, layout)
        self.keys[layer], self.values[layer] = k, v
        group = layout.heads // layout.kv_heads
        k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * layout.softmax_scale
        scores = scores.masked_fill(~self._visible(q, layout)[:, None], float("-inf"))
        return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)

    def _visible(self, q: Tensor, layout: LayerGeometry) -> Tensor:
        batch, width = q.shape[:2]
        index = torch.arange(width, device=q.device)
        distance = index[:, None] - index
        seen = (distance >= 0).expand(batch, width, width) if self.mask is None else self.mask
        if layout.window is not None and self.apply_window:
            seen = seen & (distance < layout.window)
        return seen
