"""The tensors of the cache: pages of decided rows, staging for rows that are not decided yet, and commit between them.

Which page belongs to whom is for cache/pages.py; here a row is `page * page_size + offset`.  Row 0, in the dummy page,
takes what padding writes and is zeroed after every write, so that a masked read of it stays finite.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.cache.geometry import LayerGeometry
from espalier.errors import EspalierError
from espalier.layout import RoundLayout

DUMMY_ROW = 0


@dataclass
class LayerStack:
    """K and V, [layers, rows, kv_heads, size] each, of the layers that share one shape."""

    layers: tuple[int, ...]
    k: Tensor
    v: Tensor


def stacks(
    geometry: Sequence[LayerGeometry], layers: range, rows: int, dtype: torch.dtype, device: torch.device
) -> list[LayerStack]:
    """One zeroed stack for each shape among `layers`, so that a commit is a few launches, not one a layer."""
    shapes: dict[tuple[int, int, int], list[int]] = {}
    for layer in layers:
        g = geometry[layer]
        shapes.setdefault((g.kv_heads, g.k_size, g.v_size), []).append(layer)
    return [
        LayerStack(
            tuple(members),
            torch.zeros(len(members), rows, heads, k_size, dtype=dtype, device=device),
            torch.zeros(len(members), rows, heads, v_size, dtype=dtype, device=device),
        )
        for (heads, k_size, v_size), members in shapes.items()
    ]


def by_layer(stacked: list[LayerStack]) -> dict[int, tuple[Tensor, Tensor]]:
    return {layer: (s.k[i], s.v[i]) for s in stacked for i, layer in enumerate(s.layers)}


class Staging:
    """Rows under construction of a range of layers: dense, of fixed shape, `width` rows for each request of a batch."""

    def __init__(
        self, geometry: Sequence[LayerGeometry], layers: range, rows: int, dtype: torch.dtype, device: torch.device
    ):
        self.stacks = stacks(geometry, layers, rows, dtype, device)
        self.layers = by_layer(self.stacks)
        self.rows = rows

    def put(self, layer: int, k: Tensor, v: Tensor, width: int, at: int) -> tuple[Tensor, Tensor]:
        """Stage k, v [B, Q, kv_heads, size] as rows at .. at+Q of each request's `width`.

        Returns all that is staged so far, [B, at+Q, ...] each.  Raises EspalierError where the buffer is too small.
        """
        batch, queries = k.shape[:2]
        if at + queries > width or batch * width > self.rows:
            raise EspalierError(
                f"staging holds {self.rows} rows and this launch needs {batch} requests of {width} (rows {at} to "
                f"{at + queries} of each): allocate staging and launch from the same layout"
            )
        staged_k, staged_v = (self._rows(buffer, batch, width) for buffer in self.layers[layer])
        staged_k[:, at : at + queries] = k
        staged_v[:, at : at + queries] = v
        return staged_k[:, : at + queries], staged_v[:, : at + queries]

    @staticmethod
    def _rows(buffer: Tensor, batch: int, width: int) -> Tensor:
        return buffer[: batch * width].view(batch, width, *buffer.shape[1:])


class Pages:
    """Committed K/V of every layer, target's first, then the draft's."""

    def __init__(
        self,
        layout: RoundLayout,
        num_pages: int,
        geometry: Sequence[LayerGeometry],
        num_target_layers: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.layout = layout
        self.page_size = layout.page_size
        self.num_pages = num_pages
        rows = layout.tokens_in(num_pages)
        self.target = stacks(geometry, range(num_target_layers), rows, dtype, device)
        self.draft = stacks(geometry, range(num_target_layers, len(geometry)), rows, dtype, device)
        self.layers = by_layer(self.target) | by_layer(self.draft)

    def rows(self, page_table: Tensor, positions: Tensor) -> Tensor:
        """Rows of positions [B, P] under a page table [B, T].

        Positions past the table, which only padding has, read its last column: callers mask them.
        """
        columns = (positions // self.page_size).clamp(max=page_table.shape[1] - 1)
        return page_table.gather(1, columns) * self.page_size + positions % self.page_size

    def rows_where(self, page_table: Tensor, positions: Tensor, keep: Tensor) -> Tensor:
        """Like `rows`, with positions that are not to be written sent to the dummy row."""
        return self.rows(page_table, positions).masked_fill(~keep, DUMMY_ROW)

    def zero(self, pages: Sequence[int]) -> None:
        """Clear pages that are handed out: a masked read past a request's length must be finite, whoever had it."""
        if not pages:
            return
        index = torch.tensor(pages, device=self.device)
        for stack in self.target + self.draft:
            for buffer in (stack.k, stack.v):
                buffer.view(buffer.shape[0], self.num_pages, -1)[:, index] = 0

    def commit(self, staging: Staging, source: Tensor, rows: Tensor) -> None:
        """Copy staged rows `source` [N] of every target layer to page rows `rows` [N], in order."""
        _require_rows("commit", rows, source.shape)
        for staged, stack in zip(staging.stacks, self.target, strict=True):
            for src, dst in ((staged.k, stack.k), (staged.v, stack.v)):
                dst.index_copy_(1, rows, src.index_select(1, source))
                dst[:, DUMMY_ROW] = 0

    def write(self, layer: int, k: Tensor, v: Tensor, rows: Tensor) -> None:
        """Commit one layer of a chain that was decided before it ran: k, v [B, Q, kv_heads, size] to rows [B, Q]."""
        _require_rows("write", rows, k.shape[:2])
        for value, buffer in zip((k, v), self.layers[layer], strict=True):
            buffer.index_copy_(0, rows.flatten(), value.flatten(0, 1))
            buffer[DUMMY_ROW] = 0

    @property
    def device(self) -> torch.device:
        return self.target[0].k.device

    @property
    def dtype(self) -> torch.dtype:
        return self.target[0].k.dtype


def _require_rows(what: str, rows: Tensor, shape: torch.Size) -> None:
    if rows.shape != shape:
        raise EspalierError(
            f"{what} of K/V needs one page row for each of its {list(shape)} rows and is given {list(rows.shape)}: "
            "make both from the same layout"
        )


def bytes_per_token(geometry: Sequence[LayerGeometry], dtype: torch.dtype) -> int:
    """Cache bytes of one position, all layers."""
    return sum(g.values_per_token for g in geometry) * dtype.itemsize
