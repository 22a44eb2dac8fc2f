"""The contract of attention backends.

Every forward pass of a target or a draft has queries [B, Q].  The queries attend to committed rows (K and V of earlier
tokens, in pages) and to staged rows [B, R] (K and V that this pass writes to a staging buffer, cache/kv.py).  A backend
must implement attention over the committed rows, and return its log-sum-exp.  Shared code computes attention over the
staged rows (kernels/ops/attention.py:staged_attention) and merges the two results.  A backend may override
AttentionPlan.attend, to attend to all rows in its own kernel.
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
from espalier.kernels.ops.selection import IndexerQueries, KVSplits, SelectedRows, mark_top_rows, score_keys
from espalier.kernels.state.kv_scales import KVScales


@dataclass(frozen=True)
class CommittedLengths:
    """The numbers of committed rows of a launch's requests (of a prefill pass or a round), as far as the host knows.
    max_lengths: an upper bound for each request (in a prefill pass, for each piece), in batch order; 0 for padding.
    exact: whether each bound equals the true length.  This is so in rounds without overlap.  The capture of a CUDA
    graph sets True only if the bounds are exact in every replay.
    in_graph: whether the launch captures a CUDA graph, replays it, or is the eager run before the capture."""

    max_lengths: tuple[int, ...]
    exact: bool
    in_graph: bool = False

    @property
    def max_length(self) -> int:
        return max(self.max_lengths, default=0)

    def padded_to(self, batch: int) -> "CommittedLengths":
        """Returns the lengths with padding requests up to `batch`."""
        return replace(self, max_lengths=self.max_lengths + (0,) * (batch - len(self.max_lengths)))

    def with_more_rows(self, num_rows: int) -> "CommittedLengths":
        """Returns the lengths with `num_rows` more rows for each request."""
        return replace(self, max_lengths=tuple(length + num_rows for length in self.max_lengths))


class SelectedMask(NamedTuple):
    """mask: [B, Q, P + R] bool, whether a query attends to each of P committed positions and each of R staged rows."""

    mask: Tensor


# The rows that a layer's queries attend to, in sparse attention.  A backend uses one of the two types.
Selection = SelectedMask | SelectedRows


def narrow_selection(selection: Selection, kept_rows: Tensor) -> Selection:
    """Returns the selections [B, 1, ...] of one query per request.  kept_rows: [B], its index in all B · Q queries."""
    return type(selection)(*(values.flatten(0, 1)[kept_rows][:, None] for values in selection))


@dataclass(eq=False)
class AttentionPlan:
    """Computes the attention of one pass.  Subclasses implement attend_prefix, and may override attend.

    pages: K and V of all layers.  specs: one LayerSpec per layer.  prefix: the committed rows of each request.
    nodes: the queries and the staged rows of the pass."""

    pages: PagedKV
    specs: Sequence[LayerSpec]
    prefix: Prefix
    nodes: Nodes

    def attend_prefix(self, q: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Computes attention of q [B, Q, heads, k_size] over the committed rows inside the layer's window.

        Returns out [B, Q, heads, v_size] and the log-sum-exp lse [B, Q, heads], natural log, float32 (float64 for a
        float64 model).  For an empty prefix, out is 0 and lse is -inf."""
        raise NotImplementedError

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None, selected: Selection | None = None
    ) -> Tensor:
        """Computes attention of q [B, Q, heads, k_size] over committed rows and the staged k, v [B, R, kv_heads, size].

        k, v: the results of the layer's `cache_spec.read`.
        sink: [heads] float32 (float64 for a float64 model), one more logit of each head's softmax, without a value.
        selected: the rows that the queries attend to, for a layer without sinks; None for all visible rows.
        Returns out [B, Q, heads, v_size]."""
        assert selected is None, "a backend that selects attends to its selections"
        over_staged = staged_attention(self.kernel_inputs(layer, q, (k, v), *self._no_prefix))
        return merge_results(self.attend_prefix(q, layer), over_staged, sink)

    def attend_committed(self, layer: int, q: Tensor) -> Tensor:
        """Computes attention of q [B, Q, heads, k_size] over only the committed rows; zeros for an empty prefix."""
        return self.attend_prefix(q, layer)[0]

    def select(self, layer: int, queries: IndexerQueries, keys: Tensor) -> Selection | None:
        """Returns the rows that each query attends to, at most the layer's topk; None for all visible rows.

        queries: [B, Q, ...]; keys: [B, R, 1, size], the index keys of the staged rows."""
        raise EspalierError("this attention backend does not attend to chosen rows; use another one")

    def select_by_mask(
        self, layer: int, queries: IndexerQueries, keys: Tensor, rows: Tensor, is_committed: Tensor
    ) -> SelectedMask:
        """Implements `select` in plain torch.  rows: [B, P], the row of the pages for each of P positions.
        is_committed: [B, P], whether a committed row exists at the position."""
        committed = self.pages.layers[layer][1].index_select(0, rows.flatten()).view(*rows.shape, keys.shape[3])
        scores = score_keys(queries, torch.cat((committed, keys[:, :, 0]), 1))
        committed_mask = is_committed[:, None].expand(-1, scores.shape[1], -1)
        is_visible = torch.cat((committed_mask, self.nodes.visible_rows(None)), 2)
        topk = self.specs[layer].topk
        assert topk is not None
        return SelectedMask(mark_top_rows(scores.masked_fill_(~is_visible, -torch.inf), topk))

    def kernel_inputs(
        self,
        layer: int,
        q: Tensor,
        staged: tuple[Tensor, Tensor] | None,
        prefix: Prefix,
        splits: KVSplits,
        sink: Tensor | None = None,
    ) -> AttentionInputs:
        """Returns the arguments of our attention kernels for a layer.  staged: K and V of the staged rows, or None."""
        spec, pages, page_size = self.specs[layer], self.committed_kv(layer), self.pages.page_size
        first_fields = (q, pages, page_size, prefix, self.nodes, splits, spec.softmax_scale, staged)
        return AttentionInputs(*first_fields, spec.window, sink, spec.softcap, self.kv_scales(layer))

    @cached_property
    def _no_prefix(self) -> tuple[Prefix, KVSplits]:
        return empty_prefix(self.nodes.positions.shape[0], self.nodes.positions.device)

    def kv_scales(self, layer: int) -> KVScales | None:
        """Returns the scales of a layer's K and V if they are FP8, else None."""
        return self.pages.scales.get(layer)

    def committed_kv(self, layer: int) -> tuple[Tensor, Tensor]:
        """Returns K and V [rows, kv_heads, size] of all pages of a layer, as they are stored."""
        return self.specs[layer].row_spec.read(self.pages.layers[layer])


class AttentionBackend:
    """Makes the plans of passes.  plan_class: the class of these plans.

    A CUDA graph may capture `plan` and the methods of the plan.  So these must not copy lengths from the device to the
    host."""

    support: Support
    plan_class: type[AttentionPlan]

    def prepare(self, lengths: CommittedLengths) -> None:
        """Called on the host before every launch (eager, capture or replay of a CUDA graph), on the launch's stream."""

    def plan(self, pages: PagedKV, specs: Sequence[LayerSpec], prefix: Prefix, nodes: Nodes) -> AttentionPlan:
        """Returns the plan for the queries of `nodes`.  All layers of a pass that have these queries share the plan."""
        return self.plan_class(pages, specs, prefix, nodes)


class GroupedBackend:
    """The attention backends of a model, one for each group of layers.  groups: (layers, backend) for each group."""

    def __init__(self, groups: Sequence[tuple[tuple[int, ...], AttentionBackend]]):
        self.groups = tuple(groups)
        self.backend_by_layer = {layer: backend for layers, backend in self.groups for layer in layers}

    @property
    def captures_prefill(self) -> bool:
        return all(backend.support.prefill_graph for _, backend in self.groups)

    def prepare(self, lengths: CommittedLengths) -> None:
        for _, backend in self.groups:
            backend.prepare(lengths)
