"""Computes the q, k, v and gates of new rows: a short convolution of each row with its ancestors, then L2 norms and
gates.

Grid: (heads of q, k and v, blocks of rows), so that programs that run together read adjacent memory.  A program
convolves the channels of one head.  Then the program L2-normalises a head of q or k, or computes the gates of a head of
v.  Padding rows are computed too.
"""

import triton.language as tl
from torch import Tensor

from espalier.kernels.layers.norm import num_partial_sums
from espalier.kernels.ops.recurrence import L2_NORM_EPS, ShortConv
from espalier.kernels.ops.states import ConvColumns, GateInputs, PreparedRows, RowInputs
from espalier.kernels.runtime.jit import kernel, load_sum
from espalier.kernels.runtime.launch import acc_dtype, chip, next_power_of_2
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger, pdl_wait

# Channels per program in a layer that has a convolution and no heads.
BLOCK_C = 128


@kernel
def input_column(
    channel, Q_COLUMN: tl.constexpr, K_COLUMN: tl.constexpr, V_COLUMN: tl.constexpr, K_HEAD_STRIDE: tl.constexpr,
    V_GROUP_STRIDE: tl.constexpr, K_SIZE: tl.constexpr, Q_CHANNELS: tl.constexpr, V_GROUP_CHANNELS: tl.constexpr,
):  # fmt: skip
    """Returns the column of the inputs that holds a channel (ops/states.py:ConvColumns).  Q_CHANNELS: the number of
    channels of q.  V_GROUP_CHANNELS: the number of channels of the heads of v that share a head of k."""
    v_channel = channel - 2 * Q_CHANNELS
    column = V_COLUMN + v_channel // V_GROUP_CHANNELS * V_GROUP_STRIDE + v_channel % V_GROUP_CHANNELS
    if Q_CHANNELS:
        k_channel = channel - Q_CHANNELS
        column = tl.where(v_channel < 0, K_COLUMN + k_channel // K_SIZE * K_HEAD_STRIDE + k_channel % K_SIZE, column)
        column = tl.where(k_channel < 0, Q_COLUMN + channel // K_SIZE * K_HEAD_STRIDE + channel % K_SIZE, column)
    return column


@kernel
def softplus(x):
    """Returns log(1 + exp(x)).  The factor y / (u - 1) corrects the rounding of u = 1 + exp(x) (Kahan's log1p)."""
    y = tl.exp(tl.where(x > 20.0, 20.0, x))
    u = 1.0 + y
    return tl.where(x > 20.0, x, tl.where(u == 1.0, y, tl.log(u) * (y / tl.where(u == 1.0, 1.0, u - 1.0))))


@kernel
def _convolve(
    x_ptr, tail_ptr, parent_ptr, weight_ptr, bias_ptr, staged_ptr, row, row_in_request, slot, continues_previous,
    is_row, column, channel, is_channel, x_stride, x_split_stride,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, SILU: tl.constexpr, SPLITS: tl.constexpr, ACC_DTYPE: tl.constexpr,
):  # fmt: skip
    """Returns the convolution's output [rows, channels] in the dtype of the tails, which is the model's dtype.
    row_in_request: the index of each row in its request."""
    DTYPE: tl.constexpr = tail_ptr.dtype.element_ty
    at, first = row_in_request, row - row_in_request
    out = tl.zeros([row.shape[0], channel.shape[0]], ACC_DTYPE)
    for tap in tl.static_range(TAPS):
        is_new = is_row & ((at >= 0) | continues_previous)
        mask = is_channel[None, :] & is_new[:, None]
        value_ptrs = x_ptr + (first + at)[:, None] * x_stride + column[None, :]
        value = load_sum(value_ptrs, x_split_stride, mask, SPLITS, DTYPE, ACC_DTYPE)
        if tap == 0 and staged_ptr is not None:
            tl.store(staged_ptr + row[:, None] * CHANNELS + channel[None, :], value.to(DTYPE), mask=mask)
        if tap > 0:
            is_old = is_channel[None, :] & (is_row & ~is_new)[:, None]
            old = (slot * (TAPS - 1) + (TAPS - 1 + at))[:, None] * CHANNELS + channel[None, :]
            value = tl.where(is_new[:, None], value, tl.load(tail_ptr + old, mask=is_old, other=0.0).to(ACC_DTYPE))
        weight = tl.load(weight_ptr + channel * TAPS + (TAPS - 1 - tap), mask=is_channel, other=0.0)
        out += value * weight.to(ACC_DTYPE)[None, :]
        if parent_ptr is not None:
            parent = tl.load(parent_ptr + first + at, mask=is_row & (at > 0), other=0)
            at = tl.where(at > 0, parent, at - 1)
        else:
            at -= 1
    if bias_ptr is not None:
        out += tl.load(bias_ptr + channel, mask=is_channel, other=0.0).to(ACC_DTYPE)[None, :]
    if SILU:
        out = out / (1.0 + tl.exp(-out))
    return out.to(DTYPE)


@kernel
def _compute_gates(
    decay_ptr, beta_ptr, A_log_ptr, dt_bias_ptr, row, head, is_row, row_stride, split_stride, MIN_DT: tl.constexpr,
    MAX_DT: tl.constexpr, GROUP_SIZE: tl.constexpr, COLUMN_STRIDE: tl.constexpr, SPLITS: tl.constexpr,
    DTYPE: tl.constexpr, ACC_DTYPE: tl.constexpr,
):  # fmt: skip
    """Returns (the logarithm of the decay, beta).  beta_ptr: None if beta is t (Mamba-2, see GateInputs)."""
    column = head // GROUP_SIZE * COLUMN_STRIDE + head % GROUP_SIZE
    decay = load_sum(decay_ptr + row * row_stride + column, split_stride, is_row, SPLITS, DTYPE, ACC_DTYPE)
    t = softplus(decay + tl.load(dt_bias_ptr + head).to(ACC_DTYPE))
    if MIN_DT is not None:
        t = tl.where(t < MIN_DT, MIN_DT, t)
    if MAX_DT is not None:
        t = tl.where(t > MAX_DT, MAX_DT, t)
    log_decay = -tl.exp(tl.load(A_log_ptr + head).to(ACC_DTYPE)) * t
    beta = t
    if beta_ptr is not None:
        beta_logit = load_sum(beta_ptr + row * row_stride + column, split_stride, is_row, SPLITS, DTYPE, ACC_DTYPE)
        beta = 1.0 / (1.0 + tl.exp(-beta_logit))
    return log_decay, beta


@kernel
def _convolve_q_or_k_head(
    x_ptr, tail_ptr, parent_ptr, weight_ptr, bias_ptr, q_ptr, k_ptr, staged_ptr, row, row_in_request, slot,
    continues_previous, is_row, head_index, x_stride, x_split_stride,
    K_HEADS: tl.constexpr, K_SIZE: tl.constexpr, CHANNELS: tl.constexpr, Q_COLUMN: tl.constexpr, K_COLUMN: tl.constexpr,
    K_HEAD_STRIDE: tl.constexpr, TAPS: tl.constexpr, SILU: tl.constexpr, SPLITS: tl.constexpr,
    NORMALIZES_QK: tl.constexpr, EPS: tl.constexpr, ACC_DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes one head of q or k.  head_index: 0 to K_HEADS - 1 for a head of q, then K_HEADS indices for k."""
    of_head = tl.arange(0, BLOCK)
    is_channel = of_head < K_SIZE
    is_q = head_index < K_HEADS
    head = tl.where(is_q, head_index, head_index - K_HEADS)
    column = tl.where(is_q, Q_COLUMN, K_COLUMN) + head * K_HEAD_STRIDE + of_head
    out = _convolve(
        x_ptr, tail_ptr, parent_ptr, weight_ptr, bias_ptr, staged_ptr, row, row_in_request, slot, continues_previous,
        is_row, column, head_index * K_SIZE + of_head, is_channel, x_stride, x_split_stride, CHANNELS, TAPS, SILU,
        SPLITS, ACC_DTYPE,
    )  # fmt: skip
    exact = out.to(ACC_DTYPE)
    if NORMALIZES_QK:
        exact *= (1.0 / tl.sqrt(tl.sum(exact * exact, 1) + EPS))[:, None]
    place = (row[:, None] * K_HEADS + head) * K_SIZE + of_head[None, :]
    mask = is_row[:, None] & is_channel[None, :]
    if is_q:
        if NORMALIZES_QK:
            exact *= K_SIZE**-0.5
        tl.store(q_ptr + place, exact.to(q_ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(k_ptr + place, exact.to(k_ptr.dtype.element_ty), mask=mask)


@kernel
def _convolve_v_head_and_gates(
    x_ptr, tail_ptr, parent_ptr, weight_ptr, bias_ptr, decay_ptr, beta_ptr, A_log_ptr, dt_bias_ptr, v_ptr, gates_ptr,
    staged_ptr, row, row_in_request, slot, continues_previous, is_row, head, x_stride, x_split_stride,
    gate_stride, gate_split_stride,
    HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr, FIRST_CHANNEL: tl.constexpr, V_SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    V_COLUMN: tl.constexpr, V_GROUP_STRIDE: tl.constexpr, GATE_STRIDE: tl.constexpr, MIN_DT: tl.constexpr,
    MAX_DT: tl.constexpr, TAPS: tl.constexpr, SILU: tl.constexpr, SPLITS: tl.constexpr, NUM_GATE_SPLITS: tl.constexpr,
    ACC_DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes one head of v and its gates; in a layer with a convolution only, V_SIZE channels.
    FIRST_CHANNEL: the first channel of v."""
    of_head = tl.arange(0, BLOCK)
    channel = FIRST_CHANNEL + head * V_SIZE + of_head
    is_channel = (of_head < V_SIZE) & (channel < CHANNELS)
    column = V_COLUMN + head // GROUP_SIZE * V_GROUP_STRIDE + head % GROUP_SIZE * V_SIZE + of_head
    out = _convolve(
        x_ptr, tail_ptr, parent_ptr, weight_ptr, bias_ptr, staged_ptr, row, row_in_request, slot, continues_previous,
        is_row, column, channel, is_channel, x_stride, x_split_stride, CHANNELS, TAPS, SILU, SPLITS, ACC_DTYPE,
    )  # fmt: skip
    place = row[:, None] * (CHANNELS - FIRST_CHANNEL) + head * V_SIZE + of_head[None, :]
    tl.store(v_ptr + place, out, mask=is_row[:, None] & is_channel[None, :])
    if A_log_ptr is not None:
        log_decay, beta = _compute_gates(
            decay_ptr, beta_ptr, A_log_ptr, dt_bias_ptr, row, head, is_row, gate_stride, gate_split_stride, MIN_DT,
            MAX_DT, GROUP_SIZE, GATE_STRIDE, NUM_GATE_SPLITS, tail_ptr.dtype.element_ty, ACC_DTYPE,
        )  # fmt: skip
        tl.store(gates_ptr + row * 2 * HEADS + head, log_decay, mask=is_row)
        tl.store(gates_ptr + row * 2 * HEADS + HEADS + head, beta, mask=is_row)


@kernel(do_not_specialize=["num_rows", "rows_per_request"])
def _prepare_rows_kernel(
    x_ptr, tail_ptr, slots_ptr, parent_ptr, continues_ptr, weight_ptr, bias_ptr, decay_ptr, beta_ptr, A_log_ptr,
    dt_bias_ptr, q_ptr, k_ptr, v_ptr, gates_ptr, staged_ptr,
    num_rows, rows_per_request, x_stride, x_split_stride, gate_stride, gate_split_stride,
    HEADS: tl.constexpr, K_HEADS: tl.constexpr, K_SIZE: tl.constexpr, V_SIZE: tl.constexpr, CHANNELS: tl.constexpr,
    Q_COLUMN: tl.constexpr, K_COLUMN: tl.constexpr, V_COLUMN: tl.constexpr, K_HEAD_STRIDE: tl.constexpr,
    V_GROUP_STRIDE: tl.constexpr, GATE_STRIDE: tl.constexpr, MIN_DT: tl.constexpr, MAX_DT: tl.constexpr,
    TAPS: tl.constexpr, SILU: tl.constexpr, SPLITS: tl.constexpr, NUM_GATE_SPLITS: tl.constexpr,
    NORMALIZES_QK: tl.constexpr, EPS: tl.constexpr, ACC_DTYPE: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Computes a head of q, k or v for BLOCK_R rows.  For channels and columns see ops/states.py:ConvColumns.

    This kernel waits for the previous kernel before it lets the next kernel start, which may read states (tree.py)."""
    pdl_wait(USE_PDL)
    pdl_trigger(USE_PDL)
    row = tl.program_id(1).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    head = tl.program_id(0)
    is_row = row < num_rows
    request = row // rows_per_request
    within = row % rows_per_request
    slot = tl.load(slots_ptr + request, mask=is_row, other=0)
    follows = is_row & False
    if continues_ptr is not None:
        follows = tl.load(continues_ptr + request, mask=is_row, other=False).to(tl.int1)
    # Each branch calls a function, because within one function Triton requires one shape for a name in both branches.
    # In a layer with a convolution only, the branch of q and k is not compiled.
    if K_HEADS:  # noqa: SIM102
        if head < 2 * K_HEADS:
            _convolve_q_or_k_head(
                x_ptr, tail_ptr, parent_ptr, weight_ptr, bias_ptr, q_ptr, k_ptr, staged_ptr, row, within, slot, follows,
                is_row, head, x_stride, x_split_stride, K_HEADS, K_SIZE, CHANNELS, Q_COLUMN, K_COLUMN, K_HEAD_STRIDE,
                TAPS, SILU, SPLITS, NORMALIZES_QK, EPS, ACC_DTYPE, BLOCK_K,
            )  # fmt: skip
    if head >= 2 * K_HEADS:
        GROUP_SIZE: tl.constexpr = HEADS // K_HEADS if K_HEADS else HEADS
        _convolve_v_head_and_gates(
            x_ptr, tail_ptr, parent_ptr, weight_ptr, bias_ptr, decay_ptr, beta_ptr, A_log_ptr, dt_bias_ptr, v_ptr,
            gates_ptr, staged_ptr, row, within, slot, follows, is_row, head - 2 * K_HEADS, x_stride, x_split_stride,
            gate_stride, gate_split_stride, HEADS, GROUP_SIZE, 2 * K_HEADS * K_SIZE, V_SIZE, CHANNELS, V_COLUMN,
            V_GROUP_STRIDE, GATE_STRIDE, MIN_DT, MAX_DT, TAPS, SILU, SPLITS, NUM_GATE_SPLITS, ACC_DTYPE, BLOCK_V,
        )  # fmt: skip


def prepare_rows(
    inputs: Tensor, gates: GateInputs | None, conv: ShortConv, columns: ConvColumns, rows: RowInputs, out: PreparedRows
) -> None:
    """Convolves the inputs and fills `out`, see ops/states.py:prepare_rows.  Tolerance: one ulp of the inputs' dtype
    after the convolution, and one more ulp after norms and gates."""
    num_rows = inputs.shape[-2]
    if not num_rows:
        return
    parents = None if rows.parents is None else rows.parents.contiguous()
    gate_tensors: tuple[Tensor | None, ...] = (None,) * 4
    gate_strides, gate_splits, column_stride, low, high = (0, 0), 1, 1, None, None
    if gates is not None:
        gate_tensors = (gates.decay, gates.beta, gates.A_log, gates.dt_bias)
        gate_strides, gate_splits = (gates.decay.stride(-2), gates.decay.stride(0)), num_partial_sums(gates.decay)
        column_stride, low, high = gates.column_stride, *gates.dt_bounds
    heads, v_size = (columns.heads, columns.v_size) if columns.heads else (-(-columns.channels // BLOCK_C), BLOCK_C)
    block_rows = 4 if num_rows <= 256 else 16
    _prepare_rows_kernel[2 * columns.k_heads + heads, -(-num_rows // block_rows)](
        *(inputs, rows.tail, rows.slots, parents, rows.continues_previous, conv.weight, conv.bias),
        *gate_tensors,
        *out,
        *(num_rows, rows.width, inputs.stride(-2), inputs.stride(0), *gate_strides),
        HEADS=heads, K_HEADS=columns.k_heads, K_SIZE=columns.k_size or 1, V_SIZE=v_size,
        CHANNELS=columns.channels,
        Q_COLUMN=columns.q_column, K_COLUMN=columns.k_column, V_COLUMN=columns.v_column,
        K_HEAD_STRIDE=columns.k_head_stride, V_GROUP_STRIDE=columns.v_group_stride, GATE_STRIDE=column_stride,
        MIN_DT=low, MAX_DT=high, TAPS=conv.weight.shape[1], SILU=conv.applies_silu, SPLITS=num_partial_sums(inputs),
        NUM_GATE_SPLITS=gate_splits, NORMALIZES_QK=columns.normalizes_qk, EPS=L2_NORM_EPS,
        ACC_DTYPE=acc_dtype(rows.tail.dtype), BLOCK_R=block_rows, BLOCK_K=next_power_of_2(columns.k_size or 1),
        BLOCK_V=next_power_of_2(v_size), num_warps=4, **pdl_arguments(chip(inputs)),
    )  # fmt: skip
