"""The GPU backend: one kernel attends to committed and staged rows, over splits computed on the device.

Nothing here reads a length on the host.  Splits are computed once for each Prefix, for all layers and passes over it;
with a window, once a pass.  Buffers of partial results are kept in the plan of a pass, for its layers.
"""

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from espalier.attention.base import Attention, AttentionBackend
from espalier.attention.support import By, Support
from espalier.cache.kv import PagedKV
from espalier.cache.layer_spec import KVHeads, LatentKV, LayerSpec
from espalier.errors import EspalierError
from espalier.kernels.attention.choose import uses_contiguous_blocks
from espalier.kernels.ops.attention import (
    DTYPES,
    MAX_HEAD_SIZE,
    MAX_LATENT_HEAD_SIZE,
    MAX_ROW_SIZE,
    MAX_V_SIZE,
    Inputs,
    Nodes,
    PartialResults,
    Prefix,
    count_contiguous_blocks,
    latent_attention,
    tree_attention,
)
from espalier.kernels.ops.kv_splits import KVSplitPolicy, KVSplits, kv_splits


class TritonAttention(Attention):
    def __init__(self, pages: PagedKV, specs: Sequence[LayerSpec], prefix: Prefix, nodes: Nodes):
        super().__init__(pages, specs, prefix, nodes)
        self.queries = nodes.positions.shape[1]
        self.partials: dict[tuple[KVSplitPolicy, int, int], PartialResults] = {}
        self.splits_of: dict[tuple[KVSplitPolicy, int | None], KVSplits] = {}
        self.contiguous_of: dict[tuple[LayerSpec, bool], Tensor | None] = {}

    def over_prefix(self, q: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        return self._attend(layer, q, None, None)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None) -> Tensor:
        return self._attend(layer, q, (k, v), sink)[0]

    def _attend(
        self, layer: int, q: Tensor, staged: tuple[Tensor, Tensor] | None, sink: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        spec = self.specs[layer]
        splits = self.splits(spec)
        inputs = self.inputs(layer, q, staged, self.prefix, splits, sink)
        if _is_wide_latent(spec):
            if sink is not None:
                raise EspalierError("attention=triton has no sinks over wide latent rows; use attention=reference")
            partials = None if splits.policy.max_splits == 1 else self._partials(splits, spec)
            return latent_attention.triton(inputs, partials)
        return tree_attention.triton(
            inputs, self._partials(splits, spec), contiguous=self._contiguous_blocks(spec, inputs)
        )

    def splits(self, spec: LayerSpec) -> KVSplits:
        """The splits for layers with this spec.

        Splits without a window are kept in the prefix, for all passes over it with the same policy.
        """
        key = self._policy(spec), spec.window
        if key not in self.splits_of:
            self.splits_of[key] = self._splits(*key)
        return self.splits_of[key]

    def _policy(self, spec: LayerSpec) -> KVSplitPolicy:
        (batch, queries), layout = self.nodes.positions.shape, self.pages.layout
        kv_heads = spec.keeps.kv_heads
        max_rows = layout.tokens_in(layout.table_width)
        return KVSplitPolicy.of(
            batch, queries, kv_heads, spec.heads // kv_heads, max_rows, spec.keeps.v_size, _is_wide_latent(spec)
        )

    def _splits(self, policy: KVSplitPolicy, window: int | None) -> KVSplits:
        if window is None:
            return self.prefix.shared(policy, partial(kv_splits.triton, self.prefix.length, self.prefix.first, policy))
        return kv_splits.triton(self.prefix.length, self.prefix.first, policy, self.nodes.positions, window)

    def _contiguous_blocks(self, spec: LayerSpec, inputs: Inputs) -> Tensor | None:
        """Counts of contiguous blocks, kept in the prefix; None where the kernel does not use them."""
        key = (spec, inputs.staged is None)
        if key not in self.contiguous_of:
            self.contiguous_of[key] = self._counted(inputs) if uses_contiguous_blocks(inputs) else None
        return self.contiguous_of[key]

    def _counted(self, inputs: Inputs) -> Tensor:
        pages = inputs.prefix.page_table, inputs.page_size, inputs.prefix.first
        key = (inputs.splits.policy, count_contiguous_blocks)
        return self.prefix.shared(key, partial(count_contiguous_blocks, inputs.splits, *pages))

    def _partials(self, splits: KVSplits, spec: LayerSpec) -> PartialResults:
        key = (splits.policy, spec.heads, spec.keeps.v_size)
        if key not in self.partials:
            self.partials[key] = PartialResults.of(splits, self.queries, spec.heads, spec.keeps.v_size)
        return self.partials[key]


def _is_wide_latent(spec: LayerSpec) -> bool:
    """Whether a layer keeps latent rows that are too wide for tree_attention."""
    return isinstance(spec.keeps, LatentKV) and spec.keeps.size > MAX_LATENT_HEAD_SIZE


class TritonBackend(AttentionBackend):
    support = Support(
        name="triton",
        devices=("cuda",),
        dtypes=DTYPES,
        keeps=(KVHeads, LatentKV),
        window_on_chain=By.ITSELF,
        window_on_tree=By.ITSELF,
        sinks=By.ITSELF,
        fp8=By.ITSELF,
        softcap=By.ITSELF,
        different_v_size=True,
        head_sizes=range(1, MAX_HEAD_SIZE + 1),
        largest_latent=LatentKV(MAX_ROW_SIZE, MAX_V_SIZE),
        prefill_graph=True,
        ran_on=("H100", "H200"),
    )
    attention = TritonAttention
