"""The indexer of a latent layer: index queries, their weights and index keys, by which queries choose rows.

The weights of heads are computed in float32, whatever the model's dtype, as the publishers' code does: they decide
which rows are read.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from espalier.kernels.layers.quantised import InputScales, Rows
from espalier.kernels.layers.scaled_product import kernel_rows
from espalier.kernels.ops.linear import sum_parts
from espalier.kernels.ops.norm import rounds_norm
from espalier.kernels.ops.rope import Rotation
from espalier.kernels.ops.selection import IndexNorm, IndexRows
from espalier.kernels.runtime.launch import chip
from espalier.models.layers.experts import router_logits
from espalier.models.layers.linear import Linear
from espalier.models.layers.norm import AnyNorm, Delta

# eps of the norm of index keys, which the publishers' code fixes.
INDEX_EPS = 1e-6


class IndexedRows(NamedTuple):
    """x: [N, hidden], normed rows; of_products: the same rows in the form that the layer's projections take."""

    x: Tensor
    of_products: Rows


def read_indexed(
    down: Linear, indexer: "Indexer", norm: AnyNorm, delta: Delta, x: Tensor
) -> tuple[Tensor, IndexedRows]:
    """(x + delta, its norm for `down` and for an indexer)."""
    rounding = rounding_of_both(down.rounding, indexer.k.rounding) if x.is_cuda else None
    if rounding is not None and (len(x) > kernel_rows(rounding, chip(x)) or not rounds_norm(x.shape[1], rounding)):
        rounding = None
    total, normed, rounded = norm.both_after(delta, x, rounding)
    return total, IndexedRows(normed, rounded)


def rounding_of_both(one: InputScales | None, other: InputScales | None) -> InputScales | None:
    """How a norm may round the inputs of two products at once; None where they take them differently."""
    if one is None or other is None or one.static is not None or other.static is not None or one.group != other.group:
        return None
    return one


@dataclass(frozen=True)
class Indexer:
    """q: the queries' latent -> [heads · size]; k: hidden state -> [size]; norm: of k.

    weights: [heads, hidden].  interleaved: see IndexRows.
    """

    q: Linear
    k: Linear
    norm: IndexNorm
    weights: Tensor
    interleaved: bool

    def __call__(self, rows: IndexedRows, q_latent: Tensor, rotation: Rotation) -> IndexRows:
        """The indexer's values for new rows.  q_latent: [N, q_rank]."""
        heads, size = len(self.weights), self.k.shape[0]
        parts = router_logits(rows.x, self.weights)
        weights = sum_parts(parts, parts.dtype) * (heads * size) ** -0.5
        q = self.q(q_latent).unflatten(1, (heads, size))
        return IndexRows(q, self.k(rows.of_products), weights, self.norm, rotation, self.interleaved)
