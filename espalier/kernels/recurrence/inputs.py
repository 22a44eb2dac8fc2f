"""Computes the q, k, v and gates of new rows: a short convolution along each row's path, then norms and gates.

Grid: (heads of q, k and v, blocks of rows), so that programs that run together read adjacent memory.  A program
convolves one head's channels.  Then it L2-normalises a head of q or k.  For a head of v it computes the gates.
Padding rows are computed too.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from espalier.kernels.ops.recurrence import UNIT_EPS, ShortConv
from espalier.kernels.ops.states import Columns, GateInputs, Prepared, RowInputs
from espalier.kernels.runtime.jit import kernel, load_sum
from espalier.kernels.runtime.launch import chip, exact_type, power_of_two
from espalier.kernels.runtime.pdl import pdl_arguments, pdl_trigger, pdl_wait

# Channels per program if the layer is a convolution without heads.
BLOCK_C = 128


@kernel
def input_column(
    channel, Q_AT: tl.constexpr, K_AT: tl.constexpr, V_AT: tl.constexpr, K_STEP: tl.constexpr, V_STEP: tl.constexpr,
    K_SIZE: tl.constexpr, SHARED: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Returns the column that holds a channel (ops/states.py:Columns).  SHARED: the number of channels of q.
    GROUP: the number of channels of the heads of v that share a head of k."""
    of_v = channel - 2 * SHARED
    column = V_AT + of_v // GROUP * V_STEP + of_v % GROUP
    if SHARED:
        of_k = channel - SHARED
        column = tl.where(of_v < 0, K_AT + of_k // K_SIZE * K_STEP + of_k % K_SIZE, column)
        column = tl.where(of_k < 0, Q_AT + channel // K_SIZE * K_STEP + channel % K_SIZE, column)
    return column


@kernel
def softplus(x):
    """Returns log(1 + exp(x)).  The factor corrects the rounding of 1 + exp(x) (Kahan)."""
    y = tl.exp(tl.where(x > 20.0, 20.0, x))
    u = 1.0 + y
    return tl.where(x > 20.0, x, tl.where(u == 1.0, y, tl.log(u) * (y / tl.where(u == 1.0, 1.0, u - 1.0))))


@kernel
def _convolved(
    x_ptr, tail_ptr, parent_ptr, weight_ptr, bias_ptr, staged_ptr, row, within, slot, follows, is_row, column, channel,
    is_channel, x_stride, x_split,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, SILU: tl.constexpr, SPLITS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Returns the convolution's output [rows, channels] in the model's dtype, that of tails.
    within: the index of each row in its request."""
    TYPE: tl.constexpr = tail_ptr.dtype.element_ty
    at, first = within, row - within
    out = tl.zeros([row.shape[0], channel.shape[0]], EXACT)
    for tap in tl.static_range(TAPS):
        is_new = is_row & ((at >= 0) | follows)
        mask = is_channel[None, :] & is_new[:, None]
        value_ptrs = x_ptr + (first + at)[:, None] * x_stride + column[None, :]
        value = load_sum(value_ptrs, x_split, mask, SPLITS, TYPE, EXACT)
        if tap == 0 and staged_ptr is not None:
            tl.store(staged_ptr + row[:, None] * CHANNELS + channel[None, :], value.to(TYPE), mask=mask)
        if tap > 0:
            is_old = is_channel[None, :] & (is_row & ~is_new)[:, None]
            before = (slot * (TAPS - 1) + (TAPS - 1 + at))[:, None] * CHANNELS + channel[None, :]
            value = tl.where(is_new[:, None], value, tl.load(tail_ptr + before, mask=is_old, other=0.0).to(EXACT))
        weight = tl.load(weight_ptr + channel * TAPS + (TAPS - 1 - tap), mask=is_channel, other=0.0)
        out += value * weight.to(EXACT)[None, :]
        if parent_ptr is not None:
            parent = tl.load(parent_ptr + first + at, mask=is_row & (at > 0), other=0)
            at = tl.where(at > 0, parent, at - 1)
        else:
            at -= 1
    if bias_ptr is not None:
        out += tl.load(bias_ptr + channel, mask=is_channel, other=0.0).to(EXACT)[None, :]
    if SILU:
        out = out / (1.0 + tl.exp(-out))
    return out.to(TYPE)


@kernel
def _gates(
    decay_ptr, beta_ptr, A_log_ptr, dt_bias_ptr, row, head, is_row, stride, split, LOW: tl.constexpr,
    HIGH: tl.constexpr, SHARE: tl.constexpr, STEP: tl.constexpr, SPLITS: tl.constexpr, TYPE: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Returns (the logarithm of the decay, beta).  beta_ptr: None if beta is t itself (GateInputs, Mamba-2)."""
    column = head // SHARE * STEP + head % SHARE
    raw = load_sum(decay_ptr + row * stride + column, split, is_row, SPLITS, TYPE, EXACT)
    step = softplus(raw + tl.load(dt_bias_ptr + head).to(EXACT))
    if LOW is not None:
        step = tl.where(step < LOW, LOW, step)
    if HIGH is not None:
        step = tl.where(step > HIGH, HIGH, step)
    log_decay = -tl.exp(tl.load(A_log_ptr + head).to(EXACT)) * step
    beta = step
    if beta_ptr is not None:
        b = load_sum(beta_ptr + row * stride + column, split, is_row, SPLITS, TYPE, EXACT)
        beta = 1.0 / (1.0 + tl.exp(-b))
    return log_decay, beta


@kernel
def _q_or_k(
    x_ptr, tail_ptr, parent_ptr, weight_ptr, bias_ptr, q_ptr, k_ptr, staged_ptr, row, within, slot, follows, is_row,
    part, x_stride, x_split,
    K_HEADS: tl.constexpr, K_SIZE: tl.constexpr, CHANNELS: tl.constexpr, Q_AT: tl.constexpr, K_AT: tl.constexpr,
    K_STEP: tl.constexpr, TAPS: tl.constexpr, SILU: tl.constexpr, SPLITS: tl.constexpr, UNITS: tl.constexpr,
    EPS: tl.constexpr, EXACT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes one head of q or k.  part: the head's index; q's heads come first, then k's."""
    of_head = tl.arange(0, BLOCK)
    is_channel = of_head < K_SIZE
    is_q = part < K_HEADS
    head = tl.where(is_q, part, part - K_HEADS)
    column = tl.where(is_q, Q_AT, K_AT) + head * K_STEP + of_head
    out = _convolved(
        x_ptr, tail_ptr, parent_ptr, weight_ptr, bias_ptr, staged_ptr, row, within, slot, follows, is_row, column,
        part * K_SIZE + of_head, is_channel, x_stride, x_split, CHANNELS, TAPS, SILU, SPLITS, EXACT,
    )  # fmt: skip
    exact = out.to(EXACT)
    if UNITS:
        exact *= (1.0 / tl.sqrt(tl.sum(exact * exact, 1) + EPS))[:, None]
    place = (row[:, None] * K_HEADS + head) * K_SIZE + of_head[None, :]
    mask = is_row[:, None] & is_channel[None, :]
    if is_q:
        if UNITS:
            exact *= K_SIZE**-0.5
        tl.store(q_ptr + place, exact.to(q_ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(k_ptr + place, exact.to(k_ptr.dtype.element_ty), mask=mask)


@kernel
def _v_and_gates(
    x_ptr, tail_ptr, parent_ptr, weight_ptr, bias_ptr, decay_ptr, beta_ptr, A_log_ptr, dt_bias_ptr, v_ptr, gates_ptr,
    staged_ptr, row, within, slot, follows, is_row, head, x_stride, x_split,
    gate_stride, gate_split,
    HEADS: tl.constexpr, SHARE: tl.constexpr, FIRST: tl.constexpr, V_SIZE: tl.constexpr, CHANNELS: tl.constexpr,
    V_AT: tl.constexpr, V_STEP: tl.constexpr, GATE_STEP: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    TAPS: tl.constexpr, SILU: tl.constexpr, SPLITS: tl.constexpr, GATE_SPLITS: tl.constexpr, EXACT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes one head of v and its gates, or channels of a convolution without heads.  FIRST: v's first channel."""
    of_head = tl.arange(0, BLOCK)
    channel = FIRST + head * V_SIZE + of_head
    is_channel = (of_head < V_SIZE) & (channel < CHANNELS)
    column = V_AT + head // SHARE * V_STEP + head % SHARE * V_SIZE + of_head
    out = _convolved(
        x_ptr, tail_ptr, parent_ptr, weight_ptr, bias_ptr, staged_ptr, row, within, slot, follows, is_row, column,
        channel, is_channel, x_stride, x_split, CHANNELS, TAPS, SILU, SPLITS, EXACT,
    )  # fmt: skip
    place = row[:, None] * (CHANNELS - FIRST) + head * V_SIZE + of_head[None, :]
    tl.store(v_ptr + place, out, mask=is_row[:, None] & is_channel[None, :])
    if A_log_ptr is not None:
        log_decay, beta = _gates(
            decay_ptr, beta_ptr, A_log_ptr, dt_bias_ptr, row, head, is_row, gate_stride, gate_split, LOW, HIGH, SHARE,
            GATE_STEP, GATE_SPLITS, tail_ptr.dtype.element_ty, EXACT,
        )  # fmt: skip
        tl.store(gates_ptr + row * 2 * HEADS + head, log_decay, mask=is_row)
        tl.store(gates_ptr + row * 2 * HEADS + HEADS + head, beta, mask=is_row)


@kernel(do_not_specialize=["num_rows", "rows"])
def _prepare_kernel(
    x_ptr, tail_ptr, slot_ptr, parent_ptr, follows_ptr, weight_ptr, bias_ptr, decay_ptr, beta_ptr, A_log_ptr,
    dt_bias_ptr, q_ptr, k_ptr, v_ptr, gates_ptr, staged_ptr,
    num_rows, rows, x_stride, x_split, gate_stride, gate_split,
    HEADS: tl.constexpr, K_HEADS: tl.constexpr, K_SIZE: tl.constexpr, V_SIZE: tl.constexpr, CHANNELS: tl.constexpr,
    Q_AT: tl.constexpr, K_AT: tl.constexpr, V_AT: tl.constexpr, K_STEP: tl.constexpr, V_STEP: tl.constexpr,
    GATE_STEP: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, TAPS: tl.constexpr, SILU: tl.constexpr,
    SPLITS: tl.constexpr, GATE_SPLITS: tl.constexpr, UNITS: tl.constexpr, EPS: tl.constexpr, EXACT: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """For channels and columns see ops/states.py:Columns.

    This kernel waits for the kernel before it, then triggers the next one, because the next kernel may read states
    before it waits (tree.py).
    """
    pdl_wait(DEPENDENT)
    pdl_trigger(DEPENDENT)
    row = tl.program_id(1).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    part = tl.program_id(0)
    is_row = row < num_rows
    request = row // rows
    within = row % rows
    slot = tl.load(slot_ptr + request, mask=is_row, other=0)
    follows = is_row & False
    if follows_ptr is not None:
        follows = tl.load(follows_ptr + request, mask=is_row, other=False).to(tl.int1)
    # Each branch calls a function, because Triton requires one shape per name in both branches of a function.  For a
    # convolution without heads, the branch of q and k is not compiled.
    if K_HEADS:  # noqa: SIM102
        if part < 2 * K_HEADS:
            _q_or_k(
                x_ptr, tail_ptr, parent_ptr, weight_ptr, bias_ptr, q_ptr, k_ptr, staged_ptr, row, within, slot, follows,
                is_row, part, x_stride, x_split, K_HEADS, K_SIZE, CHANNELS, Q_AT, K_AT, K_STEP, TAPS, SILU, SPLITS,
                UNITS, EPS, EXACT, BLOCK_K,
            )  # fmt: skip
    if part >= 2 * K_HEADS:
        SHARE: tl.constexpr = HEADS // K_HEADS if K_HEADS else HEADS
        _v_and_gates(
            x_ptr, tail_ptr, parent_ptr, weight_ptr, bias_ptr, decay_ptr, beta_ptr, A_log_ptr, dt_bias_ptr, v_ptr,
            gates_ptr, staged_ptr, row, within, slot, follows, is_row, part - 2 * K_HEADS, x_stride, x_split,
            gate_stride, gate_split, HEADS, SHARE, 2 * K_HEADS * K_SIZE, V_SIZE, CHANNELS, V_AT, V_STEP, GATE_STEP, LOW,
            HIGH, TAPS, SILU, SPLITS, GATE_SPLITS, EXACT, BLOCK_V,
        )  # fmt: skip


def num_parts(values: Tensor) -> int:
    """The number of partial sums: `values` is [parts, N, columns], or [N, columns]."""
    return len(values) if values.ndim == 3 else 1


def prepare(
    inputs: Tensor, gates: GateInputs | None, conv: ShortConv, columns: Columns, rows: RowInputs, out: Prepared
) -> None:
    """See ops/states.py.  Tolerance: an ulp of the inputs' dtype after the convolution, then an ulp of float32 (float64
    for float64)."""
    num_rows = inputs.shape[-2]
    if not num_rows:
        return
    parents = None if rows.parents is None else rows.parents.contiguous()
    of_gates: tuple[Tensor | None, ...] = (None,) * 4
    gate_strides, gate_splits, step, low, high = (0, 0), 1, 1, None, None
    if gates is not None:
        of_gates = (gates.decay, gates.beta, gates.A_log, gates.dt_bias)
        gate_strides, gate_splits = (gates.decay.stride(-2), gates.decay.stride(0)), num_parts(gates.decay)
        step, low, high = gates.step, *gates.bounds
    heads, v_size = (columns.heads, columns.v_size) if columns.heads else (-(-columns.channels // BLOCK_C), BLOCK_C)
    block = 4 if num_rows <= 256 else 16
    _prepare_kernel[2 * columns.k_heads + heads, -(-num_rows // block)](
        *(inputs, rows.tail, rows.slots, parents, rows.follows, conv.weight, conv.bias),
        *of_gates,
        *out,
        *(num_rows, rows.width, inputs.stride(-2), inputs.stride(0), *gate_strides),
        HEADS=heads,
        K_HEADS=columns.k_heads,
        K_SIZE=columns.k_size or 1,
        V_SIZE=v_size,
        CHANNELS=columns.channels,
        Q_AT=columns.q,
        K_AT=columns.k,
        V_AT=columns.v,
        K_STEP=columns.k_step,
        V_STEP=columns.v_step,
        GATE_STEP=step,
        LOW=low,
        HIGH=high,
        TAPS=conv.weight.shape[1],
        SILU=conv.silu,
        SPLITS=num_parts(inputs),
        GATE_SPLITS=gate_splits,
        UNITS=columns.units,
        EPS=UNIT_EPS,
        EXACT=exact_type(rows.tail.dtype),
        BLOCK_R=block,
        BLOCK_K=power_of_two(columns.k_size or 1),
        BLOCK_V=power_of_two(v_size),
        num_warps=4,
        **pdl_arguments(chip(inputs)),
    )
