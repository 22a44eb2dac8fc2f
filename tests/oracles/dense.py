"""Attention over one whole sequence at once, in the plainest words: the oracle for whatever keeps K/V in pieces."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from espalier.attention import Pass
from espalier.cache.layer_spec import KVHeads, LayerSpec, RecurrentState, RotatedHeads
from espalier.kernels.ops.rope import HeadNorms, LatentFormat, Rotation
from espalier.kernels.ops.selection import IndexerInputs
from espalier.kernels.ops.states import GateInputs
from tests.oracles.fp8_cache import LayerScales

Planes = tuple[Tensor, ...]


class DensePass(Pass):
    """A pass whose rows [B, Q] see each other as a causal sequence, within each layer's window.

    planes: by layer, what its planes should hold of the new rows: [B, Q, heads, size].  Of a layer that keeps a state:
    the state behind each row [B, Q, heads, k_size, v_size], if it has heads, and the inputs [B, Q, channels].
    positions: 0, 1, ... by default.
    mask: bool [B, Q, Q], true where row may see column, instead of the causal one (the window then applies to the
    distance between columns all the same, unless apply_window is off).
    scales: of each layer, in FP8.
    past: by layer, what its planes hold of earlier rows, [n, heads, size], which every row sees that the window allows.
    """

    def __init__(
        self,
        tokens: Tensor,
        layer_specs: Sequence[LayerSpec],
        positions: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        apply_window: bool = True,
        scales: Sequence[LayerScales] | None = None,
        past: Sequence[Sequence[Tensor]] | None = None,
        needed: Tensor | None = None,
    ) -> None:
        self.tokens = tokens
        self.positions = torch.arange(tokens.shape[1]).expand_as(tokens) if positions is None else positions
        self.layers = range(len(layer_specs))
        self.needed_row = needed
        self.specs, self.mask, self.apply_window, self.scales, self.past = layer_specs, mask, apply_window, scales, past
        self.planes: dict[int, Planes] = {}
        self.k_up: dict[int, Tensor] = {}
        self.chosen: Tensor | None = None
        self.values: dict[int, Tensor | None] = {}
        self._values_at_positions = {}

    def write(self, layer: int, *values: Any, index: IndexerInputs | None = None) -> Tensor:
        spec = self.specs[layer]
        if isinstance(spec.cache_spec, RecurrentState):
            inputs, gates, conv, *columns = values
            inputs = columns[0].in_channel_order(inputs) if columns else inputs
            gates = gates.compute_gates(inputs.dtype) if isinstance(gates, GateInputs) else gates
            shape = self.tokens.shape
            of_rows = None if gates is None else gates.unflatten(0, shape)
            out, self.values[layer], self.planes[layer] = states_of(
                spec.cache_spec, inputs.unflatten(0, shape), of_rows, *conv
            )
            return out if spec.cache_spec.heads else self._computed(layer, out)
        if spec.shares_with is not None:
            ready = isinstance(values[0], RotatedHeads)
            q = self._by_request(values[0].q) if ready else queries_of(self._by_request(values[0]), *values[1:])
            self.planes[layer] = self.planes[spec.shares_with]
            return q if self.kept_rows(layer) is None else q[torch.arange(len(q)), self.needed_row][:, None]
        if isinstance(values[0], RotatedHeads):
            q, *made = map(self._by_request, values[0])
        elif isinstance(spec.cache_spec, KVHeads):
            q, *made = heads_of(self._by_request(values[0]), spec, *values[1:])
        else:
            q, latent, *rest = values
            *turned, self.k_up[layer] = rest
            q, *made = latent_of(self._by_request(q), self._by_request(latent), *turned)
        self.planes[layer] = tuple(made) if self.scales is None else self.scales[layer].stored(tuple(made))
        if index is not None:
            self._choose(layer, index)
        return self._computed(layer, q)

    def _choose(self, layer: int, index: IndexerInputs) -> None:
        """Keep the index keys, and the rows that each row attends to: in order of (score, position), the last topk."""
        q, k, weights = (
            values.unflatten(0, self.tokens.shape) for values in (index.q, index.k[:, None], index.weights)
        )
        mean, variance = k.mean(-1, keepdim=True), k.var(-1, keepdim=True, unbiased=False)
        k = (k - mean) / (variance + index.norm.eps).sqrt() * index.norm.weight + index.norm.bias
        q, k = (index_turned(x, index.rotation, index.interleaved) for x in (q, k))
        self.planes[layer] = (*self.planes[layer], k)
        if self.past is not None:
            k = torch.cat((self.past[layer][-1].expand(len(k), *self.past[layer][-1].shape), k), 1)
        scores = (torch.einsum("bqhd,bkd->bqkh", q, k[:, :, 0]).clamp(min=0) * weights[:, :, None]).sum(-1)
        scores = scores.masked_fill(~self.seen(layer, *scores.shape[1:]), -torch.inf)
        rank = scores.argsort(dim=-1, stable=True).argsort(dim=-1)
        self.chosen = (rank >= scores.shape[2] - self.specs[layer].topk) & (scores > -torch.inf)

    def _computed(self, layer: int, rows: Tensor) -> Tensor:
        return rows if self.kept_rows(layer) is None else rows[torch.arange(len(rows)), self.needed_row][:, None]

    def attend(self, layer: int, q: Tensor, sink: Tensor | None = None) -> Tensor:
        spec = self.specs[layer]
        if isinstance(spec.cache_spec, RecurrentState):
            q = q.repeat_interleave(spec.cache_spec.heads // spec.cache_spec.k_heads, 2)
            read = torch.einsum("bqhkv,bqhk->bqhv", self.planes[layer][0], q)
            return self._computed(layer, read if sink is None else read + sink[:, None] * self.values[layer])
        k, v = self.rows_of(layer)
        k, v = (rows.repeat_interleave(spec.heads // rows.shape[2], 2) for rows in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * spec.softmax_scale
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        seen = self.seen(layer, self.tokens.shape[1], k.shape[1])
        if spec.topk is not None:
            seen = seen & self.chosen
        if self.kept_rows(layer) is not None:
            seen = seen.expand(len(q), -1, -1)[torch.arange(len(q)), self.needed_row][:, None]
        weights = softmax_of(scores.masked_fill(~seen[:, None].to(scores.device), -torch.inf), sink)
        return torch.einsum("bhqk,bkhd->bqhd", weights, v)

    def rows_of(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V [B, n, heads, size] of the earlier and the new rows.  The keys of latent rows are made, head by
        head; their values stay latent."""
        held = self.planes[layer]
        if self.past is not None:
            held = tuple(
                torch.cat((old.expand(len(new), *old.shape), new), 1)
                for old, new in zip(self.past[layer], held, strict=True)
            )
        held = held[: self.specs[layer].row_spec.num_read_planes]
        meant = held if self.scales is None else self.scales[layer].meant(held)
        if layer not in self.k_up:
            k, v = meant
            return k, v
        k_up, [latent] = self.k_up[layer], meant
        heads, _, rank = k_up.shape
        content, rope = latent[..., 0, :rank], latent[..., rank:].expand(-1, -1, heads, -1)
        return torch.cat((torch.einsum("hnr,bkr->bkhn", k_up, content), rope), 3), latent[..., :rank]

    def seen(self, layer: int, rows: int, columns: int) -> Tensor:
        """[1 or B, rows, columns] bool: the last columns are the new rows."""
        distance = torch.arange(columns - rows, columns)[:, None] - torch.arange(columns)
        seen = (distance >= 0)[None] if self.mask is None else self.mask
        window = self.specs[layer].window
        return seen if window is None or not self.apply_window else seen & (distance < window)

    def _by_request(self, flat: Tensor) -> Tensor:
        """[B, Q, heads, size] of flat rows."""
        return flat.view(*self.tokens.shape, *flat.shape[-2:])


def states_of(
    keeps: RecurrentState, inputs: Tensor, gates: Tensor | None, weight: Tensor, bias: Tensor | None, silu: bool
) -> tuple[Tensor, Tensor | None, Planes]:
    """The queries [B, Q, k_heads, k_size], v [B, Q, heads, v_size] and the planes: row by row, as papers write them."""
    batch, rows, channels = inputs.shape
    padded = torch.cat((inputs.new_zeros(batch, weight.shape[1] - 1, channels), inputs), 1)
    convolved = torch.stack(
        [(padded[:, t : t + weight.shape[1]] * weight.T).sum(1) for t in range(rows)] or [inputs.sum(1)], 1
    )[:, :rows]
    convolved = convolved if bias is None else convolved + bias
    convolved = convolved * convolved.sigmoid() if silu else convolved
    if gates is None:
        return convolved, None, (inputs,)
    width = keeps.k_heads * keeps.k_size
    q, k = (convolved[..., at : at + width].unflatten(2, (keeps.k_heads, keeps.k_size)) for at in (0, width))
    v = convolved[..., 2 * width :].unflatten(2, (keeps.heads, keeps.v_size))
    if keeps.units:
        q, k = (x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        q = q / keeps.k_size**0.5
    k = k.repeat_interleave(keeps.heads // keeps.k_heads, 2)
    state, states = inputs.new_zeros(batch, keeps.heads, keeps.k_size, keeps.v_size), []
    for t in range(rows):
        state = state * gates[:, t, 0].exp()[..., None, None]
        read = torch.einsum("bhkv,bhk->bhv", state, k[:, t]) if keeps.delta else 0
        new = gates[:, t, 1, :, None] * (v[:, t] - read)
        state = state + k[:, t, ..., None] * new[..., None, :]
        states.append(state)
    return q, v, (torch.stack(states, 1) if states else state[:, None][:, :0], inputs)


def latent_of(q: Tensor, latent: Tensor, rotation: Rotation, form: LatentFormat) -> tuple[Tensor, Tensor]:
    """q [B, Q, heads, nope + rope] and the latent row [B, Q, 1, size]: its first part normed, its last rotated, as in
    q."""
    rotary = rotation.cos.shape[1]
    cos, sin = (table.view(*latent.shape[:2], 1, rotary) for table in rotation)

    def turned(x: Tensor) -> Tensor:
        content, rope = x.split((x.shape[3] - rotary, rotary), 3)
        if form.interleaved:
            rope = torch.cat((rope[..., 0::2], rope[..., 1::2]), 3)
        return torch.cat((content, rope * cos + rope.roll(rotary // 2, -1) * sin), 3)

    if form.norm is not None:
        content, rope = latent.split((latent.shape[3] - rotary, rotary), 3)
        content = content / (content.pow(2).mean(-1, keepdim=True) + form.eps).sqrt() * form.norm
        latent = torch.cat((content, rope), 3)
    return turned(q), turned(latent)


def index_turned(x: Tensor, rotation: Rotation, interleaved: bool) -> Tensor:
    """Index heads x [B, Q, heads, size], whose first values are rotated."""
    rotary = rotation.cos.shape[1]
    cos, sin = (table.view(*x.shape[:2], 1, rotary) for table in rotation)
    rope, content = x[..., :rotary], x[..., rotary:]
    if interleaved:
        rope = torch.cat((rope[..., 0::2], rope[..., 1::2]), 3)
    return torch.cat((rope * cos + rope.roll(rotary // 2, -1) * sin, content), 3)


def heads_of(
    qkv: Tensor, g: LayerSpec, rotation: Rotation, norms: HeadNorms | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [B, Q, heads, size] of a layer's projections, in their dtype, q and k normed, and their first part
    rotated; v normed, or made from the projection of k, as `norms` says."""
    assert isinstance(g.cache_spec, KVHeads)
    kv_heads = g.cache_spec.kv_heads
    v_is_k = norms is not None and norms.v_is_k
    # Context rows have no queries.
    heads = qkv.shape[2] - (1 if v_is_k else 2) * kv_heads
    if norms is not None and norms.has_gates:
        heads //= 2
        qkv = torch.cat((qkv[:, :, : 2 * heads].unflatten(2, (heads, 2))[:, :, :, 0], qkv[:, :, 2 * heads :]), 2)
    q, k, v = qkv[:, :, :heads], qkv[:, :, heads : heads + kv_heads], qkv[:, :, qkv.shape[2] - kv_heads :]
    if norms is not None and norms.norms_v_heads:
        v = (v / (v.pow(2).mean(-1, keepdim=True) + norms.eps).sqrt()).to(qkv.dtype)
    return turned(q, rotation, norms and norms.q, norms), turned(k, rotation, norms and norms.k, norms), v


def queries_of(qkv: Tensor, rotation: Rotation, norms: HeadNorms | None = None) -> Tensor:
    """q [B, Q, heads, size] of a layer that projects queries alone."""
    return turned(qkv, rotation, norms and norms.q, norms)


def turned(x: Tensor, rotation: Rotation, weight: Tensor | None, norms: HeadNorms | None) -> Tensor:
    """Heads x [B, Q, heads, size], normed, and their first part rotated."""
    dtype, rotary = x.dtype, rotation.cos.shape[1]
    cos, sin = (table.view(*x.shape[:2], 1, rotary) for table in rotation)
    if norms is not None:
        x = x / (x.pow(2).mean(-1, keepdim=True) + norms.eps).sqrt() * weight
    first, rest = x[..., :rotary], x[..., rotary:]
    return torch.cat((first * cos + first.roll(rotary // 2, -1) * sin, rest), 3).to(dtype)


def softmax_of(scores: Tensor, sink: Tensor | None) -> Tensor:
    """Over scores [B, heads, Q, rows] and, if there is one, the head's sink [heads], which has no value."""
    if sink is None:
        return scores.softmax(-1)
    column = sink[:, None, None].expand(*scores.shape[:3], 1)
    return torch.cat((scores, column), -1).softmax(-1)[..., :-1]
