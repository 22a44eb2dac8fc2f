"""How a model's layer meets the cache: what becomes of its new rows, and attention over them.

A model calls `attend(layer, q, k, v)` with q [B, Q, heads, k_size], k and v [B, Q, kv_heads, size], rotated, and gets
[B, Q, heads, v_size]; it knows no more.
"""

from dataclasses import dataclass

from torch import Tensor

from espalier.attention.base import Attention
from espalier.cache.kv import Staging


@dataclass(frozen=True)
class Undecided:
    """Nodes of a tree: their rows go to staging, as rows at .. at+Q of each request's `width`, beside earlier ones."""

    attention: Attention
    staging: Staging
    width: int
    at: int = 0
    first_layer: int = 0

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        layer += self.first_layer
        return self.attention.attend(layer, q, *self.staging.put(layer, k, v, self.width, self.at))


@dataclass(frozen=True)
class Decided:
    """A chain that was decided before it ran: its rows are committed to page rows [B, Q], layer by layer."""

    attention: Attention
    rows: Tensor
    first_layer: int = 0

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        layer += self.first_layer
        self.attention.pages.write(layer, k, v, self.rows)
        return self.attention.attend(layer, q, k, v)
