"""Planted faults of sources beside the draft, and of rows that are shared out over a batch."""

from lab.faults.base import Fault


def _step_alone(right):
    """Ranks a node by its last step, which may be likelier than the steps above it."""

    def best(tree, rows):
        return right(tree._replace(scores=tree.scores - tree.scores.gather(1, tree.parents)), rows)

    return best


def _of_request_before(right):
    return lambda chosen, values: right(chosen, values).roll(1, 0)


def _twice(right):
    def count(*of):
        right(*of)
        return right(*of)

    return count


SOURCE_FAULTS = (
    Fault(
        "parent-not-chosen",
        "a node gets one of the shared rows and its parent does not",
        "espalier.kernels.ops.tree:Tree.best_nodes",
        _step_alone,
    ),
    Fault(
        "rows-of-neighbour",
        "a request reads the shared rows of the request before it",
        "espalier.attention.forward:ChosenRows.to_tree_rows",
        _of_request_before,
    ),
    Fault(
        "path-counted-twice",
        "what became of a path is counted twice",
        "espalier.engine.guesses:GuessSources._count_correct_guesses",
        _twice,
    ),
    Fault(
        "picks-counted-twice",
        "what became of the draft's nodes is counted twice",
        "espalier.speculate.sources.survival:SurvivalCounts.count_draft_nodes",
        _twice,
    ),
)
