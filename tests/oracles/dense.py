"""Attention over one whole sequence at once, in the plainest words: the oracle for whatever keeps K/V in pieces."""

import torch
from torch import Tensor

from espalier.cache.geometry import LayerGeometry


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

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.keys[layer], self.values[layer] = k, v
        layout = self.geometry[layer]
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
