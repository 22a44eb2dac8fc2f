"""The reference backend: plain torch on any device.  The tests compare the other backends with it."""

import torch
from torch import Tensor

from espalier.attention.base import AttentionBackend, AttentionPlan, SelectedMask, Selection
from espalier.attention.support import Provider, Support
from espalier.cache.layer_spec import KVHeads, LatentKV
from espalier.kernels.ops.attention import masked_attention, merge_results
from espalier.kernels.ops.selection import IndexerQueries


class ReferenceAttention(AttentionPlan):
    def attend_prefix(self, q: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Returns attention of q [B, Q, heads, k_size] over the committed rows: out, and lse (natural log)."""
        spec = self.specs[layer]
        positions, exists, _ = self._position_rows()
        mask = exists[:, None, :].expand(-1, q.shape[1], -1)
        if spec.window is not None:
            mask = mask & (self.nodes.positions[:, :, None] - positions[:, None, :] < spec.window)
        return self._attend_masked(q, layer, mask)

    def select(self, layer: int, queries: IndexerQueries, keys: Tensor) -> SelectedMask:
        """Returns which rows each query attends to.  keys: [B, R, 1, size], the index keys of the staged rows."""
        _, exists, rows = self._position_rows()
        return self.select_by_mask(layer, queries, keys, rows, exists)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None, selected: Selection | None = None
    ) -> Tensor:
        """Computes attention over committed rows and staged k, v.  selected: the rows to attend to; None: all."""
        if selected is None:
            return super().attend(layer, q, k, v, sink)
        assert isinstance(selected, SelectedMask)
        spec = self.specs[layer]
        committed, staged = selected.mask.split((selected.mask.shape[2] - k.shape[1], k.shape[1]), 2)
        over_staged = masked_attention(q, k, v, staged, spec.softmax_scale, self.kv_scales(layer))
        return merge_results.reference(self._attend_masked(q, layer, committed), over_staged)

    def _attend_masked(self, q: Tensor, layer: int, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Computes attention over the committed rows where mask [B, Q, P] is true."""
        spec = self.specs[layer]
        k, v = (buffer[self._position_rows()[2]] for buffer in self.committed_kv(layer))
        return masked_attention(q, k, v, mask, spec.softmax_scale, self.kv_scales(layer), spec.softcap)

    def _position_rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns three tensors [B, P]: all positions of the page tables, whether a row exists there, its page row."""
        return self.prefix.get_or_make("position rows", self._find_position_rows)

    def _find_position_rows(self) -> tuple[Tensor, Tensor, Tensor]:
        page_table = self.prefix.page_table
        capacity = page_table.shape[1] * self.pages.page_size
        positions = torch.arange(capacity, device=page_table.device).expand(page_table.shape[0], -1)
        exists = self.prefix.contains(positions)
        return positions, exists, self.pages.rows(page_table, positions, exists)


class ReferenceBackend(AttentionBackend):
    support = Support(
        name="reference",
        devices=("cpu", "cuda"),
        dtypes=(torch.float64, torch.float32, torch.bfloat16, torch.float16),
        cache_specs=(KVHeads, LatentKV),
        window_on_chain=Provider.ITSELF,
        window_on_tree=Provider.ITSELF,
        fp8=Provider.ITSELF,
        softcap=Provider.ITSELF,
        selection=Provider.ITSELF,
        any_v_size=True,
        tested_on=("CPU", "H100", "H200"),
    )
    plan_class = ReferenceAttention
