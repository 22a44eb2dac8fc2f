"""The product of FP8 inputs with an FP8 matrix in scaled blocks of 128 x 128, for many rows on Hopper.

A tile of the result has BLOCK_OUT columns and 128 or 256 rows.  One warp loads, by TMA; two warpgroups multiply, each
with every second 64 rows of the tile.  The tensor cores sum 128 columns; then the warps scale that sum and add it in
float32, while the tensor cores work for the other warpgroup.

Tolerance: that of linear_quantised.py for rounded inputs on a GPU.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from espalier.kernels.layers.quantised import FP8, QuantisedMatrix, RoundedRows
from espalier.kernels.runtime.launch import chip, gluon_kernel, require, unspecialised
from espalier.kernels.runtime.pdl import early, pdl_wait_if

if TYPE_CHECKING:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper


# Rows of a part, which a warpgroup multiplies at once; columns of a tile; columns that share a scale.
PART, BLOCK_OUT, BLOCK_IN = 64, 128, 128
WARPGROUPS = 2
# Parts of a warpgroup, and stages of shared memory.
LARGE, SMALL = (2, 4), (1, 6)
# Registers of a thread: at launch, in the loading warp, and in the others after it has given its own back.
REGISTERS, LOAD_REGISTERS, MULTIPLY_REGISTERS = 168, 24, 240
# Tiles that are multiplied one after another share their columns of the matrix in groups of so many.
GROUP = 8


class Tiles(NamedTuple):
    """The sizes of the product and the order of its tiles.

    num_rows, num_out; num_down, num_across: tiles in a column and in a row of the result; num_steps: blocks of columns
    of the inputs.
    """

    num_rows: Any
    num_out: Any
    num_down: Any
    num_across: Any
    num_steps: Any


class Stages(NamedTuple):
    """x: parts of the inputs; weight: blocks of the matrix; full, empty: a barrier for each stage."""

    x: Any
    weight: Any
    full: Any
    empty: Any
    turn: Any


# Arguments are grouped by meaning; one argument per line would hide the groups.
# fmt: off
@gluon_kernel
def _place(tiles, tile, GROUP: gl.constexpr):
    """(down, across): where a tile of the result is.  Groups of GROUP rows of tiles, each column by column."""
    in_group = GROUP * tiles.num_across
    first = tile // in_group * GROUP
    height = gl.minimum(tiles.num_down - first, GROUP)
    rest = tile % in_group
    return first + rest % height, rest // height


@gluon_kernel
def _load(tiles, stages, x_descriptor, weight_descriptor, PARTS: gl.constexpr, GROUP: gl.constexpr):
    """The loading warp: all blocks of the program's tiles."""
    STAGES: gl.constexpr = stages.full.shape[0]
    num_done = 0
    for tile in range(gl.program_id(0), tiles.num_down * tiles.num_across, gl.num_programs(0)):
        down, across = _place(tiles, tile, GROUP)
        for step in range(tiles.num_steps):
            stage = num_done % STAGES
            full = stages.full.index(stage)
            hopper.mbarrier.wait(stages.empty.index(stage), num_done // STAGES % 2 ^ 1)
            hopper.mbarrier.expect(full, (PARTS * 64 + 128) * 128)
            for part in gl.static_range(PARTS):
                hopper.tma.async_copy_global_to_shared(
                    x_descriptor, [(down * PARTS + part) * 64, step * 128], full, stages.x.index(stage * PARTS + part)
                )
            hopper.tma.async_copy_global_to_shared(
                weight_descriptor, [across * 128, step * 128], full, stages.weight.index(stage)
            )
            num_done += 1


@gluon_kernel
def _add_scaled(total, product, factor):
    """total + product · factor, a factor for each row.

    Assembly keeps its place: the compiler puts these additions off until after the next product, and then two products
    do not fit into the registers.
    """
    factor = gl.expand_dims(factor, 1) + gl.zeros_like(product)
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [product, factor, total], gl.float32, is_pure=False, pack=1
    )


@gluon_kernel
def _wait_for_turn(stages, num_before, WARPGROUP: gl.constexpr):
    hopper.mbarrier.wait(stages.turn.index(WARPGROUP), (num_before + (WARPGROUP == 0)) % 2)


@gluon_kernel
def _multiply(
    WARPGROUP: gl.constexpr, tiles, stages, staged, out_descriptor, scales, bias_ptr,
    WARPGROUPS: gl.constexpr, HALVES: gl.constexpr, GROUP: gl.constexpr, ORDERED: gl.constexpr,
):
    """A warpgroup that multiplies: its parts of the program's tiles."""
    STAGES: gl.constexpr = stages.full.shape[0]
    PARTS: gl.constexpr = WARPGROUPS * HALVES
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    x_scale_ptr, x_scale_step, scale_ptr, scale_row = scales
    zeros = gl.full([64, 128], 0.0, gl.float32, layout=SUM)
    offset = gl.arange(0, 64, layout=gl.SliceLayout(1, SUM))
    num_done = 0
    for tile in range(gl.program_id(0), tiles.num_down * tiles.num_across, gl.num_programs(0)):
        down, across = _place(tiles, tile, GROUP)
        first = (down * PARTS + WARPGROUP * HALVES) * 64
        # Memory of the scales goes on behind the last row, to the end of a tile.
        row = first + offset
        scale_at = scale_ptr + across * scale_row
        scale = gl.load(scale_at)
        factor_0 = gl.load(x_scale_ptr + row)
        factor_1 = factor_0
        if HALVES == 2:
            factor_1 = gl.load(x_scale_ptr + 64 + row)
        sum_0 = zeros
        sum_1 = zeros
        for step in range(tiles.num_steps):
            stage = num_done % STAGES
            # Scales of the next step are loaded as soon as those of this step are used.
            ahead = gl.minimum(step + 1, tiles.num_steps - 1)
            next_scale = gl.load(scale_at + ahead)
            hopper.mbarrier.wait(stages.full.index(stage), num_done // STAGES % 2)
            weight = stages.weight.index(stage).permute((1, 0))
            at = stage * PARTS + WARPGROUP * HALVES
            if ORDERED:
                _wait_for_turn(stages, num_done * HALVES, WARPGROUP)
            product = hopper.warpgroup_mma(stages.x.index(at), weight, zeros, use_acc=False, is_async=True)
            if ORDERED:
                hopper.mbarrier.arrive(stages.turn.index((WARPGROUP + 1) % WARPGROUPS), count=1)
            product = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[product])
            if HALVES == 1:
                hopper.mbarrier.arrive(stages.empty.index(stage), count=1)
            sum_0 = _add_scaled(sum_0, product, factor_0 * scale.to(gl.float32))
            factor_0 = gl.load(x_scale_ptr + ahead * x_scale_step + row)
            if HALVES == 2:
                if ORDERED:
                    _wait_for_turn(stages, num_done * HALVES + 1, WARPGROUP)
                else:
                    hopper.mbarrier.wait(stages.full.index(stage), num_done // STAGES % 2)
                product = hopper.warpgroup_mma(stages.x.index(at + 1), weight, zeros, use_acc=False, is_async=True)
                if ORDERED:
                    hopper.mbarrier.arrive(stages.turn.index((WARPGROUP + 1) % WARPGROUPS), count=1)
                product = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[product])
                hopper.mbarrier.arrive(stages.empty.index(stage), count=1)
                sum_1 = _add_scaled(sum_1, product, factor_1 * scale.to(gl.float32))
                factor_1 = gl.load(x_scale_ptr + 64 + ahead * x_scale_step + row)
            scale = next_scale
            num_done += 1
        _store(sum_0, first, across, staged, out_descriptor, bias_ptr, tiles.num_out, SUM)
        if HALVES == 2:
            _store(sum_1, first + 64, across, staged, out_descriptor, bias_ptr, tiles.num_out, SUM)
    hopper.tma.store_wait(0)


@gluon_kernel
def _store(total, row, across, staged, out_descriptor, bias_ptr, num_out, SUM: gl.constexpr):
    """Store a part of the result by TMA, which leaves out what is past its end."""
    if bias_ptr is not None:
        column = across * 128 + gl.arange(0, 128, layout=gl.SliceLayout(0, SUM))
        bias = gl.load(bias_ptr + column, mask=column < num_out, other=0.0).to(gl.float32)
        total = total + gl.expand_dims(bias, 0)
    hopper.tma.store_wait(0)
    staged.store(total.to(staged.dtype))
    hopper.fence_async_shared()
    hopper.tma.async_copy_shared_to_global(out_descriptor, [row, across * 128], staged)


@unspecialised("num_rows", "num_out", "num_in", "scale_row")
@gluon_kernel
def _block_product_kernel(
    x_descriptor, weight_descriptor, out_descriptor, x_scale_ptr, scale_ptr, bias_ptr,
    num_rows, num_out, num_in, x_scale_step, scale_row,
    WARPGROUPS: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    ORDERED: gl.constexpr,
    MULTIPLY_REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr, DEPENDENT: gl.constexpr,
):
    PARTS: gl.constexpr = WARPGROUPS * HALVES
    x = gl.allocate_shared_memory(x_descriptor.dtype, [STAGES * PARTS, 64, 128], x_descriptor.layout)
    weight = gl.allocate_shared_memory(x_descriptor.dtype, [STAGES, 128, 128], weight_descriptor.layout)
    staged = gl.allocate_shared_memory(out_descriptor.dtype, [WARPGROUPS, 64, 128], out_descriptor.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        hopper.mbarrier.init(full.index(stage), count=1)
        hopper.mbarrier.init(empty.index(stage), count=WARPGROUPS)
    turn = gl.allocate_shared_memory(gl.int64, [WARPGROUPS, 1], hopper.mbarrier.MBarrierLayout())
    for i in gl.static_range(WARPGROUPS):
        hopper.mbarrier.init(turn.index(i), count=1)
    pdl_wait_if(DEPENDENT)
    tiles = Tiles(
        num_rows, num_out, (num_rows + PARTS * 64 - 1) // (PARTS * 64), (num_out + 127) // 128, (num_in + 127) // 128
    )
    stages = Stages(x, weight, full, empty, turn)
    scales = (x_scale_ptr, x_scale_step, scale_ptr, scale_row)
    gl.warp_specialize(
        [
            (_multiply, (
                0, tiles, stages, staged.index(0), out_descriptor, scales, bias_ptr,
                WARPGROUPS, HALVES, GROUP, ORDERED,
            )),
            (_load, (tiles, stages, x_descriptor, weight_descriptor, PARTS, GROUP)),
            (_multiply, (
                1, tiles, stages, staged.index(1), out_descriptor, scales, bias_ptr,
                WARPGROUPS, HALVES, GROUP, ORDERED,
            )),
            (_multiply, (
                WARPGROUPS - 1, tiles, stages, staged.index(WARPGROUPS - 1), out_descriptor, scales, bias_ptr,
                WARPGROUPS, HALVES, GROUP, ORDERED,
            )),
        ][:WARPGROUPS + 1],
        [1, 4, 4][:WARPGROUPS],
        [LOAD_REGISTERS, MULTIPLY_REGISTERS, MULTIPLY_REGISTERS][:WARPGROUPS],
    )
# fmt: on


def block_product_triton(
    x: RoundedRows,
    weight: QuantisedMatrix,
    bias: Tensor | None,
    warpgroups: int = 2,
    halves: int = 2,
    stages: int = 4,
    group: int = GROUP,
    ordered: bool = False,
) -> Tensor:
    """x [rows, in] · weightᵀ + bias -> a new tensor [rows, out] in x's dtype."""
    (num_rows, num_in), num_out = x.values.shape, weight.shape[0]
    require("block_product: x", x.values, (-1, weight.shape[1]), FP8, weight.codes)
    out = torch.empty(num_rows, num_out, dtype=x.dtype, device=x.values.device)
    on = chip(out)
    num_tiles = -(-num_rows // (warpgroups * halves * PART)) * -(-num_out // BLOCK_OUT)
    at_launch, multiply = (168, 240) if warpgroups == 2 else (128, 160)
    _block_product_kernel[(min(num_tiles, on.processors),)](
        *(_descriptor(x.values, PART), _descriptor(weight.codes, BLOCK_OUT), _descriptor(out, PART)),
        *(x.scales, weight.scales, bias, num_rows, num_out, num_in),
        *(x.scales.stride(1), weight.scales.stride(0)),
        WARPGROUPS=warpgroups, HALVES=halves, STAGES=stages, GROUP=group, ORDERED=ordered,
        MULTIPLY_REGISTERS=multiply, LOAD_REGISTERS=LOAD_REGISTERS, **early(on), num_warps=4, maxnreg=at_launch,
    )  # fmt: skip
    return out


def _descriptor(matrix: Tensor, rows: int) -> Any:
    """The TMA descriptor for blocks of a matrix: so many rows, and 128 columns."""
    descriptor, layout = _descriptor_class(matrix.dtype, rows)
    return descriptor.from_tensor(matrix, [rows, 128], layout)


@cache
def _descriptor_class(dtype: torch.dtype, rows: int) -> tuple[Any, Any]:
    from triton.experimental.gluon import language
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    element = {torch.bfloat16: language.bfloat16, FP8: language.float8e4nv}[dtype]
    return TensorDescriptor, language.NVMMASharedLayout.get_default_for([rows, 128], element)
