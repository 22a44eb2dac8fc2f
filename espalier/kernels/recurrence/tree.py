"""Computes the outputs of a tree's nodes from the recurrent state of the prefix, which is read once and not written.

Grid: (parts of a state, requests).  A program takes K_SIZE x BLOCK_V values of a head's state, and all nodes.  The
values that the nodes add to the state are the solution x of (I + A) x = b.  In a node's row, A is nonzero only at the
node's ancestors.  The kernel repeats x = b - A x as often as the tree is deep.  The x of a node at depth d is exact
after d steps.  So a shallow tree takes few small products for any number of nodes, and errors do not add up.

In the products, the columns of the state are the rows, and the nodes are the columns, because Hopper's tensor cores
take at least 64 rows and at least 8 columns.  So a tree of 16 nodes fills them.

A tree of a single row needs no tensor cores.  _single_row_kernel sums in float32, needs few registers, and loads its
whole part of the state before it waits for the previous kernel.
"""

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from espalier.kernels.ops.states import MAX_TREE_ROWS, SlotStates
from espalier.kernels.runtime.jit import kernel
from espalier.kernels.runtime.launch import acc_dtype, chip, next_power_of_2, require
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger, pdl_wait, prefetch

# The smallest size of a block that tensor cores support.
MIN_BLOCK = 16
# Bytes of a line of the L2 cache.
LINE_BYTES = 128
# Columns of a state per program for a tree of a single row: with many heads; with few heads, where more programs must
# read.
SINGLE_ROW_BLOCK_V = (64, 32)


@kernel
def _prefetch_state(
    state_ptr, first_column, K_SIZE: tl.constexpr, V_SIZE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    LINE_VALUES: tl.constexpr,
):  # fmt: skip
    """Prefetches BLOCK_V columns of a head's state, from `first_column` on.  LINE_VALUES: state values per L2 line."""
    line = first_column + tl.arange(0, (BLOCK_V + LINE_VALUES - 1) // LINE_VALUES) * LINE_VALUES
    place = tl.arange(0, BLOCK_K)[:, None] * V_SIZE + line[None, :]
    prefetch(state_ptr + tl.minimum(place, K_SIZE * V_SIZE - 1))


@kernel
def _solve_tree(
    first_values_t, key_products, seen_t, beta, decay_between_nodes_t,
    PRODUCT_DTYPE: tl.constexpr, PRECISION: tl.constexpr, ACC_DTYPE: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Returns the values that each node adds to the state, [columns of the state, nodes].

    first_values_t: the values that each node would add if it had no ancestors, in the shape of the result.
    key_products: the products of each two nodes' keys.  seen_t: whether node i (row) is node j (column) or an ancestor
    of node j.
    """
    node = tl.arange(0, BLOCK_R)
    depth = tl.max(tl.sum(seen_t.to(tl.int32), 0), 0) - 1
    system_t = tl.where(node[:, None] == node[None, :], 0.0, beta[None, :] * key_products * decay_between_nodes_t).to(
        PRODUCT_DTYPE
    )
    new_t = first_values_t
    for _ in range(depth):
        new_t = first_values_t - tl.dot(
            new_t.to(PRODUCT_DTYPE), system_t, input_precision=PRECISION, out_dtype=ACC_DTYPE
        )
    return new_t


@kernel
def _tree_kernel(
    q_ptr, k_ptr, v_ptr, gates_ptr, state_ptr, slots_ptr, ancestor_bits_ptr, skip_ptr, out_ptr, num_nodes,
    num_ancestor_words, HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr, K_SIZE: tl.constexpr, V_SIZE: tl.constexpr,
    DELTA_RULE: tl.constexpr, ACC_DTYPE: tl.constexpr, PRODUCT_DTYPE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, STEP_COLUMNS: tl.constexpr,
    STAGES: tl.constexpr, LINE_VALUES: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Computes BLOCK_V output columns of one head, at all nodes.  Tensors named *_t have a column for each node."""
    pdl_trigger(USE_PDL)
    v_blocks: tl.constexpr = (V_SIZE + BLOCK_V - 1) // BLOCK_V
    head, request = tl.program_id(0) // v_blocks, tl.program_id(1).to(tl.int64)
    value = tl.program_id(0) % v_blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    is_value = value < V_SIZE
    # The state may be read before the wait: inputs.py's kernel waited for the kernels that write states.
    state_ptr += (tl.load(slots_ptr + request) * HEADS + head) * K_SIZE * V_SIZE
    if USE_PDL:
        _prefetch_state(state_ptr, tl.program_id(0) % v_blocks * BLOCK_V, K_SIZE, V_SIZE, BLOCK_K, BLOCK_V, LINE_VALUES)
    pdl_wait(USE_PDL)
    node = tl.arange(0, BLOCK_R)
    is_node = node < num_nodes
    row = request * num_nodes + node
    word = tl.load(ancestor_bits_ptr + row * num_ancestor_words, mask=is_node, other=0)
    seen_t = (((word[None, :] >> node[:, None]) & 1) != 0) & is_node[:, None]
    gate = gates_ptr + row * 2 * HEADS + head
    log_decay = tl.load(gate, mask=is_node, other=0.0).to(ACC_DTYPE)
    beta = tl.load(gate + HEADS, mask=is_node, other=0.0).to(ACC_DTYPE)
    v_place = (row * HEADS + head)[None, :] * V_SIZE + value[:, None]
    v_t = tl.load(v_ptr + v_place, mask=is_node[None, :] & is_value[:, None], other=0.0)
    # Products would spread NaN and infinity to all nodes, so they become 0.  Below, descendants' outputs become NaN.
    is_not_finite = (log_decay * 0.0 != 0.0) | (beta * 0.0 != 0.0)
    log_decay, beta = tl.where(log_decay * 0.0 != 0.0, 0.0, log_decay), tl.where(beta * 0.0 != 0.0, 0.0, beta)
    product_t, out_t = tl.zeros([BLOCK_V, BLOCK_R], ACC_DTYPE), tl.zeros([BLOCK_V, BLOCK_R], ACC_DTYPE)
    system_t, scores_t = tl.zeros([BLOCK_R, BLOCK_R], ACC_DTYPE), tl.zeros([BLOCK_R, BLOCK_R], ACC_DTYPE)
    for first in tl.range(0, BLOCK_K, STEP_COLUMNS, num_stages=STAGES):
        key = first + tl.arange(0, STEP_COLUMNS)
        is_key = key < K_SIZE
        k_place = (row * (HEADS // GROUP_SIZE) + head // GROUP_SIZE)[:, None] * K_SIZE + key[None, :]
        mask = is_node[:, None] & is_key[None, :]
        state = tl.load(
            state_ptr + key[:, None] * V_SIZE + value[None, :], mask=is_key[:, None] & is_value[None, :], other=0.0
        )
        k, q = tl.load(k_ptr + k_place, mask=mask, other=0.0), tl.load(q_ptr + k_place, mask=mask, other=0.0)
        state_t, q_t = tl.trans(state.to(PRODUCT_DTYPE)), tl.trans(q.to(PRODUCT_DTYPE))
        is_not_finite = is_not_finite | (tl.max((k * 0.0 != 0.0).to(tl.int32), 1) > 0)
        k = tl.where(k * 0.0 != 0.0, 0.0, k).to(PRODUCT_DTYPE)
        if DELTA_RULE:
            product_t += tl.dot(state_t, tl.trans(k), input_precision=PRECISION, out_dtype=ACC_DTYPE)
            system_t += tl.dot(k, tl.trans(k), input_precision=PRECISION, out_dtype=ACC_DTYPE)
        out_t += tl.dot(state_t, q_t, input_precision=PRECISION, out_dtype=ACC_DTYPE)
        scores_t += tl.dot(k, q_t, input_precision=PRECISION, out_dtype=ACC_DTYPE)

    v_t = v_t.to(ACC_DTYPE)
    is_not_finite = is_not_finite | (tl.max((v_t * 0.0 != 0.0).to(tl.int32), 0) > 0)
    v_t = tl.where(v_t * 0.0 != 0.0, 0.0, v_t)
    sees_not_finite = tl.max((seen_t & is_not_finite[:, None]).to(tl.int32), 0) > 0
    decay = tl.sum(tl.where(seen_t, log_decay[:, None], 0.0), 0)
    carry_t = tl.where(seen_t, tl.exp(tl.where(seen_t, decay[None, :] - decay[:, None], 0.0)), 0.0)
    new_t = beta[None, :] * v_t
    if DELTA_RULE:
        new_t -= (beta * tl.exp(decay))[None, :] * product_t
        new_t = _solve_tree(new_t, system_t, seen_t, beta, carry_t, PRODUCT_DTYPE, PRECISION, ACC_DTYPE, BLOCK_R)
    out_t = tl.exp(decay)[None, :] * out_t
    out_t += tl.dot(
        new_t.to(PRODUCT_DTYPE), (scores_t * carry_t).to(PRODUCT_DTYPE), input_precision=PRECISION, out_dtype=ACC_DTYPE
    )
    if skip_ptr is not None:
        out_t += tl.load(skip_ptr + head).to(ACC_DTYPE) * v_t
    out_t = tl.where(sees_not_finite[None, :], float("nan"), out_t)
    tl.store(out_ptr + v_place, out_t.to(out_ptr.dtype.element_ty), mask=is_node[None, :] & is_value[:, None])


@kernel
def _single_row_kernel(
    q_ptr, k_ptr, v_ptr, gates_ptr, state_ptr, slots_ptr, skip_ptr, out_ptr,
    HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr, K_SIZE: tl.constexpr, V_SIZE: tl.constexpr, DELTA_RULE: tl.constexpr,
    ACC_DTYPE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Computes one row per request.  gates_ptr: log decay, beta.  skip_ptr: each head's factor of v; may be None."""
    pdl_trigger(USE_PDL)
    v_blocks: tl.constexpr = (V_SIZE + BLOCK_V - 1) // BLOCK_V
    head, row = tl.program_id(0) // v_blocks, tl.program_id(1).to(tl.int64)
    value, key = tl.program_id(0) % v_blocks * BLOCK_V + tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_K)
    is_value, is_key = value < V_SIZE, key < K_SIZE
    # The state may be read before the wait, as in _tree_kernel.
    state_ptr += (tl.load(slots_ptr + row) * HEADS + head) * K_SIZE * V_SIZE
    state_offsets = key[:, None] * V_SIZE + value[None, :]
    state = tl.load(state_ptr + state_offsets, mask=is_key[:, None] & is_value[None, :], other=0.0).to(ACC_DTYPE)
    pdl_wait(USE_PDL)
    k_place = (row * (HEADS // GROUP_SIZE) + head // GROUP_SIZE) * K_SIZE + key
    k = tl.load(k_ptr + k_place, mask=is_key, other=0.0).to(ACC_DTYPE)
    q = tl.load(q_ptr + k_place, mask=is_key, other=0.0).to(ACC_DTYPE)
    v_place = (row * HEADS + head) * V_SIZE + value
    v = tl.load(v_ptr + v_place, mask=is_value, other=0.0).to(ACC_DTYPE)
    gate = gates_ptr + row * 2 * HEADS + head
    log_decay, beta = tl.load(gate).to(ACC_DTYPE), tl.load(gate + HEADS).to(ACC_DTYPE)
    decay, new = tl.exp(log_decay), beta * v
    if DELTA_RULE:
        new -= beta * decay * tl.sum(state * k[:, None], 0)
    out = decay * tl.sum(state * q[:, None], 0) + new * tl.sum(k * q, 0)
    if skip_ptr is not None:
        out += tl.load(skip_ptr + head).to(ACC_DTYPE) * v
    is_not_finite = (tl.max((k * 0.0 != 0.0).to(tl.int32), 0) > 0) | (tl.max((v * 0.0 != 0.0).to(tl.int32), 0) > 0)
    is_not_finite = is_not_finite | (log_decay * 0.0 != 0.0) | (beta * 0.0 != 0.0)
    out = tl.where(is_not_finite, float("nan"), out)
    tl.store(out_ptr + v_place, out.to(out_ptr.dtype.element_ty), mask=is_value)


def tree_outputs(
    q: Tensor,
    rows: tuple[Tensor, Tensor, Tensor],
    state: SlotStates,
    ancestor_bits: Tensor,
    skip_weight: Tensor | None,
    is_delta_rule: bool,
) -> Tensor:
    """Returns the output of each node, see ops/states.py:tree_outputs.  rows: (k, v, gates).
    Tolerance: the rounding of the operands (ProductPrecision), times the condition number of I + A.  The states of
    later rounds are not computed from these products."""
    k, v, gates = rows
    batch, count, heads, v_size = v.shape
    table, slots = state
    require("tree_outputs: state", table, (-1, heads, k.shape[3], v_size), None, v)
    require("tree_outputs: bits", ancestor_bits, (batch, count, -1), torch.int64, v)
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    if not batch or not count:
        return out
    assert count <= MAX_TREE_ROWS
    q, k, v, gates = (tensor.contiguous() for tensor in (q, k, v, gates))
    sizes = {"HEADS": heads, "GROUP_SIZE": heads // k.shape[2], "K_SIZE": k.shape[3], "V_SIZE": v_size}
    if count == 1:
        is_few = batch * heads < chip(v).processors
        block_v = min(next_power_of_2(v_size), SINGLE_ROW_BLOCK_V[is_few])
        _single_row_kernel[heads * -(-v_size // block_v), batch](
            *(q, k, v, gates, table, slots, skip_weight, out),
            **sizes, DELTA_RULE=is_delta_rule, ACC_DTYPE=acc_dtype(table.dtype),
            BLOCK_K=next_power_of_2(k.shape[3]), BLOCK_V=block_v, num_warps=4, **pdl_arguments(chip(v)),
        )  # fmt: skip
        return out
    block_k = max(next_power_of_2(k.shape[3]), MIN_BLOCK)
    block_r, products = max(next_power_of_2(count), MIN_BLOCK), choose_precision(v, table)
    plan = choose_tree_plan(v_size, batch * heads, block_r, products, chip(v).processors)
    _tree_kernel[heads * -(-v_size // plan.block_v), batch](
        *(q, k, v, gates, table, slots, ancestor_bits.contiguous(), skip_weight, out),
        *(count, ancestor_bits.shape[2]),
        **sizes, DELTA_RULE=is_delta_rule, ACC_DTYPE=acc_dtype(table.dtype), PRODUCT_DTYPE=products.triton_dtype,
        PRECISION=products.precision, BLOCK_R=block_r, BLOCK_K=block_k, BLOCK_V=plan.block_v,
        STEP_COLUMNS=min(plan.step_columns, block_k), STAGES=plan.num_stages, LINE_VALUES=LINE_BYTES // table.itemsize,
        num_warps=plan.num_warps, **pdl_arguments(chip(v)),
    )  # fmt: skip
    return out


class ProductPrecision(NamedTuple):
    """How products round their operands.  operand_dtype: the dtype of operands.  precision: the input_precision of
    tl.dot, which says how it multiplies 32-bit operands."""

    operand_dtype: torch.dtype
    precision: str

    @property
    def triton_dtype(self) -> object:
        return tl.bfloat16 if self.operand_dtype == torch.bfloat16 else acc_dtype(self.operand_dtype)


def choose_precision(v: Tensor, state_table: Tensor) -> ProductPrecision:
    """Chooses a dtype of operands that is at least as precise as the model's dtype.

    v: in the model's dtype.  state_table: the states.  float16 models use TF32, because float16's range is too small.
    """
    if v.dtype == torch.bfloat16 and v.is_cuda:  # Triton's interpreter multiplies bfloat16 as integers.
        return ProductPrecision(v.dtype, "tf32")
    return ProductPrecision(state_table.dtype, "tf32x3" if v.dtype.itemsize >= 4 else "tf32")


class TreePlan(NamedTuple):
    """Launch parameters.  block_v: columns of a state per program.  step_columns: columns of keys per step."""

    block_v: int
    step_columns: int
    num_stages: int
    num_warps: int


def choose_tree_plan(v_size: int, heads: int, block_r: int, products: ProductPrecision, processors: int) -> TreePlan:
    """Chooses the launch parameters.  heads: the heads of all requests together.  block_r: the nodes of a tree, rounded
    up.  processors: the GPU's multiprocessors.

    If there are few heads, each head's state is cut into more parts, so that all multiprocessors read.  If a tree has
    many nodes, a head's state is cut into fewer parts, because the program of each part multiplies the keys again.
    """
    is_few = heads < processors
    if products.operand_dtype.itemsize > 2:
        plan = TreePlan(32, 64, 2, 8 if block_r == 2 * MIN_BLOCK else 4)
    elif block_r == MIN_BLOCK and is_few:
        plan = TreePlan(32, 128, 1, 4)
    elif block_r < MAX_TREE_ROWS:
        plan = TreePlan(64, 64, 1, 4)
    else:
        plan = TreePlan(64, 64, 1, 8) if is_few else TreePlan(128, 32, 2, 8)
    block_v = max(min(next_power_of_2(v_size), plan.block_v), MIN_BLOCK)
    # With 16 columns, a program gets one warpgroup: with two, Triton 3.6's code failed on an H100.
    return plan._replace(block_v=block_v, num_warps=plan.num_warps if block_v > MIN_BLOCK else 4)
