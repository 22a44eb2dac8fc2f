"""Combines a drafter with other sources: their paths are grafted onto the drafter's trees.

The drafter itself does not change.  A drafter without files may have sources too.
"""

from collections.abc import Sequence
from functools import partial
from typing import Self

import torch
from torch import Tensor

from espalier.attention import CommittedLengths
from espalier.layout import RoundLayout
from espalier.slots import BatchState
from espalier.speculate.drafters.base import Drafter, Grow
from espalier.speculate.pieces import LastTokens
from espalier.speculate.sampler import Sampler
from espalier.speculate.sources.base import Paths
from espalier.speculate.sources.graft import graft
from espalier.speculate.sources.sent import paths_of_guesses
from espalier.speculate.sources.text import paths_of_text
from espalier.speculate.tree import VOID, Tree


class GraftedDrafter:
    """drafter: proposes the trees; layout: the layout of the rounds."""

    def __init__(self, drafter: Drafter, layout: RoundLayout):
        self.drafter = drafter
        self.layout = layout
        self.spec = drafter.spec

    @property
    def captures_prefill(self) -> bool:
        return self.drafter.captures_prefill

    def for_layout(self, layout: RoundLayout) -> Self:
        return type(self)(self.drafter.for_layout(layout), layout)

    def prepare(self, lengths: CommittedLengths) -> None:
        self.drafter.prepare(lengths)

    def begin(self, slots: BatchState) -> Grow:
        grow = self.drafter.begin(slots)
        return grow if self.layout.num_draft_tokens == 1 else partial(self._grow, slots, grow)

    def _grow(self, slots: BatchState, grow: Grow, sampler: Sampler) -> Tree:
        tree, paths = grow(sampler), Paths.join(self._paths(slots))
        return tree if are_none(paths) else graft(tree, paths, slots.table.survival, self.layout.steps)

    def _paths(self, slots: BatchState) -> Sequence[Paths]:
        steps, paths = self.layout.steps, []
        if self.layout.sent_paths:
            paths.append(paths_of_guesses(slots, steps))
        if self.layout.text_paths:
            of_text = paths_of_text(slots, self.layout.text_paths, steps)
            said = torch.cat((of_text.kinds[..., None], of_text.tokens), -1)
            missing = slots.table.said.shape[2] - said.shape[2]
            slots.table.said.index_copy_(0, slots.index, torch.nn.functional.pad(said, (0, missing), value=VOID))
            paths.append(of_text)
        return paths

    def extend(
        self, slots: BatchState, target_features: Tensor | None, length: Tensor, last: LastTokens | None = None
    ) -> None:
        self.drafter.extend(slots, target_features, length, last)


def are_none(paths: Paths) -> bool:
    """Whether there are no paths.  For CPU tensors: on a GPU this would wait, and it is False."""
    return not paths.kinds.is_cuda and not bool(paths.kinds.any())
