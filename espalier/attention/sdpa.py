"""Attention for the CPU: a request's pages are gathered beside its nodes and one masked SDPA call does both parts.

Grouped heads are packed into the query dimension, so K and V are read once a KV head.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from espalier.attention.base import Attention, Nodes, Prefix, Support
from espalier.cache.geometry import LayerGeometry
from espalier.cache.kv import Pages
from espalier.layout import MAX_PAGE_SIZE


class SdpaAttention(Attention):
    def __init__(self, pages: Pages, geometry: Sequence[LayerGeometry], prefix: Prefix, nodes: Nodes):
        super().__init__(pages, geometry, prefix, nodes)
        # Lengths are host memory on a CPU: reading them here costs no sync, and the gather is as long as the batch
        # needs.
        batch = prefix.length.shape[0]
        self.longest = int(prefix.length.max()) if batch else 0
        self.positions = torch.arange(self.longest).expand(batch, -1)
        self.rows = pages.rows_where(prefix.page_table, self.positions, prefix.holds(self.positions)).flatten()
        self.bias: dict[tuple[int | None, int], Tensor] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        queries, heads = q.shape[1:3]
        g = self.geometry[layer]
        groups = heads // g.kv_heads
        if self.longest:
            k, v = (self._beside(buffer, new) for buffer, new in zip(self.pages.layers[layer], (k, v), strict=True))
        packed = q.unflatten(2, (g.kv_heads, groups)).permute(0, 2, 3, 1, 4).flatten(2, 3)
        out = scaled_dot_product_attention(
            packed,
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=self._bias(g.window, groups, q.dtype),
            scale=g.softmax_scale,
        )
        return out.unflatten(2, (groups, queries)).permute(0, 3, 1, 2, 4).flatten(2, 3)

    def _beside(self, buffer: Tensor, new: Tensor) -> Tensor:
        committed = buffer.index_select(0, self.rows).view(new.shape[0], self.longest, *new.shape[2:])
        return torch.cat((committed, new), 1)

    def _bias(self, window: int | None, groups: int, dtype: torch.dtype) -> Tensor:
        """Additive mask [B, 1, groups * Q, longest + R], made once a pass for each kind of layer."""
        key = (window, groups)
        if key not in self.bias:
            below = self.prefix.holds(self.positions)[:, None, :].expand(-1, self.nodes.positions.shape[1], -1)
            if window is not None:
                below = below & (self.nodes.positions[:, :, None] - self.positions[:, None, :] < window)
            seen = torch.cat((below, self.nodes.seen(window)), 2)
            bias = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)
            self.bias[key] = bias[:, None].expand(-1, groups, -1, -1).flatten(1, 2)[:, None]
        return self.bias[key]


class SdpaBackend:
    support = Support(
        name="sdpa",
        devices=("cpu",),
        dtypes=(torch.float64, torch.float32, torch.bfloat16),
        sliding_window=True,
        different_v_size=True,
        max_page_size=MAX_PAGE_SIZE,
    )
    plan = staticmethod(SdpaAttention)
