"""The tensors of the KV cache: pages hold committed rows, staging buffers hold the rows of the current pass.

Only `commit` and `commit_layer` copy rows from staging to pages.  The index of a page row is page * page_size + offset
(kernels/ops/state.py).  cache/pages.py tracks the holders of each page.  A staged row with destination 0 is not copied.
So page row 0 stays zero.  Attention may read this row for padding and multiply it by zero, and 0 · NaN would be NaN.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.cache.layer_spec import LayerSpec, group_layers, plane_dtype
from espalier.cache.states import bytes_of_staged_node, bytes_per_state, table_rows
from espalier.errors import EspalierError
from espalier.kernels.layers.quantised import FP8
from espalier.kernels.ops.state import commit_rows, page_rows
from espalier.kernels.state.kv_scales import KVScales
from espalier.layout import RoundLayout


@dataclass
class LayerStack:
    """The KV tensors of a group of layers with equal `cache_spec`.

    planes: for each kind of row that a layer keeps (such as K, or V), a tensor [layers, rows, heads, size]."""

    layers: tuple[int, ...]
    planes: tuple[Tensor, ...]


def allocate_stacks(
    specs: Sequence[LayerSpec], layers: range, num_rows: int, dtype: torch.dtype, device: torch.device
) -> list[LayerStack]:
    """Allocate a zeroed LayerStack for each group of `layers` that keeps rows.  One launch commits a whole group.

    A layer that reads another layer's rows has no rows of its own, so it is in no stack.  dtype: the model's dtype.
    """
    stacks = []
    for cache_spec, members in group_layers(
        specs, [layer for layer in layers if specs[layer].shares_with is None]
    ).items():
        if cache_spec.planes:
            planes = tuple(
                torch.zeros(len(members), num_rows, *row, dtype=plane_dtype(cache_spec, name, dtype), device=device)
                for name, row in cache_spec.planes.items()
            )
            stacks.append(LayerStack(members, planes))
    return stacks


def planes_by_layer(stacks: list[LayerStack], specs: Sequence[LayerSpec]) -> dict[int, tuple[Tensor, ...]]:
    """Returns views of each layer's planes [rows, heads, size].  Layers that read the same rows share planes."""
    planes = {layer: tuple(plane[i] for plane in s.planes) for s in stacks for i, layer in enumerate(s.layers)}
    return planes | {layer: planes[spec.shares_with] for layer, spec in enumerate(specs) if spec.shares_with in planes}


class StagedKV:
    """The staging buffers of a range of layers.  They hold the rows of the current pass.

    layers: by layer, its planes (such as K and V), [rows, heads, size] each."""

    def __init__(
        self, specs: Sequence[LayerSpec], layers: range, num_rows: int, dtype: torch.dtype, device: torch.device
    ):
        self.stacks = allocate_stacks(specs, layers, num_rows, dtype, device)
        self.layers = planes_by_layer(self.stacks, specs)
        self.rows = num_rows
        self.row_indices = torch.arange(num_rows, device=device)
        # The last views that `staged_planes` returned for each layer, and their sizes.  On a CPU, new views in each
        # round would take 3% of a small model's round.  Other views are not kept, because prompts have many lengths.
        self._views: dict[int, tuple[tuple[int, int, int], tuple[Tensor, ...]]] = {}

    def staging_rows(self, positions: Tensor, width: int, first_row: int) -> Tensor:
        """Returns [B · Q]: the staging rows of a pass with `positions` [B, Q].

        Each request has `width` staging rows.  The pass writes its rows first_row .. first_row+Q-1.  Raises
        EspalierError if the buffer is too small."""
        batch, queries = positions.shape
        self._require_room(batch, queries, width, first_row)
        return self.row_indices[: batch * width].view(batch, width)[:, first_row : first_row + queries].flatten()

    def staged_planes(self, layer: int, batch: int, queries: int, width: int, first_row: int) -> tuple[Tensor, ...]:
        """Returns a layer's staged rows up to the last row of this pass: for each plane [B, first_row+Q, heads, size].

        width: a request's rows in the buffer.  queries: its rows in this pass, Q.  Raises if they do not fit."""
        sizes = batch, width, first_row + queries
        sizes_of_views, views = self._views.get(layer, (None, ()))
        if sizes_of_views != sizes:
            self._require_room(batch, queries, width, first_row)
            planes = (plane[: batch * width].view(batch, width, *plane.shape[1:]) for plane in self.layers[layer])
            views = tuple(plane[:, : first_row + queries] for plane in planes)
            self._views[layer] = sizes, views
        return views

    def _require_room(self, batch: int, queries: int, width: int, first_row: int) -> None:
        """Raises if `batch` requests of `width` rows do not fit, or if a request's rows end after `width`."""
        if first_row + queries > width or batch * width > self.rows:
            raise EspalierError(
                f"staging holds {self.rows} rows and this launch needs {batch} requests of {width} rows (rows "
                f"{first_row} to {first_row + queries - 1} of each): allocate staging and launch from the same layout"
            )


class PagedKV:
    """The pages, which hold the committed rows of all layers: the target's layers, then the draft's layers.

    layers: by layer, its planes [rows, heads, size].  scales: by layer, for layers with FP8 rows; 1 if the checkpoint
    has no scales."""

    def __init__(
        self,
        layout: RoundLayout,
        num_pages: int,
        specs: Sequence[LayerSpec],
        num_target_layers: int,
        dtype: torch.dtype,
        device: torch.device,
        scales: Mapping[int, KVScales] | None = None,
    ):
        self.layout = layout
        self.page_size = layout.page_size
        self.num_pages = num_pages
        self.dtype = dtype
        self.device = device
        rows = layout.tokens_in(num_pages)
        self.target_stacks = allocate_stacks(specs, range(num_target_layers), rows, dtype, device)
        self.draft_stacks = allocate_stacks(specs, range(num_target_layers, len(specs)), rows, dtype, device)
        self.layers = planes_by_layer([*self.target_stacks, *self.draft_stacks], specs)
        own_scales = {
            layer: (scales or {}).get(layer) or KVScales.ones(spec.cache_spec.kv_heads, dtype, device)
            for layer, spec in enumerate(specs)
            if spec.cache_spec.dtype == FP8 and spec.shares_with is None
        }
        self.scales = own_scales | {
            layer: own_scales[spec.shares_with] for layer, spec in enumerate(specs) if spec.shares_with in own_scales
        }

    def rows(self, page_table: Tensor, positions: Tensor, is_kept: Tensor | None = None) -> Tensor:
        """Returns [B, P]: the page rows of `positions` [B, P] in a page table [B, T]; 0 where `is_kept` is false."""
        return page_rows(page_table, positions, self.page_size, is_kept)

    def clear(self, pages: Sequence[int]) -> None:
        """Zero the rows of these pages, in every layer."""
        if not pages:
            return
        index = torch.tensor(pages, device=self.device)
        for planes in (planes for stack in (*self.target_stacks, *self.draft_stacks) for planes in stack.planes):
            # The tensor is filled as bytes, because PyTorch cannot fill FP8 tensors.
            planes.view(torch.uint8).unflatten(1, (self.num_pages, self.page_size)).index_fill_(1, index, 0)

    def commit(self, staged: StagedKV, source: Tensor, rows: Tensor) -> None:
        """Copy staging rows `source` [N] to page rows `rows` [N], for every layer in `staged`."""
        pages = {stack.layers: stack for stack in (*self.target_stacks, *self.draft_stacks)}
        for stack in staged.stacks:
            commit_rows(stack.planes, pages[stack.layers].planes, source, rows)

    def commit_layer(self, staged: StagedKV, layer: int, source: Tensor, rows: Tensor) -> None:
        """Copy staging rows `source` [N] to page rows `rows` [N], for one layer."""
        staged_planes, page_planes = ([plane[None] for plane in kv.layers[layer]] for kv in (staged, self))
        commit_rows(staged_planes, page_planes, source, rows)


def bytes_per_token(specs: Sequence[LayerSpec], dtype: torch.dtype) -> int:
    """Returns the bytes that one token takes in the pages of all layers together.  dtype: the model's dtype."""
    return sum(spec.bytes_per_token(dtype) for spec in specs)


def bytes_beside_pages(
    layout: RoundLayout, target_specs: Sequence[LayerSpec], draft_specs: Sequence[LayerSpec], dtype: torch.dtype
) -> int:
    """Returns the bytes of staging buffers, and of the recurrent states of all slots and the spare row."""
    states = table_rows(layout, 0) * bytes_per_state(target_specs, dtype)
    states += layout.verify_rows * bytes_of_staged_node(target_specs, dtype)
    rows = layout.target_rows * bytes_per_token(target_specs, dtype)
    rows += layout.draft_rows * bytes_per_token(draft_specs, dtype)
    return states + rows
