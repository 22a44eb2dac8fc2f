"""The FlashInfer backend.  K and V heads run in the library's FA2 and FA3 kernels, latent rows in its MLA kernel.

A wrapper is an object of the library that runs passes of one shape.  A wrapper holds a plan: how the work is divided
among programs.  The host computes the plan.  In the library's code (0.6.7), these plans need exact lengths:

- FA2 with splits.  The attention kernel computes a request's number of splits from the length on the device, but the
  merge of the splits takes the number from the plan.  Without splits, an FA2 plan is correct for any lengths.
- FA3 and MLA.  Their kernels read lengths from the plan only.

Therefore rounds run on FA2.  Without overlap, rounds split the KV rows, and the host plans again before each replay of
the graph.  With overlap, rounds have no splits, and latent rows are refused.  Long passes (prefill) have exact lengths,
so they run on FA3 if the device supports FA3.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from espalier.attention.base import AttentionBackend, CommittedLengths
from espalier.attention.library import LN_2, LibraryAttention, library_support
from espalier.attention.support import Library
from espalier.cache.kv import PagedKV
from espalier.cache.layer_spec import CacheSpec, LatentKV, LayerSpec
from espalier.errors import EspalierError
from espalier.kernels.ops.attention import Nodes, Prefix

# FA3 is used for at least this number of queries per request (chunks of prompts, large trees), if lengths are exact.
MIN_FA3_QUERIES = 256
# Bytes of scratch memory that the library needs, and the maximum bytes of the splits' partial results.
WORKSPACE_BYTES, MAX_WORKSPACE_BYTES = 2**27, 2**29
# The largest number of plans that are kept for eager passes.  In a prefill pass, the target needs two plans: one for
# all rows, and one for its last layer, which has one query per piece of a prompt.  A draft needs one or two more plans.
MAX_EAGER_PLANS = 12


@dataclass(frozen=True)
class PassShape:
    """The properties of a pass for which a plan is made.
    batch: the number of requests.  num_queries: the number of queries of each request.  num_skipped_pages: how many
    first pages of each request our kernels attend to instead of the library.  pages_per_request: the columns of the
    page table after these pages.
    num_programs: how many programs fill the device."""

    batch: int
    num_queries: int
    spec: LayerSpec
    num_skipped_pages: int
    pages_per_request: int
    page_size: int
    dtype: torch.dtype
    exact_lengths: bool
    num_programs: int
    is_hopper: bool

    @property
    def uses_fa3(self) -> bool:
        return self.is_hopper and self.exact_lengths and self.num_queries >= MIN_FA3_QUERIES

    @property
    def is_split(self) -> bool:
        return self.exact_lengths and self.split_bytes <= MAX_WORKSPACE_BYTES

    @property
    def split_bytes(self) -> int:
        """Bytes of the splits' partial results, as the library's planner computes them for a CUDA graph."""
        kv_heads, v_size = self.spec.cache_spec.kv_heads, self.spec.cache_spec.v_size
        heads_per_kv_head = self.spec.heads // kv_heads
        packed_rows = (self.batch * (self.num_queries - 1) + 1) * heads_per_kv_head
        tile = 16 if packed_rows <= 16 else 64 if packed_rows <= 64 or v_size >= 256 else 128
        num_tiles = -(-self.batch * self.num_queries * heads_per_kv_head // tile) + self.batch - 1
        return self.spec.heads * max(self.num_programs // kv_heads, num_tiles) * tile * (v_size + 1) * 4


class WrapperPlan:
    """A wrapper of the library for one shape of pass, and the wrapper's int32 buffers on the device.

    Every launch writes page_starts, pages and last_page_rows.  workspace: the library's scratch memory.
    query_starts: [B + 1] on the host, the index of each request's first query.  page_starts: [B + 1], the index of each
    request's first page in `pages` [B · pages_per_request].  last_page_rows: [B], the number of rows in each request's
    last page; for latent rows, the number of all rows of the request."""

    def __init__(self, shape: PassShape, workspace: Tensor):
        self.shape, device = shape, workspace.device
        sizes = shape.batch + 1, shape.batch * shape.pages_per_request, shape.batch
        zeros = (torch.zeros(n, dtype=torch.int32, device=device) for n in sizes)
        self.page_starts, self.pages, self.last_page_rows = zeros
        self.query_starts = torch.arange(shape.batch + 1, dtype=torch.int32) * shape.num_queries
        # The library copies a plan to the device from pinned memory, which the host may overwrite only after the copy.
        self.copy_event = torch.cuda.Event() if device.type == "cuda" else None
        self.lengths: CommittedLengths | None = None
        self.written_prefix: Prefix | None = None
        self.wrapper = self._make_wrapper(
            workspace, (self.query_starts.to(device), self.page_starts, self.pages, self.last_page_rows)
        )

    def plan_for(self, lengths: CommittedLengths) -> None:
        """Compute the plan for these lengths.  Raises EspalierError if it needs exact lengths and gets upper bounds."""
        if self.lengths is not None and (lengths == self.lengths or not self.needs_lengths):
            return
        if self.needs_lengths and not lengths.exact:
            raise EspalierError("attention=flashinfer planned a pass with exact lengths, and now has only bounds")
        self.wait_for_copy()
        skipped_rows = self.shape.num_skipped_pages * self.shape.page_size
        self._plan_wrapper((torch.tensor(lengths.max_lengths, dtype=torch.int32) - skipped_rows).clamp(min=0))
        self.lengths = lengths
        if self.copy_event is not None:
            self.copy_event.record()

    def wait_for_copy(self) -> None:
        """Wait until the last plan has been copied to the device."""
        if self.copy_event is not None:
            self.copy_event.synchronize()

    def write_pages(self, tail_prefix: Prefix) -> None:
        """Writes page_starts, pages and last_page_rows from the page table and the lengths on the device."""
        if self.written_prefix is tail_prefix:
            return
        self.written_prefix = tail_prefix
        page_ends = num_pages(tail_prefix.length, self.shape.page_size).cumsum(0)
        self.page_starts[1:].copy_(page_ends)
        self.last_page_rows.copy_(self._last_page_rows(tail_prefix.length))
        entry = torch.arange(self.pages.shape[0], device=page_ends.device)
        request = torch.searchsorted(page_ends, entry, right=True).clamp(max=self.shape.batch - 1)
        column = (entry - self.page_starts[request]).clamp(0, self.shape.pages_per_request - 1)
        self.pages.copy_(tail_prefix.page_table[request, column])

    @property
    def needs_lengths(self) -> bool:
        return self.shape.is_split or self.shape.uses_fa3

    def _make_wrapper(self, workspace: Tensor, buffers: tuple[Tensor, ...]) -> Any:
        """Returns an object of the library.  buffers: int32 tensors that it reads: query_starts to last_page_rows."""
        make = import_module("flashinfer").prefill.BatchPrefillWithPagedKVCacheWrapper
        wrapper = make(workspace, "NHD", True, *buffers, backend="fa3" if self.shape.uses_fa3 else "fa2")
        # Without splits, more programs start than the plan has entries.  The other programs read entries that no plan
        # wrote.  If these entries are zero, the programs repeat the work of the first entry.
        wrapper._pin_memory_int_workspace_buffer.zero_()
        return wrapper

    def _plan_wrapper(self, num_rows: Tensor) -> None:
        """Compute the wrapper's plan.  num_rows: [B] int32 on the host, the number of rows of each request."""
        shape = self.shape
        starts = pad(num_pages(num_rows, shape.page_size).cumsum(0), (1, 0)).int()
        self.wrapper.plan(
            *(self.query_starts, starts, self.pages[:0], self._last_page_rows(num_rows)),
            *(shape.spec.heads, *self._head_sizes(shape.spec.cache_spec), shape.page_size),
            causal=False,
            sm_scale=shape.spec.softmax_scale,
            **{"q_data_type": shape.dtype, "kv_data_type": shape.dtype, **self._plan_options()},
        )

    def _head_sizes(self, cache_spec: CacheSpec) -> tuple[int, ...]:
        """Returns the KV heads and the size of a head, as arguments of the library."""
        return cache_spec.kv_heads, cache_spec.k_size

    def _plan_options(self) -> dict[str, bool]:
        return {"disable_split_kv": not self.shape.is_split}

    def _last_page_rows(self, num_rows: Tensor) -> Tensor:
        """Returns the number of rows in each request's last page; 0 for a request without rows."""
        return num_rows - (num_pages(num_rows, self.shape.page_size) - 1).clamp(min=0) * self.shape.page_size

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Computes attention.  Returns out and the log-sum-exps in base 2.

        q: [B · Q, heads, k_size]; k, v: [pages, page_size, kv_heads, size]."""
        out = q.new_empty(*q.shape[:2], v.shape[3])
        return out, self.wrapper.run(q, (k, v), out=out, return_lse=True)[1]


class LatentWrapperPlan(WrapperPlan):
    needs_lengths = True

    def _make_wrapper(self, workspace: Tensor, buffers: tuple[Tensor, ...]) -> Any:
        return import_module("flashinfer").mla.BatchMLAPagedAttentionWrapper(workspace, True, *buffers)

    def _head_sizes(self, cache_spec: CacheSpec) -> tuple[int, ...]:
        """Returns the sizes of the latent part and of the rotated part of a row, as arguments of the library."""
        return cache_spec.v_size, cache_spec.k_size - cache_spec.v_size

    def _plan_options(self) -> dict[str, bool]:
        return {}

    def _last_page_rows(self, num_rows: Tensor) -> Tensor:
        """Returns all rows of each request: for latent rows, the library wants this number instead."""
        return num_rows

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """q: [B · Q, heads, latent + rotated].  k: latent rows.  v: the latent part of k; only its size is read."""
        size, rows = v.shape[3], k[:, :, 0]
        out = q.new_empty(*q.shape[:2], size)
        latent_and_rotated = q[..., :size], q[..., size:], rows[..., :size], rows[..., size:]
        return out, self.wrapper.run(*latent_and_rotated, out=out, return_lse=True)[1]


class FlashInferAttention(LibraryAttention):
    def __init__(self, backend: "FlashInferBackend", *pass_arguments: Any) -> None:
        super().__init__(*pass_arguments)
        self.backend = backend

    def attend_by_library(self, q: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Returns attention of q [B, Q, heads, k_size] over `tail_prefix`: out, and lse (natural log)."""
        spec, (batch, width) = self.specs[layer], self.tail_prefix.page_table.shape
        page_fields = self.num_skipped_pages, width, self.pages.page_size, self.pages.dtype
        device_fields = self.backend.lengths.exact, *device_properties(q.device)
        plan = self.backend.plan_for_shape(PassShape(batch, q.shape[1], spec, *page_fields, *device_fields), q.device)
        plan.write_pages(self.tail_prefix)
        out, lse = plan.run(q.flatten(0, 1), *self.paged_rows(layer))
        return out.view(*q.shape[:3], -1), lse.view(q.shape[:3]) * LN_2


class FlashInferBackend(AttentionBackend):
    support = library_support(
        name="flashinfer",
        head_sizes=(64, 128, 256),
        latent_rows=(LatentKV(576, 512),),
        needs_exact_lengths=(LatentKV,),
        compute_majors=range(8, 13),
        library=Library(("flashinfer",), "flashinfer"),
        tested_on=("H200",),
        limit_reasons={
            "dtype": "its kernels compute in two-byte types",
            "head_size": "BatchPrefillWithPagedKVCacheWrapper has kernels for these, of K and V alike",
            "softcap": "the logits_soft_cap of BatchPrefillWithPagedKVCacheWrapper is not used",
            "latent": "BatchMLAPagedAttentionWrapper is made for 512 values and 64 rotated ones",
            "lengths": "BatchMLAPagedAttentionWrapper.plan divides rows on the host, by exact lengths",
            "capability": "the library builds its kernels for these",
        },
    )

    def __init__(self) -> None:
        self.lengths = CommittedLengths((), exact=True)
        self.workspace: Tensor | None = None
        self.captured_plans: dict[int, dict[PassShape, WrapperPlan]] = {}
        self.eager_plans: dict[PassShape, WrapperPlan] = {}

    def prepare(self, lengths: CommittedLengths) -> None:
        """Stores the lengths.  For a CUDA graph, also computes the plans of its batch size."""
        self.lengths = lengths
        if lengths.in_graph:
            for plan in self.captured_plans.get(len(lengths.max_lengths), {}).values():
                plan.plan_for(lengths)

    def plan(self, pages: PagedKV, specs: Sequence[LayerSpec], prefix: Prefix, nodes: Nodes) -> FlashInferAttention:
        return FlashInferAttention(self, pages, specs, prefix, nodes)

    def plan_for_shape(self, shape: PassShape, device: torch.device) -> WrapperPlan:
        """Returns the plan of this shape, for the lengths that `prepare` stored.  A CUDA graph's plans are created in
        the eager run before its capture."""
        assert len(self.lengths.max_lengths) == shape.batch, "a launch of other requests than were announced"
        plans = self.captured_plans.setdefault(shape.batch, {}) if self.lengths.in_graph else self.eager_plans
        if shape not in plans:
            if plans is self.eager_plans and len(plans) == MAX_EAGER_PLANS:
                self.eager_plans.pop(next(iter(self.eager_plans))).wait_for_copy()
            plan_class = LatentWrapperPlan if isinstance(shape.spec.cache_spec, LatentKV) else WrapperPlan
            plans[shape] = plan_class(shape, self._workspace(shape, device))
        plans[shape].plan_for(self.lengths)
        return plans[shape]

    def _workspace(self, shape: PassShape, device: torch.device) -> Tensor:
        """Returns the library's scratch memory.  All plans share this memory, because passes run one after another."""
        needed = max(WORKSPACE_BYTES, shape.split_bytes if shape.is_split else 0)
        if self.workspace is None or len(self.workspace) < needed:
            self.workspace = torch.empty(needed, dtype=torch.uint8, device=device)
        return self.workspace


def device_properties(device: torch.device) -> tuple[int, bool]:
    """Returns (programs that fill the device: two per multiprocessor; whether the device supports FA3)."""
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return (264, True) if properties is None else (2 * properties.multi_processor_count, properties.major == 9)


def num_pages(num_rows: Tensor, page_size: int) -> Tensor:
    """Returns, for each number of rows, how many pages hold them."""
    return (num_rows + page_size - 1) // page_size
