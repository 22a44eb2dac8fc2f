"""Attention on a GPU: committed rows and staged rows in one kernel, over a work list made on the device once a round.

Nothing here reads a length on the host.  Work lists are kept with the prefix they are of, for every layer and every
pass that hangs from it; buffers of partial results with the pass, for its layers.
"""

from collections.abc import Sequence

from torch import Tensor

from espalier.attention.base import Attention, CommittedLengths, Nodes, Prefix, Support
from espalier.cache.kv import PagedKV
from espalier.cache.layer_spec import KVHeads, LatentKV, LayerSpec
from espalier.kernels.attention.contiguous_blocks import straight
from espalier.kernels.attention.kv_splits import KVSplits, kv_splits_triton
from espalier.kernels.attention.merge_splits import Partials
from espalier.kernels.attention.tree_attention import (
    DTYPES,
    MAX_HEAD_SIZE,
    Committed,
    Staged,
    asks_straight,
    tree_attention_triton,
)


class TritonAttention(Attention):
    def __init__(self, pages: PagedKV, specs: Sequence[LayerSpec], prefix: Prefix, nodes: Nodes):
        super().__init__(pages, specs, prefix, nodes)
        self.queries = nodes.positions.shape[1]
        self.windowed: dict[int, KVSplits] = {}
        self.partials: dict[tuple[int | None, int, int], Partials] = {}

    def over_prefix(self, q: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        return self._run(layer, q, None)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._run(layer, q, Staged(k, v, self.nodes.row_positions, self.nodes.ancestor_bits))[0]

    def _run(self, layer: int, q: Tensor, staged: Staged | None) -> tuple[Tensor, Tensor]:
        spec, prefix = self.specs[layer], self.prefix
        k, v = self.committed(layer)
        committed = Committed(k, v, prefix.page_table, prefix.length, self.pages.page_size, prefix.first)
        ranges = self._ranges(spec.window)
        partials = self._partials(ranges, spec)
        counted = None
        if asks_straight(q, committed, staged, ranges, spec.window):
            counted = self._straight(committed, ranges)
        return tree_attention_triton(
            *(q, committed, staged, self.nodes.positions, ranges, spec.softmax_scale, spec.window, None, partials),
            *(None, counted),
        )

    def _ranges(self, window: int | None) -> KVSplits:
        """The work list of a kind of layer; one without a window serves every pass of the prefix that is as wide."""
        cut = self.pages.layout.cut(self.queries)
        if window is None:
            if cut not in self.prefix.planned:
                self.prefix.planned[cut] = kv_splits_triton(self.prefix.length, self.prefix.first, cut)
            return self.prefix.planned[cut]
        if window not in self.windowed:
            positions = self.nodes.positions
            self.windowed[window] = kv_splits_triton(self.prefix.length, self.prefix.first, cut, positions, window)
        return self.windowed[window]

    def _straight(self, committed: Committed, ranges: KVSplits) -> Tensor:
        """Of ranges without a window, for every pass and layer that reads them."""
        key = (ranges.cut, straight)
        if key not in self.prefix.planned:
            page_table, first = committed.page_table, committed.first
            self.prefix.planned[key] = straight(ranges, page_table, committed.page_size, first)
        return self.prefix.planned[key]

    def _partials(self, ranges: KVSplits, spec: LayerSpec) -> Partials:
        key = (spec.window, spec.heads, spec.rows.v_size)
        if key not in self.partials:
            self.partials[key] = Partials.of(ranges, self.queries, spec.heads, spec.rows.v_size)
        return self.partials[key]


class TritonBackend:
    support = Support(
        name="triton",
        devices=("cuda",),
        dtypes=DTYPES,
        keeps=(KVHeads, LatentKV),
        sliding_window=True,
        different_v_size=True,
        head_sizes=range(1, MAX_HEAD_SIZE + 1),
    )
    plan = staticmethod(TritonAttention)

    def prepare(self, lengths: CommittedLengths) -> None:
        pass
