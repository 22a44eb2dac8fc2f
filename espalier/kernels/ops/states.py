"""The operations of a layer that keeps a state: convolve the inputs of rows, compute outputs, update states.

The tables have a row for each slot (cache/states.py).  Everything is computed in float32 (float64 for float64).  On a
GPU float64 and trees of more than MAX_TREE_ROWS nodes take the references, which have static shapes too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from espalier.kernels.attention.ancestor_bits import unpack
from espalier.kernels.layers.quantised import InputScales, RoundedRows, Rows, quantise_inputs
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
from espalier.kernels.runtime.launch import power_of_two
from espalier.kernels.runtime.op import op

# Nodes of a tree that one program holds.
MAX_TREE_ROWS = 64


class Columns(NamedTuple):
    """Where a row of projections holds the channels of a convolution: first q's, then k's, then v's.

    heads, k_heads, k_size, v_size: see cache/layer_spec.py:RecurrentState; heads is 0 for a convolution without heads.
    q, k, v: the columns of the first heads; k_step: columns from one head of q or k to the next; v_step: columns from
    one group of v's heads to the next (a group shares a head of k).  units: whether q and k are divided by their
    lengths, and q by the root of k_size.
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
        """Channels of q."""
        return self.k_heads * self.k_size

    @property
    def of_group(self) -> int:
        """Channels of the heads of v that share a head of k."""
        return self.channels - 2 * self.shared if not self.k_heads else self.heads // self.k_heads * self.v_size

    def in_order(self, inputs: Tensor) -> Tensor:
        """Inputs [N, columns] -> [N, channels], the channels in order."""
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
        """The arguments of kernels/recurrence/inputs.py:input_column."""
        return self.q, self.k, self.v, self.k_step, self.v_step, max(self.k_size, 1), self.shared, self.of_group


def plain_columns(heads: int, k_heads: int, k_size: int, v_size: int, channels: int, units: bool) -> Columns:
    """The Columns of inputs whose channels are in order, from column 0 on."""
    shared, of_group = k_heads * k_size, heads // k_heads * v_size if k_heads else channels
    return Columns(heads, k_heads, k_size, v_size, channels, 0, shared, 2 * shared, k_size, of_group, units)


def strided(values: Tensor, groups: int, step: int, size: int) -> Tensor:
    """[N, groups · size] of values [N, columns], in which groups of `size` columns begin every `step` columns."""
    if step == size:
        return values[:, : groups * size]
    at = torch.arange(groups, device=values.device)[:, None] * step + torch.arange(size, device=values.device)
    return values[:, at.flatten()]


class GateInputs(NamedTuple):
    """The inputs of gates: the decay is exp(-exp(A_log) · t) with t = softplus(decay + dt_bias).

    decay: [N, columns], in which the heads that share a head of k begin every `step` columns; beta: the same shape,
    before its sigmoid, or None if t itself is beta (Mamba-2).  A_log, dt_bias: [heads], float32 at least.
    bounds: the least and the largest t; None: no bound.
    """

    decay: Tensor
    beta: Tensor | None
    A_log: Tensor
    dt_bias: Tensor
    share: int
    step: int
    bounds: tuple[float | None, float | None] = (None, None)

    def computed(self) -> Tensor:
        """The gates [N, 2, heads], as in StateRows."""
        groups, exact = len(self.A_log) // self.share, self.A_log.dtype
        decay = strided(self.decay, groups, self.step, self.share).to(exact)
        t = F.softplus(decay + self.dt_bias)
        if self.bounds != (None, None):
            t = t.clamp(*self.bounds)
        beta = t if self.beta is None else strided(self.beta, groups, self.step, self.share).to(exact).sigmoid()
        return torch.stack((-self.A_log.exp() * t, beta), 1)


class RowInputs(NamedTuple):
    """The rows of a pass, `width` for each request.

    tail: [rows, taps - 1, channels], the tails of all slots; slots: [B]; parents: [B, width] for a tree, else None.
    follows: [B] bool, whether the batch row before holds the earlier rows of the same request; None: nowhere.
    """

    tail: Tensor
    slots: Tensor
    parents: Tensor | None
    follows: Tensor | None
    width: int


class Prepared(NamedTuple):
    """The buffers that `prepare` fills.  q: [N, k_heads, k_size]; k, v, gates: as in StateRows, but [N, ...].  Without
    heads v is the convolution's output [N, channels], and q, k and gates are None.  inputs: [N, channels], or None if
    nobody needs them."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor
    gates: Tensor | None
    inputs: Tensor | None


class StateColumns(NamedTuple):
    """table: [rows, heads, k_size, v_size]; slots: [B], the rows that are read."""

    table: Tensor
    slots: Tensor


class PathRows(NamedTuple):
    """Which rows go into the states.

    slots: [B]; source: [B, width], staged rows of each request in order, or None: its own `width` rows.
    taken: [B], how many rows go into the state; marked: [B], how many of them come before the mark, 0 for no mark;
    mark_row: [B], the row of the table that gets the state at the mark; None: no marks.  follows, ends: [B] bool, as
    cache/states.py:StateAccess has them; None: no request has several batch rows.  spare: the row of the table that
    takes what nobody keeps.
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
        """Write the states after the rows, `made` [B, ...], to the slots, and the states at the marks to the marks'
        rows."""
        ends = self.taken > 0 if self.ends is None else self.ends
        values.index_copy_(0, self.slots.where(ends, self.spare), made)
        if at_mark is not None:
            assert self.mark_row is not None and self.marked is not None
            values.index_copy_(0, self.mark_row.where(self.marked > 0, self.spare), at_mark)


def _has_kernels(values: Tensor) -> bool:
    return values.is_cuda and values.dtype != torch.float64


@op("espalier.kernels.recurrence.inputs", when=lambda inputs: _has_kernels(inputs))
def prepare(
    inputs: Tensor, gates: GateInputs | None, conv: ShortConv, columns: Columns, rows: RowInputs, out: Prepared
) -> None:
    """Convolve inputs [N, columns], and fill `out`: q, k and v, gates unless they are None, and the inputs in order."""
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
        out.gates.copy_(gates.computed())


def tail_before(ordered: Tensor, rows: RowInputs) -> Tensor:
    """[B, taps - 1, channels]: the inputs before each batch row of ordered inputs [N, channels]."""
    tail = rows.tail[rows.slots]
    if rows.follows is None or not tail.shape[1]:
        return tail
    # A piece that another one follows is full.
    last = ordered.unflatten(0, (-1, rows.width))[:, rows.width - tail.shape[1] :].roll(1, 0)
    return last.where(rows.follows[:, None, None], tail)


@op(
    "espalier.kernels.recurrence.tree",
    when=lambda rows: _has_kernels(rows[1]) and rows[1].shape[1] <= MAX_TREE_ROWS,
)
def tree_outputs(
    q: Tensor, rows: StateRows, state: StateColumns, bits: Tensor, skip: Tensor | None, delta: bool
) -> Tensor:
    """[B, D, heads, v_size] in v's dtype: the output of each node from the state after its path, which begins with the
    slot's state.

    q: [B, D, k_heads, k_size]; bits: [B, D, W] int64, ancestor bits; skip: [heads], the factor of v that is added;
    delta: by the delta rule.  A node with NaN or infinity spoils its descendants on a GPU, and its whole tree
    elsewhere.
    """
    before, seen = state.table[state.slots], unpack(bits, q.shape[1])
    return _in_dtype(outputs(q, solve(rows, before, seen, delta), before, seen), rows, skip)


@op("espalier.kernels.recurrence.chain", when=lambda rows: _has_kernels(rows[1]))
def chain_outputs(
    q: Tensor, rows: StateRows, state: StateColumns, path: PathRows, skip: Tensor | None, delta: bool
) -> Tensor:
    """[B, R, heads, v_size] in v's dtype: the outputs of a chain of rows, which also change the slots' states."""
    before = state.table[state.slots]
    scan_rows = scan if path.follows is None or not len(q) else _scan_pieces(path.follows)
    scanned = scan_rows(q, rows, before, path.taken, path.marked, delta)
    path.store(state.table, *(scanned.state, scanned.marked)[: len(path.counts)])
    return _in_dtype(scanned.out, rows, skip)


@op("espalier.kernels.recurrence.path", when=lambda state: _has_kernels(state))
def commit_states(state: Tensor, rows: StateRows, path: PathRows, delta: bool) -> None:
    """Update the slots' states by the rows of accepted paths.

    state: [layers, rows, heads, k_size, v_size]; rows: staged, [layers, n, ...] each.
    """
    assert path.source is not None
    seen = causal(path.width, state.device)
    for layer, table in enumerate(state):
        taken, before = StateRows(*(values[layer][path.source] for values in rows)), table[path.slots]
        solved = solve(taken, before, seen, delta)
        path.store(table, *(state_after(taken, solved, before, count) for count in path.counts))


@op("espalier.kernels.recurrence.path", when=lambda tail: _has_kernels(tail))
def commit_tails(tail: Tensor, inputs: Tensor, path: PathRows, columns: Columns) -> None:
    """Shift the last inputs of accepted paths into the tails.

    tail: [layers, rows, taps - 1, channels]; inputs: [layers, n, columns].
    """
    for layer, table in enumerate(tail):
        ordered = columns.in_order(inputs[layer])
        rows = RowInputs(table, path.slots, None, path.follows, path.width)
        before = tail_before(ordered, rows)
        own = ordered.unflatten(0, (-1, path.width)) if path.source is None else ordered[path.source]
        path.store(table, *(tail_after(before, own, count) for count in path.counts))


class OutputGate(NamedTuple):
    """values: [N, columns], in which `share` groups after one another begin every `step` columns.

    is_first: whether the norm is of the gated values, and its weight of all groups.
    """

    values: Tensor
    share: int
    step: int
    is_first: bool


def rounds_groups(size: int, groups: int, rounding: InputScales) -> bool:
    """Whether `gated_norm` can round: a group of the norm must have one scale, and fill its program."""
    return rounding.columns(size * groups) == size == power_of_two(size)


@op("espalier.kernels.recurrence.gated_norm", when=lambda read: _has_kernels(read))
def gated_norm(read: Tensor, gate: OutputGate, weight: Tensor, eps: float, rounding: InputScales | None = None) -> Rows:
    """[N, groups · size]: the RMS norm of each group of read [N, groups, size] and the gate's silu, multiplied.

    rounding: how the result is rounded to FP8, for sizes that `rounds_groups` takes; None: it is a tensor.
    """
    if rounding is not None:
        whole = gated_norm.reference(read, gate, weight, eps)
        assert isinstance(whole, Tensor)
        return RoundedRows(*quantise_inputs(whole, rounding), read.dtype)
    groups, size = read.shape[1:]
    exact = torch.promote_types(read.dtype, torch.float32)
    values = F.silu(strided(gate.values, groups // gate.share, gate.step, gate.share * size).view(read.shape).to(exact))
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
    """Like `scan`, but one batch row after another: a piece begins with the state after the piece before it."""

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
