"""What every drafter that runs a draft model holds: the model, its place among the layers, and its staging."""

from collections.abc import Sequence
from typing import Generic, Self, TypeVar

from espalier.attention import Attention, CommittedLengths, GroupedBackend, Nodes, Prefix
from espalier.cache.kv import PagedKV, StagedKV
from espalier.cache.layer_spec import LayerSpec
from espalier.layout import RoundLayout
from espalier.models.draft import DraftModel
from espalier.speculate.tree import RootTrees

Model = TypeVar("Model", bound=DraftModel)


class ModelDrafter(Generic[Model]):
    def __init__(
        self,
        draft: Model,
        layout: RoundLayout,
        pages: PagedKV,
        backend: GroupedBackend,
        layer_specs: Sequence[LayerSpec],
        staging: StagedKV | None = None,
    ):
        """layer_specs: specs of all layers, the target's first, the draft's last.

        staging: a buffer that is large enough for this layout; by default a new one.
        """
        self.spec = draft.spec
        self.draft = draft
        self.layout = layout
        self.pages = pages
        self.backend = backend
        self.layer_specs = layer_specs
        self.first_layer = len(layer_specs) - len(self.spec.layers)
        layers = range(self.first_layer, len(layer_specs))
        self.staging = staging or StagedKV(layer_specs, layers, layout.draft_rows, pages.dtype, pages.device)
        self.root_trees = RootTrees(layout.max_batch, pages.device)
        self.by_layout: dict[RoundLayout, Self] = {}
        self.allocate()

    def allocate(self) -> None:
        """Make the tensors that follow from the layout alone."""

    def for_layout(self, layout: RoundLayout) -> Self:
        """As Drafter.for_layout."""
        # Kept, because a CUDA graph replays with the tensors of its capture.
        if layout not in self.by_layout:
            drafter = type(self)(self.draft, layout, self.pages, self.backend, self.layer_specs, self.staging)
            self.by_layout[layout] = drafter
        return self.by_layout[layout]

    @property
    def captures_prefill(self) -> bool:
        """As Drafter.captures_prefill."""
        return self.backend.captures_prefill

    def prepare(self, lengths: CommittedLengths) -> None:
        """As Drafter.prepare."""
        self.backend.prepare(lengths)

    def plan(self, prefix: Prefix, nodes: Nodes) -> Attention:
        return self.backend.plan(self.pages, self.layer_specs, prefix, nodes)
