"""Stand-ins for the libraries of attention backends: their interface, computed in plain torch on the CPU.

Each checks what the library would refuse or read wrongly: dtypes, strides, sizes, page lists, lengths, the order of
calls.  Where a library uses what it was told on the host, so does its stand-in.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.machinery import ModuleSpec
from math import log
from types import ModuleType
from unittest.mock import patch

import torch
from torch import Tensor

from espalier.attention import BACKENDS, trtllm
from espalier.attention.fa3 import flash_attn_with_kvcache

NAMES = ("flashinfer", "fa3", "trtllm")
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def over_rows(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """q [Q, heads, k_size] over k, v [R, kv_heads, size]; lse [Q, heads], natural log.  No rows: zeros."""
    exact = torch.promote_types(q.dtype, torch.float32)
    k, v = (x.to(exact).repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,rhd->qhr", q.to(exact), k) * scale
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
    # Of no rows, libraries return some large or arbitrary number.
    return torch.einsum("qhr,rhd->qhd", weights, v).to(q.dtype), lse.masked_fill(lse == -torch.inf, 7.0)


def paged_rows(planes: Tensor, pages: Tensor, rows: int) -> Tensor:
    """[rows, heads, size], the first rows of these pages of planes [pages, page_size, heads, size]."""
    assert planes.stride(-1) == 1, "the last dimension is contiguous"
    assert pages.dtype == torch.int32 and (pages > 0).all(), "real pages, int32"
    return planes[pages.long()].flatten(0, 1)[:rows]


def require_indices(*tensors: Tensor) -> None:
    for tensor in tensors:
        assert tensor.dtype == torch.int32 and tensor.is_contiguous(), "index buffers are int32 and contiguous"


class Wrapper:
    """What the wrappers of flashinfer share.  Plans are staged in pinned memory, and lists are read from buffers."""

    def __init__(self, workspace: Tensor, *buffers: Tensor) -> None:
        assert workspace.dtype == torch.uint8
        require_indices(*buffers)
        self._pin_memory_int_workspace_buffer = torch.full((8,), 255, dtype=torch.uint8)
        self.queries, self.starts, self.pages, self.last = buffers
        self.batch = len(self.queries) - 1
        assert (len(self.starts), len(self.last)) == (self.batch + 1, self.batch)
        self.planned_rows: Tensor | None = None

    def remember(self, queries: Tensor, starts: Tensor, pages: Tensor, causal: bool) -> None:
        require_indices(queries, starts, pages)
        assert len(queries) == self.batch + 1 and len(pages) <= len(self.pages)
        assert not causal, "every query sees all rows"
        self.num_queries = int(queries[-1])
        self.queries.copy_(queries)
        self.starts.copy_(starts)
        self.pages[: len(pages)].copy_(pages)


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    def __init__(self, workspace, kv_layout, use_cuda_graph, *buffers, backend):
        assert (kv_layout, use_cuda_graph) == ("NHD", True) and backend in ("fa2", "fa3")
        super().__init__(workspace, *buffers)
        self.backend = backend

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        *,
        causal,
        sm_scale,
        q_data_type,
        kv_data_type,
        disable_split_kv,
    ):
        assert num_qo_heads % num_kv_heads == 0 and q_data_type == kv_data_type
        self.remember(qo_indptr, paged_kv_indptr, paged_kv_indices, causal)
        require_indices(paged_kv_last_page_len)
        self.last.copy_(paged_kv_last_page_len)
        self.shape, self.scale = (num_qo_heads, num_kv_heads, head_dim_qk, page_size), sm_scale
        self.is_split = not disable_split_kv and self.backend == "fa2"
        assert self.is_split or not self._pin_memory_int_workspace_buffer.any(), "unplanned programs read this"
        self.planned_rows = self.rows()

    def rows(self) -> Tensor:
        """The rows of each request, as its lists say."""
        pages = self.starts.diff()
        return torch.where(pages > 0, (pages - 1) * self.shape[3] + self.last, 0)

    def run(self, q, kv, *, out, return_lse):
        k, v = kv
        heads, kv_heads, size, page_size = self.shape
        assert q.shape == (self.num_queries, heads, size) and k.shape[1:] == v.shape[1:] == (page_size, kv_heads, size)
        assert k.stride() == v.stride() and out.shape == q.shape and out.is_contiguous() and return_lse
        rows = self.rows()
        if self.is_split or self.backend == "fa3":
            assert torch.equal(rows, self.planned_rows), "splits and FA3 need the lengths of the plan"
        lses = []
        for b, (low, high) in enumerate(zip(self.queries[:-1], self.queries[1:], strict=True)):
            pages = self.pages[self.starts[b] : self.starts[b + 1]]
            held = (paged_rows(plane, pages, int(rows[b])) for plane in (k, v))
            out[low:high], lse = over_rows(q[low:high], *held, self.scale)
            lses.append(lse)
        return out, torch.cat(lses) / log(2)


class BatchMLAPagedAttentionWrapper(Wrapper):
    def __init__(self, workspace, use_cuda_graph, *buffers):
        assert use_cuda_graph
        super().__init__(workspace, *buffers)

    def plan(
        self,
        qo_indptr,
        kv_indptr,
        kv_indices,
        kv_len_arr,
        num_heads,
        head_dim_ckv,
        head_dim_kpe,
        page_size,
        *,
        causal,
        sm_scale,
        q_data_type,
        kv_data_type,
    ):
        assert q_data_type == kv_data_type
        self.remember(qo_indptr, kv_indptr, kv_indices, causal)
        self.sizes, self.scale, self.page_size = (num_heads, head_dim_ckv, head_dim_kpe), sm_scale, page_size
        self.planned_starts, self.planned_rows = kv_indptr.clone(), kv_len_arr.clone()

    def run(self, q_nope, q_pe, ckv, kpe, *, out, return_lse):
        heads, latent, rope = self.sizes
        assert q_nope.shape == out.shape == (self.num_queries, heads, latent) and q_pe.shape[1:] == (heads, rope)
        assert ckv.shape[1:] == (self.page_size, latent) and kpe.shape[1:] == (self.page_size, rope) and return_lse
        lses = []
        for b, (low, high) in enumerate(zip(self.queries[:-1], self.queries[1:], strict=True)):
            # The kernel reads lengths from the plan alone.
            pages = self.pages[self.planned_starts[b] : self.planned_starts[b + 1]]
            v, rotated = (paged_rows(part[:, :, None], pages, int(self.planned_rows[b])) for part in (ckv, kpe))
            query = torch.cat((q_nope[low:high], q_pe[low:high]), -1)
            out[low:high], lse = over_rows(query, torch.cat((v, rotated), -1), v, self.scale)
            lses.append(lse)
        return out, torch.cat(lses) / log(2)


def with_kvcache(
    q, k_cache, v_cache, *, cache_seqlens, page_table, softmax_scale, causal, num_splits, return_softmax_lse, qv=None
):
    batch = q.shape[0]
    assert not causal and return_softmax_lse and num_splits in (0, 1)
    assert cache_seqlens.dtype == page_table.dtype == torch.int32 and page_table.stride(-1) == 1
    assert cache_seqlens.shape == (batch,) and cache_seqlens.is_contiguous() and page_table.shape[0] == batch
    assert q.stride(-1) == k_cache.stride(-1) == v_cache.stride(-1) == 1
    assert q.shape[3] <= 256 and (qv is None or (q.shape[3] <= 64 and 256 <= v_cache.shape[3] <= 512))
    outs, lses = [], []
    for b in range(batch):
        rows = int(cache_seqlens[b])
        pages = page_table[b, : -(-rows // k_cache.shape[1])]
        k, v = (paged_rows(plane, pages, rows) for plane in (k_cache, v_cache))
        query = q[b]
        if qv is not None:
            query, k = torch.cat((qv[b], q[b]), -1), torch.cat((v, k), -1)
        out, lse = over_rows(query, k, v, softmax_scale)
        outs.append(out)
        lses.append(lse.T)
    # More values follow, as in the library.
    return torch.stack(outs), torch.stack(lses), None, None


def trtllm_batch_context_with_kv_cache(
    query,
    kv_cache,
    workspace_buffer,
    block_tables,
    seq_lens,
    max_q_len,
    max_kv_len,
    bmm1_scale,
    bmm2_scale,
    batch_size,
    cum_seq_lens_q,
    cum_seq_lens_kv,
    *,
    kv_layout,
    causal,
    return_lse,
):
    k, v = kv_cache
    assert (kv_layout, causal, return_lse, bmm2_scale) == ("NHD", False, True, 1.0)
    require_indices(block_tables, seq_lens, cum_seq_lens_q, cum_seq_lens_kv)
    assert not workspace_buffer.any() and query.is_contiguous()
    assert block_tables.shape[0] == len(seq_lens) == batch_size and int(cum_seq_lens_q[-1]) == len(query)
    assert (cum_seq_lens_q.diff() == max_q_len).all(), "one stride"
    assert torch.equal(cum_seq_lens_kv.diff(), seq_lens) and (seq_lens <= max_kv_len).all()
    assert max_kv_len == block_tables.shape[1] * k.shape[1]
    parts = []
    for b, rows in enumerate(seq_lens.tolist()):
        pages = block_tables[b, : -(-rows // k.shape[1])]
        held = (paged_rows(plane, pages, rows) for plane in (k, v))
        parts.append(over_rows(query[b * max_q_len : (b + 1) * max_q_len], *held, bmm1_scale))
    out, lse = (torch.cat(part) for part in zip(*parts, strict=True))
    return out, lse / log(2)


def trtllm_batch_decode_with_kv_cache_mla(
    query,
    kv_cache,
    workspace_buffer,
    qk_nope_head_dim,
    kv_lora_rank,
    qk_rope_head_dim,
    block_tables,
    seq_lens,
    max_seq_len,
    *,
    bmm1_scale,
    backend,
    return_lse,
):
    requests, queries, _, size = query.shape
    require_indices(block_tables, seq_lens)
    assert queries == 1, "more queries than one are causal"
    assert size == kv_lora_rank + qk_rope_head_dim == kv_cache.shape[2] and backend == "trtllm-gen" and return_lse
    assert kv_cache.shape[1] in (32, 64) and not workspace_buffer.any() and query.is_contiguous()
    parts = []
    for b in range(requests):
        rows = int(seq_lens[b])
        assert rows <= max_seq_len
        k = paged_rows(kv_cache[:, :, None], block_tables[b, : -(-rows // kv_cache.shape[1])], rows)
        parts.append(over_rows(query[b], k, k[..., :kv_lora_rank], bmm1_scale))
    out, lse = (torch.cat(part) for part in zip(*parts, strict=True))
    return out[:, None], lse / log(2)


def module(name: str, **members: object) -> ModuleType:
    made = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None)
    vars(made).update(members)
    return made


@contextmanager
def installed(**relaxed: object) -> Iterator[None]:
    """All libraries are installed, and their backends run on the CPU.  relaxed: other fields of their support."""
    prefill = module(
        "flashinfer.prefill",
        BatchPrefillWithPagedKVCacheWrapper=BatchPrefillWithPagedKVCacheWrapper,
        trtllm_batch_context_with_kv_cache=trtllm_batch_context_with_kv_cache,
    )
    mla = module(
        "flashinfer.mla",
        BatchMLAPagedAttentionWrapper=BatchMLAPagedAttentionWrapper,
        trtllm_batch_decode_with_kv_cache_mla=trtllm_batch_decode_with_kv_cache_mla,
    )
    fakes = {
        "flashinfer": module("flashinfer", prefill=prefill, mla=mla),
        "flash_attn_interface": module("flash_attn_interface", flash_attn_with_kvcache=with_kvcache),
    }
    before = {name: BACKENDS[name].support for name in NAMES}
    sys.modules.update(fakes)
    flash_attn_with_kvcache.cache_clear()
    for name, support in before.items():
        BACKENDS[name].support = replace(support, devices=("cpu", "cuda"), dtypes=DTYPES, **relaxed)
    try:
        # The stand-ins read all of it, at every call, and need none.
        with patch.object(trtllm, "WORKSPACE_BYTES", 2**10):
            yield
    finally:
        for name, support in before.items():
            BACKENDS[name].support = support
        for name in fakes:
            del sys.modules[name]
        flash_attn_with_kvcache.cache_clear()
