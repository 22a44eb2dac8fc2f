"""The outputs of a tree's nodes from the state behind its prefix, which is read once and never written.

Grid: (parts of a state, requests).  A program holds K_SIZE x BLOCK_V values of a head's state, and all nodes.  The
nodes' additions to the state are the solution x of (I + A) x = b.  A is nonzero only at a node's ancestors.  The kernel
repeats x = b - A x once for each depth of the tree.  A node is exact one step after its ancestors, so a shallow tree
takes few small products, no matter how many nodes it has, and errors do not add up.

The work for a head of 128 x 128 and D nodes, in units of 2 · 128 · 128 FLOP on tensor cores: D each for S k and S q,
D² / 128 each for k k, k q and the sum over ancestors, and depth · D² / 128 for the solution.  One node after another
would take 3 D outside of tensor cores, a sum across threads for each node, and a state for each depth.  At D = 16 and
depth 4 both are 48, and tensor cores are four times as fast, with three products for each (tf32x3).  At D = 64 they are
384 and 192.  The state has 64 KiB, which a multiprocessor's share of memory bandwidth reads in 2.7 µs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from espalier.kernels.ops.states import MAX_TREE_ROWS, StateColumns
from espalier.kernels.runtime.jit import kernel
from espalier.kernels.runtime.launch import chip, exact_type, power_of_two, require
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger, pdl_wait

# The smallest block that tensor cores take.
SMALLEST = 16
# The precision of products that read or change a state: three terms of TF32.
PRECISION = "tf32x3"


@kernel
def _tree_kernel(
    q_ptr, k_ptr, v_ptr, gates_ptr, state_ptr, slot_ptr, bits_ptr, skip_ptr, out_ptr, rows, words,
    HEADS: tl.constexpr, SHARE: tl.constexpr, K_SIZE: tl.constexpr, V_SIZE: tl.constexpr, DELTA: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr, OUT_PRECISION: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    pdl_trigger(DEPENDENT)
    v_blocks: tl.constexpr = (V_SIZE + BLOCK_V - 1) // BLOCK_V
    head, request = tl.program_id(0) // v_blocks, tl.program_id(1).to(tl.int64)
    key, value = tl.arange(0, BLOCK_K), tl.program_id(0) % v_blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    is_key, is_value = key < K_SIZE, value < V_SIZE
    # The state can be read before waiting.  The kernel before this one writes no state, and it waited for the kernels
    # that do.
    slot = tl.load(slot_ptr + request)
    state = tl.load(
        state_ptr + ((slot * HEADS + head) * K_SIZE + key[:, None]) * V_SIZE + value[None, :],
        mask=is_key[:, None] & is_value[None, :], other=0.0,
    )  # fmt: skip
    pdl_wait(DEPENDENT)
    node = tl.arange(0, BLOCK_R)
    is_node = node < rows
    row = request * rows + node
    word = tl.load(bits_ptr + row * words, mask=is_node, other=0)
    seen = ((word[:, None] >> node[None, :]) & 1) != 0
    seen = seen & is_node[None, :]
    gate = gates_ptr + row * 2 * HEADS + head
    log_decay = tl.load(gate, mask=is_node, other=0.0).to(EXACT)
    beta = tl.load(gate + HEADS, mask=is_node, other=0.0).to(EXACT)
    k_place = (row * (HEADS // SHARE) + head // SHARE)[:, None] * K_SIZE + key[None, :]
    v_place = (row * HEADS + head)[:, None] * V_SIZE + value[None, :]
    k = tl.load(k_ptr + k_place, mask=is_node[:, None] & is_key[None, :], other=0.0).to(EXACT)
    v = tl.load(v_ptr + v_place, mask=is_node[:, None] & is_value[None, :], other=0.0).to(EXACT)
    # Products would carry NaN and infinity to nodes that do not see them.  So they are replaced by zeros here, and put
    # back at the end.
    is_bad = ~(
        (tl.sum(k * 0.0, 1) == 0.0) & (tl.sum(v * 0.0, 1) == 0.0) & (log_decay * 0.0 == 0.0) & (beta * 0.0 == 0.0)
    )
    k, v = tl.where(is_bad[:, None], 0.0, k), tl.where(is_bad[:, None], 0.0, v)
    log_decay, beta = tl.where(is_bad, 0.0, log_decay), tl.where(is_bad, 0.0, beta)
    sees_bad = tl.max((seen & is_bad[None, :]).to(tl.int32), 1) > 0

    decay = tl.sum(tl.where(seen, log_decay[None, :], 0.0), 1)
    carry = tl.where(seen, tl.exp(tl.where(seen, decay[:, None] - decay[None, :], 0.0)), 0.0)
    new = beta[:, None] * v
    if DELTA:
        depth = tl.max(tl.sum(seen.to(tl.int32), 1), 0) - 1
        read = tl.dot(k, state, input_precision=PRECISION, out_dtype=EXACT)
        first = new - (beta * tl.exp(decay))[:, None] * read
        system = tl.dot(k, tl.trans(k), input_precision=PRECISION, out_dtype=EXACT)
        system = tl.where(node[:, None] == node[None, :], 0.0, beta[:, None] * system * carry)
        new = first
        for _ in range(depth):
            new = first - tl.dot(system, new, input_precision=PRECISION, out_dtype=EXACT)
    q = tl.load(q_ptr + k_place, mask=is_node[:, None] & is_key[None, :], other=0.0).to(EXACT)
    scores = tl.dot(q, tl.trans(k), input_precision=OUT_PRECISION, out_dtype=EXACT) * carry
    out = tl.exp(decay)[:, None] * tl.dot(q, state, input_precision=OUT_PRECISION, out_dtype=EXACT)
    out += tl.dot(scores, new, input_precision=OUT_PRECISION, out_dtype=EXACT)
    if skip_ptr is not None:
        out += tl.load(skip_ptr + head).to(EXACT) * v
    out = tl.where(sees_bad[:, None], float("nan"), out)
    tl.store(out_ptr + v_place, out.to(out_ptr.dtype.element_ty), mask=is_node[:, None] & is_value[None, :])


def tree_outputs(
    q: Tensor, rows: tuple[Tensor, Tensor, Tensor], state: StateColumns, bits: Tensor, skip: Tensor | None, delta: bool
) -> Tensor:
    """Tolerance: the error of products of three terms of TF32.  Products that only outputs read have one term if the
    model's dtype is coarser than TF32."""
    k, v, gates = rows
    batch, count, heads, v_size = v.shape
    table, slots = state
    require("tree_outputs: state", table, (-1, heads, k.shape[3], v_size), None, v)
    require("tree_outputs: bits", bits, (batch, count, -1), torch.int64, v)
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    if not batch or not count:
        return out
    assert count <= MAX_TREE_ROWS
    block_r = max(power_of_two(count), SMALLEST)
    config = choose_config(v_size, batch * heads, block_r, v.dtype, chip(v).processors)
    _tree_kernel[heads * -(-v_size // config.block_v), batch](
        *(
            q.contiguous(),
            k.contiguous(),
            v.contiguous(),
            gates.contiguous(),
            table,
            slots,
            bits.contiguous(),
            skip,
            out,
        ),
        *(count, bits.shape[2]),
        HEADS=heads,
        SHARE=heads // k.shape[2],
        K_SIZE=k.shape[3],
        V_SIZE=v_size,
        DELTA=delta,
        EXACT=exact_type(table.dtype),
        PRECISION=config.precision,
        OUT_PRECISION=config.out_precision,
        BLOCK_R=block_r,
        BLOCK_K=max(power_of_two(k.shape[3]), SMALLEST),
        BLOCK_V=config.block_v,
        num_warps=config.num_warps,
        **pdl_arguments(chip(v)),
    )
    return out


class Config(NamedTuple):
    """Launch parameters.  block_v: columns of a state for each program; precision: Triton's name for the precision of
    products that read or change a state; out_precision: for products that only outputs read."""

    block_v: int
    num_warps: int
    precision: str
    out_precision: str


def choose_config(v_size: int, heads: int, block_r: int, dtype: torch.dtype, processors: int) -> Config:
    """heads: the sum over requests.  If there are few heads, each is cut into more parts, so that all multiprocessors
    read.  If a tree has many nodes, a head is cut into fewer, because each part multiplies the keys again."""
    largest = 64 if SMALLEST < block_r < MAX_TREE_ROWS and heads >= 2 * processors else 32
    block_v = max(min(power_of_two(v_size), largest), SMALLEST)
    # Products of one term of TF32 are finer than the rounding of outputs to 16 bits.
    out_precision = PRECISION if dtype.itemsize >= 4 else "tf32"
    # 64 rows fill one warpgroup of Hopper.  With a second one and 16 columns, code of Triton 3.6 failed on an H100.
    return Config(block_v, 8 if block_r == 2 * SMALLEST else 4, PRECISION, out_precision)
