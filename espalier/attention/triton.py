"""The GPU backend: one kernel attends to committed and staged rows.

The committed rows are split among programs.  The device computes the splits, so this module reads no lengths on the
host.  All layers and passes over one Prefix share the splits of this Prefix.  For layers with a window, splits are
computed once for each pass.  Layers with the same sizes share the buffers of partial results.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from espalier.attention.base import AttentionBackend, AttentionPlan, Selection
from espalier.attention.support import Provider, Support
from espalier.cache.kv import PagedKV
from espalier.cache.layer_spec import KVHeads, LatentKV, LayerSpec
from espalier.errors import EspalierError
from espalier.kernels.attention.ancestor_bits import causal_ancestor_bits
from espalier.kernels.attention.choose import block_rows_to_count
from espalier.kernels.ops.attention import (
    KERNEL_DTYPES,
    MAX_HEAD_SIZE,
    MAX_LATENT_HEAD_SIZE,
    MAX_ROW_SIZE,
    MAX_V_SIZE,
    AttentionInputs,
    Nodes,
    PartialResults,
    Prefix,
    count_contiguous_blocks,
    latent_attention,
    merge_results,
    tree_attention,
)
from espalier.kernels.ops.selection import (
    MAX_INDEX_SIZE,
    MAX_TOPK,
    IndexerKeys,
    IndexerQueries,
    KVSplitPolicy,
    KVSplits,
    SelectedRows,
    index_scores,
    kv_splits,
    select_rows,
)

# The largest number of index scores in memory at once (256 MiB).  The queries of a long prompt run in several steps.
MAX_INDEX_SCORES = 2**26


# The attention kernel for a layer.  It returns (out, lse), as kernels/ops/attention.py:tree_attention does.
AttentionKernel = Callable[[AttentionInputs], tuple[Tensor, Tensor]]


class TritonAttention(AttentionPlan):
    def __init__(self, pages: PagedKV, specs: Sequence[LayerSpec], prefix: Prefix, nodes: Nodes):
        super().__init__(pages, specs, prefix, nodes)
        self.partial_results: dict[tuple[KVSplitPolicy, int, int, int, int], PartialResults] = {}
        self.splits_by_policy: dict[tuple[KVSplitPolicy, int | None], KVSplits] = {}
        self.contiguous_blocks: dict[tuple[LayerSpec, bool], Tensor | None] = {}

    def attend_prefix(self, q: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Returns attention of q [B, Q, heads, k_size] over the committed rows: out, and lse (natural log)."""
        spec = self.specs[layer]
        return self._run_kernel(spec, self.kernel_inputs(layer, q, None, self.prefix, self.splits(spec)))

    def select(self, layer: int, queries: IndexerQueries, keys: Tensor) -> SelectedRows | None:
        """Returns the rows that each query attends to; None for all.

        keys: [B, R, 1, size], the indexer's keys of the staged rows, which are the rows of this pass."""
        pages, prefix, topk = self.pages, self.prefix, self.specs[layer].topk
        page_table, (batch, staged) = prefix.page_table, keys.shape[:2]
        max_rows = page_table.shape[1] * pages.page_size + staged
        assert topk is not None
        if max_rows <= topk:
            return None  # no request can have more rows than topk
        key_plane = pages.layers[layer][1]
        committed = IndexerKeys(key_plane, page_table, prefix.length, pages.page_size, prefix.first_position, keys)
        ancestor_bits = _ancestor_bits(self.nodes)
        step = max(MAX_INDEX_SCORES // (max(batch, 1) * max_rows), 1)
        selections = []
        for begin in range(0, max(queries.q.shape[1], 1), step):
            step_slice = slice(begin, begin + step)
            step_queries = IndexerQueries(queries.q[:, step_slice], queries.weights[:, step_slice])
            scores = index_scores.triton(step_queries, committed, ancestor_bits[:, step_slice])
            selections.append(select_rows.triton(scores, prefix.length, page_table, pages.page_size, topk))
        joined = (torch.cat(tensors, 1) for tensors in zip(*selections, strict=True))
        return selections[0] if len(selections) == 1 else SelectedRows(*joined)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None, selected: Selection | None = None
    ) -> Tensor:
        """Computes attention over committed rows and staged k, v.  selected: the rows to attend to; None: all."""
        spec = self.specs[layer]
        if selected is None:
            return self._run_kernel(spec, self.kernel_inputs(layer, q, (k, v), self.prefix, self.splits(spec), sink))[0]
        assert isinstance(selected, SelectedRows)
        policy = self._split_policy(spec)
        batch, queries, width = selected.rows.shape
        make = partial(self._prefixes_within_topk, spec, policy, k.shape[1])
        short_prefixes = self.prefix.get_or_make((spec.topk, k.shape[1], policy), make)
        inputs = self.kernel_inputs(layer, q, (k, v), *short_prefixes)
        chosen_rows_policy = self._choose_split_policy(spec, batch * queries, 1, width)
        return _attend_chosen(partial(self._run_kernel, spec), inputs, selected, chosen_rows_policy)

    def _prefixes_within_topk(self, spec: LayerSpec, policy: KVSplitPolicy, num_staged: int) -> tuple[Prefix, KVSplits]:
        """Returns the prefixes of requests with at most topk rows in all, and their splits.  The prefixes of longer
        requests are empty."""
        assert spec.topk is not None
        prefix = self.prefix
        length = prefix.length.where(prefix.length + num_staged <= spec.topk, 0)
        splits = kv_splits.triton(length, prefix.first_position, policy)
        return Prefix(prefix.page_table, length, prefix.first_position), splits

    def _run_kernel(self, spec: LayerSpec, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
        """Returns (out, lse) of the kernel for layers with this spec, as AttentionPlan.attend_prefix does."""
        splits, queries = inputs.splits, inputs.q.shape[1]
        if _is_wide_latent(spec):
            if inputs.sink is not None:
                raise EspalierError("attention=triton has no sinks over wide latent rows; use attention=reference")
            partial_results = None if splits.policy.max_splits == 1 else self._result_buffers(splits, spec, queries)
            return latent_attention.triton(inputs, partial_results)
        contiguous = self._contiguous_blocks(spec, inputs) if spec.topk is None else None
        return tree_attention.triton(
            inputs, self._result_buffers(splits, spec, queries), num_contiguous_blocks=contiguous
        )

    def splits(self, spec: LayerSpec) -> KVSplits:
        """Returns the splits for layers with this spec.

        Without a window, all passes over the prefix with the same policy share the splits."""
        key = self._split_policy(spec), spec.window
        if key not in self.splits_by_policy:
            self.splits_by_policy[key] = self._compute_splits(*key)
        return self.splits_by_policy[key]

    def _split_policy(self, spec: LayerSpec) -> KVSplitPolicy:
        """Returns how layers with this spec split the committed rows."""
        (batch, queries), layout = self.nodes.positions.shape, self.pages.layout
        return self._choose_split_policy(spec, batch, queries, layout.tokens_in(layout.table_width))

    def _choose_split_policy(self, spec: LayerSpec, batch: int, num_queries: int, max_rows: int) -> KVSplitPolicy:
        """max_rows: the most committed rows of a request."""
        kv_heads = spec.cache_spec.kv_heads
        return KVSplitPolicy.choose(
            batch,
            num_queries,
            kv_heads,
            spec.heads // kv_heads,
            max_rows,
            spec.cache_spec.v_size,
            _is_wide_latent(spec),
        )

    def _compute_splits(self, policy: KVSplitPolicy, window: int | None) -> KVSplits:
        """window: the number of positions to which a query attends; None for all."""
        if window is None:
            make = partial(kv_splits.triton, self.prefix.length, self.prefix.first_position, policy)
            return self.prefix.get_or_make(policy, make)
        return kv_splits.triton(self.prefix.length, self.prefix.first_position, policy, self.nodes.positions, window)

    def _contiguous_blocks(self, spec: LayerSpec, inputs: AttentionInputs) -> Tensor | None:
        """Returns the result of count_contiguous_blocks for these inputs; None if the kernel does not use counts.
        All passes over the prefix share the counts."""
        key = (spec, inputs.staged is None)
        if key not in self.contiguous_blocks:
            block_rows, counts = block_rows_to_count(inputs), None
            if block_rows is not None:
                pages = inputs.prefix.page_table, inputs.page_size, inputs.prefix.first_position, block_rows
                counts_key = (inputs.splits.policy, count_contiguous_blocks, block_rows)
                counts = self.prefix.get_or_make(counts_key, partial(count_contiguous_blocks, inputs.splits, *pages))
            self.contiguous_blocks[key] = counts
        return self.contiguous_blocks[key]

    def _result_buffers(self, splits: KVSplits, spec: LayerSpec, num_queries: int) -> PartialResults:
        """Returns the buffers of partial results, which layers of the same sizes share."""
        key = (splits.policy, len(splits.table), num_queries, spec.heads, spec.cache_spec.v_size)
        if key not in self.partial_results:
            self.partial_results[key] = PartialResults.allocate(splits, num_queries, spec.heads, spec.cache_spec.v_size)
        return self.partial_results[key]


def _is_wide_latent(spec: LayerSpec) -> bool:
    """Whether a layer keeps latent rows that are too wide for tree_attention."""
    return isinstance(spec.cache_spec, LatentKV) and spec.cache_spec.size > MAX_LATENT_HEAD_SIZE


def _ancestor_bits(nodes: Nodes) -> Tensor:
    """Returns [B, Q, W] int64: the staged rows that each query sees, as ancestor bits.  W: the number of words."""
    if nodes.ancestor_bits is not None:
        return nodes.ancestor_bits
    batch, rows = nodes.row_positions.shape
    row = torch.arange(rows, device=nodes.row_positions.device)
    return causal_ancestor_bits(row, rows).transpose(0, 1).expand(batch, -1, -1)


def _attend_chosen(
    run_kernel: AttentionKernel, inputs: AttentionInputs, chosen_rows: SelectedRows, policy: KVSplitPolicy
) -> Tensor:
    """Implements AttentionPlan.attend over chosen rows.  The attention kernel of the layer runs twice.

    The first launch attends to the chosen committed rows.  In this launch, each query counts as a request.  The page
    table of this request lists the rows that the query chose, with page_size 1.  The second launch attends to the
    chosen staged rows.  A request with at most topk rows has no rows in the first launch, and the second launch attends
    to all rows of this request.  So the result of this request is equal to full attention, bit for bit.

    inputs: the staged rows of all requests, and the prefixes that _prefixes_within_topk returned.
    policy: how the chosen rows are split among programs."""
    counts, queries = chosen_rows.counts.flatten(), inputs.nodes.positions
    over_chosen = run_kernel(
        inputs._replace(
            q=inputs.q.flatten(0, 1)[:, None],
            page_size=1,
            prefix=Prefix(chosen_rows.rows.flatten(0, 1), counts),
            nodes=Nodes.chain(queries.reshape(-1, 1)),
            splits=kv_splits.triton(counts, 0, policy),
            staged=None,
        )
    )
    out, lse = (values[:, 0].unflatten(0, queries.shape) for values in over_chosen)
    return merge_results.triton(
        (out, lse), run_kernel(inputs._replace(nodes=replace(inputs.nodes, ancestor_bits=chosen_rows.bits)))
    )


class TritonBackend(AttentionBackend):
    support = Support(
        name="triton",
        devices=("cuda",),
        dtypes=KERNEL_DTYPES,
        cache_specs=(KVHeads, LatentKV),
        window_on_chain=Provider.ITSELF,
        window_on_tree=Provider.ITSELF,
        sinks=Provider.ITSELF,
        fp8=Provider.ITSELF,
        softcap=Provider.ITSELF,
        selection=Provider.ITSELF,
        max_topk=MAX_TOPK,
        max_index_size=MAX_INDEX_SIZE,
        any_v_size=True,
        head_sizes=range(1, MAX_HEAD_SIZE + 1),
        max_latent=LatentKV(MAX_ROW_SIZE, MAX_V_SIZE),
        prefill_graph=True,
        tested_on=("H100", "H200"),
    )
    plan_class = TritonAttention
