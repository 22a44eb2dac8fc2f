"""Merges the token paths of other sources (such as the request's own text) into the trees of a drafter.

The drafter itself does not change.  The scores of the drafter's nodes and of the paths become log-probabilities of
acceptance, so that they can be compared (calibrate.py).  This also works for a drafter without a model, such as n-gram
lookup.  In a round without a draft pass, the tree is made of the paths alone.
"""

from functools import partial
from typing import Self

import torch
from torch import Tensor

from espalier.attention import CommittedLengths
from espalier.layout import RoundLayout
from espalier.slots import BatchState
from espalier.speculate.drafters.base import Drafter, GrowTree
from espalier.speculate.pieces import LastTokens
from espalier.speculate.sampler import Sampler
from espalier.speculate.sources.base import Paths
from espalier.speculate.sources.calibrate import (
    calibrate_scores,
    draft_node_kinds,
    pack_nodes,
    requests_that_sample,
    root_only_trees,
)
from espalier.speculate.sources.merge_paths import merge_paths
from espalier.speculate.sources.paths_alone import trees_of_guesses
from espalier.speculate.sources.sent import paths_of_guesses
from espalier.speculate.sources.text import paths_of_text
from espalier.speculate.tree import VOID, Tree


class PathMergingDrafter:
    """A Drafter that joins the trees of `drafter` with the sources' paths.  layout: sets the sizes of the trees."""

    def __init__(self, drafter: Drafter, layout: RoundLayout):
        self.drafter = drafter
        self.layout = layout
        self.spec, self.root_trees = drafter.spec, drafter.root_trees

    @property
    def captures_prefill(self) -> bool:
        return self.drafter.captures_prefill

    def for_layout(self, layout: RoundLayout) -> Self:
        return type(self)(self.drafter.for_layout(layout), layout)

    def prepare(self, lengths: CommittedLengths) -> None:
        self.drafter.prepare(lengths)

    def begin(self, slots: BatchState) -> GrowTree:
        """Returns the function that grows the trees: those of `drafter`, or only roots, with the paths in them."""
        layout = self.layout
        if layout.drafts:
            grow = self.drafter.begin(slots)
            return lambda sampler: self._merge_paths(slots, grow(sampler))
        if slots.root.device.type == "cpu" and not layout.num_text_paths:
            return partial(self._tree_of_guesses, slots)
        return partial(
            self._merge_paths, slots, root_only_trees(slots.root, layout.num_draft_tokens, layout.ancestor_words)
        )

    def _tree_of_guesses(self, slots: BatchState, _sampler: Sampler) -> Tree:
        """Makes the trees of a CPU from the guesses in the slots alone.  It has the parameters of GrowTree."""
        layout, table = self.layout, slots.table
        tree, kinds = trees_of_guesses(slots, layout.num_draft_tokens, layout.steps, layout.ancestor_words)
        table.candidates.index_copy_(0, slots.index, _pad_to_field(pack_nodes(tree, kinds), table.candidates))
        return tree

    def _merge_paths(self, slots: BatchState, tree: Tree, _sampler: Sampler | None = None) -> Tree:
        """Returns the drafter's trees with the sources' paths in them.  The sampler is not used."""
        paths, table = self._source_paths(slots), slots.table
        paths = None if have_no_paths(paths) else paths
        if not self.layout.shared_rows and paths is None:
            # The draft's scores are compared only with one another, within one request, so they need no calibration.
            table.candidates.index_fill_(0, slots.index, VOID)
            return tree
        if self.layout.drafts:
            kinds = draft_node_kinds(tree, requests_that_sample(slots))
            tree = calibrate_scores(tree, kinds, table.survival, table.draft_skill.index_select(0, slots.index))
        else:
            kinds = torch.zeros_like(tree.tokens)
        if paths is not None:
            tree, kinds = merge_paths(tree, kinds, paths, table.survival, self.layout.steps, self.layout.drafts)
        table.candidates.index_copy_(0, slots.index, _pad_to_field(pack_nodes(tree, kinds), table.candidates))
        return tree

    def _source_paths(self, slots: BatchState) -> Paths | None:
        """Returns the paths of all sources; None if the layout has no room for any."""
        steps, paths = self.layout.steps, []
        if self.layout.num_sent_paths:
            paths.append(paths_of_guesses(slots, steps))
        if self.layout.num_text_paths:
            text_paths = paths_of_text(slots, self.layout.num_text_paths, steps)
            packed = torch.cat((text_paths.kinds[..., None], text_paths.tokens), -1)
            slots.table.own_text_paths.index_copy_(0, slots.index, _pad_to_field(packed, slots.table.own_text_paths))
            paths.append(text_paths)
        return Paths.join(paths) if paths else None

    def extend(
        self, slots: BatchState, target_features: Tensor | None, length: Tensor, last_tokens: LastTokens | None = None
    ) -> None:
        """Runs the draft over the new tokens.  Arguments: see Drafter.extend."""
        self.drafter.extend(slots, target_features, length, last_tokens)


def _pad_to_field(values: Tensor, field: Tensor) -> Tensor:
    """Returns values [..., n], padded to the width of a field of the slot table, which fits the largest tree."""
    return torch.nn.functional.pad(values, (0, field.shape[-1] - values.shape[-1]), value=VOID)


def have_no_paths(paths: Paths | None) -> bool:
    """Whether it is known that there are no paths.  On a GPU, the content of `paths` is not known: reading it would
    wait for the GPU."""
    return paths is None or (not paths.kinds.is_cuda and not bool(paths.kinds.any()))
