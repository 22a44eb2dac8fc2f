"""Attention of the GPU backend over chosen rows (LayerSpec.topk): the selection, and the attention that it directs.

Each query is a request of its own to a kernel of ours: its chosen committed rows are pages of one row.  A second launch
attends to the staged rows that it chose.  For requests whose rows all fit the choice it also attends to their committed
rows, as without a choice: their results are the same to the bit.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from espalier.attention.base import Nodes, Prefix
from espalier.cache.kv import PagedKV
from espalier.cache.layer_spec import LayerSpec
from espalier.kernels.attention.ancestor_bits import bits_up_to
from espalier.kernels.ops.attention import Committed, Inputs, Staged, merge
from espalier.kernels.ops.kv_splits import KVSplitPolicy, KVSplits, kv_splits
from espalier.kernels.ops.selection import IndexKeys, IndexQueries, SelectedRows, index_scores, select_rows

# The most scores that are held at once, for the pieces of prompts: 256 MiB.
MAX_SCORES = 2**26


class Run(Protocol):
    """Attends with the kernel for rows of this layer: (out, lse), as in kernels/ops/attention.py:tree_attention."""

    def __call__(self, spec: LayerSpec, inputs: Inputs) -> tuple[Tensor, Tensor]: ...


class Rest(NamedTuple):
    """Of the requests whose rows all fit the choice: lengths [B] int64, 0 of the others, and their splits."""

    length: Tensor
    splits: KVSplits


def select(
    pages: PagedKV, spec: LayerSpec, layer: int, prefix: Prefix, nodes: Nodes, queries: IndexQueries, keys: Tensor
) -> SelectedRows | None:
    """As Attention.select.  None where no request can have more rows than the layer's topk."""
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
    each = torch.arange(rows, device=nodes.row_positions.device)
    return bits_up_to(each, rows).transpose(0, 1).expand(batch, -1, -1)


def attend(
    run: Run, spec: LayerSpec, q: Tensor, committed: Committed, staged: Staged, positions: Tensor, chosen: SelectedRows,
    policy: KVSplitPolicy, rest: Rest,
) -> Tensor:  # fmt: skip
    """As Attention.attend_selected.  policy: of the splits of chosen rows."""
    shape, scale = q.shape[:2], spec.softmax_scale
    count, rows = chosen.counts.flatten(), chosen.rows.flatten(0, 1)
    pages = Committed(committed.k, committed.v, rows, count, 1, 0, committed.scales)
    splits = kv_splits.triton(count, 0, policy)
    each = Inputs(q.flatten(0, 1)[:, None], pages, None, positions.reshape(-1, 1), splits, scale)
    over_chosen = (values[:, 0].unflatten(0, shape) for values in run(spec, each))
    left = Committed(
        committed.k, committed.v, committed.page_table, rest.length, committed.page_size, committed.first,
        committed.scales,
    )  # fmt: skip
    staged = Staged(staged.k, staged.v, staged.row_positions, chosen.bits)
    return merge.triton(tuple(over_chosen), run(spec, Inputs(q, left, staged, positions, rest.splits, scale)))
