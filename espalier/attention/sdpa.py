"""The CPU backend: it gathers committed rows, appends staged rows, and computes masked attention over all of them.

The query heads of a KV head are packed into the query dimension, so the rows of each KV head are read once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from espalier.attention.base import AttentionBackend, AttentionPlan, CommittedLengths, SelectedMask, Selection
from espalier.attention.support import Provider, Support
from espalier.cache.kv import PagedKV
from espalier.cache.layer_spec import KVHeads, LatentKV, LayerSpec
from espalier.kernels.ops.attention import Nodes, Prefix, apply_softcap
from espalier.kernels.ops.selection import IndexerQueries
from espalier.kernels.state.kv_scales import times_k_scale, times_v_scale


@dataclass
class CommittedRows:
    """The committed rows of a prefix.  All passes over the prefix share this object.  P: max_committed_rows.
    positions: [B, P].  exists: [B, P], whether a row exists at the position.  page_rows: [B, P], the index in pages.
    last_gathered: (the layer that was gathered last, its K and V [B, P + R, heads, size]).  The first P rows are the
    committed rows, the last R rows are the staged rows of one pass.  So a draft with one layer gathers the committed
    rows only once for all levels of a tree.
    padded_page_rows: for each R, [B · (P + R)]: the P page rows of each request, then R times the dummy row."""

    positions: Tensor
    exists: Tensor
    page_rows: Tensor
    last_gathered: tuple[int, Sequence[Tensor]] | None = None
    padded_page_rows: dict[int, Tensor] = field(default_factory=dict)

    def gather_with(self, staged: Sequence[Tensor], layer: int, planes: Sequence[Tensor]) -> Sequence[Tensor]:
        """Returns, for each plane (K, V), the committed rows, then `staged` [B, R, heads, size]: [B, P + R, heads,
        size]."""
        batch, max_committed_rows = self.page_rows.shape
        if self.last_gathered is not None and self.last_gathered[0] == layer:
            committed = (plane[:, :max_committed_rows] for plane in self.last_gathered[1])
            return [torch.cat(pair, 1) for pair in zip(committed, staged, strict=True)]
        num_staged = staged[0].shape[1]
        if num_staged not in self.padded_page_rows:
            self.padded_page_rows[num_staged] = F.pad(self.page_rows, (0, num_staged)).flatten()
        # The gathered tensor has room for the staged rows, so no second copy joins committed and staged rows.
        page_rows, gathered = self.padded_page_rows[num_staged], []
        for plane, staged_rows in zip(planes, staged, strict=True):
            values = plane.index_select(0, page_rows).view(batch, max_committed_rows + num_staged, *plane.shape[1:])
            values[:, max_committed_rows:] = staged_rows
            gathered.append(values)
        self.last_gathered = layer, gathered
        return gathered


class SdpaAttention(AttentionPlan):
    def __init__(
        self, pages: PagedKV, specs: Sequence[LayerSpec], prefix: Prefix, nodes: Nodes, max_committed_rows: int | None
    ):
        """max_committed_rows: the largest number of committed rows of a request; None: as many as a page table has."""
        super().__init__(pages, specs, prefix, nodes)
        batch, width = prefix.page_table.shape
        self.max_committed_rows = (
            (pages.layout.tokens_in(width) if max_committed_rows is None else max_committed_rows) if batch else 0
        )
        self.committed_rows = prefix.get_or_make(("committed rows", self.max_committed_rows), self._committed_rows)
        self.bias_by_window: dict[tuple[int | None, int], Tensor] = {}

    def _committed_rows(self) -> CommittedRows:
        positions = torch.arange(self.max_committed_rows).expand(self.prefix.page_table.shape[0], -1)
        exists = self.prefix.contains(positions)
        return CommittedRows(positions, exists, self.pages.rows(self.prefix.page_table, positions, exists))

    def select(self, layer: int, queries: IndexerQueries, keys: Tensor) -> SelectedMask | None:
        """Returns which rows each query attends to; None for all.  keys: [B, R, 1, size], index keys of staged rows."""
        topk = self.specs[layer].topk
        if topk is not None and self.max_committed_rows + keys.shape[1] <= topk:
            return None
        return self.select_by_mask(layer, queries, keys, self.committed_rows.page_rows, self.committed_rows.exists)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None, selected: Selection | None = None
    ) -> Tensor:
        """Computes attention over committed rows and staged k, v.  selected: the rows to attend to; None: all."""
        batch, queries, heads, size = q.shape
        spec = self.specs[layer]
        kv_heads = spec.cache_spec.kv_heads
        group_size = heads // kv_heads
        if self.max_committed_rows:
            # V of a latent row is a part of K, so only K is gathered.
            planes = self.pages.layers[layer][: spec.row_spec.num_read_planes]
            k, v = spec.row_spec.read(self.committed_rows.gather_with((k, v)[: len(planes)], layer, planes))
        scales = self.kv_scales(layer)
        if scales is not None:
            q, k, v = times_k_scale(q, scales), k.to(q.dtype), v.to(q.dtype)
        bias = self._attention_bias(spec.window, group_size, q.dtype)
        if selected is not None:
            assert isinstance(selected, SelectedMask)
            bias = _additive_mask(selected.mask, group_size, q.dtype)
        if sink is not None:
            # The sink is the bias of one more key, and the key and its value are zero.
            k, v = (F.pad(rows, (0, 0, 0, 0, 0, 1)) for rows in (k, v))
            column = sink.to(q.dtype).repeat_interleave(queries).view(1, kv_heads, -1, 1)
            bias = torch.cat((bias.expand(-1, kv_heads, -1, -1), column.expand(len(bias), -1, -1, -1)), 3)
        packed = q.view(batch, queries, kv_heads, group_size, size).permute(0, 2, 3, 1, 4).flatten(2, 3)
        if spec.softcap is None:
            rows = k.transpose(1, 2), v.transpose(1, 2)
            out = scaled_dot_product_attention(packed, *rows, attn_mask=bias, scale=spec.softmax_scale)
        else:
            out = _softcap_attention(packed, k, v, bias, spec.softmax_scale, spec.softcap)
        out = out.view(batch, kv_heads, group_size, queries, out.shape[3]).permute(0, 3, 1, 2, 4).flatten(2, 3)
        return out if scales is None else times_v_scale(out, scales)

    def attend_committed(self, layer: int, q: Tensor) -> Tensor:
        """Computes attention of q over only the committed rows; zeros for a query that sees none."""
        if not self.max_committed_rows:
            return q.new_zeros(*q.shape[:3], self.specs[layer].row_spec.v_size)
        planes = [plane[:0].expand(len(q), -1, -1, -1) for plane in self.pages.layers[layer]]
        is_visible = self._visible_rows(self.specs[layer].window).any(-1)
        out = self.attend(layer, q, *self.specs[layer].row_spec.read(planes))
        return out.masked_fill(~is_visible[:, :, None, None], 0.0)

    def _attention_bias(self, window: int | None, group_size: int, dtype: torch.dtype) -> Tensor:
        """Returns the additive mask [B, 1, group_size * Q, P + R].  group_size: the query heads of a KV head."""
        key = (window, group_size)
        if key not in self.bias_by_window:
            is_visible = torch.cat((self._visible_rows(window), self.nodes.visible_rows(window)), 2)
            self.bias_by_window[key] = _additive_mask(is_visible, group_size, dtype)
        return self.bias_by_window[key]

    def _visible_rows(self, window: int | None) -> Tensor:
        """Returns [B, Q, P] bool: the committed rows that each query sees.  window: None for all positions."""
        rows = self.committed_rows
        is_visible = rows.exists[:, None].expand(-1, self.nodes.positions.shape[1], -1)
        if window is not None:
            is_visible = is_visible & (self.nodes.positions[:, :, None] - rows.positions[:, None] < window)
        return is_visible


def _additive_mask(is_visible: Tensor, group_size: int, dtype: torch.dtype) -> Tensor:
    """Returns the additive mask [B, 1, group_size * Q, rows]: 0 where is_visible [B, Q, rows] is true, else -inf."""
    bias = torch.where(is_visible, 0.0, -torch.inf).to(dtype)
    return bias[:, None].expand(-1, group_size, -1, -1).flatten(1, 2)[:, None]


def _softcap_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, softcap: float) -> Tensor:
    """Returns SDPA of q [B, kv_heads, N, size] over k, v [B, R, kv_heads, size], with logits limited to ±softcap.

    PyTorch's function has no soft cap.  scale: a factor of logits, before the cap.  bias: added to them after it."""
    exact = torch.promote_types(q.dtype, torch.float32)
    logits = apply_softcap(q.to(exact) @ k.to(exact).permute(0, 2, 3, 1) * scale, softcap)
    return ((logits + bias).softmax(-1) @ v.to(exact).transpose(1, 2)).to(q.dtype)


class SdpaBackend(AttentionBackend):
    support = Support(
        name="sdpa",
        devices=("cpu",),
        dtypes=(torch.float64, torch.float32, torch.bfloat16),
        cache_specs=(KVHeads, LatentKV),
        window_on_chain=Provider.ITSELF,
        window_on_tree=Provider.ITSELF,
        sinks=Provider.ITSELF,
        fp8=Provider.ITSELF,
        softcap=Provider.ITSELF,
        selection=Provider.ITSELF,
        any_v_size=True,
        tested_on=("CPU",),
    )

    def __init__(self) -> None:
        self.max_committed_rows: int | None = None

    def prepare(self, lengths: CommittedLengths) -> None:
        """Stores the largest number of committed rows of a request.  The plans gather only this number of rows."""
        self.max_committed_rows = lengths.max_length

    def plan(self, pages: PagedKV, specs: Sequence[LayerSpec], prefix: Prefix, nodes: Nodes) -> SdpaAttention:
        return SdpaAttention(pages, specs, prefix, nodes, self.max_committed_rows)
