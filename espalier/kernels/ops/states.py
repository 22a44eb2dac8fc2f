"""The operations of a layer that keeps a state: convolve the inputs of rows, compute outputs, update states.

The tables have a row for each slot, and rows for snapshots (cache/states.py).  A *snapshot* (`mark` in names) is a copy
of a state after a given number of rows.  Everything is computed in float32 (float64 for float64).  On a GPU, float64
and trees of more than MAX_TREE_ROWS nodes use the references, which have static shapes too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from espalier.kernels.attention.ancestor_bits import unpack_bits
from espalier.kernels.layers.quantised import InputRows, InputScales, RoundedRows, quantise_inputs
from espalier.kernels.ops.linear import sum_parts
from espalier.kernels.ops.norm import rms_norm
from espalier.kernels.ops.recurrence import (
    Scanned,
    ShortConv,
    StateRows,
    causal,
    convolved,
    outputs,
    scan,
    solve,
    state_after,
    tail_after,
    unit,
)
from espalier.kernels.runtime.launch import next_power_of_2
from espalier.kernels.runtime.op import op

# The most nodes of a tree that one program holds.
MAX_TREE_ROWS = 64
# The most values of a row that one program rounds with one scale.
MAX_ROUNDED = 16384


class Columns(NamedTuple):
    """The columns of a projection's output that hold the channels of a convolution: q's, then k's, then v's.

    heads, k_heads, k_size, v_size: see cache/layer_spec.py:RecurrentState; heads is 0 for a convolution without heads.
    q, k, v: the first column of the first head.  k_step: columns from one head of q or k to the next.  v_step: columns
    from one group of v's heads to the next.  A group is the heads of v that share a head of k.
    units: whether q and k are divided by their lengths, and q also by the square root of k_size.
    """

    heads: int
    k_heads: int
    k_size: int
    v_size: int
    channels: int
    q: int
    k: int
    v: int
    k_step: int
    v_step: int
    units: bool

    @property
    def shared(self) -> int:
        """The number of channels of q, which is also that of k."""
        return self.k_heads * self.k_size

    @property
    def of_group(self) -> int:
        """The number of channels of the heads of v that share a head of k."""
        return self.channels - 2 * self.shared if not self.k_heads else self.heads // self.k_heads * self.v_size

    def in_order(self, inputs: Tensor) -> Tensor:
        """Inputs [N, columns] -> [N, channels], in the order of the convolution's channels."""
        if self.k_step == self.k_size and self.v_step == self.of_group:
            if (self.k, self.v) == (self.q + self.shared, self.q + 2 * self.shared):
                return inputs[:, self.q : self.q + self.channels]
            sizes = ((self.q, self.shared), (self.k, self.shared), (self.v, self.channels - 2 * self.shared))
            return torch.cat([inputs[:, at : at + size] for at, size in sizes], 1)
        parts = [(self.q, self.k_step, self.k_size), (self.k, self.k_step, self.k_size)]
        parts.append((self.v, self.v_step, self.of_group))
        return torch.cat([strided(inputs[:, at:], self.k_heads, step, size) for at, step, size in parts], 1)

    @property
    def of_tail(self) -> tuple[int, ...]:
        """The constexpr arguments of kernels/recurrence/inputs.py:input_column."""
        return self.q, self.k, self.v, self.k_step, self.v_step, max(self.k_size, 1), self.shared, self.of_group


def plain_columns(heads: int, k_heads: int, k_size: int, v_size: int, channels: int, units: bool) -> Columns:
    """Returns the Columns of inputs whose channels are in order, from column 0 on."""
    shared, of_group = k_heads * k_size, heads // k_heads * v_size if k_heads else channels
    return Columns(heads, k_heads, k_size, v_size, channels, 0, shared, 2 * shared, k_size, of_group, units)


def strided(values: Tensor, groups: int, step: int, size: int) -> Tensor:
    """values [N, columns] -> [N, groups · size]: the groups of `size` columns that begin every `step` columns."""
    if step == size:
        return values[:, : groups * size]
    at = torch.arange(groups, device=values.device)[:, None] * step + torch.arange(size, device=values.device)
    return values[:, at.flatten()]


class GateInputs(NamedTuple):
    """The inputs of gates: the decay is exp(-exp(A_log) · t) with t = softplus(decay + dt_bias).

    decay: [N, columns], or partial sums [parts, N, columns] float32, which are added and rounded to the model's dtype.
    `share` heads share a head of k; their columns are adjacent, and begin every `step` columns.
    beta: the same shape, before its sigmoid; None if t itself is beta (Mamba-2).  A_log, dt_bias: [heads], float32 at
    least.  bounds: the least and the largest t; None: no bound.
    """

    decay: Tensor
    beta: Tensor | None
    A_log: Tensor
    dt_bias: Tensor
    share: int
    step: int
    bounds: tuple[float | None, float | None] = (None, None)

    def computed(self, dtype: torch.dtype) -> Tensor:
        """Returns the gates [N, 2, heads], as in StateRows.  dtype: the model's."""
        groups, exact = len(self.A_log) // self.share, self.A_log.dtype
        decay = strided(sum_parts.reference(self.decay, dtype), groups, self.step, self.share).to(exact)
        t = F.softplus(decay + self.dt_bias)
        if self.bounds != (None, None):
            t = t.clamp(*self.bounds)
        beta = t
        if self.beta is not None:
            beta = strided(sum_parts.reference(self.beta, dtype), groups, self.step, self.share).to(exact).sigmoid()
        return torch.stack((-self.A_log.exp() * t, beta), 1)


class RowInputs(NamedTuple):
    """The rows of a pass, `width` for each request.

    tail: [table rows, taps - 1, channels], the tails of all slots.  slots: [B].  parents: [B, width] for a tree, else
    None.  follows: [B] bool, whether a batch row continues the request of the batch row before; None: none does.
    """

    tail: Tensor
    slots: Tensor
    parents: Tensor | None
    follows: Tensor | None
    width: int


class Prepared(NamedTuple):
    """The buffers that `prepare` fills.

    q: [N, k_heads, k_size].  k, v, gates: as in StateRows, but [N, ...].  For a convolution without heads, v is its
    output [N, channels], and q, k and gates are None.  inputs: [N, channels], the convolution's inputs in order; None
    if they are not needed.
    """

    q: Tensor | None
    k: Tensor | None
    v: Tensor
    gates: Tensor | None
    inputs: Tensor | None


class StateColumns(NamedTuple):
    """The states of a layer.  table: [table rows, heads, k_size, v_size].  slots: [B], each request's table row."""

    table: Tensor
    slots: Tensor


class PathRows(NamedTuple):
    """The rows that update the states, and the snapshots to save.

    slots: [B].  source: [B, width], the staged rows of each request, in order; None: the request's own `width` rows.
    taken: [B], how many rows update the state.
    marked: [B], a snapshot is saved after this many rows; 0: no snapshot.  mark_row: [B], the table row that gets the
    snapshot.  Both are None without snapshots.
    follows, ends: [B] bool, see cache/states.py:StateAccess; None: no request has several batch rows.
    spare: the table row to which unneeded states are written.
    """

    slots: Tensor
    source: Tensor | None
    taken: Tensor
    marked: Tensor | None
    mark_row: Tensor | None
    follows: Tensor | None
    ends: Tensor | None
    width: int
    spare: int

    @property
    def counts(self) -> tuple[Tensor, ...]:
        return (self.taken,) if self.marked is None else (self.taken, self.marked)

    def store(self, values: Tensor, made: Tensor, at_mark: Tensor | None = None) -> None:
        """Write the states after all rows, `made` [B, ...], to the slots, and the snapshots `at_mark` to their rows."""
        ends = self.taken > 0 if self.ends is None else self.ends
        values.index_copy_(0, self.slots.where(ends, self.spare), made)
        if at_mark is not None:
            assert self.mark_row is not None and self.marked is not None
            values.index_copy_(0, self.mark_row.where(self.marked > 0, self.spare), at_mark)


def _has_kernels(values: Tensor) -> bool:
    return values.is_cuda and values.dtype != torch.float64


@op("espalier.kernels.recurrence.inputs", condition=lambda inputs: _has_kernels(inputs))
def prepare(
    inputs: Tensor, gates: GateInputs | None, conv: ShortConv, columns: Columns, rows: RowInputs, out: Prepared
) -> None:
    """Convolve inputs [N, columns], and fill the buffers of `out` that are not None.

    inputs: may be partial sums [parts, N, columns] float32, which are added and rounded to the tails' dtype.
    """
    inputs = sum_parts.reference(inputs, rows.tail.dtype)
    ordered = columns.in_order(inputs)
    tail = tail_before(ordered, rows)
    convolution = convolved(ordered.unflatten(0, (-1, rows.width)), tail, rows.parents, conv).flatten(0, 1)
    if out.inputs is not None:
        out.inputs.copy_(ordered)
    if not columns.heads:
        out.v.copy_(convolution)
        return
    assert out.q is not None and out.k is not None
    q, k, v = convolution.split((columns.shared, columns.shared, columns.channels - 2 * columns.shared), -1)
    q, k = (x.unflatten(-1, (columns.k_heads, columns.k_size)) for x in (q, k))
    if columns.units:
        q, k = unit(q.to(out.q.dtype)) * columns.k_size**-0.5, unit(k.to(out.k.dtype))
    out.q.copy_(q)
    out.k.copy_(k)
    out.v.copy_(v.view(out.v.shape))
    if gates is not None:
        assert out.gates is not None
        out.gates.copy_(gates.computed(rows.tail.dtype))


def tail_before(ordered: Tensor, rows: RowInputs) -> Tensor:
    """Returns the tail [B, taps - 1, channels] before each batch row.  ordered: [N, channels], the inputs in order."""
    tail = rows.tail[rows.slots]
    if rows.follows is None or not tail.shape[1]:
        return tail
    # A batch row that another one continues has `width` existing rows, so its last rows are the tail.
    last = ordered.unflatten(0, (-1, rows.width))[:, rows.width - tail.shape[1] :].roll(1, 0)
    return last.where(rows.follows[:, None, None], tail)


@op(
    "espalier.kernels.recurrence.tree",
    condition=lambda rows: _has_kernels(rows[1]) and rows[1].shape[1] <= MAX_TREE_ROWS,
)
def tree_outputs(
    q: Tensor, rows: StateRows, state: StateColumns, bits: Tensor, skip: Tensor | None, delta: bool
) -> Tensor:
    """Returns the output of each node, [B, D, heads, v_size] in v's dtype.

    The output of a node is computed from the slot's state, updated by the node's ancestors and the node.
    q: [B, D, k_heads, k_size].  bits: [B, D, W] int64, ancestor bits.  skip: [heads]; skip · v is added to the output.
    delta: whether the update is the delta rule's.  A node with NaN or infinity spoils the outputs of its descendants on
    a GPU, and those of its whole tree elsewhere.
    """
    before, seen = state.table[state.slots], unpack_bits(bits, q.shape[1])
    return _in_dtype(outputs(q, solve(rows, before, seen, delta), before, seen), rows, skip)


@op("espalier.kernels.recurrence.chain", condition=lambda rows: _has_kernels(rows[1]))
def chain_outputs(
    q: Tensor, rows: StateRows, state: StateColumns, path: PathRows, skip: Tensor | None, delta: bool
) -> Tensor:
    """Returns the outputs of a chain of rows, [B, R, heads, v_size] in v's dtype, and updates the slots' states."""
    before = state.table[state.slots]
    scan_rows = scan if path.follows is None or not len(q) else _scan_pieces(path.follows)
    scanned = scan_rows(q, rows, before, path.taken, path.marked, delta)
    path.store(state.table, *(scanned.state, scanned.marked)[: len(path.counts)])
    return _in_dtype(scanned.out, rows, skip)


@op("espalier.kernels.recurrence.path", condition=lambda state: _has_kernels(state))
def commit_states(state: Tensor, rows: StateRows, path: PathRows, delta: bool) -> None:
    """Update the slots' states by the rows of accepted paths, in every layer.

    state: [layers, table rows, heads, k_size, v_size].  rows: the staged rows, [layers, n, ...] each.
    """
    assert path.source is not None
    seen = causal(path.width, state.device)
    for layer, table in enumerate(state):
        taken, before = StateRows(*(values[layer][path.source] for values in rows)), table[path.slots]
        solved = solve(taken, before, seen, delta)
        path.store(table, *(state_after(taken, solved, before, count) for count in path.counts))


@op("espalier.kernels.recurrence.path", condition=lambda tail: _has_kernels(tail))
def commit_tails(tail: Tensor, inputs: Tensor, path: PathRows, columns: Columns) -> None:
    """Shift the last inputs of accepted paths into the tails.

    tail: [layers, table rows, taps - 1, channels].  inputs: [layers, n, columns].
    """
    for layer, table in enumerate(tail):
        ordered = columns.in_order(inputs[layer])
        rows = RowInputs(table, path.slots, None, path.follows, path.width)
        before = tail_before(ordered, rows)
        own = ordered.unflatten(0, (-1, path.width)) if path.source is None else ordered[path.source]
        path.store(table, *(tail_after(before, own, count) for count in path.counts))


class OutputGate(NamedTuple):
    """The gate of a layer's output.

    values: [N, columns], or partial sums [parts, N, columns] float32.  `share` adjacent groups begin every `step`
    columns.  is_first: if true, the gate is applied before the norm, and the norm's weight covers all groups; if false,
    after the norm, and all groups share the weight.
    """

    values: Tensor
    share: int
    step: int
    is_first: bool


def rounds_groups(size: int, groups: int, rounding: InputScales) -> bool:
    """Whether `gated_norm` can round its result: a scale must cover one group of a power of two, or a short row."""
    columns = rounding.columns(size * groups)
    is_whole = columns == size * groups and next_power_of_2(groups) * next_power_of_2(size) <= MAX_ROUNDED
    return is_whole or columns == size == next_power_of_2(size)


@op("espalier.kernels.recurrence.gated_norm", condition=lambda read: _has_kernels(read))
def gated_norm(
    read: Tensor, gate: OutputGate, weight: Tensor | None, eps: float = 0.0, rounding: InputScales | None = None
) -> InputRows:
    """Returns [N, groups · size]: each group of read [N, groups, size] with its RMS norm and the factor silu(gate).

    gate.is_first decides which of the two is applied first.
    weight: of the norm.  None: there is no norm, and the factor is sigmoid(gate), rounded to read's dtype.
    rounding: how the result is rounded to FP8, for sizes that `rounds_groups` accepts; None: not rounded.
    """
    if rounding is not None:
        whole = gated_norm.reference(read, gate, weight, eps)
        assert isinstance(whole, Tensor)
        return RoundedRows(*quantise_inputs(whole, rounding), read.dtype)
    groups, size = read.shape[1:]
    exact = torch.promote_types(read.dtype, torch.float32)
    values = strided(
        sum_parts.reference(gate.values, read.dtype), groups // gate.share, gate.step, gate.share * size
    ).view(read.shape)
    if weight is None:
        return (read * values.sigmoid()).flatten(1)
    values = F.silu(values.to(exact))
    x = read.to(exact)
    if gate.is_first:
        x = x * values
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        return normed.flatten(1).to(read.dtype) * weight
    return (rms_norm.reference(read, weight, eps).to(exact) * values).to(read.dtype).flatten(1)


def _in_dtype(out: Tensor, rows: StateRows, skip: Tensor | None) -> Tensor:
    out = out if skip is None else torch.addcmul(out, skip[:, None], rows.v.to(out.dtype))
    return out.to(rows.v.dtype)


def _scan_pieces(follows: Tensor):
    """Returns a `scan` that runs one batch row after another, so that a piece starts from the state after the last."""

    def scan_rows(
        q: Tensor, rows: StateRows, before: Tensor, count: Tensor, marked: Tensor | None, delta: bool
    ) -> Scanned:
        made, state = [], before[:1]
        for piece in range(len(q)):
            one = slice(piece, piece + 1)
            state = state.where(follows[one, None, None, None], before[one])
            own = StateRows(*(values[one] for values in rows))
            made.append(scan(q[one], own, state, count[one], None if marked is None else marked[one], delta))
            state = made[-1].state
        return Scanned(*(torch.cat(values) for values in zip(*made, strict=True)))

    return scan_rows
