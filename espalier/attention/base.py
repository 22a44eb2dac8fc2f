"""The contract of attention backends.

Every forward pass (a prompt chunk, a draft level, a verify tree, a draft extend) has queries [B, Q].  They attend to
committed rows in pages and to staged rows [B, R].  A backend must supply attention over the committed rows, with its
log-sum-exp.  Attention over the staged rows (kernels/ops/attention.py:staged_attention) and the merge are then shared
code.  A backend may override `attend` to do both in one kernel.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from espalier.attention.support import Support
from espalier.cache.kv import PagedKV
from espalier.cache.layer_spec import LayerSpec
from espalier.errors import EspalierError
from espalier.kernels.attention.ancestor_bits import bits_up_to, seen_rows
from espalier.kernels.ops.attention import NoPrefix, Staged, merge, staged_attention
from espalier.kernels.ops.selection import IndexQueries, SelectedRows, scores_of, top_rows
from espalier.kernels.state.kv_scales import KVScales

T = TypeVar("T")


@dataclass(frozen=True)
class CommittedLengths:
    """What the host knows about the committed lengths before a launch.

    at_most: upper bound per request (per piece in a prefill pass), in batch order; 0 for padding at the end.
    exact: the bounds are the lengths, as where no round is in flight.  A capture says True only if every replay of its
    graph will.
    in_graph: whether the launch is a CUDA graph: its capture, the eager run before the capture, or a replay.
    """

    at_most: tuple[int, ...]
    exact: bool
    in_graph: bool = False

    @property
    def longest(self) -> int:
        return max(self.at_most, default=0)

    def padded(self, batch: int) -> "CommittedLengths":
        """With padding requests up to `batch`."""
        return replace(self, at_most=self.at_most + (0,) * (batch - len(self.at_most)))

    def longer(self, rows: int) -> "CommittedLengths":
        """With `rows` more rows for each request."""
        return replace(self, at_most=tuple(length + rows for length in self.at_most))


@dataclass(frozen=True)
class Prefix:
    """The committed rows of each request of a pass.

    page_table: [B, table_width] int32; length: [B] int64, rows first .. length-1 exist (first is 1 for an EAGLE draft:
    a row needs the feature of the previous token).  planned: the backend's plan, shared by all passes over this prefix.
    Make a new Prefix whenever a length may have changed.
    """

    page_table: Tensor
    length: Tensor
    first: int = 0
    planned: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)

    def shared(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` returns, made once for all passes over this prefix."""
        if key not in self.planned:
            self.planned[key] = make()
        made: T = self.planned[key]
        return made

    def holds(self, positions: Tensor) -> Tensor:
        """[B, P] bool: whether a row exists at each position.  Other rows must not be read: pages are not cleared."""
        return (positions >= self.first) & (positions < self.length[:, None])


@dataclass(frozen=True)
class Nodes:
    """The staged rows and the queries of a pass.

    positions: [B, Q], of the queries; row_positions: [B, R], of the staged rows; ancestor_bits: [B, Q, W] int64, the
    staged rows that a query sees (its ancestors and itself), or None for a chain, where each row follows the previous
    one.  The queries are some of the R rows; in a chain Q = R.
    parents: [B, R], the row before each row, of the root itself, for layers that keep a state; None for a chain.
    """

    positions: Tensor
    row_positions: Tensor
    ancestor_bits: Tensor | None
    parents: Tensor | None = None

    @classmethod
    def chain(cls, positions: Tensor) -> "Nodes":
        """A chain at positions [B, Q]."""
        return cls(positions, positions, None)

    def only(self, row: Tensor) -> "Nodes":
        """Of a chain, the query in `row` [B] of each request, over the same rows."""
        positions = self.positions.gather(1, row[:, None])
        return Nodes(positions, self.row_positions, bits_up_to(row, self.row_positions.shape[1]))

    def seen(self, window: int | None) -> Tensor:
        """[B, Q, R] bool: ancestors inside the window.  Every row sees itself, also padding: no softmax is empty."""
        return seen_rows(self.ancestor_bits, self.positions, self.row_positions, window)


class SelectedMask(NamedTuple):
    """mask: [B, Q, P + R] bool, whether a query attends to the row at each of the first P positions, and to each staged
    row."""

    mask: Tensor


# What the queries of a layer that chooses attend to, in the form of its backend.
Selection = SelectedMask | SelectedRows


def narrowed(selection: Selection, kept: Tensor) -> Selection:
    """The selection [B, 1, ...] of the rows `kept` [B] of the B · Q rows."""
    return type(selection)(*(values.flatten(0, 1)[kept][:, None] for values in selection))


class AttentionBackend(Protocol):
    """A backend plans each pass.

    `plan` and the Attention it returns may run inside a captured CUDA graph: they must not read lengths on the host.
    """

    support: Support

    def prepare(self, lengths: CommittedLengths) -> None:
        """Called on the host before every launch: eager, capture and replay, on the stream of the launch."""
        ...

    def plan(self, pages: PagedKV, specs: Sequence[LayerSpec], prefix: Prefix, nodes: Nodes) -> "Attention":
        """The plan for some queries of a pass, shared by all layers that have these queries."""
        ...


class Attention:
    """The plan of one pass.  Subclasses implement over_prefix, and may override attend."""

    def __init__(self, pages: PagedKV, specs: Sequence[LayerSpec], prefix: Prefix, nodes: Nodes):
        self.pages = pages
        self.specs = specs
        self.prefix = prefix
        self.nodes = nodes

    def over_prefix(self, q: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Attention of q [B, Q, heads, k_size] over the committed rows inside the layer's window.

        Returns out [B, Q, heads, v_size] and lse [B, Q, heads] float32 (float64 for float64), natural log.  An empty
        prefix gives zeros and lse -inf.
        """
        raise NotImplementedError

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None) -> Tensor:
        """Attention of q [B, Q, heads, k_size] over the committed rows and the staged k, v [B, R, kv_heads, size].

        k, v: as the layer's `keeps.read` gives them.
        sink: [heads] float32 (float64 for float64), one extra logit per head that joins the softmax and has no value.
        Returns out [B, Q, heads, v_size].
        """
        spec = self.specs[layer]
        staged = Staged(k, v, self.nodes.row_positions, self.nodes.ancestor_bits)
        over_staged = staged_attention(
            q,
            staged,
            self.nodes.positions,
            spec.softmax_scale,
            spec.window,
            self._no_prefix,
            self.scales(layer),
            spec.softcap,
        )
        return merge(self.over_prefix(q, layer), over_staged, sink)

    def select(self, layer: int, queries: IndexQueries, keys: Tensor) -> Selection | None:
        """The rows that each query attends to, the layer's topk at most; None: all that it sees.

        queries: [B, Q, ...]; keys: [B, R, 1, size], the index keys of the staged rows.
        """
        raise EspalierError("this attention backend does not attend to chosen rows; use another one")

    def attend_selected(self, layer: int, q: Tensor, k: Tensor, v: Tensor, selection: Selection | None) -> Tensor:
        """As `attend`, over the rows of `selection` alone; None: over all."""
        assert selection is None, "a backend that selects attends to its selections"
        return self.attend(layer, q, k, v)

    def select_by_mask(
        self, layer: int, queries: IndexQueries, keys: Tensor, rows: Tensor, held: Tensor
    ) -> SelectedMask:
        """`select` in plain torch.  rows [B, P]: rows of the pages; held [B, P]: whether they exist."""
        committed = self.pages.layers[layer][1].index_select(0, rows.flatten()).view(*rows.shape, keys.shape[3])
        scores = scores_of(queries, torch.cat((committed, keys[:, :, 0]), 1))
        seen = torch.cat((held[:, None].expand(-1, scores.shape[1], -1), self.nodes.seen(None)), 2)
        topk = self.specs[layer].topk
        assert topk is not None
        return SelectedMask(top_rows(scores.masked_fill_(~seen, -torch.inf), topk))

    @cached_property
    def _no_prefix(self) -> NoPrefix:
        return NoPrefix.of(self.nodes.positions.shape[0], self.nodes.positions.device)

    def scales(self, layer: int) -> KVScales | None:
        """The scales of a layer whose rows are FP8."""
        return self.pages.scales.get(layer)

    def committed(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V [rows, kv_heads, size] of all pages of a layer, as they are stored."""
        return self.specs[layer].rows.read(self.pages.layers[layer])
