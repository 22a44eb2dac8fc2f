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
    q, committed, staged, positions, splits = inputs[:5]
    (batch, queries, _, k_size), v_size, scales = q.shape, inputs.v_size, committed.scales
    require_rows(f"{name}'s k pages", committed.k, (-1, kv_heads, k_size), scales, q)
    require_rows(f"{name}'s v pages", committed.v, (committed.k.shape[0], kv_heads, v_size), scales, q)
    require(f"{name}'s page table", committed.page_table, (batch, -1), torch.int32, q)
    require(f"{name}'s positions", positions, (batch, queries), torch.int64, q)
    if committed.k.shape[0] >= 2**31:
        raise EspalierError(f"{name} supports pools below 2^31 rows, but got {committed.k.shape[0]}")
    require(f"{name}'s splits", splits.starts, (batch + 1,), torch.int32, q)
    need_contiguous_last = [committed.k, committed.v, committed.page_table]
    if staged is not None:
        rows = staged.k.shape[1] if staged.ancestor_bits is not None else queries
        require_rows(f"{name}'s staged k", staged.k, (batch, rows, kv_heads, k_size), scales, q)
        require_rows(f"{name}'s staged v", staged.v, (batch, rows, kv_heads, v_size), scales, q)
        require(f"{name}'s row positions", staged.row_positions, (batch, rows), torch.int64, q)
        need_contiguous_last += [staged.k, staged.v]
        if staged.ancestor_bits is not None:
            require_bits(f"{name}'s ancestor bits", staged.ancestor_bits, rows, q)
            need_contiguous_last.append(staged.ancestor_bits)
    if any(tensor.stride(-1) != 1 and tensor.shape[-1] > 1 for tensor in need_contiguous_last):
        raise EspalierError(f"{name} needs k, v, page table and ancestor bits with a contiguous last dimension")


def shared_arguments(
    inputs: Inputs, partials: PartialResults, out: Tensor, lse: Tensor, num_tiles: int
) -> dict[str, Any]:
    """Launch arguments that every attention kernel takes.  num_tiles: of queries."""
    q, committed, staged, positions, splits, scale = inputs[:6]
    ancestor_bits = None if staged is None else staged.ancestor_bits
    staged_kind = NO_STAGED if staged is None else CHAIN if ancestor_bits is None else TREE
    return {
        "q_ptr": q,
        "table_ptr": committed.page_table,
        "split_ptr": splits.table,
        "start_ptr": splits.starts,
        # Without ancestor bits the kernel gets another pointer, which it does not read.
        "bits_ptr": positions if ancestor_bits is None else ancestor_bits,
        "out_ptr": out,
        "lse_ptr": lse,
        "partial_ptr": partials.out,
        "partial_lse_ptr": partials.lse,
        "scale": scale * LOG2_E,
        "batch": q.shape[0],
        "queries": q.shape[1],
        "rows": 0 if staged is None else staged.k.shape[1],
        "first": committed.first,
        **strides(q, "q_b", "q_q", "q_h"),
        **strides(committed.page_table, "table_b"),
        **({"bits_b": 0, "bits_q": 0} if ancestor_bits is None else strides(ancestor_bits, "bits_b", "bits_q")),
        "PAGE_SIZE": committed.page_size,
        "STAGED": staged_kind,
        "LONGEST_FIRST": staged_kind == CHAIN and num_tiles >= 8,
        **pdl_arguments(chip(q)),
    }


def strides(tensor: Tensor, *names: str) -> dict[str, int]:
    """The tensor's first strides, by these names."""
    return dict(zip(names, tensor.stride(), strict=False))
