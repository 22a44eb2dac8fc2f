"""What a model's layer is given: it projects, and hands its projections over; they are normed, rotated and written to
staging, and attended from there.

A model calls `attend(layer, projections)` once a layer and gets [B, Q, heads, v_size]; it knows no more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from torch import Tensor

from espalier.attention.base import Attention
from espalier.cache.kv import PagedKV, StagedKV
from espalier.kernels.layers.latent import LatentRopeAndNorm, rotate_and_store_latent
from espalier.kernels.layers.rope import RopeAndNorm, rotate_and_store


class Projections(Protocol):
    """Of one layer, in the form of what it keeps."""

    def write(self, rows: Tensor, planes: Sequence[Tensor]) -> Tensor:
        """Norm and rotate; the new rows go to rows [B · Q] of the layer's staged planes.  Returns q [B · Q, heads,
        k_size]."""
        ...


@dataclass(frozen=True, slots=True)
class HeadProjections:
    """Of a layer that keeps KVHeads.  qkv: [B, Q, heads + 2 · kv_heads, size], q before k before v, or on a GPU [parts,
    B, Q, ...] float32, still to be summed (kernels/layers/rope.py).  It may be overwritten."""

    qkv: Tensor
    rope_and_norm: RopeAndNorm

    def write(self, rows: Tensor, planes: Sequence[Tensor]) -> Tensor:
        k, v = planes
        return rotate_and_store(self.qkv.flatten(-4, -3), self.rope_and_norm, rows, k, v)[0]


@dataclass(frozen=True, slots=True)
class LatentProjections:
    """Of a layer that keeps LatentKV.  q: [B, Q, heads, size], in the latent's space; latent: [B, Q, 1, size]."""

    q: Tensor
    latent: Tensor
    rope_and_norm: LatentRopeAndNorm

    def write(self, rows: Tensor, planes: Sequence[Tensor]) -> Tensor:
        [plane] = planes
        return rotate_and_store_latent(self.q.flatten(0, 1), self.latent.flatten(0, 1), self.rope_and_norm, rows, plane)


@dataclass(frozen=True)
class Commit:
    """A pass whose rows are all kept.

    rows: [B · Q], the row of the pages for each row of the pass; by_layer: commit each layer before it attends, as rows
    of the pass read others through the pages.  Otherwise one launch commits all layers after the pass.
    """

    pages: PagedKV
    rows: Tensor
    by_layer: bool = False


@dataclass(frozen=True)
class StagedPass:
    """A pass over staged rows: its own are rows at .. at+Q of each request's `width`, beside earlier ones.

    commit: None where the caller commits some of the rows, or none.
    """

    attention: Attention
    staged: StagedKV
    width: int
    at: int = 0
    first_layer: int = 0
    commit: Commit | None = None

    def __call__(self, layer: int, projections: Projections) -> Tensor:
        layer += self.first_layer
        batch, queries = self.attention.nodes.positions.shape
        q = projections.write(self.rows, self.staged.layers[layer]).unflatten(0, (batch, queries))
        if self.commit is not None and self.commit.by_layer:
            self.commit.pages.commit_layer(self.staged, layer, self.rows, self.commit.rows)
        planes = self.staged.rows_of(layer, batch, queries, self.width, self.at)
        return self.attention.attend(layer, q, *self.attention.specs[layer].rows.read(planes))

    def end(self) -> None:
        """After the last layer: commit what no layer has."""
        if self.commit is not None and not self.commit.by_layer:
            self.commit.pages.commit(self.staged, self.rows, self.commit.rows)

    @cached_property
    def rows(self) -> Tensor:
        """[B · Q]: where the pass's rows stand in staging, the same for all layers."""
        return self.staged.places(self.attention.nodes.positions, self.width, self.at)
