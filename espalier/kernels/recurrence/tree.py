"""Computes the outputs of a tree's nodes from the state before the tree, which is read once and not changed.

Grid: (parts of a state, requests).  A program holds all nodes, and K_SIZE x BLOCK_V values of a head's state.  The
nodes' additions to the state are the solution x of (I + A) x = b, where A is nonzero only at a node's ancestors.  The
kernel repeats x = b - A x once per depth of the tree.  A node is exact one step after its ancestors.  So a shallow tree
takes few small products for any number of nodes, and errors do not add up.

In the products, the state's columns are rows and the nodes are columns.  Hopper's tensor cores take at least 64 rows,
but as few as 8 columns, so a tree of 16 nodes fills them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from espalier.kernels.ops.states import MAX_TREE_ROWS, StateColumns
from espalier.kernels.runtime.jit import kernel
from espalier.kernels.runtime.launch import chip, exact_type, power_of_two, require
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger, pdl_wait, prefetch

# The smallest block for tensor cores.
SMALLEST = 16
# Bytes of a line of the L2 cache.
LINE = 128


@kernel
def _prefetch_state(
    state_ptr, first, K_SIZE: tl.constexpr, V_SIZE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    LINE: tl.constexpr,
):  # fmt: skip
    """Prefetch BLOCK_V columns of a head's state, from column `first` on.  LINE: numbers in an L2 line."""
    line = first + tl.arange(0, (BLOCK_V + LINE - 1) // LINE) * LINE
    place = tl.arange(0, BLOCK_K)[:, None] * V_SIZE + line[None, :]
    prefetch(state_ptr + tl.minimum(place, K_SIZE * V_SIZE - 1))


@kernel
def _solution(
    first_t, products, seen_t, beta, carry_t,
    PRODUCT: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Solve for what the nodes add.  first_t: [columns of the state, nodes], the additions without ancestors.

    products: the products of the nodes' keys."""
    node = tl.arange(0, BLOCK_R)
    depth = tl.max(tl.sum(seen_t.to(tl.int32), 0), 0) - 1
    system_t = tl.where(node[:, None] == node[None, :], 0.0, beta[None, :] * products * carry_t).to(PRODUCT)
    new_t = first_t
    for _ in range(depth):
        new_t = first_t - tl.dot(new_t.to(PRODUCT), system_t, input_precision=PRECISION, out_dtype=EXACT)
    return new_t


@kernel
def _tree_kernel(
    q_ptr, k_ptr, v_ptr, gates_ptr, state_ptr, slot_ptr, bits_ptr, skip_ptr, out_ptr, rows, words,
    HEADS: tl.constexpr, SHARE: tl.constexpr, K_SIZE: tl.constexpr, V_SIZE: tl.constexpr, DELTA: tl.constexpr,
    EXACT: tl.constexpr, PRODUCT: tl.constexpr, PRECISION: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, LINE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    pdl_trigger(DEPENDENT)
    v_blocks: tl.constexpr = (V_SIZE + BLOCK_V - 1) // BLOCK_V
    head, request = tl.program_id(0) // v_blocks, tl.program_id(1).to(tl.int64)
    value = tl.program_id(0) % v_blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    is_value = value < V_SIZE
    # The state can be read before the wait: the previous kernel writes no state, and it waited for the kernels that do.
    state_ptr += (tl.load(slot_ptr + request) * HEADS + head) * K_SIZE * V_SIZE
    if DEPENDENT:
        _prefetch_state(state_ptr, tl.program_id(0) % v_blocks * BLOCK_V, K_SIZE, V_SIZE, BLOCK_K, BLOCK_V, LINE)
    pdl_wait(DEPENDENT)
    # Names ending in _t have one column per reading node.
    node = tl.arange(0, BLOCK_R)
    is_node = node < rows
    row = request * rows + node
    word = tl.load(bits_ptr + row * words, mask=is_node, other=0)
    seen_t = (((word[None, :] >> node[:, None]) & 1) != 0) & is_node[:, None]
    gate = gates_ptr + row * 2 * HEADS + head
    log_decay = tl.load(gate, mask=is_node, other=0.0).to(EXACT)
    beta = tl.load(gate + HEADS, mask=is_node, other=0.0).to(EXACT)
    v_place = (row * HEADS + head)[None, :] * V_SIZE + value[:, None]
    v_t = tl.load(v_ptr + v_place, mask=is_node[None, :] & is_value[:, None], other=0.0)
    # Products would carry NaN and infinity to nodes that do not see them.  So zeros replace these values here, and the
    # values are put back at the end.
    is_bad = (log_decay * 0.0 != 0.0) | (beta * 0.0 != 0.0)
    log_decay, beta = tl.where(log_decay * 0.0 != 0.0, 0.0, log_decay), tl.where(beta * 0.0 != 0.0, 0.0, beta)
    read_t, out_t = tl.zeros([BLOCK_V, BLOCK_R], EXACT), tl.zeros([BLOCK_V, BLOCK_R], EXACT)
    system_t, scores_t = tl.zeros([BLOCK_R, BLOCK_R], EXACT), tl.zeros([BLOCK_R, BLOCK_R], EXACT)
    for first in tl.range(0, BLOCK_K, STEP, num_stages=STAGES):
        key = first + tl.arange(0, STEP)
        is_key = key < K_SIZE
        k_place = (row * (HEADS // SHARE) + head // SHARE)[:, None] * K_SIZE + key[None, :]
        is_part = is_node[:, None] & is_key[None, :]
        state = tl.load(
            state_ptr + key[:, None] * V_SIZE + value[None, :], mask=is_key[:, None] & is_value[None, :], other=0.0
        )
        k, q = tl.load(k_ptr + k_place, mask=is_part, other=0.0), tl.load(q_ptr + k_place, mask=is_part, other=0.0)
        state_t, q_t = tl.trans(state.to(PRODUCT)), tl.trans(q.to(PRODUCT))
        is_bad = is_bad | (tl.max((k * 0.0 != 0.0).to(tl.int32), 1) > 0)
        k = tl.where(k * 0.0 != 0.0, 0.0, k).to(PRODUCT)
        if DELTA:
            read_t += tl.dot(state_t, tl.trans(k), input_precision=PRECISION, out_dtype=EXACT)
            system_t += tl.dot(k, tl.trans(k), input_precision=PRECISION, out_dtype=EXACT)
        out_t += tl.dot(state_t, q_t, input_precision=PRECISION, out_dtype=EXACT)
        scores_t += tl.dot(k, q_t, input_precision=PRECISION, out_dtype=EXACT)

    v_t = v_t.to(EXACT)
    is_bad = is_bad | (tl.max((v_t * 0.0 != 0.0).to(tl.int32), 0) > 0)
    v_t = tl.where(v_t * 0.0 != 0.0, 0.0, v_t)
    sees_bad = tl.max((seen_t & is_bad[:, None]).to(tl.int32), 0) > 0
    decay = tl.sum(tl.where(seen_t, log_decay[:, None], 0.0), 0)
    carry_t = tl.where(seen_t, tl.exp(tl.where(seen_t, decay[None, :] - decay[:, None], 0.0)), 0.0)
    new_t = beta[None, :] * v_t
    if DELTA:
        new_t -= (beta * tl.exp(decay))[None, :] * read_t
        new_t = _solution(new_t, system_t, seen_t, beta, carry_t, PRODUCT, PRECISION, EXACT, BLOCK_R)
    out_t = tl.exp(decay)[None, :] * out_t
    out_t += tl.dot(new_t.to(PRODUCT), (scores_t * carry_t).to(PRODUCT), input_precision=PRECISION, out_dtype=EXACT)
    if skip_ptr is not None:
        out_t += tl.load(skip_ptr + head).to(EXACT) * v_t
    out_t = tl.where(sees_bad[None, :], float("nan"), out_t)
    tl.store(out_ptr + v_place, out_t.to(out_ptr.dtype.element_ty), mask=is_node[None, :] & is_value[:, None])


def tree_outputs(
    q: Tensor, rows: tuple[Tensor, Tensor, Tensor], state: StateColumns, bits: Tensor, skip: Tensor | None, delta: bool
) -> Tensor:
    """See ops/states.py.  Tolerance: the rounding of the products' operands (Products), times the condition number of
    the tree's system.  No stored state is computed from these products."""
    k, v, gates = rows
    batch, count, heads, v_size = v.shape
    table, slots = state
    require("tree_outputs: state", table, (-1, heads, k.shape[3], v_size), None, v)
    require("tree_outputs: bits", bits, (batch, count, -1), torch.int64, v)
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    if not batch or not count:
        return out
    assert count <= MAX_TREE_ROWS
    block_k = max(power_of_two(k.shape[3]), SMALLEST)
    block_r, products = max(power_of_two(count), SMALLEST), choose_products(v, table)
    plan = choose_plan(v_size, batch * heads, block_r, products, chip(v).processors)
    _tree_kernel[heads * -(-v_size // plan.block_v), batch](
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
        PRODUCT=products.operand,
        PRECISION=products.precision,
        BLOCK_R=block_r,
        BLOCK_K=block_k,
        BLOCK_V=plan.block_v,
        STEP=min(plan.step, block_k),
        STAGES=plan.stages,
        LINE=LINE // table.itemsize,
        num_warps=plan.num_warps,
        **pdl_arguments(chip(v)),
    )
    return out


class Products(NamedTuple):
    """How products round their operands.  kept: the dtype of operands; precision: Triton's name for the multiplication
    of 32-bit operands."""

    kept: torch.dtype
    precision: str

    @property
    def operand(self) -> object:
        return tl.bfloat16 if self.kept == torch.bfloat16 else exact_type(self.kept)


def choose_products(v: Tensor, table: Tensor) -> Products:
    """Choose how products round.  v: values in the model's dtype; table: states.  Operands are as fine as the model's
    dtype.  One term of TF32 has the mantissa of float16, which itself could not hold large states."""
    if v.dtype == torch.bfloat16 and v.is_cuda:  # Triton's interpreter multiplies bfloat16 as integers.
        return Products(v.dtype, "tf32")
    return Products(table.dtype, "tf32x3" if v.dtype.itemsize >= 4 else "tf32")


class Plan(NamedTuple):
    """Launch parameters.  block_v: columns of a state per program; step: rows of the state that are multiplied at once;
    stages: how many steps are in flight."""

    block_v: int
    step: int
    stages: int
    num_warps: int


def choose_plan(v_size: int, heads: int, block_r: int, products: Products, processors: int) -> Plan:
    """Choose launch parameters.  heads: summed over requests.  Few heads are cut into more parts, so that all
    multiprocessors read.  With many nodes a head has fewer parts, because each part multiplies the keys again."""
    is_few = heads < processors
    if products.kept.itemsize > 2:
        plan = Plan(32, 64, 2, 8 if block_r == 2 * SMALLEST else 4)
    elif block_r == SMALLEST and is_few:
        plan = Plan(32, 128, 1, 4)
    elif block_r < MAX_TREE_ROWS:
        plan = Plan(64, 64, 1, 4)
    else:
        plan = Plan(64, 64, 1, 8) if is_few else Plan(128, 32, 2, 8)
    block_v = max(min(power_of_two(v_size), plan.block_v), SMALLEST)
    # For 16 columns with two warpgroups on Hopper, the code that Triton 3.6 made failed on an H100.
    return plan._replace(block_v=block_v, num_warps=plan.num_warps if block_v > SMALLEST else 4)
