"""How a model's layer meets the cache: what becomes of its new rows, and attention over them.

A model calls `attend(layer, qkv, turn)` with its projections [B, Q, heads + 2 · kv_heads, size], or parts of them
(models/base.py), and gets [B, Q, heads, size]; it knows no more.
"""

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from espalier.attention.base import Attention
from espalier.cache.kv import Staging
from espalier.kernels.rope import Turn, rotate_and_store


@dataclass(frozen=True)
class Undecided:
    """Nodes of a tree: their rows go to staging, as rows at .. at+Q of each request's `width`, beside earlier ones."""

    attention: Attention
    staging: Staging
    width: int
    at: int = 0
    first_layer: int = 0

    def __call__(self, layer: int, qkv: Tensor, turn: Turn) -> Tensor:
        layer += self.first_layer
        batch, queries = qkv.shape[-4:-2]
        buffers = self.staging.layers[layer]
        q, _, _ = rotate_and_store(qkv.flatten(-4, -3), turn, self.rows, *buffers, dummy=False)
        k, v = self.staging.rows_of(layer, batch, queries, self.width, self.at)
        return self.attention.attend(layer, q.unflatten(0, (batch, queries)), k, v)

    @cached_property
    def rows(self) -> Tensor:
        """Where the rows of the pass stand in staging, the same for all layers."""
        return self.staging.places(self.attention.nodes.positions, self.width, self.at)


@dataclass(frozen=True)
class Decided:
    """A chain that was decided before it ran: its rows are committed to page rows [B, Q], layer by layer."""

    attention: Attention
    rows: Tensor
    first_layer: int = 0

    def __call__(self, layer: int, qkv: Tensor, turn: Turn) -> Tensor:
        layer += self.first_layer
        shape = (qkv.shape[-4], qkv.shape[-3])
        buffers = self.attention.pages.layers[layer]
        turned = rotate_and_store(qkv.flatten(-4, -3), turn, self.rows.flatten(), *buffers, dummy=True)
        return self.attention.attend(layer, *(heads.unflatten(0, shape) for heads in turned))
