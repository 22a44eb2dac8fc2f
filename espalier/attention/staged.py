"""The attention callback of a model's layers.

A model calls `attend(layer, projections)` once per layer and gets [B, Q, heads, v_size].  The callback normalizes and
rotates the projections, writes the new rows to staging, and runs the attention plan of the pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from espalier.attention.base import Attention
from espalier.attention.computed_keys import LatentUp
from espalier.cache.kv import PagedKV, StagedKV
from espalier.kernels.layers.latent import LatentRopeAndNorm, rotate_and_store_latent
from espalier.kernels.layers.rope import RopeAndNorm, rotate_and_store


class Projections(Protocol):
    """The projections of one layer."""

    def write(self, attention: Attention, layer: int, rows: Tensor, planes: Sequence[Tensor]) -> Tensor:
        """Normalize, rotate, and write the new rows to rows [B · Q] of the layer's staged planes.

        Returns q [B · Q, heads, size], for `attend`.
        """
        ...

    def attend(self, attention: Attention, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q: [B, Q, heads, size]; k, v: the staged rows.  Returns [B, Q, heads, size of a value]."""
        ...


@dataclass(frozen=True, slots=True)
class HeadProjections:
    """For a layer that keeps KVHeads.

    qkv: [B, Q, heads + 2 · kv_heads, size], in the order q, k, v; it may be overwritten.  On a GPU it can be float32
    partial sums [parts, B, Q, ...], which kernels/layers/rope.py adds.
    """

    qkv: Tensor
    rope_and_norm: RopeAndNorm

    def write(self, attention: Attention, layer: int, rows: Tensor, planes: Sequence[Tensor]) -> Tensor:
        k, v = planes
        return rotate_and_store(self.qkv.flatten(-4, -3), self.rope_and_norm, rows, k, v)[0]

    def attend(self, attention: Attention, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention.attend(layer, q, k, v)


@dataclass(frozen=True, slots=True)
class LatentProjections:
    """For a layer that keeps LatentKV.

    q: [B, Q, heads, nope + rope], the last part to be rotated; it may be overwritten.  latent: [B, Q, 1, size].
    up: the weights that make a head's keys and values from a latent.  Queries are multiplied by the keys' weights, so
    that they are compared with the latent itself, or keys and values are computed: Attention.computes_keys decides.
    """

    q: Tensor
    latent: Tensor
    rope_and_norm: LatentRopeAndNorm
    up: LatentUp

    def write(self, attention: Attention, layer: int, rows: Tensor, planes: Sequence[Tensor]) -> Tensor:
        [plane] = planes
        raw, nope = self.q.flatten(0, 1), self.up.nope_size
        q = raw
        if not attention.computes_keys(layer, self.up):
            q = raw.new_empty(*raw.shape[:2], plane.shape[2])
            _by_head(raw[..., :nope], self.up.k, q[..., : self.up.k.shape[2]])
        rotate_and_store_latent(raw[..., nope:], q, self.latent.flatten(0, 1), self.rope_and_norm, rows, plane)
        return q

    def attend(self, attention: Attention, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if attention.computes_keys(layer, self.up):
            return attention.attend_with_computed_keys(layer, q, k, self.up)
        weighted = attention.attend(layer, q, k, v).flatten(0, 1)
        out = weighted.new_empty(*weighted.shape[:2], self.up.v.shape[1])
        return _by_head(weighted, self.up.v.transpose(1, 2), out).unflatten(0, q.shape[:2])


def _by_head(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """Write x [N, heads, in] times each head's weight [heads, in, out] to `out` [N, heads, out]."""
    torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))
    return out


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
    """The callback of one pass.  Each request has `width` staged rows; this pass writes rows at .. at+Q of them.

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
        q = projections.write(self.attention, layer, self.rows, self.staged.layers[layer])
        if self.commit is not None and self.commit.by_layer:
            self.commit.pages.commit_layer(self.staged, layer, self.rows, self.commit.rows)
        planes = self.staged.rows_of(layer, batch, queries, self.width, self.at)
        k, v = self.attention.specs[layer].rows.read(planes)
        return projections.attend(self.attention, layer, q.unflatten(0, (batch, queries)), k, v)

    def end(self) -> None:
        """After the last layer: commit what no layer has."""
        if self.commit is not None and not self.commit.by_layer:
            self.commit.pages.commit(self.staged, self.rows, self.commit.rows)

    @cached_property
    def rows(self) -> Tensor:
        """[B · Q]: the staging rows of this pass, the same for all layers."""
        return self.staged.places(self.attention.nodes.positions, self.width, self.at)
