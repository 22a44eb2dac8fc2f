"""The backends of a model: one for each group of layers that keep rows of the same form."""

from collections.abc import Sequence

from espalier.attention.base import AttentionBackend, CommittedLengths


class GroupedBackend:
    """groups: for each group its layers and its backend.  of_layer: the backend of each layer."""

    def __init__(self, groups: Sequence[tuple[tuple[int, ...], AttentionBackend]]):
        self.groups = tuple(groups)
        self.of_layer = {layer: backend for layers, backend in self.groups for layer in layers}

    @property
    def captures_prefill(self) -> bool:
        return all(backend.support.prefill_graph for _, backend in self.groups)

    def prepare(self, lengths: CommittedLengths) -> None:
        for _, backend in self.groups:
            backend.prepare(lengths)
