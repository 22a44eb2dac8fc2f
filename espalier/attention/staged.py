"""How a model's layer meets the cache: stage its new rows, commit them if they are decided, attend.

A model calls `attend(layer, q, k, v)` and knows no more.
"""

from dataclasses import dataclass

from torch import Tensor

from espalier.attention.base import Attention
from espalier.cache.kv import Pages, Staging


@dataclass(frozen=True)
class StagedAttention:
    """One pass of nodes.  Its layers may stage their rows beside those of earlier passes (staging, width, at), or, for
    a chain that was decided before it runs, commit them at once (pages, rows [B, Q])."""

    attention: Attention
    layer_offset: int = 0
    staging: Staging | None = None
    width: int = 0
    at: int = 0
    pages: Pages | None = None
    rows: Tensor | None = None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, Q, heads, k_size], k and v [B, Q, kv_heads, size], rotated; returns [B, Q, heads, v_size]."""
        layer += self.layer_offset
        if self.pages is not None and self.rows is not None:
            self.pages.write(layer, k, v, self.rows)
        if self.staging is not None:
            k, v = self.staging.put(layer, k, v, self.width, self.at)
        return self.attention.attend(layer, q, k, v)
