"""Attention over committed rows (K and V in pages) and staged rows (new in this pass), and the merge of results."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from espalier.kernels.attention.ancestor_bits import causal_ancestor_bits, visible_mask
from espalier.kernels.attention.triton_config import TritonConfig
from espalier.kernels.hopper.config import HopperConfig, HopperLatentConfig, HopperLatentFewQueriesConfig
from espalier.kernels.ops.selection import SPLIT_COLUMNS, KVSplitPolicy, KVSplits
from espalier.kernels.ops.state import page_rows
from espalier.kernels.runtime.op import op
from espalier.kernels.state.kv_scales import KVScales, times_k_scale, times_v_scale


def apply_softcap(logits: Tensor, softcap: float | None) -> Tensor:
    """Returns softcap · tanh(logits / softcap), or the logits if softcap is None."""
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float,
    kv_scales: KVScales | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes attention of q [B, Q, heads, k_size] over k, v [B, R, kv_heads, size] where mask [B, Q, R] is true.

    scale: the factor of q · k.  kv_scales: the scales of FP8 k and v; None for other dtypes.  softcap: see LayerSpec.
    Returns out [B, Q, heads, v_size] in q's dtype and the log-sum-exp of the scores, lse [B, Q, heads], natural log, in
    float32 (float64 for float64).  A query that attends to no rows gets zeros and lse -inf."""
    heads, kv_heads = q.shape[2], k.shape[2]
    wide_dtype = torch.promote_types(q.dtype, torch.float32)
    queries = q.to(wide_dtype) if kv_scales is None else times_k_scale(q.to(wide_dtype), kv_scales)
    grouped_queries = queries.unflatten(2, (kv_heads, heads // kv_heads))
    scores = torch.einsum("bqhgd,brhd->bqhgr", grouped_queries, k.to(wide_dtype)) * scale
    scores = apply_softcap(scores, softcap)
    scores = scores.masked_fill(~mask[:, :, None, None, :], -torch.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0)[..., None])
    out = torch.einsum("bqhgr,brhd->bqhgd", weights, v.to(wide_dtype))
    out = out.flatten(2, 3) if kv_scales is None else times_v_scale(out.flatten(2, 3), kv_scales)
    return out.to(q.dtype), lse.flatten(2, 3)


def apply_sink(out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Returns `out` [..., heads, v_size] with attention sinks: a sink is one more logit in a head's softmax.

    A sink has no value, so `out` is multiplied by exp(lse) / (exp(lse) + exp(sink)).  lse: [..., heads], natural log,
    without the sink.  sink: [heads]."""
    finite_lse = lse.masked_fill(lse == -torch.inf, 0)
    return (out * torch.sigmoid(finite_lse - sink.to(lse.dtype))[..., None]).to(out.dtype)


KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Latent rows with more values than this have a separate kernel.
MAX_LATENT_HEAD_SIZE = 256
# A tile's output stays in registers: 64 queries x 512 float32 values take half of a multiprocessor's registers.
MAX_HEAD_SIZE = MAX_V_SIZE = 512
# The most values of a latent row (latent and RoPE part together).
MAX_ROW_SIZE = 576
OutAndLse = tuple[Tensor, Tensor]
T = TypeVar("T")


@dataclass(frozen=True)
class Prefix:
    """The committed rows (K and V in pages) of each request of a pass.

    page_table: [B, table_width] int32.  length: [B] int64.  The rows first_position .. length-1 exist.  first_position
    is 1 for an EAGLE draft, because a row is computed from the target's hidden state at the position before.
    plan_cache: values that an attention backend computes once for all passes over this prefix, such as KVSplits.  After
    any change of `length`, a new Prefix must be made, because plan_cache may be out of date."""

    page_table: Tensor
    length: Tensor
    first_position: int = 0
    plan_cache: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)

    def get_or_make(self, key: Hashable, make_value: Callable[[], T]) -> T:
        """Returns the result of `make_value`, which is called once per key for all passes over this prefix."""
        if key not in self.plan_cache:
            self.plan_cache[key] = make_value()
        value: T = self.plan_cache[key]
        return value

    def contains(self, positions: Tensor) -> Tensor:
        """Returns [B, P] bool: whether a row exists at each of `positions`.
        Rows that do not exist must not be read, because pages are not cleared."""
        return (positions >= self.first_position) & (positions < self.length[:, None])


@dataclass(frozen=True)
class Nodes:
    """The queries and the staged rows (new K and V) of a pass.

    positions: [B, Q] int64, the queries' positions.  row_positions: [B, R] int64, the positions of the staged rows.
    Without staged rows (R = 0), queries attend only to committed rows.
    ancestor_bits: [B, Q, W] int64, the staged rows that a query attends to (its ancestors and itself).  None: the rows
    are a chain, every row is a query, and query i attends to rows 0 to i.
    parents: [B, R], each row's parent row; the root is its own parent.  Only layers with a recurrent state read this
    field; for these layers, None means a chain."""

    positions: Tensor
    row_positions: Tensor
    ancestor_bits: Tensor | None
    parents: Tensor | None = None

    @classmethod
    def chain(cls, positions: Tensor) -> Nodes:
        """Returns the Nodes of a chain at positions [B, Q].  Every row is a query, so R is Q."""
        return cls(positions, positions, None)

    def single_query(self, row: Tensor) -> Nodes:
        """Returns the Nodes of a chain with one query per request: row `row` [B], which attends to rows 0 to `row`."""
        positions = self.positions.gather(1, row[:, None])
        return Nodes(positions, self.row_positions, causal_ancestor_bits(row, self.row_positions.shape[1]))

    def visible_rows(self, window: int | None) -> Tensor:
        """Returns [B, Q, R] bool, the staged rows that each query attends to: itself and its ancestors, in the window.
        A padding row also attends to itself, because a softmax over no rows is not defined."""
        return visible_mask(self.ancestor_bits, self.positions, self.row_positions, window)


class AttentionInputs(NamedTuple):
    """The arguments of one launch of an attention kernel.

    q: [B, Q, heads, k_size].  pages: K and V, [rows, kv_heads, size], where row = page * page_size + offset.
    splits: the splits of the committed rows; with a window, of the rows inside the window.  scale: the factor of q · k.
    staged: K and V of the staged rows, [B, R, kv_heads, size]; None: queries attend only to committed rows.
    window, softcap: see LayerSpec.  sink: see apply_sink.  kv_scales: the scales of committed and staged K and V in
    FP8; None for other dtypes."""

    q: Tensor
    pages: tuple[Tensor, Tensor]
    page_size: int
    prefix: Prefix
    nodes: Nodes
    splits: KVSplits
    scale: float
    staged: tuple[Tensor, Tensor] | None = None
    window: int | None = None
    sink: Tensor | None = None
    softcap: float | None = None
    kv_scales: KVScales | None = None

    @property
    def v_size(self) -> int:
        return self.pages[1].shape[2]

    def output_buffers(self) -> tuple[Tensor, Tensor]:
        """Returns new buffers for a kernel: out [B, Q, heads, v_size] in q's dtype, lse [B, Q, heads] float32."""
        rows = self.q.shape[:3]
        out = torch.empty(*rows, self.v_size, dtype=self.q.dtype, device=self.q.device)
        return out, torch.empty(*rows, dtype=torch.float32, device=self.q.device)


@dataclass(frozen=True)
class PartialResults:
    """The attention results of each split: out [B * max_splits, Q, heads, v_size] and lse [B * max_splits, Q, heads].

    Both are float32.  lse, the log-sum-exp, is base 2.  The entry of a request with a single split is not written."""

    out: Tensor
    lse: Tensor

    @classmethod
    def allocate(cls, splits: KVSplits, num_queries: int, num_heads: int, v_size: int) -> PartialResults:
        """Returns uninitialised buffers for the results of these splits.  num_queries: of each request."""
        shape = (splits.table.shape[0], num_queries, num_heads)
        device = splits.table.device
        return cls(torch.empty(*shape, v_size, device=device), torch.empty(shape, device=device))


def empty_prefix(batch: int, device: torch.device) -> tuple[Prefix, KVSplits]:
    """Returns (a Prefix without rows for each request, its splits).  With such a prefix, a kernel reads only staged
    rows."""
    starts = torch.ones(2 * batch + 1, dtype=torch.int32, device=device)
    starts[: batch + 1] = torch.arange(batch + 1, dtype=torch.int32, device=device)
    table = torch.zeros(batch, SPLIT_COLUMNS, dtype=torch.int32, device=device)
    table[:, 0] = starts[:batch]
    table[:, SPLIT_COLUMNS - 1] = 1
    length = torch.zeros(batch, dtype=torch.int64, device=device)
    return Prefix(table[:, 1:2], length), KVSplits(table, starts, KVSplitPolicy(1, 1))


def is_wide_latent(k: Tensor, v: Tensor) -> bool:
    """Returns whether staged K and V are views of one latent row that is too wide for tree_attention."""
    is_latent = k.shape[2] == 1 and k.data_ptr() == v.data_ptr()
    return is_latent and MAX_LATENT_HEAD_SIZE < k.shape[3] <= MAX_ROW_SIZE and v.shape[3] <= MAX_V_SIZE


def has_staged_kernel(inputs: AttentionInputs) -> bool:
    """Returns whether staged_attention has a kernel for the sizes, dtype, window and softcap of `inputs`."""
    assert inputs.staged is not None
    (k, v), has_no_options = inputs.staged, inputs.window is None and inputs.softcap is None
    is_supported = has_no_options if is_wide_latent(k, v) else max(k.shape[3], v.shape[3]) <= MAX_HEAD_SIZE
    return inputs.q.is_cuda and inputs.q.dtype in KERNEL_DTYPES and is_supported


@op("espalier.kernels.attention.kv_splits", tensor="page_table")
def count_contiguous_blocks(
    splits: KVSplits, page_table: Tensor, page_size: int, first_position: int, block_rows: int
) -> Tensor:
    """Returns [B * max_splits] int32: how many of a split's first blocks have their rows side by side in the memory of
    pages.

    Only unmasked blocks are counted: full blocks whose rows all exist (work_items.py:count_committed_blocks).  Counting
    stops at the first block that is not contiguous.  Entries past the last split are undefined.
    page_table: [B, T] int32.  first_position: rows at lower positions do not exist.  block_rows: the rows of a block,
    a divisor of SPLIT_ALIGNMENT."""
    out = torch.zeros(splits.table.shape[0], dtype=torch.int32)
    for split, (request, begin, end, _request_splits) in enumerate(splits.used_rows.tolist()):
        block_begin = begin + -(-max(first_position - begin, 0) // block_rows) * block_rows
        while block_begin + block_rows <= begin + (end - begin) // block_rows * block_rows:
            position = torch.arange(block_begin, block_begin + block_rows, device=page_table.device)
            [rows] = page_rows(page_table[request][None], position[None], page_size)
            if not torch.equal(rows, rows[0] + position - block_begin):
                break
            out[split] += 1
            block_begin += block_rows
    return out.to(page_table.device)


@op("espalier.kernels.attention.merge", tensor="first_result[0]")
def merge_results(first_result: OutAndLse, second_result: OutAndLse, sink: Tensor | None = None) -> Tensor:
    """Merges the attention results over two disjoint sets of keys.  Returns out in the dtype of the first result.

    first_result, second_result: out [..., heads, v_size] and lse [..., heads], natural log.  An lse may be -inf; if
    both are -inf, the returned out is zero.  sink: [heads], see apply_sink."""
    (out_a, lse_a), (out_b, lse_b) = first_result, second_result
    lse = torch.logaddexp(lse_a, lse_b)
    if sink is not None:
        lse = torch.logaddexp(lse, sink.to(lse.dtype))
    shift = lse.masked_fill(lse == -torch.inf, 0)
    weighted = out_a * torch.exp(lse_a - shift)[..., None] + out_b * torch.exp(lse_b - shift)[..., None]
    return weighted.to(out_a.dtype)


@op("espalier.kernels.attention.merge", tensor="out")
def merge_splits(
    partial_results: PartialResults, splits: KVSplits, out: Tensor, lse: Tensor, sink: Tensor | None = None
) -> None:
    """Merge partial_results of requests with several splits into out [B, Q, heads, v_size] and lse [B, Q, heads].

    lse is float32, natural log, and does not include the sink.  sink: [heads], see apply_sink.  A query that attends to
    no rows gets zeros and lse -inf."""
    batch, starts = out.shape[0], splits.starts.tolist()
    for request in range(batch):
        start, count = starts[request], starts[batch + 1 + request]
        of_request = slice(start, start + count)
        if count == 1:
            continue
        partial_lse = partial_results.lse[of_request] * torch.tensor(2.0).log()
        total_weight = torch.logsumexp(partial_lse, 0)
        shift = total_weight.masked_fill(total_weight == -torch.inf, 0)
        merged = (torch.exp(partial_lse - shift)[..., None] * partial_results.out[of_request]).sum(0)
        out[request] = merged if sink is None else apply_sink(merged, total_weight, sink)
        lse[request] = total_weight


@op("espalier.kernels.attention.tree_attention", tensor="inputs.q")
def tree_attention(
    inputs: AttentionInputs,
    partial_results: PartialResults | None = None,
    config: TritonConfig | HopperConfig | None = None,
    num_contiguous_blocks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes attention of queries over committed and staged rows.

    Returns out [B, Q, heads, v_size] in q's dtype and lse [B, Q, heads] float32, natural log, without the sink.  A
    query that attends to no rows gets zeros and lse -inf.  Products of float32 are in full precision, not in TF32.

    partial_results: a buffer to reuse (`PartialResults.allocate`).  config: a launch configuration, for tests only;
    None: it is chosen by shape.  num_contiguous_blocks: the result of count_contiguous_blocks for these splits.
    Without these counts the launch is slower; the result is the same."""
    # The reference is one masked attention over all rows.  Rows that do not exist are replaced by zeros.
    (batch, queries), table = inputs.nodes.positions.shape, inputs.prefix.page_table
    row_positions = torch.arange(table.shape[1] * inputs.page_size, device=inputs.q.device).expand(batch, -1)
    exists = inputs.prefix.contains(row_positions)
    row = page_rows(table, row_positions, inputs.page_size, exists)
    k, v = (torch.where(exists[..., None, None], pages[row], 0) for pages in inputs.pages)
    seen = exists[:, None].expand(-1, queries, -1)
    if inputs.staged is not None:
        seen = torch.cat((seen, inputs.nodes.visible_rows(None)), 2)
        k, v = (torch.cat(rows, 1) for rows in zip((k, v), inputs.staged, strict=True))
        row_positions = torch.cat((row_positions, inputs.nodes.row_positions), 1)
    if inputs.window is not None:
        seen = seen & (inputs.nodes.positions[:, :, None] - row_positions[:, None, :] < inputs.window)
    out, lse = masked_attention(inputs.q, k, v, seen, inputs.scale, inputs.kv_scales, inputs.softcap)
    return out if inputs.sink is None else apply_sink(out, lse, inputs.sink), lse


@op("espalier.kernels.attention.latent_attention", tensor="inputs.q")
def latent_attention(
    inputs: AttentionInputs,
    partial_results: PartialResults | None = None,
    config: TritonConfig | HopperLatentConfig | HopperLatentFewQueriesConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes attention of queries over latent rows (MLA): one KV head whose V is the first part of K.

    Arguments and results are those of tree_attention.  V must be a view of K, both in pages and in staged rows.
    Windows, sinks and soft-caps are not supported."""
    return tree_attention.reference(inputs)


@op("espalier.kernels.attention.tree_attention", condition=has_staged_kernel)
def staged_attention(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Computes attention of each query only over staged rows: its own row and the rows of its ancestors.

    inputs: `prefix` and `splits` must come from empty_prefix.  Returns out [B, Q, heads, v_size] in q's dtype and lse
    [B, Q, heads], natural log.  A query that attends to no rows gets zeros and lse -inf."""
    assert inputs.staged is not None
    seen = inputs.nodes.visible_rows(inputs.window)
    return masked_attention(inputs.q, *inputs.staged, seen, inputs.scale, inputs.kv_scales, inputs.softcap)
