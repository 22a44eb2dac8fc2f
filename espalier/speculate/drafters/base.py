"""What a drafter is, and what a format of drafts on disk is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from torch import Tensor

from espalier.attention import CommittedLengths, GroupedBackend
from espalier.cache.kv import PagedKV
from espalier.cache.layer_spec import LayerSpec
from espalier.layout import RoundLayout
from espalier.models.base import CausalLM
from espalier.models.config import ModelConfig, Raw
from espalier.models.draft import DraftConfig, DraftModel, DraftSpec
from espalier.models.weights import Weights
from espalier.slots import BatchState
from espalier.speculate.sampler import Sampler
from espalier.speculate.tree import Tree, root_only


class Drafter(Protocol):
    """Grows trees, and takes in what was decided of them.  spec: its declaration."""

    spec: DraftSpec

    def sized(self, layout: RoundLayout) -> Self:
        """The same drafter, in the same buffers, for trees of a layout that these hold (RoundLayout.at)."""
        ...

    def prepare(self, lengths: CommittedLengths) -> None:
        """Called on the host before each launch, with what is known of the draft's committed rows."""
        ...

    def propose(self, slots: BatchState, sampler: Sampler) -> Tree:
        """Grow a tree under each slot's root."""
        ...

    def extend(self, slots: BatchState, read: Tensor | None, length: Tensor) -> None:
        """Take in tokens n+1 .. n+length, already in the history.

        read: [B, W, F], what `spec.reads` names of the target at tokens n .. n+W-1, None if nothing is; length: [B], up
        to W.
        """
        ...


class NoDrafter:
    """Plain decoding: the tree is its root."""

    spec = DraftSpec("none")

    def __init__(self, layout: RoundLayout):
        """layout: of every drafter's; this one needs nothing of it."""

    def sized(self, layout: RoundLayout) -> Self:
        return self

    def prepare(self, lengths: CommittedLengths) -> None:
        pass

    def propose(self, slots: BatchState, sampler: Sampler) -> Tree:
        return root_only(slots.root)

    def extend(self, slots: BatchState, read: Tensor | None, length: Tensor) -> None:
        pass


class MakeDrafter(Protocol):
    def __call__(
        self, draft: Any, layout: RoundLayout, pages: PagedKV, backend: GroupedBackend, geometry: Sequence[LayerSpec]
    ) -> Drafter:
        """geometry: of all layers, the target's first; the draft's are the last."""
        ...


def no_explanation(raw: Raw, path: Path) -> str | None:
    return None


@dataclass(frozen=True)
class DraftFormat:
    """A form in which drafts are stored, from its config.json to the drafter that runs it.

    algorithm: the name that users give, and that `DraftSpec.algorithm` repeats.
    title: what refusals call such drafts, in the plural.
    architectures, speculators_types: what config.json says of such a draft, in `architectures` (or, without it,
    `model_type`), or in `speculators_model_type`, which then decides alone.
    read: (directory, config.json, the target's config) -> a config that fits this target.  Raises EspalierError.
    make: (weights, config, the target, rows of position tables) -> a DraftModel that takes every weight.
    drafter: makes what runs it.
    explain: (config.json, directory) -> why a draft that no format takes is not supported, where this format's file
    knows better than "unknown".
    """

    algorithm: str
    title: str
    architectures: tuple[str, ...]
    speculators_types: tuple[str, ...]
    read: Callable[[Path, Raw, ModelConfig], DraftConfig]
    make: Callable[[Weights, Any, CausalLM, int], DraftModel]
    drafter: MakeDrafter
    explain: Callable[[Raw, Path], str | None] = no_explanation

    def takes(self, raw: Raw) -> bool:
        declared = raw.get("speculators_model_type")
        return architecture_of(raw) in self.architectures if declared is None else declared in self.speculators_types


def architecture_of(raw: Raw) -> str | None:
    return (raw.get("architectures") or [raw.get("model_type")])[0]
