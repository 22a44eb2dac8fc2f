"""The recurrent states of layers: one state per slot, the staged inputs of tree nodes, and the commit of accepted
paths.

Row s of a state table belongs to slot s.  Row 0 belongs to the dummy slot and stays zero.  The rows after the slots
hold the snapshots of the prefix cache (cache/pages.py tracks the owner of each snapshot).  The last row is the spare
row, which receives the states that are not needed.  A verify pass stages the inputs of its nodes, and `commit` applies
the inputs of the accepted path to the states.  A pass of known tokens applies its inputs to the states immediately.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from espalier.cache.layer_spec import NO_MIXING, LayerSpec, RecurrentState, group_layers
from espalier.kernels.ops.linear import add_partial_sums
from espalier.kernels.ops.recurrence import ShortConv, StateRows
from espalier.kernels.ops.states import (
    ConvColumns,
    GateInputs,
    PathRows,
    PreparedRows,
    RowInputs,
    SlotStates,
    chain_outputs,
    commit_states,
    commit_tails,
    prepare_rows,
    tree_outputs,
)
from espalier.layout import RoundLayout

ZERO_ROW = 0


class SnapshotTargets(NamedTuple):
    """The snapshots that a launch writes.
    num_tokens: [B], a request's state is copied after so many of its tokens, if this launch reaches this number.
    row: [B], the table row that gets the copy; 0 for no snapshot."""

    num_tokens: Tensor
    row: Tensor


@dataclass(frozen=True)
class StateAccess:
    """Which states a pass reads, and which rows of the pass update these states.
    slots: [B], the slots of the requests.  prefix_len: [B], the number of tokens before the first row.
    length: [B], the number of rows without padding; None for a tree, whose accepted path is committed later.
    snapshots: the snapshots to write in this pass, or None.
    is_split: whether adjacent entries of the batch may be consecutive pieces of one prompt (speculate/pieces.py)."""

    slots: Tensor
    prefix_len: Tensor
    length: Tensor | None = None
    snapshots: SnapshotTargets | None = None
    is_split: bool = False

    @cached_property
    def rows_before_snapshot(self) -> Tensor | None:
        """[B]: the number of rows of this pass before the snapshot; 0 if this pass writes no snapshot."""
        if self.snapshots is None or self.length is None:
            return None
        rows = self.snapshots.num_tokens - self.prefix_len
        return rows.where((rows > 0) & (rows <= self.length) & (self.snapshots.row > 0), 0)

    @cached_property
    def continues_previous(self) -> Tensor:
        """[B] bool: whether the previous entry of the batch is the preceding piece of the same prompt."""
        same = self.slots[1:] == self.slots[:-1]
        return torch.cat((same[:0].new_zeros(min(len(self.slots), 1)), same & self.is_split))

    @cached_property
    def is_last_row(self) -> Tensor:
        """[B] bool: whether this entry of the batch is a prompt's last piece, whose state becomes the slot's state."""
        assert self.length is not None
        has_rows = self.length > 0
        return has_rows & ~torch.cat(
            (self.continues_previous[1:] & has_rows[1:], has_rows.new_zeros(min(len(has_rows), 1)))
        )

    def path_rows(self, source_rows: Tensor | None, width: int, spare_row: int) -> PathRows:
        """Returns the rows that update the states.  source_rows: [B, width], rows of the staging buffers; None if the
        pass's own rows update the states.  spare_row: a table row that is never read."""
        assert self.length is not None
        continues, is_last_row = (self.continues_previous, self.is_last_row) if self.is_split else (None, None)
        snapshots = self.rows_before_snapshot, None if self.snapshots is None else self.snapshots.row
        return PathRows(self.slots, source_rows, self.length, *snapshots, continues, is_last_row, width, spare_row)


@dataclass
class LayerStateTensors:
    """The states of all layers with the same sizes.  In the result of `of_layer`, the dimension `layers` is missing.
    recurrent_state: [layers, rows, heads, k_size, v_size]; None without heads.
    conv_tail: [layers, rows, taps - 1, channels], the convolution's last inputs.
    staged_inputs, staged_rows: the inputs of the convolution and of the recurrence at staged nodes,
    [layers, nodes, ...] each.  staged_rows: None without heads."""

    cache_spec: RecurrentState
    recurrent_state: Tensor | None
    conv_tail: Tensor
    staged_inputs: Tensor
    staged_rows: StateRows | None

    def of_layer(self, index: int) -> "LayerStateTensors":
        """Returns views of one layer's tensors.  index: the layer's index in the dimension `layers`."""
        state = None if self.recurrent_state is None else self.recurrent_state[index]
        rows = None if self.staged_rows is None else StateRows(*(values[index] for values in self.staged_rows))
        return LayerStateTensors(self.cache_spec, state, self.conv_tail[index], self.staged_inputs[index], rows)


class StateTable:
    """The state tables of all layers that keep states.

    stacks: the tensors.  Layers with states of the same sizes share tensors, so that one launch commits these layers.
    states: by layer, views of its tensors.  num_rows: the number of rows of each table, including the spare row."""

    def __init__(
        self,
        layout: RoundLayout,
        num_snapshots: int,
        specs: Sequence[LayerSpec],
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.num_rows = table_rows(layout, num_snapshots)
        self.first_snapshot, self.spare_row = layout.num_slots, self.num_rows - 1
        layers_with_state = [
            layer
            for layer, spec in enumerate(specs)
            if isinstance(spec.cache_spec, RecurrentState) and spec.cache_spec != NO_MIXING
        ]
        self.stacks: list[LayerStateTensors] = []
        self.states: dict[int, LayerStateTensors] = {}
        for cache_spec, layers in group_layers(specs, layers_with_state).items():
            assert isinstance(cache_spec, RecurrentState)
            stack = _allocate_states(cache_spec, len(layers), self.num_rows, layout.verify_rows, dtype, device)
            self.stacks.append(stack)
            self.states |= {layer: stack.of_layer(index) for index, layer in enumerate(layers)}

    @property
    def snapshot_rows(self) -> range:
        return range(self.first_snapshot, self.spare_row)

    def copy_rows(self, row_pairs: Sequence[tuple[int, int]]) -> None:
        """Copy rows of the state tables, one pair after another.  row_pairs: (source row, destination row) pairs."""
        for stack in self.stacks:
            tensors = (stack.conv_tail,) if stack.recurrent_state is None else (stack.recurrent_state, stack.conv_tail)
            for values in tensors:
                for source, destination in row_pairs:
                    values[:, destination].copy_(values[:, source])

    def commit(self, state_access: StateAccess, staged_rows: Tensor) -> None:
        """Update the states with the accepted paths.  staged_rows: [B, W], the staging rows of each path's nodes, of
        which the first state_access.length [B] exist."""
        path = state_access.path_rows(staged_rows.contiguous(), staged_rows.shape[1], self.spare_row)
        for stack in self.stacks:
            commit_tails(stack.conv_tail, stack.staged_inputs, path, stack.cache_spec.columns)
            if stack.recurrent_state is not None and stack.staged_rows is not None:
                commit_states(stack.recurrent_state, stack.staged_rows, path, stack.cache_spec.delta)


@dataclass
class PassStates:
    """Reads and writes the states in one pass.

    parents, ancestor_bits: the parent's index and the ancestors' bits of each tree node; None if the pass has no
    tree."""

    state_table: StateTable
    state_access: StateAccess
    parents: Tensor | None
    ancestor_bits: Tensor | None
    _rows_by_layer: dict[int, StateRows] = field(default_factory=dict)

    def write(
        self,
        layer: int,
        width: int,
        inputs: Tensor,
        gates: GateInputs | Tensor | None,
        conv: ShortConv,
        columns: ConvColumns | None = None,
    ) -> Tensor:
        """Convolve the inputs of N new rows, `width` per request.  Keep the results for `read` and StateTable.commit.

        inputs: [N, I], rows of I values, or partial sums [parts, N, I] of such rows.
        gates: [N, 2, heads], the natural logarithm of the decay, then beta; or the GateInputs from which the kernel
        computes the gates; None for a layer that has only a convolution.  columns: the columns of q, k and v in a row
        of inputs; None for the order of RecurrentState.
        Returns q [B, width, k_heads, k_size]; without gates, the convolution's output [B, width, channels]."""
        states, is_tree = self.state_table.states[layer], self.state_access.length is None
        columns = states.cache_spec.columns if columns is None else columns
        # The convolution's tail keeps whole inputs, so their partial sums are added up.
        inputs = inputs if is_tree else add_partial_sums(inputs, states.conv_tail.dtype)
        out = _buffers_for(states, inputs.shape[-2], is_tree)
        continues = self.state_access.continues_previous if self.state_access.is_split else None
        rows = RowInputs(states.conv_tail, self.state_access.slots, self.parents, continues, width)
        prepare_rows(inputs, gates if isinstance(gates, GateInputs) else None, conv, columns, rows, out)
        if not is_tree:
            path = self.state_access.path_rows(None, width, self.state_table.spare_row)
            commit_tails(states.conv_tail[None], inputs[None], path, columns)
        if out.q is None or out.k is None or out.gates is None:
            return out.v.unflatten(0, (-1, width))
        if isinstance(gates, Tensor):
            out.gates.copy_(gates)
        self._rows_by_layer[layer] = StateRows(
            *(values.unflatten(0, (-1, width)) for values in (out.k, out.v, out.gates))
        )
        return out.q.unflatten(0, (-1, width))

    def read(self, layer: int, q: Tensor, skip_factor: Tensor | None = None) -> Tensor:
        """Returns the rows' outputs [B, width, heads, v_size].  Must follow `write`.  In a pass without a tree, all
        tokens are decided, so this also advances the slots' states.

        q: from `write`.  skip_factor: [heads], a factor of v; skip_factor · v is added to a row's output."""
        rows, states = self._rows_by_layer.pop(layer), self.state_table.states[layer]
        assert states.recurrent_state is not None
        state = SlotStates(states.recurrent_state, self.state_access.slots)
        if self.state_access.length is None:
            assert self.ancestor_bits is not None
            return tree_outputs(q, rows, state, self.ancestor_bits, skip_factor, states.cache_spec.delta)
        path = self.state_access.path_rows(None, q.shape[1], self.state_table.spare_row)
        return chain_outputs(q, rows, state, path, skip_factor, states.cache_spec.delta)


def table_rows(layout: RoundLayout, num_snapshots: int) -> int:
    """Returns the number of rows of a StateTable."""
    return layout.num_slots + num_snapshots + 1


def bytes_per_state(specs: Sequence[LayerSpec], dtype: torch.dtype) -> int:
    """Returns the bytes of one row of the state tables of all layers together.  dtype: the model's dtype."""
    return sum(_num_bytes(states.recurrent_state, states.conv_tail) for states in _one_row_states(specs, dtype))


def bytes_of_staged_node(specs: Sequence[LayerSpec], dtype: torch.dtype) -> int:
    """Returns the bytes that one node of a tree takes in the staging of all layers.  dtype: the model's dtype."""
    return sum(_num_bytes(s.staged_inputs, *(s.staged_rows or ())) for s in _one_row_states(specs, dtype))


def _one_row_states(specs: Sequence[LayerSpec], dtype: torch.dtype) -> list[LayerStateTensors]:
    """Returns each layer's states with one table row and one staged node, on the meta device (without data)."""
    state_specs = [spec.cache_spec for spec in specs if isinstance(spec.cache_spec, RecurrentState)]
    return [_allocate_states(cache_spec, 1, 1, 1, dtype, torch.device("meta")) for cache_spec in state_specs]


def _num_bytes(*tensors: Tensor | None) -> int:
    return sum(0 if tensor is None else tensor.nbytes for tensor in tensors)


def _allocate_states(
    cache_spec: RecurrentState,
    num_layers: int,
    num_rows: int,
    num_staged: int,
    dtype: torch.dtype,
    device: torch.device,
) -> LayerStateTensors:
    """Allocates the tensors of layers with equal states.  num_rows: of the state table.  num_staged: staged nodes."""
    exact = torch.promote_types(dtype, torch.float32)

    def zeros(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.zeros(num_layers, *shape, dtype=dtype, device=device)

    recurrent_state = rows = None
    if cache_spec.heads:
        recurrent_state = zeros(num_rows, cache_spec.heads, cache_spec.k_size, cache_spec.v_size, dtype=exact)
        rows = StateRows(
            zeros(num_staged, cache_spec.k_heads, cache_spec.k_size, dtype=exact),
            zeros(num_staged, cache_spec.heads, cache_spec.v_size),
            zeros(num_staged, 2, cache_spec.heads, dtype=exact),
        )
    conv_tail = zeros(num_rows, cache_spec.taps - 1, cache_spec.channels)
    return LayerStateTensors(cache_spec, recurrent_state, conv_tail, zeros(num_staged, cache_spec.channels), rows)


def _buffers_for(states: LayerStateTensors, num_rows: int, is_tree: bool) -> PreparedRows:
    """Returns the buffers for `num_rows` prepared rows of a layer: staging if is_tree, else new memory."""
    cache_spec, inputs = states.cache_spec, states.staged_inputs
    staged_inputs = inputs[:num_rows] if is_tree else None
    if states.staged_rows is None:
        return PreparedRows(None, None, inputs.new_empty(num_rows, cache_spec.channels), None, staged_inputs)
    if is_tree:
        k, v, gates = (values[:num_rows] for values in states.staged_rows)
    else:
        k, v, gates = (values.new_empty(num_rows, *values.shape[1:]) for values in states.staged_rows)
    q_dtype = k.dtype if cache_spec.units else inputs.dtype
    return PreparedRows(k.new_empty(k.shape, dtype=q_dtype), k, v, gates, staged_inputs)
