"""The backends of a model: one for each group of layers that keep rows of the same form."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from espalier.attention.base import Attention, AttentionBackend, CommittedLengths, Nodes, Prefix
from espalier.cache.kv import PagedKV
from espalier.cache.layer_spec import LayerSpec


class GroupedAttention(Attention):
    """The plan of one pass: for each layer, the plan of its group."""

    def __init__(self, by_layer: Mapping[int, Attention], *pass_arguments: Any) -> None:
        super().__init__(*pass_arguments)
        self.by_layer = by_layer

    def over_prefix(self, q: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        return self.by_layer[layer].over_prefix(q, layer)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None) -> Tensor:
        return self.by_layer[layer].attend(layer, q, k, v, sink)


class GroupedBackend:
    """groups: for each group its layers and its backend."""

    def __init__(self, groups: Sequence[tuple[tuple[int, ...], AttentionBackend]]):
        self.groups = tuple(groups)

    @property
    def captures_prefill(self) -> bool:
        return all(backend.support.prefill_graph for _, backend in self.groups)

    def prepare(self, lengths: CommittedLengths) -> None:
        for _, backend in self.groups:
            backend.prepare(lengths)

    def plan(self, pages: PagedKV, specs: Sequence[LayerSpec], prefix: Prefix, nodes: Nodes) -> Attention:
        if len(self.groups) == 1:
            return self.groups[0][1].plan(pages, specs, prefix, nodes)
        plans = [(layers, backend.plan(pages, specs, prefix, nodes)) for layers, backend in self.groups]
        by_layer = {layer: plan for layers, plan in plans for layer in layers}
        return GroupedAttention(by_layer, pages, specs, prefix, nodes)
