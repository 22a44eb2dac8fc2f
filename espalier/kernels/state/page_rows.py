"""From positions to rows of the page pool: row = page * page_size + offset, with the page from the request's table.

This file has the only copies of that arithmetic: one in torch, one for kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from espalier.kernels.runtime.launch import kernel
from espalier.layout import DUMMY_ROW

if TYPE_CHECKING:
    import triton.language as tl


def page_rows(page_table: Tensor, positions: Tensor, page_size: int, keep: Tensor | None = None) -> Tensor:
    """[B, P] int64: rows of positions [B, P] int64, by page tables [B, T] int32.

    Positions past the table, which only padding has, read its last column.  keep: [B, P] bool; False gives the dummy
    row.
    """
    columns = (positions // page_size).clamp(max=page_table.shape[1] - 1)
    rows = page_table.gather(1, columns).long() * page_size + positions % page_size
    return rows if keep is None else rows.where(keep, DUMMY_ROW)


@kernel
def page_row(table_ptr, position, page_size, keep):
    """int64 rows of positions, by one request's page table; where `keep` is False, the dummy row."""
    page = tl.load(table_ptr + position // page_size, mask=keep, other=0).to(tl.int64)
    return tl.where(keep, page * page_size + position % page_size, 0)
