"""The common part of backends that call a library.  Our own kernels attend to the rows that the library cannot.

A library attends to all rows of a request's pages.  But a draft may have no rows below Prefix.first_position.  So our
kernels attend to the first pages, which lack rows, and the library to the later pages.  In layers with a sliding
window, only our kernels attend: in a tree, the window of a node depends on the node's depth, and no library has an
argument for depths.
"""

from collections.abc import Sequence
from functools import partial
from math import log

import torch
from torch import Tensor

from espalier.attention.base import AttentionPlan
from espalier.attention.reference import ReferenceAttention
from espalier.attention.support import Provider, Support
from espalier.attention.triton import TritonAttention, TritonBackend
from espalier.cache.kv import PagedKV
from espalier.cache.layer_spec import KVHeads, LatentKV, LayerSpec
from espalier.errors import EspalierError
from espalier.kernels.ops.attention import Nodes, Prefix, merge_results

LN_2 = log(2)

# The fields of Support that have the same value for every library.
library_support = partial(
    Support,
    devices=("cuda",),
    dtypes=(torch.bfloat16, torch.float16),
    cache_specs=(KVHeads, LatentKV),
    window_on_chain=Provider.OUR_KERNELS,
    window_on_tree=Provider.OUR_KERNELS,
    lacks_first_rows=Provider.OUR_KERNELS,
)


class LibraryAttention(AttentionPlan):
    """An attention plan that calls a library, and our kernels where needed.  Subclasses implement attend_by_library.

    tail_prefix: the part of the prefix to which the library attends."""

    def __init__(self, pages: PagedKV, specs: Sequence[LayerSpec], prefix: Prefix, nodes: Nodes):
        super().__init__(pages, specs, prefix, nodes)
        # The number of pages with positions below first_position.  At these positions no rows exist.
        self.num_skipped_pages = -(-prefix.first_position // pages.page_size)
        self.tail_prefix = prefix.get_or_make("tail", self._make_tail_prefix) if self.num_skipped_pages else prefix
        self.our_plans: dict[str, AttentionPlan] = {}

    def attend_by_library(self, q: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Computes attention of q [B, Q, heads, k_size] over all rows of `tail_prefix`.

        Returns out [B, Q, heads, v_size] and lse [B, Q, heads], natural log.  For a request without rows, out must be
        finite, and lse may have any value.  Not called for an empty batch, or if no request can have rows."""
        raise NotImplementedError

    def attend_prefix(self, q: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Merges the library's result over `tail_prefix` with our kernels' result over the rows before it, if any."""
        spec, page_size = self.specs[layer], self.pages.page_size
        if spec.window is not None:
            return self._our_plan("all").attend_prefix(q, layer)
        if q.shape[0] and self.tail_prefix.page_table.shape[1]:
            out, lse = self.attend_by_library(q, layer)
            tail = out, torch.where(self.tail_prefix.length[:, None, None] > 0, lse, -torch.inf)
        else:
            exact = torch.promote_types(q.dtype, torch.float32)
            tail = q.new_zeros(*q.shape[:3], spec.cache_spec.v_size), q.new_full(q.shape[:3], -torch.inf, dtype=exact)
        if self.prefix.first_position == self.num_skipped_pages * page_size:
            return tail
        head = self._our_plan("head").attend_prefix(q, layer)
        return merge_results(tail, head), torch.logaddexp(tail[1], head[1])

    def paged_rows(self, layer: int) -> tuple[Tensor, Tensor]:
        """Returns views of K and V of all pages of a layer, [pages, page_size, kv_heads, size] each."""
        k, v = (rows.unflatten(0, (-1, self.pages.page_size)) for rows in self.committed_kv(layer))
        return k, v

    def int_lengths(self) -> Tensor:
        """Returns [B] int32: the number of each request's rows in `tail_prefix`.  Computed once per prefix."""
        return self.prefix.get_or_make("lengths", self.tail_prefix.length.int)

    def _make_tail_prefix(self) -> Prefix:
        rows = self.num_skipped_pages * self.pages.page_size
        return Prefix(self.prefix.page_table[:, self.num_skipped_pages :], (self.prefix.length - rows).clamp(min=0))

    def _make_head_prefix(self) -> Prefix:
        rows = self.num_skipped_pages * self.pages.page_size
        page_table, length = self.prefix.page_table[:, : self.num_skipped_pages], self.prefix.length.clamp(max=rows)
        return Prefix(page_table, length, self.prefix.first_position)

    def _our_plan(self, prefix_part: str) -> AttentionPlan:
        """Returns our kernels' plan.  prefix_part: "all" is the whole prefix, "head" the pages before tail_prefix."""
        if prefix_part not in self.our_plans:
            prefix = self.prefix.get_or_make("head", self._make_head_prefix) if prefix_part == "head" else self.prefix
            our_plans = TritonAttention if prefix.length.is_cuda else ReferenceAttention
            self.our_plans[prefix_part] = our_plans(self.pages, self.specs, prefix, self.nodes)
        return self.our_plans[prefix_part]


def require_our_kernels(
    support: Support,
    device: str,
    dtype: torch.dtype,
    page_size: int,
    specs: Sequence[LayerSpec],
    lacks_first_rows: bool,
) -> None:
    """Check that our kernels support those layers in which they replace the library.  Raises EspalierError."""
    our_specs = [spec for spec in specs if lacks_first_rows or spec.window is not None]
    if support.library is None or device != "cuda" or not our_specs:
        return
    try:
        TritonBackend.support.require(device, dtype, page_size, our_specs)
    except EspalierError as error:
        raise EspalierError(f"attention={support.name} leaves a part of this to our kernels: {error}") from None
