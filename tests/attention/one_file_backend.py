"""A backend in one file, as a wrapper of a library would be: it only attends to committed rows.

It knows lengths on the host only from `prepare`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from espalier.attention import BACKENDS, AttentionBackend, AttentionPlan, CommittedLengths, Nodes, Prefix, Support
from espalier.cache.kv import PagedKV
from espalier.cache.layer_spec import KVHeads, LatentKV, LayerSpec


class LibraryAttention(AttentionPlan):
    longest = 0

    def attend_prefix(self, q: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        spec, positions = self.specs[layer], torch.arange(self.longest)
        page_table, page_size = self.prefix.page_table, self.pages.page_size
        out = q.new_zeros(*q.shape[:3], spec.cache_spec.v_size)
        lse = q.new_full(q.shape[:3], -torch.inf)
        for b in range(q.shape[0] if self.longest else 0):
            rows = page_table[b, positions // page_size].long() * page_size + positions % page_size
            held = (positions >= self.prefix.first_position) & (positions < self.prefix.length[b])
            k, v = (
                plane[rows].repeat_interleave(spec.heads // plane.shape[1], 1) for plane in self.committed_kv(layer)
            )
            scores = torch.einsum("qhd,rhd->qhr", q[b], torch.where(held[:, None, None], k, 0)) * spec.softmax_scale
            scores = scores.masked_fill(~held, -torch.inf)
            lse[b] = scores.logsumexp(-1)
            values = torch.where(held[:, None, None], v, 0)
            out[b] = torch.einsum("qhr,rhd->qhd", scores.softmax(-1).nan_to_num(0), values)
        return out, lse


class LibraryBackend(AttentionBackend):
    support = Support(
        name="library",
        devices=("cpu",),
        dtypes=(torch.float64,),
        cache_specs=(KVHeads, LatentKV),
        any_v_size=True,
    )

    def __init__(self) -> None:
        self.lengths = CommittedLengths((), exact=True)

    def prepare(self, lengths: CommittedLengths) -> None:
        self.lengths = lengths

    def plan(self, pages: PagedKV, specs: Sequence[LayerSpec], prefix: Prefix, nodes: Nodes) -> AttentionPlan:
        real = int(prefix.length.max()) if len(prefix.length) else 0
        assert real <= self.lengths.max_length, "a launch has more committed rows than prepare announced"
        assert real == self.lengths.max_length or not self.lengths.exact, (
            "prepare announced exact lengths, and they are not"
        )
        made = LibraryAttention(pages, specs, prefix, nodes)
        made.longest = min(self.lengths.max_length, pages.layout.tokens_in(prefix.page_table.shape[1]))
        return made


BACKENDS[LibraryBackend.support.name] = LibraryBackend
