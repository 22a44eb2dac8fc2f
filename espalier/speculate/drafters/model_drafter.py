"""The base class of drafters that run a draft model.  It holds the model, the layout, and the cache of its layers."""

from typing import Generic, Self, TypeVar

from espalier.attention import CommittedLengths, ModelCache
from espalier.layout import RoundLayout
from espalier.models.draft import DraftModel
from espalier.speculate.tree import RootTrees

Model = TypeVar("Model", bound=DraftModel)


class ModelDrafter(Generic[Model]):
    def __init__(self, draft: Model, layout: RoundLayout, cache: ModelCache) -> None:
        """cache: the KV cache of the draft's layers, with staging buffers that are large enough for this layout."""
        self.spec = draft.spec
        self.draft = draft
        self.layout = layout
        self.cache = cache
        self.device = cache.pages.device
        self.root_trees = RootTrees(layout.max_batch, self.device)
        self.drafter_by_layout: dict[RoundLayout, Self] = {}
        self.allocate_tensors()

    def allocate_tensors(self) -> None:
        """Makes the tensors that depend on the layout alone.  Subclasses override this."""

    def for_layout(self, layout: RoundLayout) -> Self:
        # The drafter of each layout is kept, because CUDA graphs use the tensors with which they were captured.
        if layout not in self.drafter_by_layout:
            self.drafter_by_layout[layout] = type(self)(self.draft, layout, self.cache)
        return self.drafter_by_layout[layout]

    @property
    def captures_prefill(self) -> bool:
        return self.cache.backend.captures_prefill

    def prepare(self, lengths: CommittedLengths) -> None:
        self.cache.backend.prepare(lengths)
