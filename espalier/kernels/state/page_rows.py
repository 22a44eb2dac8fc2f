"""From positions to rows of the page pool: row = page * page_size + offset, with the page from the request's table.

This file has the only copies of that arithmetic: one in torch, one for kernels.
"""

from __future__ import annotations

import triton.language as tl

from espalier.kernels.runtime.jit import kernel


@kernel
def page_row(table_ptr, position, page_size, keep):
    """int64 rows of positions, by one request's page table; where `keep` is False, the dummy row."""
    page = tl.load(table_ptr + position // page_size, mask=keep, other=0).to(tl.int64)
    return tl.where(keep, page * page_size + position % page_size, 0)
