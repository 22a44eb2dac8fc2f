"""The contract of attention backends.

Every forward pass (a prompt chunk, a draft level, a verify tree, a draft extend) has queries [B, Q].  They attend to
committed rows in pages and to staged rows [B, R].  A backend must supply attention over the committed rows, with its
log-sum-exp.  Attention over the staged rows (kernels/ops/attention.py:staged_attention) and the merge are then shared
code.  A backend may override `attend` to do both in one kernel.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from espalier.attention.support import Support
from espalier.cache.kv import PagedKV
from espalier.cache.layer_spec import LayerSpec
from espalier.errors import EspalierError
from espalier.kernels.ops.attention import AttentionInputs, Nodes, Prefix, empty_prefix, merge_results, staged_attention
from espalier.kernels.ops.selection import IndexQueries, KVSplits, SelectedRows, scores_of, top_rows
from espalier.kernels.state.kv_scales import KVScales


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

    def with_more_rows(self, rows: int) -> "CommittedLengths":
        """With `rows` more rows for each request."""
        return replace(self, at_most=tuple(length + rows for length in self.at_most))


class SelectedMask(NamedTuple):
    """mask: [B, Q, P + R] bool, whether a query attends to the row at each of the first P positions, and to each staged
    row."""

    mask: Tensor


# The chosen rows of a layer's queries, in the form of its backend.
Selection = SelectedMask | SelectedRows


def narrow_selection(selection: Selection, kept: Tensor) -> Selection:
    """The selection [B, 1, ...] of the rows `kept` [B] of the B · Q rows."""
    return type(selection)(*(values.flatten(0, 1)[kept][:, None] for values in selection))


@dataclass(eq=False)
class Attention:
    """The plan of one pass.  Subclasses implement over_prefix, and may override attend."""

    pages: PagedKV
    specs: Sequence[LayerSpec]
    prefix: Prefix
    nodes: Nodes

    def over_prefix(self, q: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Attention of q [B, Q, heads, k_size] over the committed rows inside the layer's window.

        Returns out [B, Q, heads, v_size] and lse [B, Q, heads] float32 (float64 for float64), natural log.  An empty
        prefix gives zeros and lse -inf.
        """
        raise NotImplementedError

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None, selected: Selection | None = None
    ) -> Tensor:
        """Attention of q [B, Q, heads, k_size] over the committed rows and the staged k, v [B, R, kv_heads, size].

        k, v: as the layer's `keeps.read` gives them.
        sink: [heads] float32 (float64 for float64), one extra logit per head that joins the softmax and has no value.
        selected: the only rows that the queries attend to, of a layer without sinks; None: all that they see.
        Returns out [B, Q, heads, v_size].
        """
        assert selected is None, "a backend that selects attends to its selections"
        over_staged = staged_attention(self.inputs(layer, q, (k, v), *self._no_prefix))
        return merge_results(self.over_prefix(q, layer), over_staged, sink)

    def over_committed(self, layer: int, q: Tensor) -> Tensor:
        """As `attend` where there are no staged rows; zeros for an empty prefix."""
        return self.over_prefix(q, layer)[0]

    def select(self, layer: int, queries: IndexQueries, keys: Tensor) -> Selection | None:
        """The rows that each query attends to, the layer's topk at most; None: all that it sees.

        queries: [B, Q, ...]; keys: [B, R, 1, size], the index keys of the staged rows.
        """
        raise EspalierError("this attention backend does not attend to chosen rows; use another one")

    def select_by_mask(
        self, layer: int, queries: IndexQueries, keys: Tensor, rows: Tensor, held: Tensor
    ) -> SelectedMask:
        """`select` in plain torch.  rows [B, P]: rows of the pages; held [B, P]: whether they exist."""
        committed = self.pages.layers[layer][1].index_select(0, rows.flatten()).view(*rows.shape, keys.shape[3])
        scores = scores_of(queries, torch.cat((committed, keys[:, :, 0]), 1))
        seen = torch.cat((held[:, None].expand(-1, scores.shape[1], -1), self.nodes.visible_rows(None)), 2)
        topk = self.specs[layer].topk
        assert topk is not None
        return SelectedMask(top_rows(scores.masked_fill_(~seen, -torch.inf), topk))

    def inputs(
        self,
        layer: int,
        q: Tensor,
        staged: tuple[Tensor, Tensor] | None,
        prefix: Prefix,
        splits: KVSplits,
        sink: Tensor | None = None,
    ) -> AttentionInputs:
        """The arguments of one of our attention kernels in a layer."""
        spec, pages, page_size = self.specs[layer], self.committed(layer), self.pages.page_size
        rows = (q, pages, page_size, prefix, self.nodes, splits, spec.softmax_scale, staged)
        return AttentionInputs(*rows, spec.window, sink, spec.softcap, self.scales(layer))

    @cached_property
    def _no_prefix(self) -> tuple[Prefix, KVSplits]:
        return empty_prefix(self.nodes.positions.shape[0], self.nodes.positions.device)

    def scales(self, layer: int) -> KVScales | None:
        """The scales of a layer whose rows are FP8."""
        return self.pages.scales.get(layer)

    def committed(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V [rows, kv_heads, size] of all pages of a layer, as they are stored."""
        return self.specs[layer].rows.read(self.pages.layers[layer])


class AttentionBackend:
    """A backend plans each pass.  attention: the class of its plans.

    `plan` and the Attention it returns may run inside a captured CUDA graph: they must not read lengths on the host.
    """

    support: Support
    attention: type[Attention]

    def prepare(self, lengths: CommittedLengths) -> None:
        """Called on the host before every launch: eager, capture and replay, on the stream of the launch."""

    def plan(self, pages: PagedKV, specs: Sequence[LayerSpec], prefix: Prefix, nodes: Nodes) -> Attention:
        """The plan for some queries of a pass, shared by all layers that have these queries."""
        return self.attention(pages, specs, prefix, nodes)


class GroupedBackend:
    """groups: for each group its layers and its backend.  of_layer: the backend of each layer."""

    def __init__(self, groups: Sequence[tuple[tuple[int, ...], AttentionBackend]]):
        self.groups = tuple(groups)
        self.of_layer = {layer: backend for layers, backend in self.groups for layer in layers}

    @property
    def captures_prefill(self) -> bool:
        return all(backend.support.prefill_graph for _, backend in self.groups)

    def prepare(self, lengths: CommittedLengths) -> None:
        for _, backend in self.groups:
            backend.prepare(lengths)
