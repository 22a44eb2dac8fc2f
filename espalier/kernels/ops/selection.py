"""Sparse attention with an indexer: chooses the rows of K and V that a query attends to, by the scores of index keys.

A query has several index heads, each with a weight.  The score of a row is the sum over heads of weight · max(q · k, 0)
(DeepSeek-AI 2025, "DeepSeek-V3.2", section 2.1).  Among equal scores the later position comes first, so a selection
depends only on scores and positions.  This module also splits the committed rows (K and V in pages) of requests, see
KVSplits.  So several programs of an attention kernel can share a request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from espalier.kernels.attention.ancestor_bits import pack_bits
from espalier.kernels.ops.rope import Rotation, rotate
from espalier.kernels.ops.state import page_rows
from espalier.kernels.runtime.op import op
from espalier.layout import next_bucket

# The most products q · k (of one index head of a query with one key) that the reference holds at once.
MAX_REFERENCE_PRODUCTS = 2**25
# Limits of the kernels: the values of a key, and the number of chosen rows.
MAX_INDEX_SIZE = 256
MAX_TOPK = 8192
# Adjacent rows per group.  A selection first reads the highest score of each group, and then the scores of few groups.
SCORE_GROUP_SIZE = 8
# Splits start at multiples of this number of rows.  No attention kernel reads larger blocks of rows (BLOCK_N).
SPLIT_ALIGNMENT = 64
# The fewest rows of a split.  A shorter split would save less time than its merge takes.  MIN_SHORT_SPLIT_ROWS is for
# up to SMALL_TILE_QUERIES packed queries (queries x query heads per KV head), whose partial results are small.
# MIN_LARGE_TILE_SPLIT_ROWS is for large tiles of queries, whose partial results are large.  Requests with one tile of
# queries over wide latent rows also get short splits, because one program reads wide rows slowly.
MIN_SPLIT_ROWS, MIN_SHORT_SPLIT_ROWS, MIN_LARGE_TILE_SPLIT_ROWS = 128, 64, 320
SMALL_TILE_QUERIES = 16
# The most rows of a split, unless a larger limit below applies.  With longer splits, a long request would run alone at
# the end.
MAX_SPLIT_ROWS = 2048
# Number of programs that fill a GPU (H200, docs/log.md): two per multiprocessor, because one program alone reads K and
# V at about half of the bandwidth.  With a large tile of packed queries, one program keeps the tensor cores busy.
TARGET_PROGRAMS = 256
LARGE_TILE_QUERIES, LARGE_TILE_PROGRAMS = 128, 128
# The most rows of a split if one request fills half of LARGE_TILE_PROGRAMS (a prefill chunk).  With shorter splits,
# merging the large partial results took 2.5% of a prompt of 8k (docs/log.md).
MAX_MANY_TILES_SPLIT_ROWS = 8192
# Limits for the kernels of wide latent rows.  A tile has 64 packed queries, so one program fills a multiprocessor.  A
# partial result has up to 512 values, which makes merging slow.  So fewer, longer splits are faster.
LATENT_TILE_QUERIES, MAX_LATENT_ROWS_PER_SPLIT = 64, 4096
# The most splits of one request.  MAX_SPLITS_OF_FEW_HEADS is for wide latent rows, and for few requests with few KV
# heads, because with MAX_SPLITS splits a part of the GPU would be idle.
MAX_SPLITS, MAX_SPLITS_OF_FEW_HEADS = 32, 128
# The most rows of partial results (queries x splits) of one request.
MAX_PARTIAL_ROWS_PER_REQUEST = 512
# The most float32 values in the partial results of a batch: 256 MiB.
MAX_PARTIAL_VALUES = 2**26
# Columns of the table of splits: request, begin (multiple of SPLIT_ALIGNMENT), end (exclusive), the request's splits.
SPLIT_COLUMNS = 4


class IndexerNorm(NamedTuple):
    """The LayerNorm of index keys: weight and bias [size], eps."""

    weight: Tensor
    bias: Tensor
    eps: float


class IndexerInputs(NamedTuple):
    """The indexer's queries, keys and weights for new rows, before norm and RoPE.

    q: [N, heads, size].  k: [N, size].  weights: [N, heads] float32 (float64 for float64), the weight of each head.
    norm: the norm of k.  rotation: the RoPE of the first values of q and k.
    interleaved: whether the two values of a rotated pair are adjacent in q and k; see LatentFormat.interleaved."""

    q: Tensor
    k: Tensor
    weights: Tensor
    norm: IndexerNorm
    rotation: Rotation
    interleaved: bool


class IndexerQueries(NamedTuple):
    """The index queries of rows.  q: [.., heads, size], after RoPE.  weights: [.., heads], the weight of each head."""

    q: Tensor
    weights: Tensor


@dataclass(frozen=True)
class IndexerKeys:
    """The index keys of committed and staged rows.

    committed: [rows, 1, size], the index keys in the pages.  page_table: [B, T] int32.  length: [B] int64; the rows
    first_position .. length - 1 exist.  staged: [B, R, 1, size], the index keys of this pass."""

    committed: Tensor
    page_table: Tensor
    length: Tensor
    page_size: int
    first_position: int
    staged: Tensor


class IndexerScores(NamedTuple):
    """The index scores of C committed positions and R staged rows, for each query.

    row_scores: [B, Q, C + R] float32, the scores of the page table's positions, then those of the staged rows.
    group_scores: [B, Q, ceil(C / SCORE_GROUP_SIZE) + ceil(R / SCORE_GROUP_SIZE)] float32, the highest score of each
    group of SCORE_GROUP_SIZE positions, then of each group of SCORE_GROUP_SIZE staged rows.
    Scores of positions past a request's length, and of groups that begin there, are undefined."""

    row_scores: Tensor
    group_scores: Tensor

    @classmethod
    def empty(
        cls, batch_size: int, num_queries: int, capacity: int, num_staged_rows: int, device: torch.device
    ) -> IndexerScores:
        """Returns empty buffers; kernels can load four scores at once.  capacity: positions of a page table."""
        sizes = (capacity + num_staged_rows, -(-capacity // SCORE_GROUP_SIZE) + -(-num_staged_rows // SCORE_GROUP_SIZE))
        buffers = (
            torch.empty(batch_size, num_queries, -(-size // 16) * 16, dtype=torch.float32, device=device)[..., :size]
            for size in sizes
        )
        return cls(*buffers)


class SelectedRows(NamedTuple):
    """The rows that each query attends to.

    rows: [B, Q, K] int32, the chosen rows of the pages, in order of position, then dummy rows.  counts: [B, Q] int64,
    the number of chosen rows of the pages.  If a request has at most topk committed and staged rows, the count is 0,
    and its queries attend to all rows.  bits: [B, Q, W] int64, the chosen staged rows, in the form of ancestor bits."""

    rows: Tensor
    counts: Tensor
    bits: Tensor


def mark_top_rows(scores: Tensor, topk: int) -> Tensor:
    """Returns [..., N] bool: whether each of scores [..., N] is above -inf and among the topk highest.

    The columns are in order of position.  Among equal scores, later positions are chosen."""
    exists = scores > -torch.inf
    if scores.shape[-1] <= topk:
        return exists
    threshold = scores.topk(topk, -1).values[..., -1:]
    is_above = scores > threshold
    is_tie = (scores == threshold) & exists
    num_ties = topk - is_above.sum(-1, keepdim=True)
    return is_above | is_tie & (is_tie.flip(-1).cumsum(-1).flip(-1) <= num_ties)


def score_keys(queries: IndexerQueries, keys: Tensor) -> Tensor:
    """Returns [B, Q, N] float32 (float64 for float64): the scores of keys [B, N, size] for queries [B, Q, ...]."""
    q, weights = queries
    wide_dtype = torch.promote_types(q.dtype, torch.float32)
    batch, rows, heads = q.shape[:3]
    scores = torch.empty(batch, rows, keys.shape[1], dtype=wide_dtype, device=q.device)
    keys = keys.to(wide_dtype).transpose(1, 2)
    step = max(MAX_REFERENCE_PRODUCTS // max(batch * heads * keys.shape[2], 1), 1)
    for begin in range(0, rows, step):
        query_slice = slice(begin, begin + step)
        products = (q[:, query_slice].to(wide_dtype).flatten(1, 2) @ keys).relu_().unflatten(1, (-1, heads))
        scores[:, query_slice] = (weights[:, query_slice].to(wide_dtype)[:, :, None] @ products)[:, :, 0]
    return scores


@op("espalier.kernels.layers.index_rows", tensor="indexer_inputs.q")
def rotate_and_store_index(indexer_inputs: IndexerInputs, cache_rows: Tensor, plane: Tensor) -> Tensor:
    """Norm and rotate the index keys, and write them to rows cache_rows [N] of `plane` [R, 1, size].

    Returns the index queries [N, heads, size], rotated."""
    norm, rotary = indexer_inputs.norm, indexer_inputs.rotation.cos.shape[1]
    size = indexer_inputs.k.shape[-1]
    k = F.layer_norm(indexer_inputs.k, (size,), norm.weight, norm.bias, norm.eps)[:, None]
    q, k = (_rotate_x(x, indexer_inputs.rotation, rotary, indexer_inputs.interleaved) for x in (indexer_inputs.q, k))
    plane.index_copy_(0, cache_rows, k)
    return q


def _rotate_x(x: Tensor, rotation: Rotation, rotary: int, is_interleaved: bool) -> Tensor:
    """Rotates the first `rotary` values of each head of x [N, heads, size].  is_interleaved: see IndexerInputs."""
    if is_interleaved:
        paired = x[..., :rotary].unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        x = torch.cat((paired, x[..., rotary:]), -1)
    return rotate(x, *rotation)


@op("espalier.kernels.attention.index_scores", tensor="queries.q")
def index_scores(queries: IndexerQueries, keys: IndexerKeys, ancestor_bits: Tensor) -> IndexerScores:
    """Returns the scores of all committed and staged rows for each query.

    ancestor_bits: [B, Q, W] int64, the staged rows that a query attends to.  The score is -inf for other staged rows
    and for positions below first_position."""
    batch, num_staged = keys.staged.shape[:2]
    capacity = keys.page_table.shape[1] * keys.page_size
    positions = torch.arange(capacity, device=keys.length.device).expand(batch, -1)
    exists = (positions >= keys.first_position) & (positions < keys.length[:, None])
    committed = keys.committed[page_rows(keys.page_table, positions, keys.page_size, exists), 0]
    scores = score_keys(queries, torch.cat((committed, keys.staged[:, :, 0]), 1))
    bits = torch.arange(num_staged, device=scores.device)
    seen = (ancestor_bits[..., bits // 64] >> bits % 64 & 1).bool()
    seen = torch.cat((exists[:, None].expand(-1, seen.shape[1], -1), seen), 2)
    scores.masked_fill_(~seen, -torch.inf)
    return IndexerScores(scores, max_group_scores(scores, capacity))


def max_group_scores(row_scores: Tensor, capacity: int) -> Tensor:
    """Returns IndexerScores.group_scores for row_scores [..., C + R], with C = capacity."""
    parts = [row_scores[..., :capacity], row_scores[..., capacity:]]
    padded = [F.pad(part, (0, -part.shape[-1] % SCORE_GROUP_SIZE), value=-torch.inf) for part in parts]
    return torch.cat(padded, -1).unflatten(-1, (-1, SCORE_GROUP_SIZE)).amax(-1)


@op("espalier.kernels.attention.select_rows", tensor="scores.row_scores")
def select_rows(scores: IndexerScores, length: Tensor, page_table: Tensor, page_size: int, topk: int) -> SelectedRows:
    """Chooses the rows with the topk highest scores.  The kernel chooses exactly the reference's rows.

    scores: the result of index_scores.  length: [B] int64, the number of committed rows of each request.
    page_table: [B, T] int32, for C = T · page_size positions."""
    capacity = page_table.shape[1] * page_size
    rows = scores.row_scores
    num_staged = rows.shape[2] - capacity
    is_past = torch.arange(rows.shape[2], device=rows.device).expand(len(length), -1)
    is_past = (is_past >= length[:, None]) & (is_past < capacity)
    chosen = mark_top_rows(rows.masked_fill(is_past[:, None], -torch.inf), topk)
    committed, staged = chosen.split((capacity, num_staged), 2)
    width = min(topk, capacity)
    count = committed.sum(2).where((length + num_staged > topk)[:, None], 0)
    # `order` lists the chosen positions in ascending order, then the positions that are not chosen.
    order = committed.logical_not().to(torch.uint8).argsort(dim=2, stable=True)[..., :width]
    is_chosen = torch.arange(width, device=rows.device) < count[..., None]
    of_pages = page_rows(page_table, order.flatten(1), page_size, is_chosen.flatten(1)).view(order.shape)
    return SelectedRows(of_pages.int(), count, pack_bits(staged))


@dataclass(frozen=True)
class KVSplitPolicy:
    """How a pass splits the committed rows of each request among the programs of an attention kernel.

    num_splits: the number of splits of most requests.  A request whose splits would be shorter than min_split_rows gets
    fewer splits.  A request whose splits would be longer than max_split_rows gets more splits, but at most max_splits;
    then its splits may be longer than max_split_rows."""

    num_splits: int
    max_splits: int
    max_split_rows: int = MAX_SPLIT_ROWS
    min_split_rows: int = MIN_SPLIT_ROWS

    @classmethod
    def choose(
        cls,
        batch_size: int,
        num_queries: int,
        kv_heads: int,
        group_size: int,
        max_rows: int,
        v_size: int,
        is_wide_latent: bool = False,
    ) -> KVSplitPolicy:
        """Returns the policy that fills a GPU with programs, within the limits of the partial results.

        num_queries: the queries of each request.  group_size: query heads per KV head.  max_rows: the most committed
        rows of a request.  batch_size is rounded up to its bucket (layout.next_bucket), so that a CUDA graph, whose
        batch is padded, and an eager launch get the same splits.  v_size: the values of V per KV head.
        is_wide_latent: whether a kernel for wide latent rows runs (latent_attention.py, hopper/latent.py)."""
        batch_size, packed_queries = next_bucket(batch_size), num_queries * group_size
        target_programs, num_tiles, min_split_rows, max_split_rows = TARGET_PROGRAMS, 1, MIN_SPLIT_ROWS, MAX_SPLIT_ROWS
        if is_wide_latent:
            target_programs, num_tiles = LARGE_TILE_PROGRAMS, -(-packed_queries // LATENT_TILE_QUERIES)
            min_split_rows = MIN_SHORT_SPLIT_ROWS if num_tiles == 1 else MIN_SPLIT_ROWS
            max_split_rows = MAX_LATENT_ROWS_PER_SPLIT
        elif packed_queries > LARGE_TILE_QUERIES // 2:
            target_programs, num_tiles = LARGE_TILE_PROGRAMS, -(-packed_queries // LARGE_TILE_QUERIES)
            # Few programs get one warpgroup each (choose_hopper_config), because two would leave processors idle.
            most_splits = -(-max_rows // MIN_LARGE_TILE_SPLIT_ROWS)
            if 4 * batch_size * kv_heads * num_tiles * most_splits < 3 * target_programs:
                min_split_rows = MIN_LARGE_TILE_SPLIT_ROWS
            if 2 * kv_heads * num_tiles >= target_programs:
                max_split_rows = MAX_MANY_TILES_SPLIT_ROWS
        elif packed_queries <= SMALL_TILE_QUERIES:
            min_split_rows = MIN_SHORT_SPLIT_ROWS
        num_wanted = target_programs // (batch_size * kv_heads * num_tiles)
        if is_wide_latent:
            # With more splits, one request would have more work items than a GPU runs at once.
            limit = min(MAX_SPLITS_OF_FEW_HEADS, target_programs // num_tiles)
        else:
            limit = max(MAX_SPLITS, min(num_wanted, MAX_SPLITS_OF_FEW_HEADS))
        partial_values = batch_size * packed_queries * kv_heads * v_size
        limit = min(limit, MAX_PARTIAL_VALUES // partial_values, MAX_PARTIAL_ROWS_PER_REQUEST // num_queries)
        max_splits = max(1, min(limit, -(-max_rows // min_split_rows)))
        num_splits = min(max(1, num_wanted), max_splits)
        fits_max_rows = max_rows <= num_splits * max_split_rows
        return cls(num_splits, num_splits if fits_max_rows else max_splits, max_split_rows, min_split_rows)

    def rows_per_split(self, num_rows: int) -> int:
        """Returns the rows per split of a request with `num_rows` committed rows, a multiple of SPLIT_ALIGNMENT.
        The last split may have fewer rows than the other splits."""
        num_wanted = max(min(-(-num_rows // self.min_split_rows), self.num_splits), -(-num_rows // self.max_split_rows))
        count = min(max(num_wanted, 1), self.max_splits)
        return max(-(-num_rows // (count * SPLIT_ALIGNMENT)), 1) * SPLIT_ALIGNMENT


@dataclass(frozen=True)
class KVSplits:
    """The splits of a batch.  Every request has at least one split, which may be empty.

    table: [B * policy.max_splits, SPLIT_COLUMNS] int32, one row per split; unused rows are undefined.  The splits of a
    request are adjacent, in order of position.  Without a window, requests with longer splits come first.
    starts: [2 · B + 1] int32: each request's first split (B values), the number of all splits (one value), each
    request's number of splits (B values)."""

    table: Tensor
    starts: Tensor
    policy: KVSplitPolicy

    @property
    def used_rows(self) -> Tensor:
        """The rows of the table that hold splits."""
        return self.table[: int(self.starts[len(self.starts) // 2])]


@op("espalier.kernels.attention.kv_splits")
def kv_splits(
    length: Tensor, first_position: int, policy: KVSplitPolicy, positions: Tensor | None = None, window: int = 0
) -> KVSplits:
    """Splits the committed rows first_position .. length - 1 of each request.

    length: [B] int64, the number of committed rows.  window: as in LayerSpec; 0 for no window.  positions: [B, Q]
    int64, the positions of the queries, needed only with a window.  Rows before the windows of all queries are left
    out.  The first split begins at a multiple of SPLIT_ALIGNMENT, so it may contain a few earlier rows."""
    batch = length.shape[0]
    table = torch.zeros(batch * policy.max_splits, SPLIT_COLUMNS, dtype=torch.int32)
    starts, counts, num_used, ranges = [0] * batch, [0] * batch, 0, []
    for request, rows in enumerate(length.tolist()):
        begin = first_position
        if window and positions is not None:
            begin = max(first_position, int(positions[request].min()) - window + 1)
        begin = begin // SPLIT_ALIGNMENT * SPLIT_ALIGNMENT
        num_rows = max(rows - begin, 0)
        ranges.append((request, begin, max(rows, begin), policy.rows_per_split(num_rows)))
    for request, begin, end, split_rows in ranges if window else sorted(ranges, key=lambda span: -span[3]):
        starts[request], counts[request] = num_used, max(1, -(-(end - begin) // split_rows))
        for split_begin in range(begin, max(end, begin + 1), split_rows):
            table[num_used] = torch.tensor([request, split_begin, min(split_begin + split_rows, end), counts[request]])
            num_used += 1
    all_starts = torch.tensor([*starts, num_used, *counts], dtype=torch.int32)
    return KVSplits(table.to(length.device), all_starts.to(length.device), policy)
