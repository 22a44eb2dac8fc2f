"""The contracts of a drafter and of a draft's checkpoint format."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, Self

from torch import Tensor

from espalier.attention import CommittedLengths, ModelCache
from espalier.layout import RoundLayout
from espalier.models.base import CausalLM
from espalier.models.config import Json, ModelConfig, architecture_of
from espalier.models.draft import DraftConfig, DraftModel, DraftSpec
from espalier.models.weights import Weights
from espalier.slots import BatchState
from espalier.speculate.pieces import LastTokens
from espalier.speculate.sampler import Sampler
from espalier.speculate.tree import RootTrees, Tree

# A function that takes the launch's sampler and grows the trees of a batch, starting from the draft's first logits.
GrowTree = Callable[[Sampler], Tree]


class Drafter(Protocol):
    """Proposes token trees, and runs its draft model over the tokens that the target has decided.

    spec: the inputs and layers that the draft declares.  root_trees: makes the trees of plain decoding, which have only
    a root.  captures_prefill: whether a CUDA graph can capture the drafter's part of a prefill pass."""

    spec: DraftSpec
    root_trees: RootTrees

    @property
    def captures_prefill(self) -> bool: ...

    def for_layout(self, layout: RoundLayout) -> Self:
        """Returns this drafter for the tree of another layout, such as RoundLayout.for_batch, with the same buffers."""
        ...

    def prepare(self, lengths: CommittedLengths) -> None:
        """Called on the host before each launch.  lengths: how many draft rows of each request are committed."""
        ...

    def begin(self, slots: BatchState) -> GrowTree:
        """Begins to propose a tree for each request: runs the model up to the logits of depth 1.

        The masks of grammars are not needed for this part.  Returns the function that grows the trees, which have
        layout.num_draft_tokens nodes, at least two."""
        ...

    def extend(
        self, slots: BatchState, target_features: Tensor | None, length: Tensor, last_tokens: LastTokens | None = None
    ) -> None:
        """Runs the draft over the new tokens n+1 .. n+length, where token n is the root of `slots`.  The history in the
        slot table already holds these tokens.

        target_features: [B, W, F], the target's output that `spec.target_output` names, at tokens n .. n+W-1; None if
        the draft reads no output of the target.  length: [B], the number of new tokens, at most W.
        last_tokens: where each request's last token is in a prefill pass, for which `slots` has one row for each piece
        (speculate/pieces.py).  None in a round, for which `slots` has one row for each request."""
        ...


class DrafterWithoutFiles:
    """The base of drafters that need no model.  A subclass sets `spec`, which names the algorithm, and defines
    `propose`.  registry.py:WITHOUT_FILES lists the subclasses."""

    spec: DraftSpec
    captures_prefill = True

    def __init__(self, layout: RoundLayout, root_trees: RootTrees):
        self.layout = layout
        self.root_trees = root_trees

    def for_layout(self, layout: RoundLayout) -> Self:
        return type(self)(layout, self.root_trees)

    def prepare(self, lengths: CommittedLengths) -> None:
        """Does nothing, because there are no draft rows."""

    def begin(self, slots: BatchState) -> GrowTree:
        return partial(self.propose, slots)

    def propose(self, slots: BatchState, sampler: Sampler) -> Tree:
        """Returns a tree of layout.num_draft_tokens nodes under the root of each slot.

        A CUDA graph captures this method, so sizes must follow from the layout alone, and nothing may wait for the
        device.  sampler.guide: which next tokens a grammar allows or forces; a drafter may ignore it."""
        raise NotImplementedError

    def extend(
        self, slots: BatchState, target_features: Tensor | None, length: Tensor, last_tokens: LastTokens | None = None
    ) -> None:
        """Does nothing, because there is no draft model to run over the new tokens."""


class NoDrafter(DrafterWithoutFiles):
    """Plain decoding: each tree is the root alone."""

    spec = DraftSpec("none")


# A function that makes a drafter.  Arguments: the draft, the layout, and the cache of the draft's layers.
MakeDrafter = Callable[[Any, RoundLayout, ModelCache], Drafter]


# How the ranks divide the layers of a draft.  "whole": every rank holds all of each layer.  "as target": every rank
# holds a part, as of the target's layers; startup fails if the number of ranks cannot divide the draft.
# "if divisible": like "as target" if the number of ranks can divide the draft, else like "whole".
DraftSharding = Literal["whole", "as target", "if divisible"]


@dataclass(frozen=True)
class DraftFormat:
    """A checkpoint format of drafts: how to recognise, read, load and run a draft of this format.

    algorithm: the name that users give; equal to `DraftSpec.algorithm`.
    title: the name of such drafts in error texts, in the plural.
    architectures: names in `architectures` of config.json (or in `model_type`, if `architectures` is missing) that mean
    this format.  marked_architectures: names that mean this format only if config.json has one of `marker_fields`.
    excluding_fields: if config.json has one of these fields, the draft does not have this format.
    speculators_types: values of `speculators_model_type` that mean this format.  If a config has that field, no other
    field counts.
    read: (directory, config.json, the target's config) -> a config that fits this target.  Raises EspalierError.
    make: (weights, config, the target, number of rows of position tables) -> a DraftModel that uses every weight.
    drafter: makes the drafter that runs the model.
    is_in_target: (directory of a target, its config) -> whether the directory also holds a draft of this format; None
    if no target's directory does.
    checks: the fields of the draft's config.json to check if almost none of its tokens is accepted.
    sharding: see DraftSharding."""

    algorithm: str
    title: str
    architectures: tuple[str, ...]
    speculators_types: tuple[str, ...]
    read: Callable[[Path, Json, ModelConfig], DraftConfig]
    make: Callable[[Weights, Any, CausalLM, int], DraftModel]
    drafter: MakeDrafter
    is_in_target: Callable[[Path, ModelConfig], bool] | None = None
    checks: str = ""
    marked_architectures: tuple[str, ...] = ()
    marker_fields: tuple[str, ...] = ()
    excluding_fields: tuple[str, ...] = ()
    sharding: DraftSharding = "whole"

    def format_names(self, by_speculators: bool) -> str:
        """Returns the names in a config.json that mean this format.  by_speculators: whether speculators wrote it."""
        if not by_speculators:
            return ", ".join(self.architectures)
        return f"speculators' {', '.join(self.speculators_types)}" if self.speculators_types else ""

    def matches(self, config_json: Json) -> bool:
        """Returns whether the config.json of a checkpoint says that the checkpoint is a draft of this format."""
        speculators_type = config_json.get("speculators_model_type")
        if speculators_type is not None:
            return speculators_type in self.speculators_types
        set_fields = {name for name, value in config_json.items() if value is not None}
        marked_architectures = self.marked_architectures if set_fields.intersection(self.marker_fields) else ()
        return architecture_of(config_json) in (
            *self.architectures,
            *marked_architectures,
        ) and not set_fields.intersection(self.excluding_fields)
