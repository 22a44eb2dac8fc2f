"""The reference backend: plain torch on any device.  The tests compare the other backends with it."""

import torch
from torch import Tensor

from espalier.attention.base import Attention, AttentionBackend
from espalier.attention.support import By, Support
from espalier.cache.layer_spec import KVHeads, LatentKV
from espalier.kernels.ops.attention import masked_attention


class ReferenceAttention(Attention):
    def over_prefix(self, q: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        spec = self.specs[layer]
        capacity = self.prefix.page_table.shape[1] * self.pages.page_size
        positions = torch.arange(capacity, device=q.device).expand(q.shape[0], -1)
        exists = self.prefix.holds(positions)
        rows = self.pages.rows(self.prefix.page_table, positions, exists)
        k, v = (buffer[rows] for buffer in self.committed(layer))
        mask = exists[:, None, :].expand(-1, q.shape[1], -1)
        if spec.window is not None:
            mask = mask & (self.nodes.positions[:, :, None] - positions[:, None, :] < spec.window)
        return masked_attention(q, k, v, mask, spec.softmax_scale, self.scales(layer), spec.softcap)


class ReferenceBackend(AttentionBackend):
    support = Support(
        name="reference",
        devices=("cpu", "cuda"),
        dtypes=(torch.float64, torch.float32, torch.bfloat16, torch.float16),
        keeps=(KVHeads, LatentKV),
        window_on_chain=By.ITSELF,
        window_on_tree=By.ITSELF,
        fp8=By.ITSELF,
        softcap=By.ITSELF,
        different_v_size=True,
        ran_on=("CPU", "H100", "H200"),
    )
    attention = ReferenceAttention
