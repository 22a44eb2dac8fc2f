"""The tensors of the cache: pages of decided rows, staging for rows that are not decided yet, and commit between them.

Which page belongs to whom is for cache/pages.py; here a row is `page * page_size + offset`.  Row 0, in the dummy page,
takes what padding writes and stays zero, so that a masked read of it is finite.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.cache.geometry import LayerGeometry
from espalier.errors import EspalierError
from espalier.kernels.commit import commit_rows
from espalier.layout import DUMMY_ROW, RoundLayout


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
        self.order = torch.arange(rows, device=device)

    def places(self, like: Tensor, width: int, at: int) -> Tensor:
        """[B · Q]: the rows that are rows at .. at+Q of each request's `width`, for a pass of `like` [B, Q].

        Raises EspalierError where the buffer is too small.
        """
        batch, queries = like.shape
        self._require(batch, queries, width, at)
        return self.order[: batch * width].view(batch, width)[:, at : at + queries].flatten()

    def rows_of(self, layer: int, batch: int, queries: int, width: int, at: int) -> tuple[Tensor, Tensor]:
        """All that is staged of a layer so far, [B, at+Q, kv_heads, size] each.  Raises EspalierError likewise."""
        self._require(batch, queries, width, at)
        k, v = (buffer[: batch * width].view(batch, width, *buffer.shape[1:]) for buffer in self.layers[layer])
        return k[:, : at + queries], v[:, : at + queries]

    def _require(self, batch: int, queries: int, width: int, at: int) -> None:
        if at + queries > width or batch * width > self.rows:
            raise EspalierError(
                f"staging holds {self.rows} rows and this launch needs {batch} requests of {width} (rows {at} to "
                f"{at + queries} of each): allocate staging and launch from the same layout"
            )


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

    def commit(self, staging: Staging, source: Tensor, rows: Tensor) -> None:
        """Copy staged rows `source` [N] of every target layer to page rows `rows` [N], in order."""
        for staged, stack in zip(staging.stacks, self.target, strict=True):
            commit_rows((staged.k, staged.v), (stack.k, stack.v), source, rows)

    @property
    def device(self) -> torch.device:
        return self.target[0].k.device

    @property
    def dtype(self) -> torch.dtype:
        return self.target[0].k.dtype


def bytes_per_token(geometry: Sequence[LayerGeometry], dtype: torch.dtype) -> int:
    """Cache bytes of one position, all layers."""
    return sum(g.values_per_token for g in geometry) * dtype.itemsize
