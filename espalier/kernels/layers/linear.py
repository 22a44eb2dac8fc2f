"""A linear map of few rows: y = x · weightᵀ + bias, bound by reading the weight once.

Each program multiplies a block of the weight's rows with all rows of x, over the whole of `in` or one of `splits`
parts of it.  Parts are written apart, in float32, and what reads them adds them in order: no atomics, so the same
input gives the same bits.  `linear` has a kernel for that; `linear_parts` leaves it to whoever reads them.

From some 100 rows on PyTorch's library is faster, for some shapes if it is asked for less at once (`LibraryPlan`): what
fills the chip one time and a half with its tiles takes as long as what fills it twice.

Where gate and up of a gated block are stacked in one weight and nothing is split, the kernel goes on to silu(gate) · up
(`linear_gated`).

Which way is fast is measured (`espalier doctor --tune`) and stands in a file (kernels/layers/linear_tuning.py); this
file knows which of them are worth measuring on a chip.

Both kernels are launched early where the chip can do that (kernels/runtime/pdl.py); the first asks for its first
weights before it waits.

Tolerance: products of two-byte numbers are exact in float32 and are summed in float32, in another order than elsewhere;
the result is rounded once.  Against float64 the error is at most half a unit in the last place of the result, plus
in · 2⁻²⁴ times the sum of the products' magnitudes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.layers.silu import require_gated, silu_mul, silu_times
from espalier.kernels.runtime.launch import Chip, chip, kernel, power_of_two, require
from espalier.kernels.runtime.pdl import ask_for, early, pdl_trigger, pdl_wait, pdl_wait_if

if TYPE_CHECKING:
    import triton.language as tl

DTYPES = (torch.bfloat16, torch.float16)
MAX_ROWS = 256
# A block of x is padded to the tensor cores' least, so that 1 to 16 rows are one and the same computation.
LEAST_ROWS = 16
SUM_BLOCK = 1024

# (block_out, block_in, warps) worth measuring for a block of so many rows: what came within 2.5% of the best in a wider
# search on an H200 (docs/log.md), and one that fits small cards.
TILES = (
    (32, ((32, 256, 4), (64, 64, 4), (64, 128, 4), (64, 256, 4), (128, 64, 4), (128, 128, 4))),
    (64, ((64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 128, 4))),
    (128, ((64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 64, 8))),
    (256, ((64, 64, 4), (128, 64, 8))),
)
STAGES = (2, 3, 4, 6, 8)
SPLITS = (1, 2, 3, 4, 6, 8)
# Of PyTorch's library, worth measuring where its tiles are as good as ours.
LIBRARY_ROWS = 65
PIECES = (2, 3, 4)
LIBRARY_SPLITS = (2, 4)
# What a tile of the library holds at most of the weight's rows or columns, without a remainder.
TILE = 128
# Shared memory that a program takes besides its tiles.
RESERVED = 1024


@dataclass(frozen=True)
class TritonPlan:
    """How a linear is launched.  block_out × block_in: a tile of the weight; splits: parts of `in` that are summed
    apart; stages: tiles that are on their way at once."""

    block_out: int
    block_in: int
    splits: int
    warps: int
    stages: int

    def shared_memory(self, rows: int) -> int:
        """Bytes that a program takes for `rows` rows."""
        return self.stages * (self.block_out + block_rows(rows)) * self.block_in * 2 + RESERVED


@dataclass(frozen=True)
class LibraryPlan:
    """PyTorch's product, asked for `pieces` of the weight's rows, one after the other, or for `splits` parts of `in`,
    in one batched call; one of them is 1.  In float32 parts it neither sums by itself nor rounds."""

    pieces: int
    splits: int


LinearPlan = TritonPlan | LibraryPlan | None


def block_rows(rows: int) -> int:
    return max(power_of_two(rows), LEAST_ROWS)


def candidates(rows: int, num_out: int, num_in: int, on: Chip) -> list[TritonPlan | LibraryPlan]:
    """What is worth measuring beside F.linear."""
    return [*_launches(rows, num_out, num_in, on), *(_library(num_out, num_in) if rows >= LIBRARY_ROWS else ())]


def _library(num_out: int, num_in: int) -> list[LibraryPlan]:
    pieces = [LibraryPlan(pieces, 1) for pieces in PIECES if num_out % (pieces * TILE) == 0]
    return pieces + [LibraryPlan(1, splits) for splits in LIBRARY_SPLITS if num_in % (splits * TILE) == 0]


def _launches(rows: int, num_out: int, num_in: int, on: Chip) -> list[TritonPlan]:
    """As many programs as run at once, or several turns of them where nothing is split."""
    tiles = next(tiles for bound, tiles in TILES if rows <= bound)
    choices = (
        TritonPlan(block_out, block_in, splits, warps, stages)
        for block_out, block_in, warps in tiles
        for stages in STAGES
        for splits in SPLITS
    )
    return [choice for choice in choices if _worthwhile(choice, rows, num_out, num_in, on)]


def _worthwhile(choice: TritonPlan, rows: int, num_out: int, num_in: int, on: Chip) -> bool:
    at_once = on.shared_memory // choice.shared_memory(rows)
    # A third of the shared memory on its way hides what memory takes to answer.
    if at_once == 0 or choice.shared_memory(rows) * min(at_once, 8) < on.shared_memory // 3:
        return False
    if _blocks(num_in, choice.block_in) < choice.stages * choice.splits:
        return choice.splits == 1 and choice.stages == STAGES[0]
    blocks = _blocks(num_out, choice.block_out) * choice.splits
    return choice.splits == 1 or 0.6 * on.processors <= blocks <= on.processors * at_once


def _blocks(count: int, block: int) -> int:
    return -(-count // block)


@kernel
def _linear_kernel(
    x_ptr, w_ptr, bias_ptr, out_ptr, num_rows, num_out, num_in, x_stride, w_stride,
    ROWS: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr,
    EVEN_OUT: tl.constexpr, EVEN_IN: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """GATED: num_out numbers silu(gate) * up are written, of as many rows of gate over as many of up."""
    WRITTEN: tl.constexpr = OUT // 2 if GATED else OUT
    if GATED:
        # Eight rows of gate, then their eight of up: a thread has both of a product of 16 rows.
        row = tl.arange(0, OUT)
        w_rows = tl.program_id(0) * WRITTEN + row // 16 * 8 + row % 8
        w_rows = (w_rows if EVEN_OUT else tl.minimum(w_rows, num_out - 1)) + row % 16 // 8 * num_out
    else:
        # Blocks past the end repeat the last row; nothing of that is written.
        w_rows = tl.program_id(0) * OUT + tl.arange(0, OUT)
        w_rows = w_rows if EVEN_OUT else tl.minimum(w_rows, num_out - 1)
    part, parts = tl.program_id(1), tl.num_programs(1)
    steps = tl.cdiv(num_in, IN)
    first, last = part * steps // parts * IN, (part + 1) * steps // parts * IN
    rows, ins = tl.arange(0, ROWS), tl.arange(0, IN)
    w_ptrs = w_ptr + w_rows.to(tl.int64)[:, None] * w_stride + (first + ins)[None, :]
    pdl_trigger(DEPENDENT)
    if DEPENDENT:
        # A line of the L2 holds 64 numbers.
        lines = first + tl.arange(0, IN // 64) * 64
        ask_for(w_ptr + w_rows.to(tl.int64)[:, None] * w_stride + tl.minimum(lines, num_in - 1)[None, :])
    pdl_wait(DEPENDENT)
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
        # Of the first part alone.
        total += tl.where(part == 0, tl.load(bias_ptr + w_rows).to(tl.float32), 0.0)[:, None]
    made = total.to(out_ptr.dtype.element_ty)
    if GATED:
        pairs = tl.reshape(made, (OUT // 16, 2, 8, ROWS)).permute(0, 2, 3, 1)
        gate, up = tl.split(tl.reshape(pairs, (WRITTEN, ROWS, 2)))
        made = silu_times(gate.to(tl.float32), up.to(tl.float32)).to(out_ptr.dtype.element_ty)
    outs = tl.program_id(0) * WRITTEN + tl.arange(0, WRITTEN)
    places = (part.to(tl.int64) * num_rows + rows)[:, None] * num_out + outs[None, :]
    mask = (rows[:, None] < num_rows) & (outs[None, :] < num_out)
    tl.store(out_ptr + places, tl.trans(made), mask=mask)


@kernel
def load_sum(pointer, part_stride, mask, PARTS: tl.constexpr, TYPE: tl.constexpr, EXACT: tl.constexpr):
    """Parts added in their order in EXACT and rounded to TYPE, as `linear` would hand them on; in EXACT again."""
    total = tl.load(pointer, mask=mask, other=0.0).to(EXACT)
    for part in tl.static_range(1, PARTS):
        total += tl.load(pointer + part * part_stride, mask=mask, other=0.0).to(EXACT)
    return total.to(TYPE).to(EXACT)


@kernel
def _sum_parts_kernel(
    parts_ptr, out_ptr, count, PARTS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    pdl_wait_if(DEPENDENT)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    total = load_sum(parts_ptr + at, count, mask, PARTS, out_ptr.dtype.element_ty, tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=mask)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, way: LinearPlan) -> Tensor:
    """x · weightᵀ + bias: x [rows, in] -> a fresh [rows, out] in x's dtype, computed as chosen; None is F.linear.

    Bits of a row depend on the way and, launched by us, on block_rows(rows), else on rows; and on no other row.
    """
    return _summed(linear_parts(x, weight, bias, way), x)


def linear_parts(x: Tensor, weight: Tensor, bias: Tensor | None, way: LinearPlan) -> Tensor:
    """`linear`, or, where the way splits, its parts [splits, rows, out] in float32: added in order and rounded to x's
    dtype they are `linear` to the bit."""
    if way is None:
        return linear_reference(x, weight, bias)
    if isinstance(way, LibraryPlan):
        return linear_parts_library(x, weight, bias, way)
    return linear_parts_triton(x, weight, bias, way)


def linear_gated(x: Tensor, weight: Tensor, bias: Tensor | None, way: LinearPlan) -> Tensor:
    """silu(gate) · up [rows, out / 2] of `linear`, whose weight stacks gate over up, to the bit.  Raises EspalierError
    for an odd `out`."""
    require_gated(weight.shape[0])
    if isinstance(way, TritonPlan) and way.splits == 1:
        return _launch(x, weight, bias, way, gated=True)
    return silu_mul(linear(x, weight, bias, way))


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias)


def sum_parts_reference(parts: Tensor, dtype: torch.dtype) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total.to(dtype)


def _summed(made: Tensor, x: Tensor) -> Tensor:
    if made.ndim == 2:
        return made
    parts, rows, num_out = made.shape
    out = x.new_empty(rows, num_out)
    _sum_parts_kernel[(_blocks(out.numel(), SUM_BLOCK),)](
        made, out, out.numel(), PARTS=parts, BLOCK=SUM_BLOCK, num_warps=4, **early(chip(x))
    )
    return out


def linear_triton(x: Tensor, weight: Tensor, bias: Tensor | None, choice: TritonPlan) -> Tensor:
    """See linear_parts_triton."""
    return _summed(linear_parts_triton(x, weight, bias, choice), x)


def linear_parts_library(x: Tensor, weight: Tensor, bias: Tensor | None, way: LibraryPlan) -> Tensor:
    """Views of x and weight are multiplied where they stand.  Raises RuntimeError where `in` has no such parts."""
    rows, num_out = x.shape[0], weight.shape[0]
    if way.splits > 1 and rows * num_out > 0:
        parts = (way.splits, -1)
        of_x, of_weight = x.unflatten(1, parts).transpose(0, 1), weight.unflatten(1, parts).permute(1, 2, 0)
        # A CPU, on which the tests look at the views, has no product of its own for that.
        exact = torch.float32
        made = torch.bmm(of_x, of_weight, out_dtype=exact) if x.is_cuda else of_x.to(exact) @ of_weight.to(exact)
        if bias is not None:
            made[0] += bias
        return made
    out = x.new_empty(rows, num_out)
    ends = [num_out * piece // way.pieces for piece in range(way.pieces + 1)]
    for begin, end in pairwise(ends):
        piece = slice(begin, end)
        if bias is None:
            torch.mm(x, weight[piece].T, out=out[:, piece])
        else:
            torch.addmm(bias[piece], x, weight[piece].T, out=out[:, piece])
    return out


def linear_parts_triton(x: Tensor, weight: Tensor, bias: Tensor | None, choice: TritonPlan) -> Tensor:
    """x's and weight's rows may stand any stride apart, their numbers side by side; all in x's dtype.

    Raises EspalierError on other shapes, dtypes or strides, and where the choice does not fit the chip.
    """
    return _launch(x, weight, bias, choice, gated=False)


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None, choice: TritonPlan, gated: bool) -> Tensor:
    rows, num_in = x.shape
    parts, on = choice.splits, chip(x)
    _require(x, weight, bias, choice, on)
    num_out, written = weight.shape[0], choice.block_out
    if gated:
        num_out, written = num_out // 2, written // 2
    split = parts > 1 and rows * num_out > 0
    out = x.new_empty(parts, rows, num_out, dtype=torch.float32) if split else x.new_empty(rows, num_out)
    if out.numel() == 0:
        return out
    _linear_kernel[_blocks(num_out, written), parts](
        x, weight, bias, out, rows, num_out, num_in, x.stride(0), weight.stride(0),
        ROWS=block_rows(rows), OUT=choice.block_out, IN=choice.block_in,
        EVEN_OUT=num_out % written == 0, EVEN_IN=num_in % choice.block_in == 0,
        BIAS=bias is not None, GATED=gated,
        num_warps=choice.warps, num_stages=choice.stages, **early(on),
    )  # fmt: skip
    return out


def _require(x: Tensor, weight: Tensor, bias: Tensor | None, choice: TritonPlan, on: Chip) -> None:
    rows, num_in = x.shape
    require("weight", weight, (-1, num_in), x.dtype, x)
    if bias is not None:
        require("bias", bias, (weight.shape[0],), x.dtype, x)
    if x.dtype not in DTYPES or rows > MAX_ROWS:
        raise EspalierError(f"a linear of few rows takes up to {MAX_ROWS} of two bytes a number; {rows} of {x.dtype}")
    if 1 not in (x.stride(1), num_in) or 1 not in (weight.stride(1), num_in):
        raise EspalierError("a linear of few rows needs the numbers of a row side by side: x or weight is transposed")
    if choice.shared_memory(rows) > on.shared_memory:
        raise EspalierError(
            f"{choice} takes {choice.shared_memory(rows)} bytes of shared memory for {rows} rows, this chip has "
            f"{on.shared_memory}; measure anew: espalier doctor --tune"
        )
