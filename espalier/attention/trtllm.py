"""TensorRT-LLM's Blackwell kernels, through flashinfer: K and V heads and latent rows.

The kernels read page tables and lengths on the device.  All requests must have the same number of queries.  The
log-sum-exp has base 2.  For K and V heads, queries attend to all rows of their request (causal=False).  The function
for latent rows has only causal masks, in which the queries of one request see different rows.  So for latent rows, each
query is passed as a separate request with the same pages.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from espalier.attention.base import AttentionBackend
from espalier.attention.library import LN_2, LibraryAttention, library_support
from espalier.attention.support import Library
from espalier.cache.kv import PagedKV
from espalier.cache.layer_spec import LatentKV, LayerSpec
from espalier.kernels.ops.attention import Nodes, Prefix

# Bytes of the library's workspace, which must be zero at the start.  All launches on a stream share it.
WORKSPACE_BYTES = 2**27


class TrtllmAttention(LibraryAttention):
    def __init__(self, workspace: Tensor, pages: PagedKV, specs: Sequence[LayerSpec], prefix: Prefix, nodes: Nodes):
        super().__init__(pages, specs, prefix, nodes)
        self.workspace = workspace
        self.num_queries = nodes.positions.shape[1]

    def attend_by_library(self, q: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Returns attention of q [B, Q, heads, k_size] over `tail_prefix`: out, and lse (natural log)."""
        spec, flat = self.specs[layer], q.flatten(0, 1)
        run = self._attend_latent if isinstance(spec.cache_spec, LatentKV) else self._attend_heads
        out, lse = run(flat, layer, spec)
        return out.view(*q.shape[:3], spec.cache_spec.v_size), lse.view(q.shape[:3]) * LN_2

    def _attend_heads(self, q: Tensor, layer: int, spec: LayerSpec) -> tuple[Tensor, Tensor]:
        """q: [B · Q, heads, k_size].  Returns out [B · Q, heads, v_size] and lse [B · Q, heads] in base 2."""
        batch = self.tail_prefix.length.shape[0]
        out_and_lse: tuple[Tensor, Tensor] = _flashinfer().prefill.trtllm_batch_context_with_kv_cache(
            q.contiguous(),
            self.paged_rows(layer),
            self.workspace,
            self.prefix.get_or_make("table", self.tail_prefix.page_table.contiguous),
            self.int_lengths(),
            self.num_queries,
            self._max_rows,
            spec.softmax_scale,
            1.0,
            batch,
            self.prefix.get_or_make(("query starts", self.num_queries), self._query_starts),
            self.prefix.get_or_make("row starts", self._row_starts),
            kv_layout="NHD",
            causal=False,
            return_lse=True,
        )
        return out_and_lse

    def _attend_latent(self, q: Tensor, layer: int, spec: LayerSpec) -> tuple[Tensor, Tensor]:
        """q: [B · Q, heads, k_size].  Returns out [B · Q, heads, v_size] and lse [B · Q, heads] in base 2."""
        latent, _ = self.paged_rows(layer)
        v_size = spec.cache_spec.v_size
        query_page_table = self.prefix.get_or_make(
            ("tables", self.num_queries), lambda: self.tail_prefix.page_table.repeat_interleave(self.num_queries, 0)
        )
        query_lengths = self.prefix.get_or_make(
            ("lengths", self.num_queries), lambda: self.int_lengths().repeat_interleave(self.num_queries)
        )
        out_and_lse: tuple[Tensor, Tensor] = _flashinfer().mla.trtllm_batch_decode_with_kv_cache_mla(
            q[:, None].contiguous(),
            latent[:, :, 0],
            self.workspace,
            v_size,
            v_size,
            spec.cache_spec.k_size - v_size,
            query_page_table,
            query_lengths,
            self._max_rows,
            bmm1_scale=spec.softmax_scale,
            backend="trtllm-gen",
            return_lse=True,
        )
        return out_and_lse

    @property
    def _max_rows(self) -> int:
        """The largest number of rows of a request: as many as a row of the page table has room for."""
        return self.tail_prefix.page_table.shape[1] * self.pages.page_size

    def _query_starts(self) -> Tensor:
        batch, device = self.tail_prefix.length.shape[0], self.tail_prefix.length.device
        return torch.arange(batch + 1, dtype=torch.int32, device=device) * self.num_queries

    def _row_starts(self) -> Tensor:
        return torch.nn.functional.pad(self.tail_prefix.length.cumsum(0), (1, 0)).int()


def _flashinfer() -> Any:
    return import_module("flashinfer")


class TrtllmBackend(AttentionBackend):
    support = library_support(
        name="trtllm",
        page_sizes=(16, 32, 64, 128, 256, 512),
        latent_page_sizes=(32, 64),
        head_sizes=(64, 128, 256),
        latent_rows=(LatentKV(576, 512), LatentKV(320, 256)),
        compute_majors=(10,),
        library=Library(("flashinfer",), "trtllm"),
        limit_reasons={
            "dtype": "trtllm_batch_context_with_kv_cache has these types, and FP8",
            "page_size": "kernels exist for these pages; those for latent rows have a block_size of 32 or 64",
            "head_size": "kernels exist for these heads",
            "softcap": "trtllm_batch_context_with_kv_cache has none",
            "latent": "the library's MLA shapes are these",
            "capability": "kernels exist for sm_100 and sm_103",
        },
    )

    def __init__(self) -> None:
        self.workspace: Tensor | None = None

    def plan(self, pages: PagedKV, specs: Sequence[LayerSpec], prefix: Prefix, nodes: Nodes) -> TrtllmAttention:
        if self.workspace is None:
            self.workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=pages.device)
        return TrtllmAttention(self.workspace, pages, specs, prefix, nodes)
