"""Kernels of layers that keep a state, against their references in float64: trees, chains, paths, inputs.

Tolerance: float32 products and sums, whose error grows with the condition of the delta rule's system: 1e-5 of the
largest value.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from espalier.cache.layer_spec import RecurrentState
from espalier.errors import EspalierError
from espalier.kernels.attention.ancestor_bits import ancestor_mask, pack_bits
from espalier.kernels.layers.quantised import InputScales
from espalier.kernels.ops.linear import add_partial_sums, quantise_rows
from espalier.kernels.ops.recurrence import ShortConv, StateRows
from espalier.kernels.ops.states import (
    ConvColumns,
    GateInputs,
    OutputGate,
    PathRows,
    PreparedRows,
    RowInputs,
    SlotStates,
    chain_outputs,
    commit_states,
    commit_tails,
    gated_norm,
    prepare_rows,
    tree_outputs,
)
from tests.interpreter import run_programs_in_reverse
from tests.pairwise import fewer, in_turn_params, pairwise_params, product_params

CLOSE = 1e-5
# Sizes that fill no block, and heads of keys that serve several heads.
DELTA = RecurrentState(taps=4, heads=4, k_heads=2, k_size=20, v_size=36)
ADDED = RecurrentState(taps=3, heads=2, k_heads=1, k_size=16, v_size=8, delta=False, units=False)
PUBLISHED = {
    "delta": RecurrentState(taps=4, heads=2, k_heads=1, k_size=128, v_size=128),
    "added": RecurrentState(taps=4, heads=2, k_heads=1, k_size=128, v_size=64, delta=False, units=False),
}
kinds = pytest.mark.parametrize("keeps", [DELTA, ADDED], ids=["delta", "added"])
KINDS = {"delta": DELTA, "added": ADDED}
ROWS = 7


class Drawn:
    """Random tensors of a seed on a device."""

    def __init__(self, seed: int, device: torch.device):
        self.generator, self.device = torch.Generator().manual_seed(seed), device

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device)

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=self.generator).to(self.device)

    def rows(self, keeps: RecurrentState, *shape: int) -> tuple[Tensor, StateRows]:
        """q, and rows [*shape, ...]: keys of length 1 of which some repeat, decays of all sizes."""
        k = torch.nn.functional.normalize(self(*shape, keeps.k_heads, keeps.k_size), dim=-1)
        k[..., 1::3, :, :] = k[..., :1, :, :]
        gates = torch.stack((-self(*shape, keeps.heads).exp() / 4, self(*shape, keeps.heads).sigmoid()), -2)
        q = self(*shape, keeps.k_heads, keeps.k_size)
        return q, StateRows(k, self(*shape, keeps.heads, keeps.v_size), gates)

    def state(self, keeps: RecurrentState, *shape: int) -> Tensor:
        return self(*shape, keeps.heads, keeps.k_size, keeps.v_size)

    def slots(self, batch: int) -> Tensor:
        return 1 + torch.randperm(ROWS - 2, generator=self.generator)[:batch].to(self.device)

    def tree(self, batch: int, nodes: int) -> tuple[Tensor, Tensor]:
        """parents [B, D], and ancestor bits in which some leaves are void."""
        share = torch.rand(batch, nodes, generator=self.generator)
        parents = (share * torch.arange(nodes)).long()
        is_leaf = torch.ones(batch, nodes, dtype=torch.bool).scatter_(1, parents, False)
        void = is_leaf & (torch.rand(batch, nodes, generator=self.generator) < 0.3)
        void[:, 0] = False
        return parents.to(self.device), pack_bits(ancestor_mask(parents, void, nodes)).to(self.device)


def exact(values: Any) -> Any:
    """Floating tensors in float64, in tuples too."""
    if isinstance(values, Tensor):
        return values.double() if values.is_floating_point() else values
    if isinstance(values, tuple):
        parts = map(exact, values)
        return type(values)(*parts) if hasattr(values, "_fields") else tuple(parts)
    return values


def assert_close(got: Tensor, expected: Tensor, close: float = CLOSE) -> None:
    assert got.shape == expected.shape and got.isfinite().all()
    assert (got.double() - expected).abs().max() <= close * max(float(expected.abs().max()), 1.0)


@pytest.mark.parametrize(
    ("kind", "shape"), in_turn_params(list(KINDS), [(5, 1), (4, 2), (3, 4), (1, 8), (2, 16), (1, 33), (2, 64)])
)
def test_a_node_reads_the_state_of_its_parent(kind, shape, kernel_device):
    keeps, (batch, nodes) = KINDS[kind], shape
    drawn = Drawn(batch * nodes, kernel_device)
    q, rows = drawn.rows(keeps, batch, nodes)
    _, bits = drawn.tree(batch, nodes)
    state, skip = SlotStates(drawn.state(keeps, ROWS), drawn.slots(batch)), drawn(keeps.heads)
    unused = [row for row in range(ROWS) if row not in state.slots.tolist()]
    state.table[unused] = torch.nan
    out = tree_outputs.triton(q, rows, state, bits, skip, keeps.delta)
    assert_close(out, tree_outputs.reference(*exact((q, rows, state, bits, skip)), keeps.delta))


@pytest.mark.parametrize(("kind", "dtype"), in_turn_params(list(PUBLISHED), [torch.bfloat16, torch.float32]))
def test_heads_have_published_sizes(kind, dtype, kernel_device):
    """Trees that fill one warpgroup of Hopper or less, and a chain.  A model in 16 bits has operands in 16 bits."""
    keeps, drawn, close = PUBLISHED[kind], Drawn(8, kernel_device), CLOSE if dtype == torch.float32 else 1e-2
    state = SlotStates(drawn.state(keeps, ROWS + 1), drawn.slots(1))
    for nodes in (1, 3, 24, 64):
        q, rows = drawn.rows(keeps, 1, nodes)
        rows = rows._replace(v=rows.v.to(dtype))
        _, bits = drawn.tree(1, nodes)
        out = tree_outputs.triton(q, rows, state, bits, None, keeps.delta)
        assert_close(out, tree_outputs.reference(*exact((q, rows, state, bits)), None, keeps.delta), close)
    path = PathRows(state.slots, None, torch.full_like(state.slots, nodes), None, None, None, None, nodes, ROWS)
    expected = exact(state)
    wanted = chain_outputs.reference(*exact((q, rows)), expected, path, None, keeps.delta)
    assert_close(chain_outputs.triton(q, rows, state, path, None, keeps.delta), wanted, close)
    assert_close(state.table[state.slots], expected.table[state.slots], close)


@kinds
def test_what_is_no_number_reaches_descendants_alone(keeps, kernel_device):
    """And the outputs of a single row that holds it."""
    drawn, batch, nodes = Drawn(3, kernel_device), 2, 16
    q, rows = drawn.rows(keeps, batch, nodes)
    _, bits = drawn.tree(batch, nodes)
    state = SlotStates(drawn.state(keeps, ROWS), drawn.slots(batch))
    clean = tree_outputs.triton(q, rows, state, bits, None, keeps.delta)
    sees = (bits[..., 0] >> 1) & 1 == 1
    assert 0 < sees[0].sum() < nodes - 1
    for values, value in zip(rows, (torch.nan, torch.inf, torch.nan), strict=True):
        spoilt = [each.clone() for each in rows]
        spoilt[[each is values for each in rows].index(True)][0, 1] = value
        out = tree_outputs.triton(q, StateRows(*spoilt), state, bits, None, keeps.delta)
        assert torch.equal(out[1], clean[1]) and torch.equal(out[0, ~sees[0]], clean[0, ~sees[0]])
        assert out[0, sees[0]].isnan().all()
        alone = [each[:, 1:2] for each in (q, *spoilt)]
        out = tree_outputs.triton(alone[0], StateRows(*alone[1:]), state, bits[:, :1], None, keeps.delta)
        assert out[0].isnan().all() and out[1].isfinite().all()


def path_of(drawn: Drawn, batch: int, width: int, source: Tensor | None, marks: bool) -> PathRows:
    slots, count = drawn.slots(batch), drawn.integers(width + 1, batch)
    count[0] = width
    if batch > 1:
        count[1] = 0
    marked = (count * 2 // 3).clamp(max=width) if marks else None
    mark_row = torch.where(marked > 0, ROWS - 1, 0) if marked is not None else None
    if marked is not None and mark_row is not None:
        # One row is left for snapshots.
        marked[1:], mark_row[1:] = 0, 0
    return PathRows(slots, source, count, marked, mark_row, None, None, width, ROWS)


@pytest.mark.parametrize(("kind", "path"), in_turn_params(list(KINDS), [(5, 6, True), (3, 4, False), (1, 1, True)]))
def test_a_path_goes_into_the_states_of_all_layers(kind, path, kernel_device):
    """Rows that are not taken are no numbers; nor is what unused slots hold."""
    keeps, (batch, width, marks) = KINDS[kind], path
    drawn, layers, staged = Drawn(batch, kernel_device), 2, 5 * width
    _, rows = drawn.rows(keeps, layers, staged)
    source = torch.stack([5 * torch.randperm(width, generator=drawn.generator) for _ in range(batch)])
    source = source.to(kernel_device)
    path = path_of(drawn, batch, width, source, marks)
    taken = [source[b, : path.row_counts[b]].tolist() for b in range(batch)]
    others = [row for row in range(staged) if not any(row in own for own in taken)]
    clean = StateRows(*(values.clone() for values in rows))
    for values in rows:
        values[:, others] = torch.nan
    state = drawn.state(keeps, layers, ROWS + 1)
    used = [*path.slots[path.row_counts > 0].tolist()]
    state[:, [row for row in range(ROWS + 1) if row not in used]] = torch.nan
    expected, before = state.double(), state.clone()
    commit_states.reference(expected, exact(clean), path, keeps.delta)
    commit_states.triton(state, rows, path, keeps.delta)
    for row in range(ROWS):
        if row in used or (path.snapshot_counts is not None and path.snapshot_counts[0] > 0 and row == ROWS - 1):
            assert_close(state[:, row], expected[:, row])
        else:
            assert torch.equal(state[:, row].nan_to_num(), before[:, row].nan_to_num())


@kinds
def test_a_state_does_not_depend_on_how_a_text_was_cut(keeps, kernel_device):
    drawn = Drawn(1, kernel_device)
    _, rows = drawn.rows(keeps, 1, 5)
    whole, cut = (drawn.state(keeps, 1, 3) for _ in range(2))
    cut.copy_(whole)
    path = PathRows(torch.tensor([1]), torch.arange(5)[None], torch.tensor([5]), None, None, None, None, 5, 2)
    path = PathRows(*(each.to(kernel_device) if isinstance(each, Tensor) else each for each in path))
    commit_states.triton(whole, rows, path, keeps.delta)
    for first, count in ((0, 2), (2, 1), (3, 2)):
        source, counts = path.source_rows[:, first:].contiguous(), path.row_counts * 0 + count
        part = path._replace(source_rows=source, row_counts=counts, width=5 - first)
        commit_states.triton(cut, rows, part, keeps.delta)
    assert torch.equal(whole, cut)


CHAINS = [(2, 1, False), (1, 64, True), (3, 70, False), (2, 130, True)]


@pytest.mark.parametrize(("kind", "chain"), in_turn_params(list(KINDS), CHAINS))
def test_a_chain_is_read_and_taken_in(kind, chain, kernel_device):
    keeps, (batch, width, marks) = KINDS[kind], chain
    drawn = Drawn(batch * width, kernel_device)
    q, rows = drawn.rows(keeps, batch, width)
    path, skip = path_of(drawn, batch, width, None, marks), drawn(keeps.heads)
    table = drawn.state(keeps, ROWS + 1)
    hold_chain(keeps, q, rows, path, table, skip)


@pytest.mark.parametrize(("kind", "width"), in_turn_params(list(KINDS), [70, 16]))
def test_pieces_of_a_chain_follow_one_another(kind, width, kernel_device):
    """Of the first request three pieces, of which the last has few rows; of the second two, of which one has none."""
    keeps = KINDS[kind]
    drawn = Drawn(width, kernel_device)
    q, rows = drawn.rows(keeps, 6, width)
    slots, count = torch.tensor([3, 3, 3, 2, 2, 0]), torch.tensor([width, width, 5, width - 3, 0, 0])
    follows = torch.tensor([False, True, True, False, True, False])
    ends = torch.tensor([False, False, True, True, False, False])
    marked, mark_row = torch.tensor([0, 9, 0, 0, 0, 0]), torch.tensor([0, ROWS - 1, 0, 0, 0, 0])
    path = PathRows(slots, None, count, marked, mark_row, follows, ends, width, ROWS)
    path = PathRows(*(each.to(kernel_device) if isinstance(each, Tensor) else each for each in path))
    hold_chain(keeps, q, rows, path, drawn.state(keeps, ROWS + 1), None)


def hold_chain(
    keeps: RecurrentState, q: Tensor, rows: StateRows, path: PathRows, table: Tensor, skip: Tensor | None
) -> None:
    """The outputs of rows that exist, and the states behind them, whatever stands in the others."""
    exists = torch.arange(path.width, device=q.device) < path.row_counts[:, None]
    clean = StateRows(*(values.clone() for values in rows))
    for values, others in zip(rows, clean, strict=True):
        values[~exists], others[~exists] = torch.nan, 0
    kept = {*path.slots[path.row_counts > 0].tolist()}
    table[[row for row in range(ROWS + 1) if row not in {*path.slots.tolist()}]] = torch.nan
    expected, before = table.double(), table.clone()
    wanted = chain_outputs.reference(
        *exact((q, clean)), SlotStates(expected, path.slots), path, exact(skip), keeps.delta
    )
    out = chain_outputs.triton(q, rows, SlotStates(table, path.slots), path, skip, keeps.delta)
    assert_close(out[exists], wanted[exists])
    if path.snapshot_rows is not None:
        kept |= {*path.snapshot_rows[path.snapshot_counts > 0].tolist()}
    for row in range(ROWS):
        if row in kept:
            assert_close(table[row], expected[row])
        else:
            assert torch.equal(table[row].nan_to_num(), before[row].nan_to_num())


GROUPED = DELTA.columns._replace(k_column=20, v_column=40, k_head_stride=190, v_group_stride=190)
ORDERS = {
    "delta": (DELTA, DELTA.columns, True),
    "grouped": (DELTA, GROUPED, False),
    "added": (ADDED, ADDED.columns._replace(q_column=32, k_column=16, v_column=0), False),
    "convolution": (RecurrentState(taps=3, conv_channels=150), RecurrentState(taps=3, conv_channels=150).columns, True),
}
CONVOLVED = [
    ("delta", "tree", torch.float32),
    ("delta", "pieces", torch.float16),
    ("grouped", "chain", torch.float16),
    ("added", "pieces", torch.float32),
    ("added", "tree", torch.float16),
    ("convolution", "chain", torch.float32),
]


@pytest.mark.parametrize(
    ("order", "kind", "dtype"),
    fewer(
        product_params(list(ORDERS), ["tree", "chain", "pieces"], [torch.float32, torch.float16]),
        lambda *cell: cell in CONVOLVED,
    ),
)
def test_inputs_are_convolved_along_their_paths(order, kind, dtype, kernel_device):
    keeps, columns, bias = ORDERS[order]
    drawn, batch, width = Drawn(5, kernel_device), 3, 9
    parts = drawn(2, batch * width, 400)[..., :390]
    inputs = add_partial_sums.reference(parts, dtype)
    weight, of_bias = drawn(keeps.channels, keeps.taps).to(dtype), drawn(keeps.channels).to(dtype)
    conv = ShortConv(weight, of_bias if bias else None, applies_silu=keeps.heads > 0)
    tail, slots = drawn(ROWS, keeps.taps - 1, keeps.channels).to(dtype), drawn.slots(batch)
    parents = drawn.tree(batch, width)[0] if kind == "tree" else None
    follows = torch.tensor([False, True, False], device=kernel_device) if kind == "pieces" else None
    rows = RowInputs(tail, slots, parents, follows, width)
    gates, of_parts = None, None
    if keeps.heads:
        A_log, dt_bias, values = drawn(keeps.heads), drawn(keeps.heads), 6 * drawn(2, batch * width, 2 * keeps.heads)
        values, in_parts = add_partial_sums.reference(values, dtype), values
        gates, of_parts = (gates_of(keeps, columns, each, A_log, dt_bias) for each in (values, in_parts))
    made = []
    runs = (
        (prepare_rows.triton, lambda each: each),
        (prepare_rows.reference, exact),
        (prepare_rows.triton, lambda each: each),
    )
    for (run, cast), given in zip(runs, ((inputs, gates), (inputs, gates), (parts, of_parts)), strict=True):
        out = room(keeps, batch * width, inputs, cast)
        run(*cast(given), conv._replace(weight=cast(weight), bias=cast(conv.bias)), columns,
            rows._replace(tail=cast(tail)), out)  # fmt: skip
        made.append(out)
    close = CLOSE if dtype == torch.float32 else 4e-3
    for got, expected, of_parts in zip(*made, strict=True):
        assert (got is None) == (expected is None)
        if got is not None and got.numel():
            assert_close(got, expected, close)
            assert torch.equal(got, of_parts)
    assert torch.equal(made[0].inputs.double(), made[1].inputs)


def gates_of(keeps: RecurrentState, columns: ConvColumns, values: Tensor, A_log: Tensor, dt_bias: Tensor) -> GateInputs:
    share = keeps.heads // keeps.k_heads
    if not keeps.delta:
        return GateInputs(values, None, A_log, dt_bias, share, share, (0.1, 3.0))
    if columns is GROUPED:
        return GateInputs(values[..., share:], values, A_log, dt_bias, share, 2 * share)
    return GateInputs(values[..., keeps.heads :], values, A_log, dt_bias, share, share)


def room(keeps: RecurrentState, rows: int, inputs: Tensor, cast) -> PreparedRows:
    def empty(*shape: int, dtype: torch.dtype = inputs.dtype) -> Tensor:
        return cast(torch.full((rows, *shape), torch.nan, dtype=dtype, device=inputs.device))

    ordered = empty(keeps.channels)
    if not keeps.heads:
        return PreparedRows(None, None, empty(keeps.channels), None, ordered)
    k_shape, single = (keeps.k_heads, keeps.k_size), torch.float32
    q = empty(*k_shape, dtype=single if keeps.units else inputs.dtype)
    gates = empty(2, keeps.heads, dtype=single)
    return PreparedRows(q, empty(*k_shape, dtype=single), empty(keeps.heads, keeps.v_size), gates, ordered)


@pytest.mark.parametrize(("order", "kind"), in_turn_params(list(ORDERS), ["path", "chain", "pieces"]))
def test_tails_end_in_the_last_inputs_taken(order, kind, kernel_device):
    keeps, columns, _ = ORDERS[order]
    drawn, layers, width = Drawn(6, kernel_device), 2, 6
    inputs, tail = drawn(layers, 4 * width, 390), drawn(layers, ROWS + 1, keeps.taps - 1, keeps.channels)
    source = drawn.integers(4 * width, 4, width) if kind == "path" else None
    slots, count, marked = drawn.slots(4), torch.tensor([width, 2, 0, 1]), torch.tensor([0, 1, 0, 0])
    follows, ends = torch.tensor([False, True, False, False]), torch.tensor([False, True, False, True])
    mark_row, pieces = torch.tensor([0, ROWS - 1, 0, 0]), (None, None)
    if kind == "pieces":
        slots[0], pieces = slots[1], (follows.to(kernel_device), ends.to(kernel_device))
    on_device = [each.to(kernel_device) for each in (count, marked, mark_row)]
    path = PathRows(slots, source, *on_device, *pieces, width, ROWS)
    expected = tail.clone()
    commit_tails.reference(expected, inputs, path, columns)
    commit_tails.triton(tail, inputs, path, columns)
    assert torch.equal(tail[:, :ROWS], expected[:, :ROWS])


def test_a_snapshot_in_the_first_piece_has_old_inputs_of_the_slot(kernel_device, monkeypatch):
    """Also if the last piece's program runs first: a GPU gives no order."""
    drawn, width = Drawn(6, kernel_device), 6
    inputs, tail = drawn(1, 2 * width, 390), drawn(1, ROWS + 1, DELTA.taps - 1, DELTA.channels)
    given = [1, 1], [width, 2], [1, 0], [ROWS - 1, 0], [False, True], [False, True]
    slots, count, marked, mark_row, follows, ends = (torch.tensor(each, device=kernel_device) for each in given)
    path = PathRows(slots, None, count, marked, mark_row, follows, ends, width, ROWS)
    expected = tail.clone()
    commit_tails.reference(expected, inputs, path, DELTA.columns)
    if kernel_device.type == "cpu":
        run_programs_in_reverse(monkeypatch)
    commit_tails.triton(tail, inputs, path, DELTA.columns)
    assert torch.equal(tail[:, :ROWS], expected[:, :ROWS])


@pytest.mark.parametrize("gate", [(1, 36, False), (2, 100, False), (1, 36, True)], ids=["heads", "grouped", "first"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_what_heads_read_is_normed_and_gated(gate, dtype, kernel_device):
    drawn, (share, step, is_first) = Drawn(7, kernel_device), gate
    read, values = drawn(5, 4, 36).to(dtype), drawn(5, 230)[:, 3:].to(dtype)
    weight = drawn(4 * 36 if is_first else 36).to(dtype)
    gate = OutputGate(values, share, step, is_first)
    out = gated_norm.triton(read, gate, weight, 1e-6)
    expected = gated_norm.reference(read.double(), gate._replace(values=values.double()), weight.double(), 1e-6)
    assert_close(out, expected, CLOSE if dtype == torch.float32 else 3e-3)


@pytest.mark.parametrize(
    ("is_first", "static", "is_whole"), pairwise_params([False, True], [False, True], [False, True])
)
def test_what_is_normed_and_gated_is_also_rounded(is_first, static, is_whole, kernel_device):
    """As by a launch of its own, to the bit, with a scale for each group or for the whole row."""
    drawn, size, groups = Drawn(9, kernel_device), 32, 6 if is_whole else 4
    read, parts = drawn(5, groups, size).half(), drawn(3, 5, groups * size + 3)[..., 3:]
    read[2, 1] = read[3] = 0
    weight = drawn(groups * size if is_first else size).half()
    gate, scale = OutputGate(parts, 1, size, is_first), torch.full((1,), 0.25, device=kernel_device)
    rounding = InputScales(None if is_whole else size, scale if static else None)
    rounded = gated_norm.triton(read, gate, weight, 1e-6, rounding)
    expected, scales = quantise_rows.triton(gated_norm.triton(read, gate, weight, 1e-6), rounding)
    assert torch.equal(rounded.values.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(rounded.scales, scales) and rounded.dtype == read.dtype
    summed = gate._replace(values=add_partial_sums.reference(parts, torch.float16))
    assert torch.equal(gated_norm.triton(read, summed, weight, 1e-6), gated_norm.triton(read, gate, weight, 1e-6))
    values = drawn(5, 2 * groups * size + 3)[:, 3:].half()
    alone = OutputGate(values, 2, 4 * size, False)
    gated = gated_norm.triton(read, alone, None)
    assert_close(gated, gated_norm.reference(read.double(), alone._replace(values=values.double()), None), 3e-3)
    rounded, (expected, _) = gated_norm.triton(read, alone, None, 0.0, rounding), quantise_rows.triton(gated, rounding)
    assert torch.equal(rounded.values.view(torch.uint8), expected.view(torch.uint8))
    with pytest.raises(EspalierError, match="not rounded in groups of 64"):
        gated_norm.triton(read, gate, weight, 1e-6, InputScales(64))
