"""Decides the tree of each round: asks the chooser (tree_choice.py), and gives the results of rounds to the chooser."""

from collections import Counter
from collections.abc import Sequence

from espalier.engine.acceptance import AcceptanceSample
from espalier.engine.launch_input import LaunchInput, RequestResult
from espalier.engine.tree_choice import LookupGain, TreeChooser
from espalier.layout import RoundLayout, TreeShape
from espalier.request import Request


class RoundTrees:
    """Decides the tree of each round, and counts results.

    chooser: chooses among RoundLayout.choices; None to run the fixed tree of each batch size.
    runs_any_tree: whether a round may have another tree than the layout's trees (Executor.runs_any_tree).
    num_rounds: how many rounds of each tree were launched."""

    def __init__(self, layout: RoundLayout, chooser: TreeChooser | None = None, runs_any_tree: bool = False) -> None:
        self.layout = layout
        self.chooser = chooser or TreeChooser()
        self.runs_any_tree = runs_any_tree
        self.num_rounds: Counter[TreeShape] = Counter()
        # Whether a round may run without a draft pass, with looked-up guesses alone.
        self.has_lookup_trees = any(not tree.drafts for _, trees in layout.choices for tree in trees)

    def next_tree(self, batch: Sequence[Request], lookup_gain: LookupGain | None = None) -> TreeShape | None:
        """Returns the tree of these requests' next round; None for the layout's tree.  lookup_gain: see TreeChooser."""
        tree = self._chosen_tree(batch, lookup_gain)
        self.num_rounds[tree or self.layout.for_batch(len(batch)).tree] += 1
        return tree

    def _chosen_tree(self, batch: Sequence[Request], lookup_gain: LookupGain | None) -> TreeShape | None:
        """Returns the tree that the chooser wants; None for the layout's tree.  lookup_gain: see TreeChooser.choose."""
        if not self.layout.steps:
            return None
        if not self.runs_any_tree and any(request.masker for request in batch):
            # Rounds with a grammar run in stages, and only the layout's tree has stages.
            return None
        drafting = self._num_drafting(batch)
        context = sum(request.num_known for request in batch) / len(batch)
        tree = self.chooser.choose(len(batch), drafting, context, lookup_gain)
        return self.layout.tree_without_draft if tree is None and not drafting else tree

    def tree_of_pass(self, batch: Sequence[Request]) -> TreeShape | None:
        """Returns the value of LaunchInput.tree for the prefill pass of these requests, which is launched now."""
        self.chooser.prefill_launched()
        return self.layout.tree_without_draft if self.layout.steps and not self._num_drafting(batch) else None

    def _num_drafting(self, batch: Sequence[Request]) -> int:
        """Returns how many requests of the batch can accept guesses."""
        return sum(request.params.depth_limit(self.layout.steps) > 0 for request in batch)

    def has_draft_rows(self, request: Request) -> bool:
        """Whether the draft has run over all tokens of the request; True without a draft model."""
        return not self.layout.has_draft_model or request.params.depth_limit(self.layout.steps) > 0

    def num_verified_rows(self, tree: TreeShape | None, batch: int) -> int:
        """Returns how many nodes a round of this tree verifies.  batch: the number of requests."""
        return batch * (tree or self.layout.for_batch(batch).tree).rows

    def record(
        self,
        launch_input: LaunchInput,
        results: Sequence[RequestResult],
        max_depths: Sequence[int],
        num_correct: Sequence[int],
    ) -> None:
        """Counts the results of a launch, for the choice of later trees.

        max_depths: for each request, the greatest depth at which it could accept nodes.  num_correct: for each
        request, the largest number of correct tokens in one guess."""
        tree = launch_input.tree
        if launch_input.is_prefill:
            self.chooser.restart()
        if launch_input.is_prefill or tree is None:
            return
        num_guesses = [sum(result.tree_size.tokens_by_depth) for result in results]
        num_verified = len(results) + sum(num_guesses) if tree.shared_rows else len(results) * (1 + max(num_guesses))
        lacks_guesses = [
            num_verified < len(results) * tree.rows if tree.shared_rows else num_found < tree.num_draft_tokens - 1
            for num_found in num_guesses
        ]
        counted = [(i, result) for i, result in enumerate(results) if max_depths[i] > 0 and result.is_finite]
        samples = [
            AcceptanceSample(max_depths[i], result.sibling_ranks, result.is_leaf, lacks_guesses[i])
            for i, result in counted
        ]
        looked_up = counted if self.has_lookup_trees else ()
        lookup_samples = [_lookup_sample(max_depths[i], num_correct[i], len(result.tokens)) for i, result in looked_up]
        self.chooser.record(samples, num_verified, lookup_samples)


def tree_label(tree: TreeShape) -> str:
    """A short name of a tree, for metrics."""
    shared = f" sharing {tree.shared_rows}" if tree.shared_rows else ""
    return ",".join(map(str, tree.sizes.values())) + shared + ("" if tree.drafts and tree.extends else " without draft")


def _lookup_sample(max_depth: int, num_correct: int, num_emitted: int) -> AcceptanceSample:
    """Returns the sample that the guesses of the host's and the device's sources would have given without the draft.

    If all emitted tokens agree with a guess, later tokens of the guess might have been accepted too.  So in this case,
    no token counts as rejected."""
    depth = num_correct if num_correct == num_emitted else max_depth
    return AcceptanceSample(depth, (0,) * min(max_depth, num_correct), True, True)
