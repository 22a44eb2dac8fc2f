"""All-reduce kernels (the sum of all ranks' rows, alone or with residual and norm), and the gathering of columns.

Ranks synchronise inside the kernels (`_barrier`).  The programs with the same index on all ranks work together.  A
program writes its rank's values into its slot (its part of the rank's shared memory), sets a flag on every other rank,
and waits for the flags from all other ranks.

- One-shot: each rank reads the rows of all ranks.
- Two-shot: each rank sums a part of the columns, and writes these sums to all ranks.  This takes two barriers,
  but each rank reads fewer bytes.

The values of the ranks are added in the order of ranks, in float32 (float64 for float64), and each sum is rounded once.
So one-shot and two-shot give all ranks the bits of espalier/shards/gloo.py.

A program alternates between two slots.  Between two writes of slot A, the program passes a barrier for slot B.  After
this barrier, all ranks have finished reading slot A.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from espalier.kernels.layers.norm import VALUES_PER_NORM_WARP
from espalier.kernels.ranks.collectives import FLAGS_BYTES, MAX_PROGRAMS, PeerMemory
from espalier.kernels.runtime.jit import kernel, load_sum
from espalier.kernels.runtime.launch import acc_dtype, chip, next_power_of_2, warps_for
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger_and_wait

# Columns that a program gathers at a time.
GATHER_BLOCK = 2048
# A waiting thread reads its flag again and again.  It also reads the host's stop flag, but only once in 4,096 reads,
# because host memory is slow to read.
SIGNAL_ASM = tl.constexpr("""{
.reg .pred live;
setp.ne.u32 live, $3, 0;
@live st.release.sys.global.u32 [$1], $2;
mov.u32 $0, 0;
}""")
WAIT_ASM = tl.constexpr("""{
.reg .pred more;
.reg .u32 seen, looks, stop;
mov.u32 looks, 0;
setp.eq.u32 more, $4, 0;
@more bra DONE;
LOOK:
ld.acquire.sys.global.u32 seen, [$1];
sub.s32 seen, seen, $2;
setp.ge.s32 more, seen, 0;
@more bra DONE;
add.u32 looks, looks, 1;
and.b32 stop, looks, 4095;
setp.ne.u32 more, stop, 0;
@more bra LOOK;
ld.volatile.global.u32 stop, [$3];
setp.eq.u32 more, stop, 0;
@more bra LOOK;
DONE:
mov.u32 $0, 0;
}""")


@kernel
def _barrier(memory_ptr, stop_ptr, rank, program, flag_value, WORLD_SIZE: tl.constexpr, NUM_THREADS: tl.constexpr):
    """Wait until the programs with this index on all ranks have set their flags to at least `flag_value`.

    After that, this program can read their earlier writes.  NUM_THREADS: threads of the program.  For each rank, one
    thread sets a flag on that rank and waits for a flag from that rank."""
    tl.debug_barrier()
    peer = tl.arange(0, NUM_THREADS)
    is_rank = peer < WORLD_SIZE
    peer_flags = tl.load(memory_ptr + peer, mask=is_rank, other=0) + (program * WORLD_SIZE + rank) * 4
    own_flags = tl.load(memory_ptr + rank) + (program * WORLD_SIZE + peer) * 4
    live, flag_values = is_rank.to(tl.int32), flag_value + tl.zeros_like(peer)
    tl.inline_asm_elementwise(SIGNAL_ASM, "=r,l,r,r", [peer_flags, flag_values, live], tl.int32, is_pure=False, pack=1)
    stops = stop_ptr.to(tl.int64) + tl.zeros_like(own_flags)
    tl.inline_asm_elementwise(
        WAIT_ASM, "=r,l,r,l,r", [own_flags, flag_values, stops, live], tl.int32, is_pure=False, pack=1
    )
    tl.debug_barrier()


@kernel
def _pointer_at(address, DTYPE: tl.constexpr):
    """Returns a pointer to values at an address that is a multiple of 16."""
    return tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16)


@kernel
def _sum_of_ranks(
    memory_ptr, slot_offset, column, mask, DTYPE: tl.constexpr, ACC_DTYPE: tl.constexpr, WORLD_SIZE: tl.constexpr
):  # fmt: skip
    """Returns the sum over the ranks of the values at `column` of the slot that begins at slot_offset."""
    total = tl.load(_pointer_at(tl.load(memory_ptr) + slot_offset, DTYPE) + column, mask=mask, other=0.0).to(ACC_DTYPE)
    for peer in tl.static_range(1, WORLD_SIZE):
        values = _pointer_at(tl.load(memory_ptr + peer) + slot_offset, DTYPE)
        total += tl.load(values + column, mask=mask, other=0.0).to(ACC_DTYPE)
    return total.to(DTYPE)


@kernel(do_not_specialize=["rank", "rows"])
def _all_reduce_kernel(
    parts_ptr, residual_ptr, weight_ptr, sum_ptr, out_ptr, memory_ptr, num_launches_ptr, stop_ptr,
    rank, rows, part_row_stride, part_split_stride, residual_row_stride,
    EPS: tl.constexpr, ROW_SIZE: tl.constexpr, SPLITS: tl.constexpr, ACC_DTYPE: tl.constexpr, BLOCK: tl.constexpr,
    OWN_COLUMNS: tl.constexpr, BLOCK_OWN_COLUMNS: tl.constexpr, ROW_BYTES: tl.constexpr, WORLD_SIZE: tl.constexpr,
    FLAG_BYTES: tl.constexpr, SLOT_BYTES: tl.constexpr, NUM_SLOTS: tl.constexpr, NUM_THREADS: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """Write the sum over the ranks to out.  With a residual, write residual + sum to sum_ptr, and the norm of that to
    out.

    OWN_COLUMNS: the columns that each rank sums if two-shot; 0 if one-shot.  memory_ptr: to PeerMemory.addresses."""
    pdl_trigger_and_wait(USE_PDL)
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    program = tl.program_id(0)
    num_launches = tl.load(num_launches_ptr + program)
    column = tl.arange(0, BLOCK)
    mask = column < ROW_SIZE
    memory = tl.load(memory_ptr + rank)
    slot = FLAG_BYTES + ((num_launches & 1) * NUM_SLOTS + program).to(tl.int64) * SLOT_BYTES
    place = slot
    for row in range(program, rows, tl.num_programs(0)):
        part_ptrs = parts_ptr + tl.cast(row, tl.int64) * part_row_stride + column
        value = load_sum(part_ptrs, part_split_stride, mask, SPLITS, DTYPE, ACC_DTYPE)
        tl.store(_pointer_at(memory + place, DTYPE) + column, value.to(DTYPE), mask=mask)
        place += ROW_BYTES
    _barrier(memory_ptr, stop_ptr, rank, program, 2 * num_launches + 1, WORLD_SIZE, NUM_THREADS)
    if OWN_COLUMNS:
        offset = tl.arange(0, BLOCK_OWN_COLUMNS)
        place = slot
        for _ in range(program, rows, tl.num_programs(0)):
            total = _sum_of_ranks(
                memory_ptr, place, rank * OWN_COLUMNS + offset, offset < OWN_COLUMNS, DTYPE, ACC_DTYPE, WORLD_SIZE
            )
            for peer in tl.static_range(WORLD_SIZE):
                peer_sums = _pointer_at(tl.load(memory_ptr + peer) + place + 2 * NUM_SLOTS * SLOT_BYTES, DTYPE)
                tl.store(peer_sums + rank * OWN_COLUMNS + offset, total, mask=offset < OWN_COLUMNS)
            place += ROW_BYTES
        _barrier(memory_ptr, stop_ptr, rank, program, 2 * num_launches + 2, WORLD_SIZE, NUM_THREADS)
    place = slot
    for row in range(program, rows, tl.num_programs(0)):
        if OWN_COLUMNS:
            sums = _pointer_at(memory + place + 2 * NUM_SLOTS * SLOT_BYTES, DTYPE)
            total = tl.load(sums + column, mask=mask, other=0.0)
        else:
            total = _sum_of_ranks(memory_ptr, place, column, mask, DTYPE, ACC_DTYPE, WORLD_SIZE)
        row = tl.cast(row, tl.int64)
        out_offset = row * ROW_SIZE + column
        if residual_ptr is not None:
            weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(ACC_DTYPE)
            residual = tl.load(residual_ptr + row * residual_row_stride + column, mask=mask, other=0.0)
            # The sum is rounded before the norm, as in norm.py, because the residual stream holds the rounded sum.
            x = (residual.to(ACC_DTYPE) + total.to(ACC_DTYPE)).to(DTYPE)
            tl.store(sum_ptr + out_offset, x, mask=mask, eviction_policy="evict_last")
            x = x.to(ACC_DTYPE)
            scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / ROW_SIZE + EPS)
            tl.store(out_ptr + out_offset, (x * scale * weight).to(DTYPE), mask=mask)
        else:
            tl.store(out_ptr + out_offset, total, mask=mask)
        place += ROW_BYTES
    tl.store(num_launches_ptr + program, num_launches + 1)


def all_reduce_rows(memory: PeerMemory, parts: Tensor, dtype: torch.dtype, two_shot: bool) -> Tensor:
    """Returns [rows, H] in `dtype`: the sum over the ranks of parts [rows, H], or of partial sums [splits, rows, H]."""
    out = parts.new_empty(parts.shape[-2:], dtype=dtype)
    _launch_all_reduce(memory, parts, out, two_shot)
    return out


def all_reduce_add_norm(
    memory: PeerMemory, parts: Tensor, residual: Tensor, weight: Tensor, eps: float, two_shot: bool
) -> tuple[Tensor, Tensor]:
    """Returns (total, norm of total), with total = residual + sum over the ranks, as add_rms_norm.  The sum over the
    ranks has the bits of all_reduce_rows."""
    total, out = (residual.new_empty(residual.shape) for _ in range(2))
    _launch_all_reduce(memory, parts, out, two_shot, (residual, weight, total), eps)
    return total, out


def supports_all_reduce(memory: PeerMemory, parts: Tensor, dtype: torch.dtype) -> bool:
    """Returns whether the kernel can sum parts [rows, H] or [splits, rows, H]."""
    rows, size = parts.shape[-2:]
    row_bytes = size * dtype.itemsize
    num_bytes = -(-rows // MAX_PROGRAMS) * row_bytes
    return rows > 0 and not row_bytes % 16 and num_bytes <= memory.slot_bytes and parts.stride(-1) == 1


def _launch_all_reduce(
    memory: PeerMemory, parts: Tensor, out: Tensor, two_shot: bool, add_norm: Any = (None, None, None), eps: float = 0.0
) -> None:
    """Launch _all_reduce_kernel.  add_norm: (residual, norm weight, output for residual + sum), or three times None."""
    (residual, weight, total), num_warps = add_norm, warps_for(next_power_of_2(out.shape[1]), VALUES_PER_NORM_WARP)
    rows, size = out.shape
    row_bytes, block = size * out.itemsize, next_power_of_2(size)
    own_columns = size // memory.num_ranks if two_shot and row_bytes % (16 * memory.num_ranks) == 0 else 0
    _all_reduce_kernel[(min(rows, MAX_PROGRAMS),)](
        parts, residual, weight, total, out, memory.addresses, memory.num_launches, memory.stop_flag,
        memory.rank, rows, parts.stride(-2), parts.stride(0), 0 if residual is None else residual.stride(0),
        EPS=eps, ROW_SIZE=size, SPLITS=len(parts) if parts.ndim == 3 else 1, ACC_DTYPE=acc_dtype(out.dtype),
        BLOCK=block, OWN_COLUMNS=own_columns, BLOCK_OWN_COLUMNS=next_power_of_2(own_columns), ROW_BYTES=row_bytes,
        **_barrier_arguments(memory, num_warps),
    )  # fmt: skip


@kernel(do_not_specialize=["rank", "rows"])
def _gather_columns_kernel(
    x_ptr, out_ptr, memory_ptr, num_launches_ptr, stop_ptr, rank, rows, x_row_stride, own_columns, size,
    COLUMNS_PER_RANK: tl.constexpr, BLOCK: tl.constexpr, BLOCK_BYTES: tl.constexpr, WORLD_SIZE: tl.constexpr,
    FLAG_BYTES: tl.constexpr, SLOT_BYTES: tl.constexpr, NUM_SLOTS: tl.constexpr, NUM_THREADS: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """Write out [rows, size]: COLUMNS_PER_RANK columns of each rank.  The last ranks may have fewer columns."""
    pdl_trigger_and_wait(USE_PDL)
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    BLOCKS: tl.constexpr = (COLUMNS_PER_RANK + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    num_launches = tl.load(num_launches_ptr + program)
    own_memory = tl.load(memory_ptr + rank)
    slot = FLAG_BYTES + ((num_launches & 1) * NUM_SLOTS + program).to(tl.int64) * SLOT_BYTES
    offset_in_block = tl.arange(0, BLOCK)
    block_offset = slot
    for block in range(program, rows * BLOCKS, tl.num_programs(0)):
        row, column = (block // BLOCKS).to(tl.int64), block % BLOCKS * BLOCK + offset_in_block
        value = tl.load(x_ptr + row * x_row_stride + column, mask=column < own_columns, other=0.0)
        tl.store(_pointer_at(own_memory + block_offset, DTYPE) + offset_in_block, value)
        block_offset += BLOCK_BYTES
    _barrier(memory_ptr, stop_ptr, rank, program, 2 * num_launches + 1, WORLD_SIZE, NUM_THREADS)
    block_offset = slot
    for block in range(program, rows * BLOCKS, tl.num_programs(0)):
        row, column = (block // BLOCKS).to(tl.int64), block % BLOCKS * BLOCK + offset_in_block
        for peer in tl.static_range(WORLD_SIZE):
            value = tl.load(_pointer_at(tl.load(memory_ptr + peer) + block_offset, DTYPE) + offset_in_block)
            mask = (column < COLUMNS_PER_RANK) & (peer * COLUMNS_PER_RANK + column < size)
            tl.store(out_ptr + row * size + peer * COLUMNS_PER_RANK + column, value, mask=mask)
        block_offset += BLOCK_BYTES
    tl.store(num_launches_ptr + program, num_launches + 1)


def gather_columns(memory: PeerMemory, x: Tensor, columns_per_rank: int, size: int) -> Tensor:
    """Returns the columns of all ranks side by side, see Collectives.gather_columns in espalier/shards/base.py."""
    rows, own_columns = x.shape
    out = x.new_empty(rows, size)
    _gather_columns_kernel[(min(rows * -(-columns_per_rank // GATHER_BLOCK), MAX_PROGRAMS),)](
        x, out, memory.addresses, memory.num_launches, memory.stop_flag, memory.rank, rows, x.stride(0), own_columns,
        size, COLUMNS_PER_RANK=columns_per_rank, BLOCK=GATHER_BLOCK, BLOCK_BYTES=GATHER_BLOCK * x.itemsize,
        **_barrier_arguments(memory, 8),
    )  # fmt: skip
    return out


def supports_gather(memory: PeerMemory, x: Tensor, columns_per_rank: int) -> bool:
    """Returns whether `gather_columns` takes x."""
    blocks_per_program = -(-len(x) * -(-columns_per_rank // GATHER_BLOCK) // MAX_PROGRAMS)
    return len(x) > 0 and blocks_per_program * GATHER_BLOCK * x.itemsize <= memory.slot_bytes and x.stride(-1) == 1


def _barrier_arguments(memory: PeerMemory, num_warps: int) -> dict[str, object]:
    """Returns the launch arguments for `_barrier` and the slots, which both kernels take."""
    sizes = {"FLAG_BYTES": FLAGS_BYTES, "SLOT_BYTES": memory.slot_bytes}
    sizes |= {"NUM_SLOTS": MAX_PROGRAMS, "WORLD_SIZE": memory.num_ranks}
    return {**sizes, "NUM_THREADS": 32 * num_warps, "num_warps": num_warps, **pdl_arguments(chip(memory.addresses))}
