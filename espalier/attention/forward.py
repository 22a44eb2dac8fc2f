"""A forward pass as an object (Pass): the rows that run, the rows that they attend to, and the buffers of the layers.

`ModelCache.begin_pass` creates the passes of rounds and of drafters.  A layer calls `Pass.write`, then `Pass.attend`.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from espalier.attention.base import AttentionPlan, GroupedBackend, Selection, narrow_selection
from espalier.cache.kv import PagedKV, StagedKV
from espalier.cache.layer_spec import LatentKV, LayerSpec, RecurrentState
from espalier.cache.states import PassStates, StateAccess, StateTable
from espalier.kernels.ops.attention import Nodes, Prefix
from espalier.kernels.ops.rope import Rotation
from espalier.kernels.ops.selection import IndexerInputs, IndexerQueries
from espalier.kernels.ops.tree import gather_rows


class Rope(Hashable, Protocol):
    """One RoPE of a model, with its tables of cos and sin (espalier/models/rope.py)."""

    def rows(self, positions: Tensor) -> Rotation:
        """Returns cos and sin for the flattened positions."""
        ...


@dataclass(frozen=True)
class ModelCache:
    """The buffers in which the layers of one model keep rows, and the attention backends of these layers.
    specs: the specs of the target's layers, then of the draft's layers.
    layers: the indices in `specs` of this model's layers.  states: None for a model whose layers keep no states."""

    specs: Sequence[LayerSpec]
    layers: range
    pages: PagedKV
    staging: StagedKV
    backend: GroupedBackend
    states: StateTable | None = None

    def begin_pass(
        self,
        prefix: Prefix,
        nodes: Nodes | Sequence[Nodes],
        tokens: Tensor,
        positions: Tensor | None = None,
        *,
        width: int | None = None,
        first_staged: int = 0,
        layers: range | None = None,
        page_rows: Tensor | None = None,
        commits_by_layer: bool = False,
        needed_row: Tensor | None = None,
        state_access: StateAccess | None = None,
        chosen_rows: "ChosenRows | None" = None,
    ) -> "Pass":
        """Returns a pass of the model over Q new rows of each of B requests, after a committed prefix.

        nodes: the staged rows that each new row attends to; one Nodes per layer if only some layers are causal.
        tokens: [B, Q] int64, see Pass.
        positions: [B, Q], the RoPE positions; by default the positions of the nodes.
        width: the number of staged rows that are reserved for each request; by default Q.
        first_staged: the index of the pass's first row among the staged rows of its request.
        layers: the layers that run; by default all layers of this model.
        page_rows: [B · Q], the page rows to which the new rows are copied, 0 for padding; None to copy no rows.
        commits_by_layer: whether each layer copies its rows to the pages before it attends, instead of `Pass.commit`.
        Needed in two cases.  If a request has several pieces of its prompt in the pass, a later piece reads the rows of
        earlier pieces from the pages.  In a draft with several modules, a pass fills the rows of only one module.
        needed_row: [B] int64, see Pass.
        state_access: the recurrent states that the layers read; None if no layer of the pass keeps a state.
        chosen_rows: the rows that run; None to run all B · Q rows."""
        first_nodes = nodes if isinstance(nodes, Nodes) else nodes[0]
        positions = first_nodes.positions if positions is None else positions
        return Pass(
            cache=self,
            prefix=prefix,
            nodes=nodes,
            tokens=tokens if chosen_rows is None else chosen_rows.select(tokens),
            positions=positions if chosen_rows is None else chosen_rows.select(positions),
            staged_width=tokens.shape[1] if width is None else width,
            first_staged=first_staged,
            layers=self.layers if layers is None else layers,
            page_rows=page_rows,
            commits_by_layer=commits_by_layer,
            needed_row=needed_row,
            state_access=state_access,
            chosen_rows=chosen_rows,
        )

    @property
    def snapshot_rows(self) -> range | None:
        """The rows of the state tables for snapshots (copies of recurrent states); None for a model without states."""
        return None if self.states is None else self.states.snapshot_rows

    def before_launch(self, cleared_pages: Sequence[int], state_copies: Sequence[tuple[int, int]]) -> None:
        """Zeroes pages, then copies rows of the state tables in order.  state_copies: (source row, destination row)."""
        self.pages.clear(cleared_pages)
        if self.states is not None:
            self.states.copy_rows(state_copies)

    def commit(self, source: Tensor, rows: Tensor, path: StateAccess | None = None) -> None:
        """Copy staging rows `source` [N] of all layers to page rows `rows` [N].

        path: after a round, the slots and the lengths of their accepted paths, for layers that keep states; else None.
        With a path, `source` has equally many rows for each slot."""
        self.pages.commit(self.staging, source, rows)
        if self.states is not None and path is not None:
            self.states.commit(path, source.view(len(path.slots), -1))


@dataclass(frozen=True)
class ChosenRows:
    """Chooses R of the B · Q rows of a pass.  Only these rows run, as one request with R rows.
    pass_rows: [R] int64, ascending: the index of each chosen row among all B · Q rows.  The first row of each request
    is always chosen.
    chosen_index: [B, Q] int64: the index of each of the B · Q rows among the R chosen rows.  A row that is not chosen
    has the index of its request's first row, and its results are not used."""

    pass_rows: Tensor
    chosen_index: Tensor

    @classmethod
    def from_pass_rows(cls, pass_rows: Tensor, batch: int, width: int) -> "ChosenRows":
        """Returns the ChosenRows for the rows `pass_rows` [R] of a pass with batch · width rows."""
        order = torch.arange(len(pass_rows), device=pass_rows.device)
        index = torch.full((batch * width,), -1, device=order.device).scatter(0, pass_rows, order).view(batch, width)
        return cls(pass_rows, torch.where(index < 0, index[:, :1], index))

    def select(self, values: Tensor) -> Tensor:
        """Returns the chosen rows [1, R, ...] of values [B, Q, ...]."""
        return values.flatten(0, 1)[self.pass_rows][None]

    def to_tree_rows(self, values: Tensor) -> Tensor:
        """Expands values [1, R, ...] of the chosen rows to [B, Q, ...]; see `chosen_index`."""
        return values[0][self.chosen_index]

    def fill_unchosen_rows(self, planes: Sequence[Tensor]) -> None:
        """In each plane, copies a request's first staged row over its rows that are not chosen, which hold old data."""
        for plane in planes:
            plane[: self.chosen_index.numel()] = plane[self.pass_rows[self.chosen_index.flatten()]]


@dataclass(eq=False)
class Pass:
    """One forward pass of a model.  `ModelCache.begin_pass` makes the pass, and describes the fields that are missing
    here.  staged_width: the argument `width` of begin_pass.
    tokens: [B, Q] int64.  A negative token marks a void node or padding.  Such a row runs with the token of its
    request's first row, or with token 0 if that token is negative too, and uses no expert.
    positions: [B, Q] int64, for RoPE.
    page_rows: [B · Q], the page rows to which the new rows are copied; None: no copy.  commits_by_layer: whether each
    layer copies its rows before it attends.  state_access: the recurrent states that layers read, or None.  needed_row:
    [B] int64, the row of each request whose output is read; None for all rows.  The last layer writes all rows, but
    computes the output of the needed rows only.
    chosen_rows: the rows that run; None for all rows.  If set, tokens, positions and tensors of layers are [1, R, ...].
    """

    cache: ModelCache
    prefix: Prefix
    nodes: Nodes | Sequence[Nodes]
    tokens: Tensor
    positions: Tensor
    staged_width: int
    first_staged: int
    layers: range
    page_rows: Tensor | None
    commits_by_layer: bool
    needed_row: Tensor | None
    state_access: StateAccess | None = None
    chosen_rows: ChosenRows | None = None

    def __post_init__(self) -> None:
        self._values_at_positions: dict[Hashable, Any] = {}
        self._plans: dict[tuple[int, int], AttentionPlan] = {}
        # The index queries of a layer, kept from its `write` until its `attend`, and the last indexer's choice.
        self._index_queries: IndexerQueries | None = None
        self._selection: Selection | None = None

    def write(self, layer: int, *values: Any, index: IndexerInputs | None = None) -> Tensor:
        """Writes a layer's new rows (K and V, or inputs of a state) to staging.  Returns the layer's queries.

        A layer that reads the rows of another layer writes nothing.
        layer: the layer's index among the layers that run.
        values: the last arguments of the layer's `cache_spec.write`, or of PassStates.write if it keeps a state.
        index: the index queries and keys of a layer with an indexer.  The queries choose the rows for this layer, and
        for later layers that attend to chosen rows without an indexer of their own.
        Returns the queries of the rows whose output the layer computes: [B, Q, heads, k_size], or [B, 1, ...] with
        `needed_row`.  For a layer that keeps a state, returns the queries of all rows.  For a layer with only a
        convolution, returns the convolution's output at the rows that the layer computes, [B, Q, channels] or [B, 1,
        channels]."""
        spec_index, pages, staging = self.layers[layer], self.cache.pages, self.cache.staging
        spec = self.cache.specs[spec_index]
        if self.cache.states is not None and isinstance(spec.cache_spec, RecurrentState):
            q = self._states.write(spec_index, self.tokens.shape[1], *values)
            # Without gates, q is the convolution's output.
            return q if values[1] is not None else self._select_kept_rows(layer, q)
        shares = spec.shares_with is not None
        # A layer that reads another layer's rows writes no K and V heads, so its planes have 0 heads.
        planes = tuple(plane[:, :0] for plane in pages.layers[spec_index]) if shares else staging.layers[spec_index]
        q = spec.row_spec.write(self.rows, planes, pages.scales.get(spec_index), *values)
        if index is not None:
            assert isinstance(spec.cache_spec, LatentKV)
            self._index_queries = spec.cache_spec.write_index(self.rows, planes, index)
        if self.chosen_rows is not None:
            self.chosen_rows.fill_unchosen_rows(planes)
        if self.commits_by_layer and self.page_rows is not None and not shares:
            pages.commit_layer(staging, spec_index, self.rows, self.page_rows)
        kept = None if self.needed_row is None else self.kept_rows(layer)
        return q.view(*self.tokens.shape, *q.shape[1:]) if kept is None else q[kept][:, None]

    def attend(self, layer: int, q: Tensor, sink: Tensor | None = None) -> Tensor:
        """Computes attention of the queries that `write` returned over the rows of K and V that they see: committed
        rows, which are in pages, and staged rows, which are the rows of this pass.

        sink: see AttentionPlan.attend.  For a layer that keeps a state, sink holds factors [heads], and factor · v is
        added to each row's output.  Returns [B, Q, heads, v_size], or [B, 1, ...] with `needed_row`."""
        spec_index = self.layers[layer]
        batch, queries = self.tokens.shape if self.chosen_rows is None else self.chosen_rows.chosen_index.shape
        if self.cache.states is not None and isinstance(self.cache.specs[spec_index].cache_spec, RecurrentState):
            return self._select_kept_rows(layer, self._states.read(spec_index, q, sink))
        if spec_index not in self.cache.staging.layers:
            # A draft layer that reads the target's rows has no staged rows.
            return self._plan_of_layer(layer).attend_committed(spec_index, q)
        spec, plan = self.cache.specs[spec_index], self._plan_of_layer(layer)
        planes = self.cache.staging.staged_planes(spec_index, batch, queries, self.staged_width, self.first_staged)
        k, v = spec.row_spec.read(planes)
        if self.chosen_rows is not None:
            return self.chosen_rows.select(plan.attend(spec_index, self.chosen_rows.to_tree_rows(q), k, v, sink))
        selection = None if spec.topk is None else self._selection_of(layer, plan, planes)
        return plan.attend(spec_index, q, k, v, sink, selection)

    def _selection_of(self, layer: int, plan: AttentionPlan, planes: tuple[Tensor, ...]) -> Selection | None:
        """Returns the rows that this layer, or an earlier layer, chose for the layer's queries; None for all rows."""
        kept = self.kept_rows(layer)
        if self._index_queries is not None:
            q, weights = (
                self._select_kept_rows(layer, values.unflatten(0, self.tokens.shape)) for values in self._index_queries
            )
            self._selection = plan.select(self.layers[layer], IndexerQueries(q, weights), planes[1])
            self._index_queries = None
        elif kept is not None and self._selection is not None:
            self._selection = narrow_selection(self._selection, kept)
        return self._selection

    def _select_kept_rows(self, layer: int, values: Tensor) -> Tensor:
        """Returns the rows of values [B, Q, ...] that the layer computes."""
        kept = self.kept_rows(layer)
        return values if kept is None else values.flatten(0, 1)[kept][:, None]

    def commit(self) -> None:
        """Copies the new rows of all layers to pages.  Does nothing if each layer has copied its own rows."""
        if self.page_rows is not None and not self.commits_by_layer:
            self.cache.commit(self.rows, self.page_rows)

    def kept_rows(self, layer: int) -> Tensor | None:
        """Returns [B]: the indices, among B · Q rows, of the rows that the layer computes; None for all rows."""
        return self._needed_rows if self.needed_row is not None and layer == len(self.layers) - 1 else None

    @property
    def out_shape(self) -> tuple[int, int]:
        """The shape of the rows after the last layer: (B, Q), or (B, 1) with `needed_row`."""
        batch, queries = self.tokens.shape
        return batch, queries if self.needed_row is None else 1

    def rotation(self, rope: Rope) -> Rotation:
        """Returns cos and sin at the rows' positions.  A RoPE's tables are read once per pass."""
        if rope not in self._values_at_positions:
            self.store_rotation(rope, rope.rows(self.positions))
        return self._values_at_positions[rope]

    def table_at_positions(self, layer: int, table: Tensor) -> Tensor:
        """Returns the values of `table` at the positions of the rows that the layer computes, as [B, Q, 1, 1].
        table: one value for each position.  It is read once per pass."""
        if table not in self._values_at_positions:
            self._values_at_positions[table] = gather_rows(self.positions.reshape(1, -1), table[None, :, None])
        values, kept = self._values_at_positions[table].view(-1), self.kept_rows(layer)
        return (values if kept is None else values[kept]).view(len(self.tokens), -1, 1, 1)

    def store_rotation(self, rope: Rope, rotation: Rotation) -> None:
        """Stores cos and sin at the rows' positions.  The embedding's kernel reads them (models/layers/linear.py)."""
        self._values_at_positions[rope] = rotation

    @cached_property
    def rows(self) -> Tensor:
        """The indices [B · Q] of this pass's rows in the staging buffers, equal for all layers."""
        if self.chosen_rows is not None:
            return self.chosen_rows.pass_rows
        return self.cache.staging.staging_rows(self.tokens, self.staged_width, self.first_staged)

    @cached_property
    def _states(self) -> PassStates:
        states, state_access, nodes = self.cache.states, self.state_access, self.nodes
        assert states is not None and state_access is not None, "layers that keep a state run for a target alone"
        assert isinstance(nodes, Nodes)
        return PassStates(states, state_access, nodes.parents, nodes.ancestor_bits)

    @cached_property
    def _needed_rows(self) -> Tensor:
        batch, queries = self.tokens.shape
        assert self.needed_row is not None
        return torch.arange(batch, device=self.tokens.device) * queries + self.needed_row

    @cached_property
    def _needed_nodes(self) -> Nodes:
        assert isinstance(self.nodes, Nodes) and self.needed_row is not None, "only a chain computes single rows"
        return self.nodes.single_query(self.needed_row)

    def _plan_of_layer(self, layer: int) -> AttentionPlan:
        """Returns the layer's plan.  Layers with one backend share a plan if their queries see the same rows."""
        if self.needed_row is not None and self.kept_rows(layer) is not None:
            nodes = self._needed_nodes
        else:
            nodes = self.nodes if isinstance(self.nodes, Nodes) else self.nodes[layer]
        backend = self.cache.backend.backend_by_layer[self.layers[layer]]
        key = (id(backend), id(nodes))
        if key not in self._plans:
            self._plans[key] = backend.plan(self.cache.pages, self.cache.specs, self.prefix, nodes)
        return self._plans[key]
