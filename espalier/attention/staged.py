"""The attention callback of a model's layers.

A model calls `attend(layer, projections)` once per layer and gets the heads' values [B, Q, heads, size].  The callback
normalizes and rotates the projections, writes the new rows to staging, and runs the attention plan of the pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from espalier.attention.base import Attention, Nodes
from espalier.cache.kv import PagedKV, StagedKV
from espalier.kernels.ops.rope import LatentRopeAndNorm, RopeAndNorm, head_product, rotate_and_store, write_latents
from espalier.kernels.state.kv_scales import KVScales


class Projections(Protocol):
    """The projections of one layer.  sink: as Attention.attend takes it."""

    @property
    def sink(self) -> Tensor | None: ...

    def write(self, rows: Tensor, planes: Sequence[Tensor], scales: KVScales | None = None) -> Tensor:
        """Normalize, rotate, and write the new rows to rows [B · Q] of the layer's staged planes.

        scales: of FP8 planes.  Returns q [B · Q, heads, k_size].
        """
        ...

    def values(self, attended: Tensor) -> Tensor:
        """The heads' values [B, Q, heads, size] from the attention's output [B, Q, heads, v_size]."""
        ...


@dataclass(frozen=True, slots=True)
class HeadProjections:
    """For a layer that keeps KVHeads.

    qkv: [B, Q, heads + 2 · kv_heads, size], in the order q, k, v; it may be overwritten.  On a GPU it can be float32
    partial sums [parts, B, Q, ...], which kernels/layers/rope.py adds.
    """

    qkv: Tensor
    rope_and_norm: RopeAndNorm
    sink: Tensor | None = None

    def write(self, rows: Tensor, planes: Sequence[Tensor], scales: KVScales | None = None) -> Tensor:
        k, v = planes
        return rotate_and_store(self.qkv.flatten(-4, -3), self.rope_and_norm, rows, k, v, scales)[0]

    def values(self, attended: Tensor) -> Tensor:
        return attended


@dataclass(frozen=True, slots=True)
class LatentProjections:
    """For a layer that keeps LatentKV, whose rows have a latent of `rank` values and a rotated part of `rope`.

    q: [B, Q, heads, nope + rope]; latent: [B, Q, 1, rank + rope].
    k_up: [heads, nope, rank]; v_up: [heads, value, rank].
    A head's key is k_up · latent, followed by the rotated part; its value is v_up · latent.  Neither is ever computed:
    queries are multiplied by k_up, and weighted sums of latents by v_up.
    """

    sink: ClassVar[None] = None

    q: Tensor
    latent: Tensor
    rope_and_norm: LatentRopeAndNorm
    k_up: Tensor
    v_up: Tensor

    def write(self, rows: Tensor, planes: Sequence[Tensor], scales: KVScales | None = None) -> Tensor:
        [plane] = planes
        raw = self.q.flatten(0, 1)
        # Both parts are written into one tensor: nothing is copied to join them.
        q = raw.new_empty(*raw.shape[:2], plane.shape[2])
        write_latents(raw, self.k_up, q, self.latent.flatten(0, 1), self.rope_and_norm, rows, plane, scales)
        return q

    def values(self, attended: Tensor) -> Tensor:
        flat = attended.flatten(0, 1)
        out = flat.new_empty(*flat.shape[:2], self.v_up.shape[1])
        head_product(flat, self.v_up.transpose(1, 2), out)
        return out.unflatten(0, attended.shape[:2])


@dataclass(frozen=True)
class Commit:
    """The commit of a pass over known tokens.

    page_rows: [B · Q], the page row of each row of the pass, 0 for padding; by_layer: commit each layer before it
    attends, because pieces read others through the pages, or draft modules fill other rows.  Otherwise one launch
    commits all layers after the pass.
    """

    pages: PagedKV
    page_rows: Tensor
    by_layer: bool = False


@dataclass(frozen=True)
class StagedPass:
    """The callback of one pass.  Each request has `width` staged rows; this pass writes rows at .. at+Q-1.

    commit: None where the caller commits some of the rows, or none.
    plan: makes the plan for other queries over the same rows; for chains, whose last layer may be called with `needed`.
    """

    attention: Attention
    staged: StagedKV
    width: int
    at: int = 0
    first_layer: int = 0
    commit: Commit | None = None
    plan: Callable[[Nodes], Attention] | None = None

    def __call__(self, layer: int, projections: Projections, needed: Tensor | None = None) -> Tensor:
        layer += self.first_layer
        batch, queries = self.attention.nodes.positions.shape
        scales = self.attention.pages.scales.get(layer)
        q = projections.write(self.rows, self.staged.layers[layer], scales)
        q = q.view(batch, queries, *q.shape[1:])
        if self.commit is not None and self.commit.by_layer:
            self.commit.pages.commit_layer(self.staged, layer, self.rows, self.commit.page_rows)
        planes = self.staged.rows_of(layer, batch, queries, self.width, self.at)
        k, v = self.attention.specs[layer].rows.read(planes)
        attention = self.attention
        if needed is not None:
            assert self.plan is not None, "only a chain computes single rows"
            attention = self.plan(attention.nodes.only(needed))
            q = q[torch.arange(batch, device=q.device), needed][:, None]
        return projections.values(attention.attend(layer, q, k, v, projections.sink))

    def end(self) -> None:
        """After the last layer: commit what no layer has."""
        if self.commit is not None and not self.commit.by_layer:
            self.commit.pages.commit(self.staged, self.rows, self.commit.page_rows)

    @cached_property
    def rows(self) -> Tensor:
        """[B · Q]: the staging rows of this pass, the same for all layers."""
        return self.staged.places(self.attention.nodes.positions, self.width, self.at)
