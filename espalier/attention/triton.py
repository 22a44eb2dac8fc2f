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
from espalier.kernels.attention.kv_splits import KVSplitPolicy, KVSplits, kv_splits_triton
from espalier.kernels.attention.latent_attention import MAX_ROW_SIZE, MAX_V_SIZE, latent_attention_triton
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
        self.windowed: dict[tuple[int, KVSplitPolicy], KVSplits] = {}
        self.partials: dict[tuple[KVSplitPolicy, int, int], Partials] = {}

    def over_prefix(self, q: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        return self._run(layer, q, None)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._run(layer, q, Staged(k, v, self.nodes.row_positions, self.nodes.ancestor_bits))[0]

    def _run(self, layer: int, q: Tensor, staged: Staged | None) -> tuple[Tensor, Tensor]:
        spec, prefix = self.specs[layer], self.prefix
        k, v = self.committed(layer)
        committed = Committed(k, v, prefix.page_table, prefix.length, self.pages.page_size, prefix.first)
        splits = self.splits(spec)
        if _is_wide_latent(spec):
            made = None if splits.policy.max_splits == 1 else self._partials(splits, spec)
            return latent_attention_triton(q, committed, staged, self.nodes.positions, splits, spec.softmax_scale, made)
        partials = self._partials(splits, spec)
        counted = None
        if asks_straight(q, committed, staged, splits, spec.window):
            counted = self._straight(committed, splits)
        return tree_attention_triton(
            *(q, committed, staged, self.nodes.positions, splits, spec.softmax_scale, spec.window, None, partials),
            *(None, counted),
        )

    def splits(self, spec: LayerSpec) -> KVSplits:
        """The work list of layers like this.

        One without a window is kept with the prefix, for every pass over it that splits alike.
        """
        (batch, queries), layout, window = self.nodes.positions.shape, self.pages.layout, spec.window
        kv_heads = spec.rows.kv_heads
        max_rows = layout.tokens_in(layout.table_width)
        policy = KVSplitPolicy.of(batch, queries, kv_heads, spec.heads // kv_heads, max_rows)
        if window is None:
            if policy not in self.prefix.planned:
                self.prefix.planned[policy] = kv_splits_triton(self.prefix.length, self.prefix.first, policy)
            return self.prefix.planned[policy]
        key = (window, policy)
        if key not in self.windowed:
            positions = self.nodes.positions
            self.windowed[key] = kv_splits_triton(self.prefix.length, self.prefix.first, policy, positions, window)
        return self.windowed[key]

    def _straight(self, committed: Committed, splits: KVSplits) -> Tensor:
        """Of splits without a window, for every pass and layer that reads them."""
        key = (splits.policy, straight)
        if key not in self.prefix.planned:
            page_table, first = committed.page_table, committed.first
            self.prefix.planned[key] = straight(splits, page_table, committed.page_size, first)
        return self.prefix.planned[key]

    def _partials(self, splits: KVSplits, spec: LayerSpec) -> Partials:
        key = (splits.policy, spec.heads, spec.rows.v_size)
        if key not in self.partials:
            self.partials[key] = Partials.of(splits, self.queries, spec.heads, spec.rows.v_size)
        return self.partials[key]


def _is_wide_latent(spec: LayerSpec) -> bool:
    """Whether a layer keeps latent rows that are too wide for tree_attention."""
    return isinstance(spec.keeps, LatentKV) and spec.keeps.size > MAX_HEAD_SIZE


class TritonBackend:
    support = Support(
        name="triton",
        devices=("cuda",),
        dtypes=DTYPES,
        keeps=(KVHeads, LatentKV),
        sliding_window=True,
        different_v_size=True,
        head_sizes=range(1, MAX_HEAD_SIZE + 1),
        largest_latent=LatentKV(MAX_ROW_SIZE, MAX_V_SIZE),
    )
    plan = staticmethod(TritonAttention)

    def prepare(self, lengths: CommittedLengths) -> None:
        pass
