"""The rows that attention reads, committed and staged, as every attention kernel takes and checks them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.attention.ancestor_bits import require_bits
from espalier.kernels.attention.work_items import CHAIN, NO_STAGED, TREE
from espalier.kernels.ops.attention import Inputs, PartialResults
from espalier.kernels.runtime.launch import chip, require
from espalier.kernels.runtime.pdl import pdl_arguments
from espalier.kernels.state.kv_scales import require_rows

LOG2_E = 1.4426950408889634


def check_shapes(name: str, inputs: Inputs, kv_heads: int) -> None:
    """Check the shapes, dtypes and strides that every attention kernel needs.

    name: of the kernel in the error text.  Raises EspalierError.
    """
    q, (k, v), scales, prefix, nodes = inputs.q, inputs.pages, inputs.scales, inputs.prefix, inputs.nodes
    (batch, queries, _, k_size), v_size = q.shape, inputs.v_size
    require_rows(f"{name}'s k pages", k, (-1, kv_heads, k_size), scales, q)
    require_rows(f"{name}'s v pages", v, (k.shape[0], kv_heads, v_size), scales, q)
    require(f"{name}'s page table", prefix.page_table, (batch, -1), torch.int32, q)
    require(f"{name}'s positions", nodes.positions, (batch, queries), torch.int64, q)
    if k.shape[0] >= 2**31:
        raise EspalierError(f"{name} supports pools below 2^31 rows, but got {k.shape[0]}")
    require(f"{name}'s splits", inputs.splits.starts, (batch + 1,), torch.int32, q)
    need_contiguous_last = [k, v, prefix.page_table]
    if inputs.staged is not None:
        staged_k, staged_v = inputs.staged
        rows = staged_k.shape[1] if nodes.ancestor_bits is not None else queries
        require_rows(f"{name}'s staged k", staged_k, (batch, rows, kv_heads, k_size), scales, q)
        require_rows(f"{name}'s staged v", staged_v, (batch, rows, kv_heads, v_size), scales, q)
        require(f"{name}'s row positions", nodes.row_positions, (batch, rows), torch.int64, q)
        need_contiguous_last += inputs.staged
        if nodes.ancestor_bits is not None:
            require_bits(f"{name}'s ancestor bits", nodes.ancestor_bits, rows, q)
            need_contiguous_last.append(nodes.ancestor_bits)
    if any(tensor.stride(-1) != 1 and tensor.shape[-1] > 1 for tensor in need_contiguous_last):
        raise EspalierError(f"{name} needs k, v, page table and ancestor bits with a contiguous last dimension")


def shared_arguments(
    inputs: Inputs, partials: PartialResults, out: Tensor, lse: Tensor, num_tiles: int
) -> dict[str, Any]:
    """Launch arguments that every attention kernel takes.  num_tiles: of queries."""
    q, prefix, staged, splits = inputs.q, inputs.prefix, inputs.staged, inputs.splits
    ancestor_bits = None if staged is None else inputs.nodes.ancestor_bits
    staged_kind = NO_STAGED if staged is None else CHAIN if ancestor_bits is None else TREE
    return {
        "q_ptr": q,
        "table_ptr": prefix.page_table,
        "split_ptr": splits.table,
        "start_ptr": splits.starts,
        # Without ancestor bits the kernel gets another pointer, which it does not read.
        "bits_ptr": inputs.nodes.positions if ancestor_bits is None else ancestor_bits,
        "out_ptr": out,
        "lse_ptr": lse,
        "partial_ptr": partials.out,
        "partial_lse_ptr": partials.lse,
        "scale": inputs.scale * LOG2_E,
        "batch": q.shape[0],
        "queries": q.shape[1],
        "rows": 0 if staged is None else staged[0].shape[1],
        "first": prefix.first,
        **strides(q, "q_b", "q_q", "q_h"),
        **strides(prefix.page_table, "table_b"),
        **({"bits_b": 0, "bits_q": 0} if ancestor_bits is None else strides(ancestor_bits, "bits_b", "bits_q")),
        "PAGE_SIZE": inputs.page_size,
        "STAGED": staged_kind,
        "LONGEST_FIRST": staged_kind == CHAIN and num_tiles >= 8,
        **pdl_arguments(chip(q)),
    }


def strides(tensor: Tensor, *names: str) -> dict[str, int]:
    """The tensor's first strides, by these names."""
    return dict(zip(names, tensor.stride(), strict=False))
