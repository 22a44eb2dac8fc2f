"""Attention over latent rows (MLA) that are too wide for kernels/attention/tree_attention.py, as 512 + 64 values are.

K is the whole row and V its first part.  A block of rows is read once and used as both.  The row is cut into two parts,
because Triton's tiles have powers of two: the latent, which is V, and the rope part.  All heads share the one row, so a
tile of queries holds the heads of a query side by side.  Work items, splits, partial results and their merge are those
of kernels/attention/tree_attention.py; so is the plain-torch reference.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.attention.attention_blocks import _fold_scores, _page, _row, _rows, _write
from espalier.kernels.attention.kv_splits import KVSplits
from espalier.kernels.attention.merge_splits import Partials, merge_splits_triton
from espalier.kernels.attention.tree_attention import DTYPES, LOG2_E, Committed, Staged, tree_attention_reference
from espalier.kernels.attention.work_items import (
    CHAIN,
    NO_NODES,
    WORDS,
    block_at,
    committed_blocks,
    items_of,
    nodes_of,
    unit_of,
    work_at,
)
from espalier.kernels.runtime.launch import Chip, chip, kernel, power_of_two, require
from espalier.kernels.runtime.pdl import early

if TYPE_CHECKING:
    import triton.language as tl

# The running sum of a tile stays in registers: 64 queries x 512 float32 values take half of a multiprocessor's.
MAX_V_SIZE = 512
MAX_ROW_SIZE = 576


def latent_attention(
    q: Tensor,
    committed: Committed,
    staged: Staged | None,
    positions: Tensor,
    splits: KVSplits,
    scale: float,
    partials: Partials | None = None,
) -> tuple[Tensor, Tensor]:
    """As kernels/attention/tree_attention.py:tree_attention, for one KV head whose V is the first part of K's rows.

    committed.v and staged.v are views of committed.k and staged.k.  There is no window and no sink.
    """
    if q.is_cuda:
        return latent_attention_triton(q, committed, staged, positions, splits, scale, partials)
    return tree_attention_reference(q, committed, staged, positions, splits, scale)


# Arguments of kernels are grouped, not one a line.
# fmt: off
@kernel
def _fold_latent(
    q, q_rope, pointer, offsets, real, seen, scale, top, total, out,
    MASKED: tl.constexpr, V_SIZE: tl.constexpr, ROPE_SIZE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_ROPE: tl.constexpr,
):
    """Take the rows at `offsets` into a running softmax (kernels/attention/attention_blocks.py:_fold)."""
    latent = _rows(pointer, offsets, real, MASKED, V_SIZE, BLOCK_V)
    rope = _rows(pointer + V_SIZE, offsets, real, MASKED, ROPE_SIZE, BLOCK_ROPE)
    scores = tl.dot(q, tl.trans(latent), input_precision=PRECISION)
    scores = tl.dot(q_rope, tl.trans(rope), scores, input_precision=PRECISION)
    return _fold_scores(scores, latent, seen, scale, top, total, out, MASKED, PRECISION)


@kernel
def _over_committed_latents(
    q, q_rope, table, pointer, row_stride, begin, end, first, lower, whole, low, high, scale, top, total, out,
    MASKED: tl.constexpr, PAGE_SIZE: tl.constexpr, V_SIZE: tl.constexpr, ROPE_SIZE: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_ROPE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Blocks low .. high of the split's order (kernels/attention/work_items.py:block_at).

    MASKED: some rows are at `end` or past it, or below `first`.  They may be NaN, so they are never read.
    """
    page = _page(table, begin + block_at(low, lower, whole) * BLOCK_N, end, PAGE_SIZE, BLOCK_N)
    for t in tl.range(low, high, num_stages=STAGES):
        at = begin + block_at(t, lower, whole) * BLOCK_N
        at_next = begin + block_at(t + 1, lower, whole) * BLOCK_N
        held = at + tl.arange(0, BLOCK_N)
        row = _row(page, at, PAGE_SIZE, BLOCK_N)
        page = _page(table, at_next, end, PAGE_SIZE, BLOCK_N)
        real = (held >= first) & (held < end)
        top, total, out = _fold_latent(
            q, q_rope, pointer, row * row_stride, real, real[None, :], scale, top, total, out,
            MASKED, V_SIZE, ROPE_SIZE, PRECISION, BLOCK_V, BLOCK_ROPE,
        )
    return top, total, out


@kernel
def _over_staged_latents(
    q, q_rope, query, asked, pointer, word_ptr, word_q, row_stride, low, high, rows, scale, top, total, out,
    NODES: tl.constexpr, V_SIZE: tl.constexpr, ROPE_SIZE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_ROPE: tl.constexpr, STAGES: tl.constexpr,
):
    """Staged rows low .. high of `rows`.  NODES 1: a chain, in which a query sees itself and the rows before it; 2: a
    query sees the rows of its ancestor words."""
    for at in tl.range(low, high, BLOCK_R, num_stages=STAGES):
        node = at + tl.arange(0, BLOCK_R)
        real = node < rows
        row = node.to(tl.int64)
        if NODES == 1:
            seen = real[None, :] & (node[None, :] <= query[:, None])
        else:
            word = tl.load(word_ptr + query.to(tl.int64) * word_q + at // 64, mask=asked, other=0)
            seen = real[None, :] & (((word[:, None] >> (row % 64)[None, :]) & 1) != 0)
        top, total, out = _fold_latent(
            q, q_rope, pointer, row * row_stride, real, seen, scale, top, total, out,
            True, V_SIZE, ROPE_SIZE, PRECISION, BLOCK_V, BLOCK_ROPE,
        )
    return top, total, out


@kernel
def _latent_attention_kernel(
    q_ptr, row_ptr, new_ptr, table_ptr, item_ptr, start_ptr, word_ptr, out_ptr, lse_ptr, part_ptr, part_lse_ptr,
    scale, batch, queries, rows, first,
    q_b, q_q, q_h, row_stride, new_b, new_r, table_b, word_b, word_q,
    HEADS: tl.constexpr, V_SIZE: tl.constexpr, ROPE_SIZE: tl.constexpr, PAGE_SIZE: tl.constexpr, NODES: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_ROPE: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):
    tiles = (queries * HEADS + BLOCK_M - 1) // BLOCK_M
    items = items_of(start_ptr, batch, DEPENDENT)
    units = items * tiles
    backwards = 0
    for base in tl.range(0, units, tl.num_programs(0)):
        unit = unit_of(base, backwards)
        backwards = 1 - backwards
        if unit < units:
            item, request, begin, end, siblings, is_last, tile, _ = work_at(
                unit, item_ptr, start_ptr, items, tiles, 1, WIDE
            )
            packed = tile * BLOCK_M + tl.arange(0, BLOCK_M)
            query = packed // HEADS
            head = packed % HEADS
            asked = query < queries
            at_query = request * q_b + query.to(tl.int64) * q_q + head * q_h
            q = _rows(q_ptr, at_query, asked, True, V_SIZE, BLOCK_V)
            q_rope = _rows(q_ptr + V_SIZE, at_query, asked, True, ROPE_SIZE, BLOCK_ROPE)
            top = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            out = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
            steps, lower, whole = committed_blocks(begin, end, first, 0, BLOCK_N)
            table = table_ptr + request * table_b
            top, total, out = _over_committed_latents(
                q, q_rope, table, row_ptr, row_stride, begin, end, first, lower, whole, 0, whole,
                scale, top, total, out,
                False, PAGE_SIZE, V_SIZE, ROPE_SIZE, PRECISION, BLOCK_N, BLOCK_V, BLOCK_ROPE, STAGES,
            )
            top, total, out = _over_committed_latents(
                q, q_rope, table, row_ptr, row_stride, begin, end, first, lower, whole, whole, steps,
                scale, top, total, out,
                True, PAGE_SIZE, V_SIZE, ROPE_SIZE, PRECISION, BLOCK_N, BLOCK_V, BLOCK_ROPE, STAGES,
            )
            if NODES > 0:
                low, high = nodes_of(tile, tl.where(is_last, rows, 0), NODES, 0, HEADS, BLOCK_M, BLOCK_R)
                top, total, out = _over_staged_latents(
                    q, q_rope, query, asked, new_ptr + request * new_b, word_ptr + request * word_b, word_q, new_r,
                    low, high, rows, scale, top, total, out,
                    NODES, V_SIZE, ROPE_SIZE, PRECISION, BLOCK_R, BLOCK_V, BLOCK_ROPE, STAGES,
                )
            divisor = tl.where(total == 0.0, 1.0, total)
            out = out / divisor[:, None]
            lse = tl.where(total == 0.0, float("-inf"), tl.fma(top, scale, tl.log2(divisor)))
            if siblings == 1:
                row = (request * queries + query) * HEADS + head
                _write(out_ptr, lse_ptr, row, out, lse * 0.6931471805599453, asked, V_SIZE, BLOCK_V)
            else:
                row = (item.to(tl.int64) * queries + query) * HEADS + head
                _write(part_ptr, part_lse_ptr, row, out, lse, asked, V_SIZE, BLOCK_V)
# fmt: on


@dataclass(frozen=True)
class LatentBlocks:
    """Launch configuration.  m: packed queries; n: committed rows, r: staged rows of a step; per_processor: blocks that
    the persistent grid puts on one multiprocessor."""

    m: int
    n: int
    r: int
    warps: int
    stages: int
    per_processor: int = 1

    def held(self, on: Chip, row_bytes: int) -> int:
        """Bytes of shared memory: the tile of queries and the rows of the stages.  Hopper's product of 64 queries waits
        for rows that are still read, so no stage is free; it has its weights in registers."""
        if self.m >= 64 and on.capability >= (9, 0):
            return (self.m + self.stages * self.n) * row_bytes
        return self.m * (row_bytes + 2 * self.n) + max(self.stages - 1, 1) * self.n * row_bytes


def choose_latent(on: Chip, packed: int, rows: int, row_bytes: int, dtype: torch.dtype) -> LatentBlocks:
    """By the number of packed queries, and by what fits in shared memory.

    row_bytes: of a row in shared memory.  A smaller chip gets fewer rows a step, then fewer stages, then fewer queries.
    """
    if dtype == torch.float32:
        # No tensor cores: larger tiles spill registers.
        return LatentBlocks(16, 16, 16, 4, 1)
    m = 64 if packed > 32 else 32 if packed > 16 else 16
    b = LatentBlocks(m, 32, 32, 8 if m == 64 else 4, 3)
    if b.held(on, row_bytes) > on.shared_memory:
        b = replace(b, n=16)
    if b.held(on, row_bytes) > on.shared_memory:
        b = replace(b, stages=2)
    while b.m > 16 and b.held(on, row_bytes) > on.shared_memory:
        b = replace(b, m=b.m // 2)
    # Two tiles of 64 queries need more registers than a multiprocessor has.
    fit = 1 if b.m == 64 else max(1, min(2, on.shared_memory // b.held(on, row_bytes)))
    return replace(b, r=min(b.n, max(16, power_of_two(rows))), per_processor=fit)


def latent_attention_triton(
    q: Tensor,
    committed: Committed,
    staged: Staged | None,
    positions: Tensor,
    splits: KVSplits,
    scale: float,
    partials: Partials | None = None,
    how: LatentBlocks | None = None,
) -> tuple[Tensor, Tensor]:
    """how: launch configuration in place of the chosen one, for tests and measurements."""
    q = q if q.stride(3) == 1 else q.contiguous()
    _check(q, committed, staged, positions, splits)
    (batch, queries, heads, size), v_size = q.shape, committed.v.shape[2]
    out = torch.empty(batch, queries, heads, v_size, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, queries, heads, dtype=torch.float32, device=q.device)
    if not out.numel():
        return out, lse
    is_split = splits.policy.max_splits > 1
    if partials is None:
        # Without splits the kernel writes its results, and no partial ones: 128 heads would need 64 kB a query.
        partials = Partials.of(splits, queries, heads, v_size) if is_split else Partials(out, lse)
    # The pointers are not followed, and the strides are 0, if there are no staged rows or no words.
    new, (new_b, new_r), ancestor_bits = q, (0, 0), None
    if staged is not None:
        new, (new_b, new_r), ancestor_bits = staged.k, staged.k.stride()[:2], staged.ancestor_bits
    rows = 0 if staged is None else new.shape[1]
    nodes = NO_NODES if staged is None else CHAIN if ancestor_bits is None else WORDS
    if how is None:
        how = choose_latent(chip(q), queries * heads, rows, sum(_parts(size, v_size)) * q.dtype.itemsize, q.dtype)
    tiles = -(-queries * heads // how.m)
    grid = min(splits.items.shape[0] * tiles, chip(q).processors * how.per_processor)
    _latent_attention_kernel[(grid,)](
        q,
        committed.k,
        new,
        committed.page_table,
        splits.items,
        splits.starts,
        positions if ancestor_bits is None else ancestor_bits,
        out,
        lse,
        partials.out,
        partials.lse,
        scale * LOG2_E,
        batch,
        queries,
        rows,
        committed.first,
        *q.stride()[:3],
        committed.k.stride(0),
        new_b,
        new_r,
        committed.page_table.stride(0),
        *((0, 0) if ancestor_bits is None else ancestor_bits.stride()[:2]),
        HEADS=heads,
        PAGE_SIZE=committed.page_size,
        NODES=nodes,
        WIDE=nodes == CHAIN and tiles >= 8,
        **_constants(how, size, v_size, q.dtype),
        **early(chip(q)),
    )
    if is_split:
        merge_splits_triton(partials, splits, out, lse)
    return out, lse


def _constants(blocks: LatentBlocks, size: int, v_size: int, dtype: torch.dtype) -> dict[str, Any]:
    block_v, block_rope = _parts(size, v_size)
    return {
        "V_SIZE": v_size,
        "ROPE_SIZE": size - v_size,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "BLOCK_M": blocks.m,
        "BLOCK_N": blocks.n,
        "BLOCK_R": blocks.r,
        "BLOCK_V": block_v,
        "BLOCK_ROPE": block_rope,
        "STAGES": blocks.stages,
        "num_warps": blocks.warps,
    }


def _parts(size: int, v_size: int) -> tuple[int, int]:
    """Values that a tile's row takes for the latent and for the rope part."""
    return max(16, power_of_two(v_size)), max(16, power_of_two(size - v_size))


def _check(q: Tensor, committed: Committed, staged: Staged | None, positions: Tensor, splits: KVSplits) -> None:
    batch, queries, _, size = q.shape
    v_size = committed.v.shape[2]
    if q.dtype not in DTYPES or not v_size < size <= MAX_ROW_SIZE or v_size > MAX_V_SIZE:
        raise EspalierError(
            f"latent attention takes {', '.join(map(str, DTYPES))}, rows of up to {MAX_ROW_SIZE} values and V of up to "
            f"{MAX_V_SIZE} of them, and is given {q.dtype}, rows of {size} and V of {v_size}: use attention='reference'"
        )
    require("latent attention's pages", committed.k, (-1, 1, size), q.dtype, q)
    require("latent attention's page table", committed.page_table, (batch, -1), torch.int32, q)
    require("latent attention's positions", positions, (batch, queries), torch.int64, q)
    require("latent attention's splits", splits.starts, (batch + 1,), torch.int32, q)
    if committed.k.shape[0] >= 2**31:
        raise EspalierError(
            f"latent attention reads pools of fewer than 2^31 rows, and this has {committed.k.shape[0]}"
        )
    pairs = [(committed.k, committed.v)]
    last = [committed.k, committed.page_table]
    if staged is not None:
        rows = staged.k.shape[1] if staged.ancestor_bits is not None else queries
        require("latent attention's staged rows", staged.k, (batch, rows, 1, size), q.dtype, q)
        pairs.append((staged.k, staged.v))
        last.append(staged.k)
        if staged.ancestor_bits is not None:
            require("latent attention's words", staged.ancestor_bits, (batch, queries, -(-rows // 64)), torch.int64, q)
            last.append(staged.ancestor_bits)
    if any(k.data_ptr() != v.data_ptr() or k.stride() != v.stride() for k, v in pairs):
        raise EspalierError("latent attention needs V to be the first part of K's rows, a view of the same tensor")
    if any(tensor.stride(-1) != 1 and tensor.shape[-1] > 1 for tensor in last):
        raise EspalierError("latent attention needs a contiguous last dimension of its rows, tables and words")
