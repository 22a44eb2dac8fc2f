"""A linear map of few rows: y = x · weightᵀ + bias, bound by reading the weight once.

Each program multiplies a block of the weight's rows with all rows of x, over the whole of `in` or over one of `splits`
parts of it.  Parts are written apart, in float32, and a second kernel adds them in order: no atomics, so the same
input gives the same bits.  Which block sizes are fast is measured (`espalier doctor --tune`) and stands in a file
(kernels/choices.py); this file only knows which of them fit a chip.

On Hopper and later both kernels are launched as programmatic dependents: a program asks for its first weights while the
kernel before it still runs, and waits before it reads or writes anything that another kernel touches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.launch import Chip, chip, kernel, power_of_two, require

if TYPE_CHECKING:
    import triton.language as tl

MAX_ROWS = 256
DTYPES = (torch.bfloat16, torch.float16)
# What a block of x is padded to: the tensor cores' least.
LEAST_ROWS = 16
REDUCE_BLOCK = 1024
HOPPER = (9, 0)


@dataclass(frozen=True)
class Choice:
    """How a linear is launched.  block_out × block_in: a tile of the weight, `stages` of which are in flight; splits: parts
    of `in` that are summed apart; dependent: launched before the kernel in front of it has ended (Hopper)."""

    block_out: int
    block_in: int
    splits: int
    warps: int
    stages: int
    dependent: bool = False
    ahead: int = 0

    def shared_memory(self, rows: int) -> int:
        """Bytes a program needs for `rows` rows of two-byte numbers."""
        return self.stages * (self.block_out + block_rows(rows)) * self.block_in * 2


def block_rows(rows: int) -> int:
    return max(power_of_two(rows), LEAST_ROWS)


# (block_out, block_in, warps) worth a trial for a block of so many rows.
TILES = {
    16: ((16, 512, 4), (32, 256, 4), (64, 64, 4), (64, 128, 4), (64, 256, 4), (128, 64, 4), (128, 128, 4)),
    32: ((32, 256, 4), (64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 128, 4)),
    64: ((64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 128, 4), (128, 64, 8), (256, 64, 8)),
    128: ((64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 64, 8), (128, 128, 8), (256, 64, 8)),
    256: ((64, 64, 4), (128, 64, 8), (128, 128, 8)),
}
SPLITS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)
STAGES = (2, 3, 4, 6, 8)
RESERVED = 1024


def candidates(rows: int, num_out: int, num_in: int, on: Chip) -> list[Choice]:
    """What is worth measuring: all programs run at once and fill the chip, or there are many turns of them."""
    found = []
    for out, width, warps in TILES[block_rows(rows)]:
        blocks, tile = -(-num_out // out), (out + block_rows(rows)) * width * 2
        for stages in STAGES:
            programs = on.shared_memory // (stages * tile + RESERVED)
            if programs == 0 or stages * tile * min(programs, 8) < on.shared_memory // 3:
                continue
            steps = -(-num_in // width)
            for splits in SPLITS:
                turns = blocks * splits / (on.processors * programs)
                if steps < stages * splits or splits * out > num_in:
                    continue
                full = turns / -(-turns // 1)
                if full >= 0.75 and (turns <= 1 or splits == 1 or rows > 64 and turns < 3):
                    found.append(Choice(out, width, splits, warps, stages, on.capability >= HOPPER, stages))
    return list(dict.fromkeys(found))


@kernel
def _prefetch(pointers):
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.int64)], tl.int32, is_pure=False, pack=1
    )


@kernel
def _linear_kernel(
    x_ptr, w_ptr, bias_ptr, out_ptr, num_rows, num_out, num_in, x_stride, w_stride, steps,
    ROWS: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr, AHEAD: tl.constexpr,
    EVEN_OUT: tl.constexpr, EVEN_IN: tl.constexpr, BIAS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    outs = tl.program_id(0) * OUT + tl.arange(0, OUT)
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    first = part * steps // parts * IN
    last = (part + 1) * steps // parts * IN
    rows, ins = tl.arange(0, ROWS), tl.arange(0, IN)
    # Rows past the end read the last one; their sums are never written.
    w_rows = outs if EVEN_OUT else tl.minimum(outs, num_out - 1)
    w_rows_ptr = w_ptr + w_rows.to(tl.int64)[:, None] * w_stride + first
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        # One address a line of the L2: 64 numbers.
        lines = tl.arange(0, IN // 64)[None, :] * 64
        for stage in tl.static_range(AHEAD):
            _prefetch(w_rows_ptr + tl.minimum(stage * IN + lines, num_in - first - 1))
        tl.extra.cuda.gdc_wait()
    w_ptrs = w_rows_ptr + ins[None, :]
    x_ptrs = x_ptr + rows.to(tl.int64)[None, :] * x_stride + (first + ins)[:, None]
    total = tl.zeros((OUT, ROWS), tl.float32)
    for at in range(first, last, IN):
        if EVEN_IN:
            w = tl.load(w_ptrs)
            x = tl.load(x_ptrs, mask=rows[None, :] < num_rows, other=0.0)
        else:
            left = num_in - at
            w = tl.load(w_ptrs, mask=ins[None, :] < left, other=0.0)
            x = tl.load(x_ptrs, mask=(rows[None, :] < num_rows) & (ins[:, None] < left), other=0.0)
        total = tl.dot(w, x, total)
        w_ptrs += IN
        x_ptrs += IN
    if BIAS:
        total += tl.load(bias_ptr + w_rows).to(tl.float32)[:, None]
    places = (part.to(tl.int64) * num_rows + rows)[:, None] * num_out + outs[None, :]
    mask = (rows[:, None] < num_rows) & (outs[None, :] < num_out)
    tl.store(out_ptr + places, tl.trans(total).to(out_ptr.dtype.element_ty), mask=mask)


@kernel
def _sum_parts_kernel(
    parts_ptr, bias_ptr, out_ptr, count, num_out, PARTS: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    total = tl.load(parts_ptr + at, mask=mask, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts_ptr + part * count + at, mask=mask, other=0.0)
    if BIAS:
        total += tl.load(bias_ptr + at % num_out, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=mask)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, choice: Choice) -> Tensor:
    """x · weightᵀ + bias.  x [rows, in], its rows apart by any stride; weight [out, in] contiguous; bias [out]."""
    return linear_triton(x, weight, bias, choice) if x.is_cuda else linear_reference(x, weight, bias)


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias)


def linear_triton(x: Tensor, weight: Tensor, bias: Tensor | None, choice: Choice) -> Tensor:
    (rows, num_in), num_out = x.shape, weight.shape[0]
    require("weight", weight, (num_out, num_in), x.dtype, x)
    out = x.new_empty(rows, num_out)
    if rows == 0 or num_out == 0:
        return out
    parts = choice.splits
    steps = -(-num_in // choice.block_in)
    block, blocks = block_rows(rows), -(-num_out // choice.block_out)
    made = out if parts == 1 else x.new_empty(parts, rows, num_out, dtype=torch.float32)
    dependent = {"launch_pdl": True} if choice.dependent else {}
    _linear_kernel[blocks, parts](
        x, weight, bias, made, rows, num_out, num_in, x.stride(0), weight.stride(0), steps,
        ROWS=block, OUT=choice.block_out, IN=choice.block_in, AHEAD=choice.ahead, EVEN_OUT=num_out % choice.block_out == 0,
        EVEN_IN=num_in % choice.block_in == 0, BIAS=bias is not None and parts == 1, DEPENDENT=choice.dependent,
        num_warps=choice.warps, num_stages=choice.stages, **dependent,
    )  # fmt: skip
    if parts > 1:
        count = rows * num_out
        _sum_parts_kernel[(-(-count // REDUCE_BLOCK),)](
            made, bias, out, count, num_out, PARTS=parts, BLOCK=REDUCE_BLOCK, BIAS=bias is not None,
            DEPENDENT=choice.dependent, num_warps=4, **dependent,
        )  # fmt: skip
    return out
