"""The tensors of the cache: pages of decided rows, staging for the rows of a pass, and commit, the only way from one to
the other.

Which page belongs to whom is for cache/pages.py; here a row is `page * page_size + offset`
(kernels/state/page_rows.py).  Row 0, in the dummy page, stands for what is not kept and stays zero, so that a masked
read of it is finite.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.cache.layer_spec import LayerSpec, RecurrentState, groups_of
from espalier.errors import EspalierError
from espalier.kernels.state.commit import commit_rows
from espalier.kernels.state.page_rows import page_rows
from espalier.layout import RoundLayout


@dataclass
class LayerStack:
    """Planes [layers, rows, heads, size] of the layers that keep the same."""

    layers: tuple[int, ...]
    planes: tuple[Tensor, ...]


def stacks(
    specs: Sequence[LayerSpec], layers: range, rows: int, dtype: torch.dtype, device: torch.device
) -> list[LayerStack]:
    """One zeroed stack for each group of `layers` that keeps rows, so that a commit is one launch a group."""
    made = []
    for keeps, members in groups_of(specs, layers).items():
        shapes = [(len(members), rows, *shape) for shape in keeps.planes.values()]
        if shapes:
            planes = tuple(torch.zeros(shape, dtype=dtype, device=device) for shape in shapes)
            made.append(LayerStack(members, planes))
    return made


def by_layer(stacked: list[LayerStack]) -> dict[int, tuple[Tensor, ...]]:
    return {layer: tuple(plane[i] for plane in s.planes) for s in stacked for i, layer in enumerate(s.layers)}


class StagedKV:
    """Rows of a pass, of a range of layers: dense, of fixed shape, `width` rows for each request of a batch.

    layers: planes [rows, heads, size] by layer.
    """

    def __init__(self, specs: Sequence[LayerSpec], layers: range, rows: int, dtype: torch.dtype, device: torch.device):
        self.stacks = stacks(specs, layers, rows, dtype, device)
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

    def rows_of(self, layer: int, batch: int, queries: int, width: int, at: int) -> tuple[Tensor, ...]:
        """All that is staged of a layer so far, [B, at+Q, heads, size] a plane.  Raises EspalierError likewise."""
        self._require(batch, queries, width, at)
        planes = (plane[: batch * width].view(batch, width, *plane.shape[1:]) for plane in self.layers[layer])
        return tuple(plane[:, : at + queries] for plane in planes)

    def _require(self, batch: int, queries: int, width: int, at: int) -> None:
        if at + queries > width or batch * width > self.rows:
            raise EspalierError(
                f"staging holds {self.rows} rows and this launch needs {batch} requests of {width} (rows {at} to "
                f"{at + queries} of each): allocate staging and launch from the same layout"
            )


class PagedKV:
    """Committed rows of every layer, target's first, then the draft's.  layers: planes [rows, heads, size] by layer."""

    def __init__(
        self,
        layout: RoundLayout,
        num_pages: int,
        specs: Sequence[LayerSpec],
        num_target_layers: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.layout = layout
        self.page_size = layout.page_size
        self.num_pages = num_pages
        self.dtype = dtype
        self.device = device
        rows = layout.tokens_in(num_pages)
        self.target = stacks(specs, range(num_target_layers), rows, dtype, device)
        self.draft = stacks(specs, range(num_target_layers, len(specs)), rows, dtype, device)
        self.layers = by_layer(self.target) | by_layer(self.draft)

    def rows(self, page_table: Tensor, positions: Tensor, keep: Tensor | None = None) -> Tensor:
        """Rows of positions [B, P] under a page table [B, T]; where `keep` is False, the dummy row."""
        return page_rows(page_table, positions, self.page_size, keep)

    def commit(self, staged: StagedKV, source: Tensor, rows: Tensor) -> None:
        """Copy staged rows `source` [N] to page rows `rows` [N], of every layer that is staged there."""
        pages = {stack.layers: stack for stack in (*self.target, *self.draft)}
        for stack in staged.stacks:
            commit_rows(stack.planes, pages[stack.layers].planes, source, rows)


class RecurrentStates:
    """What the recurrent layers among `layers` keep, by (layers that keep the same, name).

    states: [layers, num_slots, ...]; left: [layers, rows, ...], what the nodes of a pass leave for the commit.
    """

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        layers: range,
        num_slots: int,
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.states: dict[tuple[tuple[int, ...], str], Tensor] = {}
        self.left: dict[tuple[tuple[int, ...], str], Tensor] = {}
        for keeps, members in groups_of(specs, layers).items():
            if isinstance(keeps, RecurrentState):
                for held, count, shapes in ((self.states, num_slots, keeps.state), (self.left, rows, keeps.left)):
                    for name, shape in shapes:
                        held[members, name] = torch.zeros(len(members), count, *shape, dtype=dtype, device=device)


def bytes_per_token(specs: Sequence[LayerSpec], dtype: torch.dtype) -> int:
    """Cache bytes of one position, all layers."""
    return sum(spec.values_per_token for spec in specs) * dtype.itemsize


def bytes_beside_pages(
    layout: RoundLayout, target: Sequence[LayerSpec], draft: Sequence[LayerSpec], dtype: torch.dtype
) -> int:
    """Cache bytes that do not grow with the pages: staged rows, and what recurrent layers keep and stage."""
    values = 0
    for specs, rows in ((target, layout.target_rows), (draft, layout.draft_rows)):
        values += rows * sum(spec.values_per_token for spec in specs)
        recurrent = [spec.keeps for spec in specs if isinstance(spec.keeps, RecurrentState)]
        values += sum(layout.num_slots * keeps.values_per_slot + rows * keeps.values_per_node for keeps in recurrent)
    return values * dtype.itemsize
