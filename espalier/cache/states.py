"""The states of layers that keep one for each slot (RecurrentState), the staged nodes of trees, the commit of a path.

Row s of a table is slot s's; row 0, the dummy slot's, stays zero.  Snapshots for the prefix cache follow, and the last
row is spare.  cache/snapshots.py tracks which snapshot is whose.  A verify pass stages what its nodes bring, and
`commit` applies an accepted path.  A pass of known tokens applies its rows as it reads.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from espalier.cache.layer_spec import NOTHING, LayerSpec, RecurrentState
from espalier.kernels.ops.recurrence import Scanned, ShortConv, StateRows, causal, scan, tail_after
from espalier.layout import RoundLayout

ZERO_ROW = 0


class Marks(NamedTuple):
    """Where a launch leaves snapshots.  at: [B], the number of tokens after which the state is kept; row: [B], the row
    of the table that gets it, 0 for none.  A request that does not come from below `at` to it leaves none."""

    at: Tensor
    row: Tensor


@dataclass(frozen=True)
class StateAccess:
    """Whose states a pass reads, and how many of its rows they take in.

    slots: [B]; length: [B], rows that exist; None for a tree, whose path is committed later.
    prefix_len: [B], tokens before the first row; marks: None for none.
    is_split: whether a request may have several rows of the batch, one after another (speculate/pieces.py).
    """

    slots: Tensor
    prefix_len: Tensor
    length: Tensor | None = None
    marks: Marks | None = None
    is_split: bool = False

    @cached_property
    def marked(self) -> Tensor | None:
        """[B]: the rows of this pass before the mark; 0 where it is not reached in this pass."""
        if self.marks is None or self.length is None:
            return None
        rows = self.marks.at - self.prefix_len
        return rows.where((rows > 0) & (rows <= self.length) & (self.marks.row > 0), 0)

    @property
    def counts(self) -> tuple[Tensor, ...]:
        """The numbers of rows [B] whose states are kept: of all that exist, and of those before the mark."""
        assert self.length is not None
        return (self.length,) if self.marked is None else (self.length, self.marked)

    @cached_property
    def follows(self) -> Tensor:
        """[B] bool: whether the batch row before holds the request's rows before."""
        same = self.slots[1:] == self.slots[:-1]
        return torch.cat((same[:0].new_zeros(min(len(self.slots), 1)), same & self.is_split))

    @cached_property
    def ends(self) -> Tensor:
        """[B] bool: whether the slot's state behind the pass is the one behind this batch row."""
        assert self.length is not None
        has_rows = self.length > 0
        return has_rows & ~torch.cat((self.follows[1:] & has_rows[1:], has_rows.new_zeros(min(len(has_rows), 1))))


@dataclass
class LayerStates:
    """One layer's.  recurrent: [rows, heads, k_size, v_size], None without heads; tail: [rows, taps - 1, channels].

    inputs, k, v, gates: staged rows, [n, ...] each; those without heads have inputs alone.
    """

    keeps: RecurrentState
    recurrent: Tensor | None
    tail: Tensor
    inputs: Tensor
    rows: StateRows | None


class StateTable:
    """states: by layer.  num_rows: of the table, the spare one included."""

    def __init__(
        self,
        layout: RoundLayout,
        num_snapshots: int,
        specs: Sequence[LayerSpec],
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.num_rows = table_rows(layout, num_snapshots)
        self.first_snapshot, self.spare = layout.num_slots, self.num_rows - 1
        self.states = {
            layer: _allocated(spec.keeps, self.num_rows, layout.verify_rows, dtype, device)
            for layer, spec in enumerate(specs)
            if isinstance(spec.keeps, RecurrentState) and spec.keeps != NOTHING
        }

    @property
    def snapshot_rows(self) -> range:
        return range(self.first_snapshot, self.spare)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy rows, (source, destination) each, in this order."""
        if not pairs:
            return
        for layer in self.states.values():
            for values in (layer.tail,) if layer.recurrent is None else (layer.recurrent, layer.tail):
                for source, destination in pairs:
                    values[destination].copy_(values[source])

    def commit(self, access: StateAccess, source: Tensor) -> None:
        """Apply the staged rows `source` [B, W] of accepted paths, of which the first `access.length` are decided."""
        seen = causal(source.shape[1], source.device)
        for layer in self.states.values():
            inputs, tail = layer.inputs[source], layer.tail[access.slots]
            self.store(access, layer.tail, *(tail_after(tail, inputs, count) for count in access.counts))
            if layer.recurrent is not None and layer.rows is not None:
                rows, state = StateRows(*(values[source] for values in layer.rows)), layer.recurrent[access.slots]
                self.store(access, layer.recurrent, *layer.keeps.commit(rows, state, seen, *access.counts))

    def store(self, access: StateAccess, values: Tensor, made: Tensor, at_mark: Tensor | None = None) -> None:
        """Write to the slots what is behind the rows, [B, ...], and to the marks' rows what is behind their rows."""
        values.index_copy_(0, access.slots.where(access.ends, self.spare), made)
        if at_mark is not None:
            assert access.marks is not None and access.marked is not None
            values.index_copy_(0, access.marks.row.where(access.marked > 0, self.spare), at_mark)


@dataclass
class PassStates:
    """The states in one pass.  parents: [B, R], as `convolved` takes them; seen: [B, R, R] bool, of a tree."""

    table: StateTable
    access: StateAccess
    parents: Tensor | None
    seen: Tensor | None
    _rows: dict[int, StateRows] = field(default_factory=dict)

    def write(self, layer: int, inputs: Tensor, gates: Tensor | None, conv: ShortConv) -> Tensor:
        """As RecurrentState.write, of inputs [B, R, channels]: returns q, or the convolution's output."""
        states = self.table.states[layer]
        tail = self._tail_before(states, inputs)
        q, rows = states.keeps.write(inputs, gates, conv, tail, self.parents)
        if self.access.length is None:
            self._stage(states, inputs, rows)
        else:
            behind = (tail_after(tail, inputs, count) for count in self.access.counts)
            self.table.store(self.access, states.tail, *behind)
        if rows is not None:
            self._rows[layer] = rows
        return q

    def read(self, layer: int, q: Tensor, skip: Tensor | None = None) -> Tensor:
        """[B, R, heads, v_size]: the rows' outputs.  A pass of known tokens goes on to the slots' next state.

        skip: [heads], the factor of a row's v that is added to its output.
        """
        rows = self._rows.pop(layer)
        out = self._outputs(self.table.states[layer], q, rows)
        out = out if skip is None else torch.addcmul(out, skip[:, None], rows.v.to(out.dtype))
        return out.to(rows.v.dtype)

    def _outputs(self, states: LayerStates, q: Tensor, rows: StateRows) -> Tensor:
        assert states.recurrent is not None
        before = states.recurrent[self.access.slots]
        if self.access.length is None:
            assert self.seen is not None
            return states.keeps.read(q, rows, before, self.seen)
        scan_rows = self._scan_pieces if self.access.is_split and len(q) else scan
        scanned = scan_rows(q, rows, before, self.access.length, self.access.marked, states.keeps.delta)
        behind = (scanned.state, scanned.marked)[: len(self.access.counts)]
        self.table.store(self.access, states.recurrent, *behind)
        return scanned.out

    def _tail_before(self, states: LayerStates, inputs: Tensor) -> Tensor:
        """[B, taps - 1, channels]: the inputs before each batch row."""
        tail = states.tail[self.access.slots]
        if not self.access.is_split or not tail.shape[1]:
            return tail
        # A piece that another one follows is full.
        last = inputs[:, inputs.shape[1] - tail.shape[1] :].roll(1, 0)
        return last.where(self.access.follows[:, None, None], tail)

    def _stage(self, states: LayerStates, inputs: Tensor, rows: StateRows | None) -> None:
        count = inputs.shape[0] * inputs.shape[1]
        states.inputs[:count] = inputs.flatten(0, 1)
        if rows is not None and states.rows is not None:
            for staged, values in zip(states.rows, rows, strict=True):
                staged[:count] = values.flatten(0, 1)

    def _scan_pieces(
        self, q: Tensor, rows: StateRows, before: Tensor, count: Tensor, marked: Tensor | None, delta: bool
    ) -> Scanned:
        """As `scan`, one batch row after another: a piece begins with the state behind the one before it."""
        made, state = [], before[:1]
        for piece in range(len(q)):
            one = slice(piece, piece + 1)
            state = state.where(self.access.follows[one, None, None, None], before[one])
            own = StateRows(*(values[one] for values in rows))
            made.append(scan(q[one], own, state, count[one], None if marked is None else marked[one], delta))
            state = made[-1].state
        return Scanned(*(torch.cat(values) for values in zip(*made, strict=True)))


def table_rows(layout: RoundLayout, num_snapshots: int) -> int:
    """Rows of a StateTable."""
    return layout.num_slots + num_snapshots + 1


def bytes_per_state(specs: Sequence[LayerSpec], dtype: torch.dtype) -> int:
    """Bytes of a row of the table, all layers together.  dtype: the model's."""
    exact = torch.promote_types(dtype, torch.float32).itemsize
    kept = (spec.keeps for spec in specs if isinstance(spec.keeps, RecurrentState))
    return sum(
        keeps.heads * keeps.k_size * keeps.v_size * exact + (keeps.taps - 1) * keeps.channels * dtype.itemsize
        for keeps in kept
    )


def bytes_of_staged_node(specs: Sequence[LayerSpec], dtype: torch.dtype) -> int:
    """Bytes of a node of a tree in staging, all layers together."""
    exact = torch.promote_types(dtype, torch.float32).itemsize
    kept = (spec.keeps for spec in specs if isinstance(spec.keeps, RecurrentState))
    return sum(
        (keeps.k_heads * keeps.k_size + 2 * keeps.heads) * exact
        + (keeps.heads * keeps.v_size + keeps.channels) * dtype.itemsize
        for keeps in kept
    )


def _allocated(
    keeps: RecurrentState, num_rows: int, staged: int, dtype: torch.dtype, device: torch.device
) -> LayerStates:
    exact = torch.promote_types(dtype, torch.float32)

    def zeros(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    recurrent = rows = None
    if keeps.heads:
        recurrent = zeros(num_rows, keeps.heads, keeps.k_size, keeps.v_size, dtype=exact)
        rows = StateRows(
            zeros(staged, keeps.k_heads, keeps.k_size, dtype=exact),
            zeros(staged, keeps.heads, keeps.v_size),
            zeros(staged, 2, keeps.heads, dtype=exact),
        )
    tail = zeros(num_rows, keeps.taps - 1, keeps.channels)
    return LayerStates(keeps, recurrent, tail, zeros(staged, keeps.channels), rows)
