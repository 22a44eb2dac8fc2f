"""What a drafter is: two verbs and a declaration."""

from collections.abc import Mapping
from typing import Protocol, Self

from torch import Tensor

from espalier.attention import CommittedLengths
from espalier.layout import RoundLayout
from espalier.slots import Slots
from espalier.speculate.draws import Draws
from espalier.speculate.tree import Tree, root_only


class Drafter(Protocol):
    """algorithm: the name users give; layers: draft layers kept in pages; hidden_from: whose hidden feeds layer k at
    token q, "target" (the target's at q - k), "chain" (layer k - 1's at q - 1) or None; carried: what a slot hands from
    launch to launch, shapes by name."""

    algorithm: str
    layers: int
    hidden_from: str | None
    carried: Mapping[str, tuple[int, ...]]

    def sized(self, layout: RoundLayout) -> Self:
        """The same drafter, in the same buffers, for trees of a layout that these hold (RoundLayout.at)."""
        ...

    def prepare(self, lengths: CommittedLengths) -> None:
        """Called on the host before each launch, with what is known of the draft's committed rows."""
        ...

    def propose(self, slots: Slots, draws: Draws) -> Tree:
        """Grow a tree under each slot's root."""
        ...

    def extend(self, slots: Slots, captured: Tensor | None, length: Tensor) -> None:
        """Take in tokens n+1 .. n+length, already in the history.

        captured: [B, W, features] of the target at tokens n .. n+W-1, None if nothing is; length: [B], up to W.
        """
        ...


class NoDrafter:
    """Plain decoding: the tree is its root."""

    algorithm = "none"
    layers = 0
    hidden_from: str | None = None
    carried: Mapping[str, tuple[int, ...]] = {}

    def sized(self, layout: RoundLayout) -> Self:
        return self

    def prepare(self, lengths: CommittedLengths) -> None:
        pass

    def propose(self, slots: Slots, draws: Draws) -> Tree:
        return root_only(slots.root)

    def extend(self, slots: Slots, captured: Tensor | None, length: Tensor) -> None:
        pass
