"""The contracts of a drafter and of a draft's checkpoint format."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

from torch import Tensor

from espalier.attention import CommittedLengths, ModelCache
from espalier.layout import RoundLayout
from espalier.models.base import CausalLM
from espalier.models.config import ModelConfig, Raw, architecture_of
from espalier.models.draft import DraftConfig, DraftModel, DraftSpec
from espalier.models.weights import Weights
from espalier.slots import BatchState
from espalier.speculate.pieces import LastTokens
from espalier.speculate.sampler import Sampler
from espalier.speculate.tree import RootTrees, Tree

# The rest of a proposal, once the sampler is known.
Grow = Callable[[Sampler], Tree]


class Drafter(Protocol):
    """Proposes token trees, and runs over the tokens that were decided.

    spec: what the draft needs (DraftSpec); root_trees: trees without a proposal; captures_prefill: whether its part of
    prefill passes can be captured.
    """

    spec: DraftSpec
    root_trees: RootTrees

    @property
    def captures_prefill(self) -> bool: ...

    def for_layout(self, layout: RoundLayout) -> Self:
        """The same drafter with the same buffers, for the tree of a smaller layout (RoundLayout.at)."""
        ...

    def prepare(self, lengths: CommittedLengths) -> None:
        """Called on the host before each launch.  lengths: of the draft's committed rows."""
        ...

    def begin(self, slots: BatchState) -> Grow:
        """Begin to propose a tree under the root of each slot: all that no mask changes, up to the first logits.

        The tree has layout.num_draft_tokens nodes, at least two.
        """
        ...

    def extend(
        self, slots: BatchState, target_features: Tensor | None, length: Tensor, last: LastTokens | None = None
    ) -> None:
        """Run over the new tokens n+1 .. n+length, which are in the slots' history already.

        target_features: [B, W, F], the features in `spec.reads`, at tokens n .. n+W-1; None if it names none.
        length: [B], at most W.
        last: of a prefill pass, where each request's last token is; `slots` has one row for each piece
        (speculate/pieces.py).  None in a round, where each row is a request.
        """
        ...


class DrafterWithoutFiles:
    """The base of drafters that need no model.  A subclass has a `spec`, which names it, and a `propose`.

    Registered as in speculate/drafters/registry.py:WITHOUT_FILES.
    """

    spec: DraftSpec
    captures_prefill = True

    def __init__(self, layout: RoundLayout, root_trees: RootTrees):
        self.layout = layout
        self.root_trees = root_trees

    def for_layout(self, layout: RoundLayout) -> Self:
        return type(self)(layout, self.root_trees)

    def prepare(self, lengths: CommittedLengths) -> None:
        pass

    def begin(self, slots: BatchState) -> Grow:
        return partial(self.propose, slots)

    def propose(self, slots: BatchState, sampler: Sampler) -> Tree:
        """A tree of layout.num_draft_tokens nodes under the root of each slot.

        A CUDA graph captures this: sizes follow from the layout alone, and nothing waits for the device.
        sampler.guide: what a grammar says of the next tokens; a drafter may ignore it.
        """
        raise NotImplementedError

    def extend(
        self, slots: BatchState, target_features: Tensor | None, length: Tensor, last: LastTokens | None = None
    ) -> None:
        pass


class NoDrafter(DrafterWithoutFiles):
    """Plain decoding: the tree is the root alone."""

    spec = DraftSpec("none")


# (draft, layout, where its layers keep their rows) -> drafter.
MakeDrafter = Callable[[Any, RoundLayout, ModelCache], Drafter]


@dataclass(frozen=True)
class DraftFormat:
    """A checkpoint format of drafts: how to recognise it, read it, load it and run it.

    algorithm: the name that users give; equal to `DraftSpec.algorithm`.
    title: the name of such drafts in error texts, in the plural.
    architectures: values of `architectures` in config.json (or of `model_type`, if that is missing) of this format.
    marked: further architectures, which are of this format if config.json has one of the fields `marks`.
    unmarked: fields that config.json must not have; with one of them it is of another format.
    speculators_types: values of `speculators_model_type` of this format; if a config has that field, it alone decides.
    read: (directory, config.json, the target's config) -> a config that fits this target.  Raises EspalierError.
    make: (weights, config, the target, rows of position tables) -> a DraftModel that uses every weight.
    drafter: makes the drafter that runs the model.
    in_target: (directory of a target, its config) -> whether it holds a draft of this format beside the target; None:
    no target does.
    checks: what to check in the draft's config.json if almost none of its tokens is accepted.
    in_parts: whether each of several ranks holds a part of its layers, which are a target's; else each has it whole.
    """

    algorithm: str
    title: str
    architectures: tuple[str, ...]
    speculators_types: tuple[str, ...]
    read: Callable[[Path, Raw, ModelConfig], DraftConfig]
    make: Callable[[Weights, Any, CausalLM, int], DraftModel]
    drafter: MakeDrafter
    in_target: Callable[[Path, ModelConfig], bool] | None = None
    checks: str = ""
    marked: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    unmarked: tuple[str, ...] = ()
    in_parts: bool = False

    def names(self, by_speculators: bool) -> str:
        """The names by which `takes` knows this format, if speculators wrote the config.json or not."""
        if not by_speculators:
            return ", ".join(self.architectures)
        return f"speculators' {', '.join(self.speculators_types)}" if self.speculators_types else ""

    def takes(self, raw: Raw) -> bool:
        declared = raw.get("speculators_model_type")
        if declared is not None:
            return declared in self.speculators_types
        given = {name for name, value in raw.items() if value is not None}
        marked = self.marked if given.intersection(self.marks) else ()
        return architecture_of(raw) in (*self.architectures, *marked) and not given.intersection(self.unmarked)
