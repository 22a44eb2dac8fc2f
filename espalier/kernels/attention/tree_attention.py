"""Attention of a pass's queries over committed rows in pages and among its staged rows, in one kernel.

One block of the persistent grid takes a range of a request's rows (kernels/attention/kv_splits.py), one KV head and a
tile of the queries that share it, each query's heads packed side by side.  The last range goes on to the staged rows.
A request of one range is written at once; others leave partial results, which kernels/attention/merge_splits.py merges.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.attention.ancestor_bits import seen_rows
from espalier.kernels.attention.attention_blocks import _over_committed, _over_nodes, _rows, _write
from espalier.kernels.attention.hopper import DTYPES as HOPPER_DTYPES
from espalier.kernels.attention.hopper import (
    GROUP,
    SIZES,
    HopperBlocks,
    _hopper_attention_kernel,
    choose_hopper,
    copies_straight,
    hopper_constants,
    in_whole_copies,
    must_count,
    straight_rows,
)
from espalier.kernels.attention.kv_splits import PROGRAMS, KVSplits
from espalier.kernels.attention.masked_attention import masked_attention
from espalier.kernels.attention.merge_splits import Partials, merge_splits_triton
from espalier.kernels.attention.work_items import (
    CHAIN,
    NO_NODES,
    WORDS,
    item_of,
    items_of,
    nodes_of,
    split_at,
    tile_and_head,
    unit_of,
)
from espalier.kernels.runtime.launch import Chip, Kernel, chip, kernel, power_of_two, require
from espalier.kernels.runtime.pdl import early
from espalier.kernels.state.page_rows import page_rows

if TYPE_CHECKING:
    import triton.language as tl

LOG2_E = 1.4426950408889634
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_HEAD_SIZE = 256


@dataclass(frozen=True)
class Committed:
    """Rows in pages.  k, v: [rows, kv_heads, size] each, row = page * page_size + offset; page_table: [B, T] int32;
    length: [B] int64; rows below `first` do not exist."""

    k: Tensor
    v: Tensor
    page_table: Tensor
    length: Tensor
    page_size: int
    first: int = 0


@dataclass(frozen=True)
class Staged:
    """New rows.  k, v: [B, R, kv_heads, size]; row_positions: [B, R] int64; ancestor_bits: [B, Q, W] int64, the rows
    that each query sees, or None for a chain, of consecutive positions."""

    k: Tensor
    v: Tensor
    row_positions: Tensor
    ancestor_bits: Tensor | None


def tree_attention(
    q: Tensor,
    committed: Committed,
    staged: Staged | None,
    positions: Tensor,
    splits: KVSplits,
    scale: float,
    window: int | None = None,
    sink: Tensor | None = None,
    partials: Partials | None = None,
) -> tuple[Tensor, Tensor]:
    """Queries q [B, Q, heads, k_size] at positions [B, Q] over both kinds of rows; q's last dimension is contiguous.

    splits: of committed.length, for this window; sink: [heads], an extra logit a head without a value; partials: a
    buffer to use again (`Partials.of`).  Returns out [B, Q, heads, v_size] in q's dtype and lse [B, Q, heads] float32,
    natural log; a query that sees nothing gives zeros and -inf.  Products of float32 are IEEE.
    """
    make = tree_attention_triton if q.is_cuda else tree_attention_reference
    return make(q, committed, staged, positions, splits, scale, window, sink, partials)


# Arguments of kernels stand in groups, which a line each would hide.
# fmt: off
@kernel
def _tree_attention_kernel(
    q_ptr, k_ptr, v_ptr, new_k_ptr, new_v_ptr,
    table_ptr, item_ptr, start_ptr, position_ptr, row_position_ptr, word_ptr,
    out_ptr, lse_ptr, part_ptr, part_lse_ptr,
    scale, batch, queries, rows, first,
    q_b, q_q, q_h, k_row, k_h, v_row, v_h, new_k_b, new_k_r, new_k_h, new_v_b, new_v_r, new_v_h,
    table_b, position_b, position_q, row_position_b, row_position_r, word_b, word_q,
    KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, K_SIZE: tl.constexpr, V_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr, NODES: tl.constexpr,
    DIRECT: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):
    tiles = (queries * GROUPS + BLOCK_M - 1) // BLOCK_M
    items = items_of(start_ptr, batch, DEPENDENT)
    units = items * tiles * KV_HEADS
    backwards = 0
    ahead = item_of(tl.program_id(0), items, tiles, KV_HEADS, WIDE)
    request_ahead, begin_ahead, end_ahead, siblings_ahead = split_at(item_ptr, ahead, tl.program_id(0) < units)
    for base in tl.range(0, units, tl.num_programs(0)):
        unit = unit_of(base, backwards)
        backwards = 1 - backwards
        item, request, begin, end, siblings = ahead, request_ahead, begin_ahead, end_ahead, siblings_ahead
        # The next range is read before this one's work, so that nobody waits for it.
        unit_ahead = unit_of(base + tl.num_programs(0), backwards)
        ahead = item_of(unit_ahead, items, tiles, KV_HEADS, WIDE)
        request_ahead, begin_ahead, end_ahead, siblings_ahead = split_at(item_ptr, ahead, unit_ahead < units)
        if unit < units:
            tile, head = tile_and_head(unit, items, tiles, KV_HEADS, WIDE)
            packed = tile * BLOCK_M + tl.arange(0, BLOCK_M)
            query = packed // GROUPS
            asked = query < queries
            q_head = head * GROUPS + packed % GROUPS
            q_row = request * q_b + query.to(tl.int64) * q_q + q_head * q_h
            q = _rows(q_ptr, q_row, asked, True, K_SIZE, BLOCK_K)
            position = query
            if WINDOW > 0:
                at_query = position_ptr + request * position_b + query.to(tl.int64) * position_q
                position = tl.load(at_query, mask=asked, other=0x7FFFFFFF).to(tl.int32)
                begin = tl.maximum(begin, (tl.min(position, 0) - WINDOW + 1) // BLOCK_N * BLOCK_N)
            top = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            out = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
            top, total, out = _over_committed(
                q, position, table_ptr + request * table_b, k_ptr + head * k_h, v_ptr + head * v_h, k_row, v_row,
                begin, end, first, scale, top, total, out,
                PAGE_SIZE, WINDOW, K_SIZE, V_SIZE, PRECISION, BLOCK_N, BLOCK_K, BLOCK_V, STAGES,
            )
            if NODES > 0:
                is_last = item + 1 == tl.load(start_ptr + request + 1)
                low, high = nodes_of(tile, tl.where(is_last, rows, 0), NODES, WINDOW, GROUPS, BLOCK_M, BLOCK_R)
                top, total, out = _over_nodes(
                    q, query, asked, position,
                    new_k_ptr + request * new_k_b + head * new_k_h, new_v_ptr + request * new_v_b + head * new_v_h,
                    row_position_ptr + request * row_position_b, word_ptr + request * word_b, word_q,
                    new_k_r, new_v_r, row_position_r, low, high, rows, scale, top, total, out,
                    NODES, WINDOW, K_SIZE, V_SIZE, PRECISION, BLOCK_R, BLOCK_K, BLOCK_V, STAGES,
                )
            divisor = tl.where(total == 0.0, 1.0, total)
            out = out / divisor[:, None]
            lse = tl.where(total == 0.0, float("-inf"), tl.fma(top, scale, tl.log2(divisor)))
            if DIRECT and siblings == 1:
                row = (request * queries + query) * (KV_HEADS * GROUPS) + q_head
                _write(out_ptr, lse_ptr, row, out, lse * 0.6931471805599453, asked, V_SIZE, BLOCK_V)
            else:
                row = (item.to(tl.int64) * queries + query) * (KV_HEADS * GROUPS) + q_head
                _write(part_ptr, part_lse_ptr, row, out, lse, asked, V_SIZE, BLOCK_V)
# fmt: on


@dataclass(frozen=True)
class Blocks:
    """Launch choices.  m: packed queries; n: committed rows, r: staged rows of a step; per_processor: blocks that the
    persistent grid puts on one multiprocessor."""

    m: int
    n: int
    r: int
    warps: int
    stages: int
    per_processor: int

    def held(self, on: Chip, k_bytes: int, v_bytes: int) -> int:
        """Shared memory, nearly: queries, the stages' rows, and weights; but from Hopper on a product reads its weights
        from registers, and waits for rows that are still read.
        """
        step = self.n * (k_bytes + v_bytes)
        if self.m >= 64 and on.capability >= (9, 0):
            return self.m * k_bytes + self.stages * step
        return self.m * (k_bytes + 2 * self.n) + max(self.stages - 1, 1) * step


def choose(
    on: Chip, packed: int, rows: int, k_size: int, v_size: int, dtype: torch.dtype, at_once: bool = False
) -> Blocks:
    """By the queries that share a KV head, and by the shared memory that keys and values of a step need.

    at_once: all splits run at the same time, as those of a small batch do: then the time of one counts more than how
    many fit on a multiprocessor.

    The figures are those that were fastest on an H200 (docs/log.md); a smaller chip gets fewer stages, then fewer rows.
    """
    k_bytes, v_bytes = (max(16, power_of_two(size)) * dtype.itemsize for size in (k_size, v_size))
    large = k_bytes + v_bytes > 512
    if dtype == torch.float32:
        # No tensor cores: small tiles, or the products spill.
        n = 16 if k_bytes + v_bytes > 1024 else 32
        return Blocks(16, n, n, 4, 1, 2) if packed <= 16 else Blocks(32, n, n, 8, 1, 2)
    if packed <= 16 and not large:
        b = Blocks(16, 64, 64, 4, 2, 4) if at_once else Blocks(16, 32, 32, 2, 4, 4)
    elif packed <= 64 or large:
        # From Hopper on a product of 64 rows needs no exchange between warps: faster than one of 32.
        m = 64 if on.capability >= (9, 0) else min(64, max(16, power_of_two(packed)))
        b = Blocks(m, 32 if large else 64, 64, 8 if large else 4, 3, 2)
    else:
        b = Blocks(128, 64, 64, 8, 4, 1)
    for fewest_stages, fewest_rows in ((3, 32), (2, 16)):
        while b.stages > fewest_stages and b.held(on, k_bytes, v_bytes) > on.shared_memory:
            b = replace(b, stages=b.stages - 1)
        while b.n > fewest_rows and b.held(on, k_bytes, v_bytes) > on.shared_memory:
            b = replace(b, n=b.n // 2)
    fit = max(1, on.shared_memory // b.held(on, k_bytes, v_bytes))
    return replace(b, r=min(b.n, max(16, power_of_two(rows))), per_processor=min(b.per_processor, fit))


def tree_attention_triton(
    q: Tensor,
    committed: Committed,
    staged: Staged | None,
    positions: Tensor,
    splits: KVSplits,
    scale: float,
    window: int | None = None,
    sink: Tensor | None = None,
    partials: Partials | None = None,
    how: Blocks | HopperBlocks | None = None,
    straight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """how: launch choices in place of its own, for tests and measurements.  straight: of the splits, as
    kernels/attention/contiguous_blocks.py counts them; without it nothing is lost but time."""
    q = q if q.stride(3) == 1 else q.contiguous()
    _check(q, committed, staged, positions, splits)
    if straight is not None:
        require("tree attention's straight blocks", straight, (splits.items.shape[0],), torch.int32, q)
    batch, queries, heads, _ = q.shape
    v_size = committed.v.shape[2]
    out = torch.empty(batch, queries, heads, v_size, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, queries, heads, dtype=torch.float32, device=q.device)
    if not out.numel():
        return out, lse
    direct = sink is None
    if partials is None:
        partials = Partials.of(splits, queries, heads, v_size)
    if how is None:
        how = _how(q, committed, staged, splits)
    elif isinstance(how, HopperBlocks) and not _whole_tiles(q, committed, staged):
        raise EspalierError("Hopper's attention takes two-byte types, sizes of whole tiles, and rows of whole copies")
    _launch(q, committed, staged, positions, splits, scale, window or 0, direct, partials, how, straight, out, lse)
    if splits.policy.max_splits > 1 or not direct:
        merge_splits_triton(partials, splits, out, lse, sink)
    return out, lse


def asks_straight(q: Tensor, committed: Committed, staged: Staged | None, splits: KVSplits, window: int | None) -> bool:
    """Whether tree_attention_triton gains by `straight`."""
    if not must_count(committed.page_size, window or 0):
        return False
    how = _how(q, committed, staged, splits)
    return isinstance(how, HopperBlocks) and copies_straight(how)


def _how(q: Tensor, committed: Committed, staged: Staged | None, splits: KVSplits) -> Blocks | HopperBlocks:
    """Launch choices.  Those with Hopper's instructions give the same bits as the others."""
    (batch, queries, heads, k_size), (kv_heads, v_size) = q.shape, committed.v.shape[1:]
    packed = queries * heads // kv_heads
    if _whole_tiles(q, committed, staged):
        tiles = -(-packed // (2 * GROUP))
        blocks = choose_hopper(chip(q), packed, splits.items.shape[0] * kv_heads * tiles, k_size, committed.page_size)
        if blocks is not None:
            return blocks
    rows = queries if staged is None else staged.k.shape[1]
    at_once = batch * kv_heads * splits.policy.splits <= PROGRAMS
    return choose(chip(q), packed, rows, k_size, v_size, q.dtype, at_once)


def _whole_tiles(q: Tensor, committed: Committed, staged: Staged | None) -> bool:
    """Whether Hopper's kernel can read it: types, sizes, and where rows stand."""
    sizes = (q.shape[3], committed.v.shape[2])
    read = [q, committed.k, committed.v, *(() if staged is None else (staged.k, staged.v))]
    whole = q.dtype in HOPPER_DTYPES and sizes[0] == sizes[1] in SIZES and all(map(in_whole_copies, read))
    return whole and (staged is None or staged.k.shape[1] > 0)


def _launch(
    q: Tensor,
    committed: Committed,
    staged: Staged | None,
    positions: Tensor,
    splits: KVSplits,
    scale: float,
    window: int,
    direct: bool,
    partials: Partials,
    how: Blocks | HopperBlocks,
    straight: Tensor | None,
    out: Tensor,
    lse: Tensor,
) -> None:
    (batch, queries, heads, k_size), (kv_heads, v_size) = q.shape, committed.v.shape[1:]
    tiles = -(-queries * (heads // kv_heads) // how.m)
    # Pointers that are not followed, and strides of nothing, where there are no staged rows or no words.
    new_k, new_v, row_positions = (q, q, positions) if staged is None else (staged.k, staged.v, staged.row_positions)
    ancestor_bits = None if staged is None else staged.ancestor_bits
    kind = NO_NODES if staged is None else CHAIN if ancestor_bits is None else WORDS
    run: Kernel
    if isinstance(how, HopperBlocks):
        same = committed.k.stride(0) == committed.v.stride(0)
        run, own = _hopper_attention_kernel, hopper_constants(how, k_size, same)
        own |= straight_rows(how, committed.k, committed.v, committed.page_size, window, straight)
    else:
        run, own = _tree_attention_kernel, _constants(how, k_size, v_size, q.dtype)
    grid = min(splits.items.shape[0] * tiles * kv_heads, chip(q).processors * how.per_processor)
    run[(grid,)](
        q,
        committed.k,
        committed.v,
        new_k,
        new_v,
        committed.page_table,
        splits.items,
        splits.starts,
        positions,
        row_positions,
        positions if ancestor_bits is None else ancestor_bits,
        out,
        lse,
        partials.out,
        partials.lse,
        scale * LOG2_E,
        batch,
        queries,
        new_k.shape[1],
        committed.first,
        *q.stride()[:3],
        *committed.k.stride()[:2],
        *committed.v.stride()[:2],
        *new_k.stride()[:3],
        *new_v.stride()[:3],
        committed.page_table.stride(0),
        *positions.stride(),
        *row_positions.stride(),
        *((0, 0) if ancestor_bits is None else ancestor_bits.stride()[:2]),
        KV_HEADS=kv_heads,
        GROUPS=heads // kv_heads,
        PAGE_SIZE=committed.page_size,
        WINDOW=window,
        NODES=kind,
        DIRECT=direct,
        WIDE=kind == CHAIN and tiles >= 8,
        **own,
        **early(chip(q)),
    )


def _constants(blocks: Blocks, k_size: int, v_size: int, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "K_SIZE": k_size,
        "V_SIZE": v_size,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "BLOCK_M": blocks.m,
        "BLOCK_N": blocks.n,
        "BLOCK_R": blocks.r,
        "BLOCK_K": max(16, power_of_two(k_size)),
        "BLOCK_V": max(16, power_of_two(v_size)),
        "STAGES": blocks.stages,
        "num_warps": blocks.warps,
    }


def _check(q: Tensor, committed: Committed, staged: Staged | None, positions: Tensor, splits: KVSplits) -> None:
    batch, queries, heads, k_size = q.shape
    kv_heads, v_size = committed.v.shape[1:]
    if q.dtype not in DTYPES or heads % kv_heads or max(k_size, v_size) > MAX_HEAD_SIZE:
        raise EspalierError(
            f"tree attention takes {', '.join(map(str, DTYPES))}, whole groups of heads and head sizes up to "
            f"{MAX_HEAD_SIZE}, and is given {q.dtype}, {heads} heads over {kv_heads} of sizes {k_size} and {v_size}: "
            "use attention='reference'"
        )
    require("tree attention's k pages", committed.k, (-1, kv_heads, k_size), q.dtype, q)
    require("tree attention's v pages", committed.v, (committed.k.shape[0], kv_heads, v_size), q.dtype, q)
    require("tree attention's page table", committed.page_table, (batch, -1), torch.int32, q)
    require("tree attention's positions", positions, (batch, queries), torch.int64, q)
    if committed.k.shape[0] >= 2**31:
        raise EspalierError(f"tree attention reads pools of fewer than 2^31 rows, and this has {committed.k.shape[0]}")
    require("tree attention's splits", splits.starts, (batch + 1,), torch.int32, q)
    last = [committed.k, committed.v, committed.page_table]
    if staged is not None:
        rows = staged.k.shape[1] if staged.ancestor_bits is not None else queries
        require("tree attention's staged k", staged.k, (batch, rows, kv_heads, k_size), q.dtype, q)
        require("tree attention's staged v", staged.v, (batch, rows, kv_heads, v_size), q.dtype, q)
        require("tree attention's row positions", staged.row_positions, (batch, rows), torch.int64, q)
        last += [staged.k, staged.v]
        if staged.ancestor_bits is not None:
            require("tree attention's words", staged.ancestor_bits, (batch, queries, -(-rows // 64)), torch.int64, q)
            last.append(staged.ancestor_bits)
    if any(tensor.stride(-1) != 1 and tensor.shape[-1] > 1 for tensor in last):
        raise EspalierError("tree attention needs a contiguous last dimension of its keys, values, tables and words")


def tree_attention_reference(
    q: Tensor,
    committed: Committed,
    staged: Staged | None,
    positions: Tensor,
    splits: KVSplits | None,
    scale: float,
    window: int | None = None,
    sink: Tensor | None = None,
    partials: Partials | None = None,
) -> tuple[Tensor, Tensor]:
    """All rows side by side under one mask; a buffer's rows outside what is meant read as zeros."""
    batch, queries = positions.shape
    held = torch.arange(committed.page_table.shape[1] * committed.page_size, device=q.device).expand(batch, -1)
    real = (held >= committed.first) & (held < committed.length[:, None])
    row = page_rows(committed.page_table, held, committed.page_size, real)
    k, v = (torch.where(real[..., None, None], buffer[row], 0) for buffer in (committed.k, committed.v))
    seen = real[:, None].expand(-1, queries, -1)
    if staged is not None:
        among = seen_rows(staged.ancestor_bits, positions, staged.row_positions, None)
        seen = torch.cat((seen, among), 2)
        k, v, held = (
            torch.cat((k, staged.k), 1),
            torch.cat((v, staged.v), 1),
            torch.cat((held, staged.row_positions), 1),
        )
    if window is not None:
        seen = seen & (positions[:, :, None] - held[:, None, :] < window)
    out, lse = masked_attention(q, k, v, seen, scale)
    if sink is None:
        return out, lse
    with_sink = torch.logaddexp(lse, sink.to(lse.dtype))
    share = torch.exp(lse - with_sink).nan_to_num(0)
    return (out * share[..., None]).to(out.dtype), with_sink
