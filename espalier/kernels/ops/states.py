"""The operations of a layer with a recurrent state: convolve the inputs of rows, compute outputs, update states.

The tables of states have a row for each slot (request), and rows for snapshots (cache/states.py).  A *snapshot* is a
copy of a state after some number of rows.  A *tail* is the last inputs of a convolution.  Everything is computed in
float32 (float64 for float64).  On a GPU, the references run for float64 and for trees of more than MAX_TREE_ROWS nodes.
So the references have static shapes, as CUDA graphs need.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from espalier.kernels.attention.ancestor_bits import unpack_bits
from espalier.kernels.layers.quantised import InputRows, InputScales, RoundedRows, quantise_inputs
from espalier.kernels.ops.linear import add_partial_sums
from espalier.kernels.ops.norm import rms_norm
from espalier.kernels.ops.recurrence import (
    ScanResult,
    ShortConv,
    StateRows,
    causal_mask,
    conv_tail_after,
    convolve,
    l2_normalize,
    row_outputs,
    scan,
    solve_updates,
    state_after,
)
from espalier.kernels.runtime.launch import next_power_of_2
from espalier.kernels.runtime.op import op

# The most nodes of a tree that one program holds.
MAX_TREE_ROWS = 64
# The most values that one program rounds with one scale.
MAX_ROUNDED_VALUES = 16384


class ConvColumns(NamedTuple):
    """The columns of a projection's output that hold the channels of a convolution: q's, then k's, then v's.

    heads, k_heads, k_size, v_size: see cache/layer_spec.py:RecurrentState; heads is 0 for a layer with a convolution
    only.  channels: the number of all channels.
    q_column, k_column, v_column: the first column of the first head of q, of k and of v.  k_head_stride: columns from
    one head of q or k to the next.  v_group_stride: columns from one group of heads of v to the next; the heads of a
    group share a head of k.  normalizes_qk: whether q and k are L2-normalised, and q is divided by the square root of
    k_size."""

    heads: int
    k_heads: int
    k_size: int
    v_size: int
    channels: int
    q_column: int
    k_column: int
    v_column: int
    k_head_stride: int
    v_group_stride: int
    normalizes_qk: bool

    @property
    def num_q_channels(self) -> int:
        """The number of channels of q.  k has the same number."""
        return self.k_heads * self.k_size

    @property
    def v_group_channels(self) -> int:
        """The number of channels of the heads of v that share a head of k."""
        return self.channels - 2 * self.num_q_channels if not self.k_heads else self.heads // self.k_heads * self.v_size

    def in_channel_order(self, inputs: Tensor) -> Tensor:
        """Returns inputs [N, columns] as [N, channels], in the order of the convolution's channels."""
        q, k, v, size = self.q_column, self.k_column, self.v_column, self.num_q_channels
        if self.k_head_stride == self.k_size and self.v_group_stride == self.v_group_channels:
            if (k, v) == (q + size, q + 2 * size):
                return inputs[:, q : q + self.channels]
            v_end = v + self.channels - 2 * size
            return torch.cat([inputs[:, q : q + size], inputs[:, k : k + size], inputs[:, v:v_end]], 1)
        column_groups = [(at, self.k_head_stride, self.k_size) for at in (q, k)]
        column_groups.append((v, self.v_group_stride, self.v_group_channels))
        return torch.cat([strided_columns(inputs[:, at:], self.k_heads, *sizes) for at, *sizes in column_groups], 1)

    @property
    def constexpr_arguments(self) -> dict[str, int]:
        """The constexpr arguments of kernels/recurrence/inputs.py:input_column."""
        columns = {"Q_COLUMN": self.q_column, "K_COLUMN": self.k_column, "V_COLUMN": self.v_column}
        strides = {"K_HEAD_STRIDE": self.k_head_stride, "V_GROUP_STRIDE": self.v_group_stride}
        channels = {"Q_CHANNELS": self.num_q_channels, "V_GROUP_CHANNELS": self.v_group_channels}
        return columns | strides | {"K_SIZE": max(self.k_size, 1)} | channels


def ordered_conv_columns(
    heads: int, k_heads: int, k_size: int, v_size: int, channels: int, normalizes_qk: bool
) -> ConvColumns:
    """Returns the ConvColumns of inputs whose channels are in order, from column 0 on."""
    qk, v_group = k_heads * k_size, heads // k_heads * v_size if k_heads else channels
    return ConvColumns(heads, k_heads, k_size, v_size, channels, 0, qk, 2 * qk, k_size, v_group, normalizes_qk)


def strided_columns(values: Tensor, num_groups: int, stride: int, width: int) -> Tensor:
    """Returns [N, num_groups · width]: `width` columns of values [N, columns] from each multiple of `stride` on."""
    if stride == width:
        return values[:, : num_groups * width]
    first_columns = torch.arange(num_groups, device=values.device) * stride
    return values[:, (first_columns[:, None] + torch.arange(width, device=values.device)).flatten()]


class GateInputs(NamedTuple):
    """The inputs of gates.  A row multiplies the state by exp(-exp(A_log) · t), with t = softplus(`decay` + dt_bias).

    decay: [N, columns], or partial sums [parts, N, columns] float32, which are added and rounded to the model's dtype.
    Each head has a column.  The columns of `group_size` heads, which share a head of k, are adjacent.  Groups begin at
    multiples of `column_stride`.
    beta: the logits of beta (beta is their sigmoid), with the same shape and columns as `decay`; None if beta is t
    (Mamba-2).
    A_log, dt_bias: [heads], float32 or float64.  dt_bounds: the least and the largest t; None: no bound."""

    decay: Tensor
    beta: Tensor | None
    A_log: Tensor
    dt_bias: Tensor
    group_size: int
    column_stride: int
    dt_bounds: tuple[float | None, float | None] = (None, None)

    def compute_gates(self, dtype: torch.dtype) -> Tensor:
        """Returns the gates [N, 2, heads], as in StateRows.  dtype: the model's dtype."""
        sizes = len(self.A_log) // self.group_size, self.column_stride, self.group_size
        wide_dtype = self.A_log.dtype
        decay = strided_columns(add_partial_sums.reference(self.decay, dtype), *sizes).to(wide_dtype)
        t = F.softplus(decay + self.dt_bias)
        if self.dt_bounds != (None, None):
            t = t.clamp(*self.dt_bounds)
        beta = t
        if self.beta is not None:
            beta = strided_columns(add_partial_sums.reference(self.beta, dtype), *sizes).to(wide_dtype).sigmoid()
        return torch.stack((-self.A_log.exp() * t, beta), 1)


class RowInputs(NamedTuple):
    """The rows of a pass: B batch rows of `width` rows each.  A batch row is a request, or one piece of its prompt.

    tail: [table rows, taps - 1, channels], the tails of all slots.  slots: [B], the table row of each batch row.
    parents: [B, width], the parent of each row of a tree; None for a chain.  continues_previous: [B] bool, whether a
    batch row is the next piece of the prompt whose earlier piece is the batch row before; None: no batch row is."""

    tail: Tensor
    slots: Tensor
    parents: Tensor | None
    continues_previous: Tensor | None
    width: int


class PreparedRows(NamedTuple):
    """The buffers that `prepare_rows` fills.

    q: [N, k_heads, k_size].  k, v, gates: as in StateRows, but [N, ...].  In a layer with a convolution only, v is the
    convolution's output [N, channels], and q, k and gates are None.  inputs: [N, channels], gets a copy of the
    convolution's inputs; None: no copy is needed."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor
    gates: Tensor | None
    inputs: Tensor | None


class SlotStates(NamedTuple):
    """The states of a layer.  table: [table rows, heads, k_size, v_size].  slots: [B], each request's table row."""

    table: Tensor
    slots: Tensor


class PathRows(NamedTuple):
    """The rows that update the states of B batch rows (requests, or pieces of prompts), and the snapshots to save.

    slots: [B], the table row of each batch row.  source_rows: [B, width], the indices of the staged rows (rows of this
    pass) that update each state, in order; None: each batch row has `width` staged rows, already in order.
    row_counts: [B], how many of these rows update the state.
    snapshot_counts: [B], after how many rows a snapshot is saved; 0: no snapshot.  snapshot_rows: [B], the table row
    that gets the snapshot.  Without snapshots, snapshot_counts and snapshot_rows are None.
    continues_previous, is_last_row: [B] bool, see cache/states.py:StateAccess; None: no request has several batch rows.
    spare_row: a table row that is never read.  The references write states there that are not needed."""

    slots: Tensor
    source_rows: Tensor | None
    row_counts: Tensor
    snapshot_counts: Tensor | None
    snapshot_rows: Tensor | None
    continues_previous: Tensor | None
    is_last_row: Tensor | None
    width: int
    spare_row: int

    @property
    def update_counts(self) -> tuple[Tensor, ...]:
        return (self.row_counts,) if self.snapshot_counts is None else (self.row_counts, self.snapshot_counts)

    def store_states(self, table: Tensor, new_states: Tensor, snapshots: Tensor | None = None) -> None:
        """Write to table [table rows, ...]: `new_states` [B, ...] to the slots, and `snapshots` to their rows."""
        ends = self.row_counts > 0 if self.is_last_row is None else self.is_last_row
        table.index_copy_(0, self.slots.where(ends, self.spare_row), new_states)
        if snapshots is not None:
            assert self.snapshot_rows is not None and self.snapshot_counts is not None
            table.index_copy_(0, self.snapshot_rows.where(self.snapshot_counts > 0, self.spare_row), snapshots)


def _supports_kernels(values: Tensor) -> bool:
    """Whether the kernels run on tensors of this device and dtype."""
    return values.is_cuda and values.dtype != torch.float64


@op("espalier.kernels.recurrence.inputs", condition=lambda inputs: _supports_kernels(inputs))
def prepare_rows(
    inputs: Tensor, gates: GateInputs | None, conv: ShortConv, columns: ConvColumns, rows: RowInputs, out: PreparedRows
) -> None:
    """Convolve inputs [N, columns], and fill the buffers of `out` that are not None.

    inputs: may be partial sums [parts, N, columns] float32, which are added and rounded to the dtype of rows.tail."""
    inputs = add_partial_sums.reference(inputs, rows.tail.dtype)
    ordered = columns.in_channel_order(inputs)
    tail = conv_tail_before(ordered, rows)
    convolution = convolve(ordered.unflatten(0, (-1, rows.width)), tail, rows.parents, conv).flatten(0, 1)
    if out.inputs is not None:
        out.inputs.copy_(ordered)
    if not columns.heads:
        out.v.copy_(convolution)
        return
    assert out.q is not None and out.k is not None
    q_channels = columns.num_q_channels
    q, k, v = convolution.split((q_channels, q_channels, columns.channels - 2 * q_channels), -1)
    q, k = (x.unflatten(-1, (columns.k_heads, columns.k_size)) for x in (q, k))
    if columns.normalizes_qk:
        q, k = l2_normalize(q.to(out.q.dtype)) * columns.k_size**-0.5, l2_normalize(k.to(out.k.dtype))
    out.q.copy_(q)
    out.k.copy_(k)
    out.v.copy_(v.view(out.v.shape))
    if gates is not None:
        assert out.gates is not None
        out.gates.copy_(gates.compute_gates(rows.tail.dtype))


def conv_tail_before(ordered_inputs: Tensor, rows: RowInputs) -> Tensor:
    """Returns [B, taps - 1, channels]: the convolution's inputs just before the first input of each batch row.

    ordered_inputs: [B · width, channels], the inputs of all batch rows, from `in_channel_order`."""
    tail = rows.tail[rows.slots]
    if rows.continues_previous is None or not tail.shape[1]:
        return tail
    # If the next batch row continues a batch row, all `width` rows of the batch row exist.  So its last rows are the
    # tail for the next batch row.
    last = ordered_inputs.unflatten(0, (-1, rows.width))[:, rows.width - tail.shape[1] :].roll(1, 0)
    return last.where(rows.continues_previous[:, None, None], tail)


@op(
    "espalier.kernels.recurrence.tree",
    condition=lambda rows: _supports_kernels(rows[1]) and rows[1].shape[1] <= MAX_TREE_ROWS,
)
def tree_outputs(
    q: Tensor,
    rows: StateRows,
    state: SlotStates,
    ancestor_bits: Tensor,
    skip_weight: Tensor | None,
    is_delta_rule: bool,
) -> Tensor:
    """Returns the output of each node, [B, D, heads, v_size] in v's dtype.  A node's output is computed from the slot's
    state after updates by the node's ancestors and by the node.
    q: [B, D, k_heads, k_size].  ancestor_bits: [B, D, W] int64, as Tree.ancestors.  skip_weight: [heads]; skip_weight ·
    v is added to each output; None: nothing is added.  is_delta_rule: whether rows update states by the delta rule.
    If a node has NaN or infinity, the outputs of the node and its descendants become NaN on a GPU, and all outputs of
    the tree on a CPU."""
    before, mask = state.table[state.slots], unpack_bits(ancestor_bits, q.shape[1])
    return _add_skip(row_outputs(q, solve_updates(rows, before, mask, is_delta_rule), before, mask), rows, skip_weight)


@op("espalier.kernels.recurrence.chain", condition=lambda rows: _supports_kernels(rows[1]))
def chain_outputs(
    q: Tensor, rows: StateRows, state: SlotStates, path: PathRows, skip_weight: Tensor | None, is_delta_rule: bool
) -> Tensor:
    """Returns the outputs [B, width, heads, v_size] of a chain of rows, and updates the slots' states.  Arguments: see
    tree_outputs."""
    before = state.table[state.slots]
    scan_rows = scan if path.continues_previous is None or not len(q) else _make_piecewise_scan(path.continues_previous)
    scanned = scan_rows(q, rows, before, path.row_counts, path.snapshot_counts, is_delta_rule)
    path.store_states(state.table, *(scanned.state, scanned.snapshot)[: len(path.update_counts)])
    return _add_skip(scanned.out, rows, skip_weight)


@op("espalier.kernels.recurrence.path", condition=lambda state: _supports_kernels(state))
def commit_states(state: Tensor, rows: StateRows, path: PathRows, is_delta_rule: bool) -> None:
    """Update the slots' states by the rows of accepted paths, in every layer.

    state: [layers, table rows, heads, k_size, v_size].  rows: all n staged rows of the pass; each field is [layers, n,
    ...]."""
    assert path.source_rows is not None
    mask = causal_mask(path.width, state.device)
    for layer, table in enumerate(state):
        path_rows, before = StateRows(*(values[layer][path.source_rows] for values in rows)), table[path.slots]
        updates = solve_updates(path_rows, before, mask, is_delta_rule)
        path.store_states(table, *(state_after(path_rows, updates, before, count) for count in path.update_counts))


@op("espalier.kernels.recurrence.path", condition=lambda tail: _supports_kernels(tail))
def commit_tails(tail: Tensor, inputs: Tensor, path: PathRows, columns: ConvColumns) -> None:
    """Update the tails by the convolution's inputs on accepted paths, in every layer.

    tail: [layers, table rows, taps - 1, channels].  inputs: [layers, n, columns], for all n staged rows of the pass."""
    for layer, table in enumerate(tail):
        ordered = columns.in_channel_order(inputs[layer])
        rows = RowInputs(table, path.slots, None, path.continues_previous, path.width)
        before = conv_tail_before(ordered, rows)
        path_inputs = ordered.unflatten(0, (-1, path.width)) if path.source_rows is None else ordered[path.source_rows]
        path.store_states(table, *(conv_tail_after(before, path_inputs, count) for count in path.update_counts))


class OutputGate(NamedTuple):
    """The gate of a layer's output.  A group is the columns that are normed together, such as a head.

    values: [N, columns], or partial sums [parts, N, columns] float32.  In `values`, the columns of each
    `adjacent_groups` groups are adjacent, and begin at a multiple of `column_stride`.  is_before_norm: whether the gate
    is applied before the norm.  If so, each group has its own norm weight; if not, all groups share the weight."""

    values: Tensor
    adjacent_groups: int
    column_stride: int
    is_before_norm: bool


def can_round_groups(group_size: int, num_groups: int, rounding: InputScales) -> bool:
    """Whether `gated_norm` can round to FP8: a scale must be for a whole short row, or for a group of 2^n columns."""
    columns, row_values = rounding.columns(group_size * num_groups), next_power_of_2(num_groups)
    row_values *= next_power_of_2(group_size)
    is_whole = columns == group_size * num_groups and row_values <= MAX_ROUNDED_VALUES
    return is_whole or columns == group_size == next_power_of_2(group_size)


@op("espalier.kernels.recurrence.gated_norm", condition=lambda x: _supports_kernels(x))
def gated_norm(
    x: Tensor, gate: OutputGate, weight: Tensor | None, eps: float = 0.0, rounding: InputScales | None = None
) -> InputRows:
    """Returns [N, groups · size]: each group of x [N, groups, size] with its RMS norm and the factor silu(gate).

    gate.is_before_norm decides whether the factor or the norm is applied first.
    weight: the weight of the norm.  None: there is no norm, and the factor is sigmoid(gate), rounded to x's dtype.
    rounding: how the result is rounded to FP8, for sizes that `can_round_groups` accepts; None: not rounded."""
    if rounding is not None:
        unrounded = gated_norm.reference(x, gate, weight, eps)
        assert isinstance(unrounded, Tensor)
        return RoundedRows(*quantise_inputs(unrounded, rounding), x.dtype)
    groups, size = x.shape[1:]
    wide_dtype = torch.promote_types(x.dtype, torch.float32)
    values = strided_columns(
        add_partial_sums.reference(gate.values, x.dtype),
        groups // gate.adjacent_groups,
        gate.column_stride,
        gate.adjacent_groups * size,
    ).view(x.shape)
    if weight is None:
        return (x * values.sigmoid()).flatten(1)
    values = F.silu(values.to(wide_dtype))
    if gate.is_before_norm:
        gated = x.to(wide_dtype) * values
        normed = gated * torch.rsqrt(gated.pow(2).mean(-1, keepdim=True) + eps)
        return normed.flatten(1).to(x.dtype) * weight
    return (rms_norm.reference(x, weight, eps).to(wide_dtype) * values).to(x.dtype).flatten(1)


def _add_skip(out: Tensor, rows: StateRows, skip_weight: Tensor | None) -> Tensor:
    """Returns out + skip_weight · v, or `out` without a skip_weight, in v's dtype."""
    out = out if skip_weight is None else torch.addcmul(out, skip_weight[:, None], rows.v.to(out.dtype))
    return out.to(rows.v.dtype)


def _make_piecewise_scan(continues_previous: Tensor):
    """Returns a function like `scan` that runs one batch row after another.
    Where continues_previous [B] is True, a batch row starts from the state after the batch row before."""

    def scan_rows(
        q: Tensor,
        rows: StateRows,
        states: Tensor,
        row_counts: Tensor,
        snapshot_counts: Tensor | None,
        is_delta_rule: bool,
    ) -> ScanResult:
        """Arguments and result: see `scan`."""
        results, state = [], states[:1]
        for row in range(len(q)):
            row_slice = slice(row, row + 1)
            state = state.where(continues_previous[row_slice, None, None, None], states[row_slice])
            row_inputs = StateRows(*(values[row_slice] for values in rows))
            snapshots = None if snapshot_counts is None else snapshot_counts[row_slice]
            results.append(scan(q[row_slice], row_inputs, state, row_counts[row_slice], snapshots, is_delta_rule))
            state = results[-1].state
        return ScanResult(*(torch.cat(values) for values in zip(*results, strict=True)))

    return scan_rows
