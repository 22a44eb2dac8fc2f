"""Attention over one whole sequence at once, in the plainest words: the oracle for whatever keeps K/V in pieces."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.attention.staged import HeadProjections, LatentProjections, Projections
from espalier.cache.layer_spec import KVHeads, LatentKV, LayerSpec
from espalier.kernels.ops.rope import RopeAndNorm
from tests.oracles.fp8_cache import LayerScales


@dataclass(frozen=True)
class Attended:
    """What a layer's projections come to.  q [B, Q, heads, k_size], k, v [B, n, kv_heads, size]; kept: what its planes
    should hold of the new rows, in their order."""

    q: Tensor
    k: Tensor
    v: Tensor
    kept: tuple[Tensor, ...]


def attended(
    projections: Projections, g: LayerSpec, scales: LayerScales | None = None, past: Sequence[Tensor] | None = None
) -> Attended:
    """k and v are those of the new rows behind `past`, what the planes hold of [n, kv_heads, size] earlier rows.

    scales: of planes in FP8.
    """
    if isinstance(projections, LatentProjections):
        assert isinstance(g.keeps, LatentKV)
        q, latent = latent_of(projections)
        kept: tuple[Tensor, ...] = (latent,)
    else:
        assert isinstance(projections, HeadProjections)
        q, *heads = heads_of(projections.qkv, projections.rope_and_norm, g)
        kept = tuple(heads)
    held = kept = kept if scales is None else scales.stored(kept)
    if past is not None:
        held = tuple(
            torch.cat((before.expand(len(new), *before.shape), new), 1) for before, new in zip(past, kept, strict=True)
        )
    meant = held if scales is None else scales.meant(held)
    k, v = keys_and_values(projections, meant[0]) if isinstance(projections, LatentProjections) else meant
    return Attended(q, k, v, kept)


def keys_and_values(projections: LatentProjections, latent: Tensor) -> tuple[Tensor, Tensor]:
    """Every head's k and v [B, n, heads, size] of latent rows [B, n, 1, size]."""
    heads, _, rank = projections.k_up.shape
    content, rope = latent[..., 0, :rank], latent[..., rank:].expand(-1, -1, heads, -1)
    k, v = (torch.einsum("hnr,bkr->bkhn", weight, content) for weight in (projections.k_up, projections.v_up))
    return torch.cat((k, rope), 3), v


def latent_of(projections: LatentProjections) -> tuple[Tensor, Tensor]:
    """q [B, Q, heads, nope + rope] and the latent row [B, Q, 1, size]: its first part normed, its last rotated, as in
    q."""
    turn, latent = projections.rope_and_norm, projections.latent
    rotary = turn.cos.shape[1]
    cos, sin = (table.view(*latent.shape[:2], 1, rotary) for table in (turn.cos, turn.sin))

    def turned(x: Tensor) -> Tensor:
        content, rope = x.split((x.shape[3] - rotary, rotary), 3)
        if turn.interleaved:
            rope = torch.cat((rope[..., 0::2], rope[..., 1::2]), 3)
        return torch.cat((content, rope * cos + rope.roll(rotary // 2, -1) * sin), 3)

    if turn.norm is not None:
        content, rope = latent.split((latent.shape[3] - rotary, rotary), 3)
        content = content / (content.pow(2).mean(-1, keepdim=True) + turn.eps).sqrt() * turn.norm
        latent = torch.cat((content, rope), 3)
    return turned(projections.q), turned(latent)


def heads_of(qkv: Tensor, turn: RopeAndNorm, g: LayerSpec) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [B, Q, heads, size] of a layer's projections, in their dtype, q and k normed, and their first part
    rotated."""
    assert isinstance(g.keeps, KVHeads)
    q, k, v = qkv.split((g.heads, g.keeps.kv_heads, g.keeps.kv_heads), 2)
    rotary = turn.cos.shape[1]
    cos, sin = (table.view(*qkv.shape[:2], 1, rotary) for table in (turn.cos, turn.sin))

    def turned(x: Tensor, norm: Tensor | None) -> Tensor:
        if norm is not None:
            x = x / (x.pow(2).mean(-1, keepdim=True) + turn.eps).sqrt() * norm
        first, rest = x[..., :rotary], x[..., rotary:]
        return torch.cat((first * cos + first.roll(rotary // 2, -1) * sin, rest), 3).to(qkv.dtype)

    return turned(q, turn.q_norm), turned(k, turn.k_norm), v


def softmax_of(scores: Tensor, sink: Tensor | None) -> Tensor:
    """Over scores [B, heads, Q, rows] and, if there is one, the head's sink [heads], which has no value."""
    if sink is None:
        return scores.softmax(-1)
    column = sink[:, None, None].expand(*scores.shape[:3], 1)
    return torch.cat((scores, column), -1).softmax(-1)[..., :-1]


class DenseAttend:
    """An `attend` whose tokens see each other as a causal sequence, within each layer's window.

    layer_specs: one entry a layer.  mask: bool [B, Q, Q], true where row may see column, instead of the causal one (the
    window then applies to the distance between columns all the same, unless apply_window is off). `kept` holds what
    each layer's planes should: [B, Q, heads, size].  scales: of each layer, in FP8.
    """

    def __init__(
        self,
        layer_specs: tuple[LayerSpec, ...],
        mask: Tensor | None = None,
        apply_window: bool = True,
        scales: Sequence[LayerScales] | None = None,
    ) -> None:
        self.layer_specs = layer_specs
        self.mask = mask
        self.apply_window = apply_window
        self.scales = scales
        self.kept: dict[int, tuple[Tensor, ...]] = {}

    def __call__(self, layer: int, projections: Projections, needed: Tensor | None = None) -> Tensor:
        layout = self.layer_specs[layer]
        own = attended(projections, layout, None if self.scales is None else self.scales[layer])
        q, k, v, self.kept[layer] = own.q, own.k, own.v, own.kept
        group = layout.heads // k.shape[2]
        k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * layout.softmax_scale
        scores = scores.masked_fill(~self._visible(q, layout)[:, None], float("-inf"))
        values = torch.einsum("bhqk,bkhd->bqhd", softmax_of(scores, projections.sink), v)
        return values if needed is None else values[torch.arange(len(values)), needed][:, None]

    def _visible(self, q: Tensor, layout: LayerSpec) -> Tensor:
        batch, width = q.shape[:2]
        index = torch.arange(width, device=q.device)
        distance = index[:, None] - index
        seen = (distance >= 0).expand(batch, width, width) if self.mask is None else self.mask
        if layout.window is not None and self.apply_window:
            seen = seen & (distance < layout.window)
        return seen
