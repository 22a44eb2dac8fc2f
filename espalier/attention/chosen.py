"""Attention of the GPU backend to chosen rows (LayerSpec.topk): choosing the rows, and attention to them.

The kernel of a layer runs twice.  The first launch attends to committed rows.  It treats each query as a request, whose
pages are the chosen rows, one row a page.  The second launch attends to the chosen staged rows.  A request with at most
topk rows has no rows in the first launch.  The second attends to all of its rows, so it has the bits of full attention.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from espalier.cache.kv import PagedKV
from espalier.cache.layer_spec import LayerSpec
from espalier.kernels.attention.ancestor_bits import bits_up_to
from espalier.kernels.ops.attention import Inputs, Nodes, Prefix, merge
from espalier.kernels.ops.kv_splits import KVSplitPolicy, kv_splits
from espalier.kernels.ops.selection import IndexKeys, IndexQueries, SelectedRows, index_scores, select_rows

# The most scores in memory at once (256 MiB).  More are needed for long prompts, so their queries are taken in turn.
MAX_SCORES = 2**26


# The attention kernel for a layer's rows: (out, lse), as kernels/ops/attention.py:tree_attention returns them.
AttentionKernel = Callable[[Inputs], tuple[Tensor, Tensor]]


def select(
    pages: PagedKV, spec: LayerSpec, layer: int, prefix: Prefix, nodes: Nodes, queries: IndexQueries, keys: Tensor
) -> SelectedRows | None:
    """Attention.select, by kernels.  None if no request can have more rows than the layer's topk."""
    table, (batch, staged) = prefix.page_table, keys.shape[:2]
    columns = table.shape[1] * pages.page_size + staged
    assert spec.topk is not None
    if columns <= spec.topk:
        return None
    committed = IndexKeys(pages.layers[layer][1], table, prefix.length, pages.page_size, prefix.first, keys)
    bits = bits_of(nodes)
    step = max(MAX_SCORES // (max(batch, 1) * columns), 1)
    parts = []
    for begin in range(0, max(queries.q.shape[1], 1), step):
        some = slice(begin, begin + step)
        asking = IndexQueries(queries.q[:, some], queries.weights[:, some])
        scores = index_scores.triton(asking, committed, bits[:, some])
        parts.append(select_rows.triton(scores, prefix.length, table, pages.page_size, spec.topk))
    return parts[0] if len(parts) == 1 else SelectedRows(*(torch.cat(each, 1) for each in zip(*parts, strict=True)))


def bits_of(nodes: Nodes) -> Tensor:
    """[B, Q, W] int64: the staged rows that each query sees."""
    if nodes.ancestor_bits is not None:
        return nodes.ancestor_bits
    batch, rows = nodes.row_positions.shape
    row = torch.arange(rows, device=nodes.row_positions.device)
    return bits_up_to(row, rows).transpose(0, 1).expand(batch, -1, -1)


def attend(run: AttentionKernel, rest: Inputs, chosen: SelectedRows, policy: KVSplitPolicy) -> Tensor:
    """Attention.attend_selected, by kernels.

    rest: the staged rows of all requests, and the prefixes of requests with at most topk rows (others are empty here).
    policy: how the chosen rows are split over programs.
    """
    counts, queries = chosen.counts.flatten(), rest.nodes.positions
    over_chosen = run(
        rest._replace(
            q=rest.q.flatten(0, 1)[:, None],
            page_size=1,
            prefix=Prefix(chosen.rows.flatten(0, 1), counts),
            nodes=Nodes.chain(queries.reshape(-1, 1)),
            splits=kv_splits.triton(counts, 0, policy),
            staged=None,
        )
    )
    out, lse = (values[:, 0].unflatten(0, queries.shape) for values in over_chosen)
    return merge.triton((out, lse), run(rest._replace(nodes=replace(rest.nodes, ancestor_bits=chosen.bits))))
