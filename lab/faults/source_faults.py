"""Planted faults of sources beside the draft, and of rows that are shared out over a batch."""

from lab.faults.base import Fault


def _nodes_without_parents(original):
    """Ranks a node by its last step, which may be likelier than the steps above it."""

    def best(tree, rows):
        return original(tree._replace(scores=tree.scores - tree.scores.gather(1, tree.parents)), rows)

    return best


def _sources_of_request_before(original):
    return lambda chosen, values: original(chosen, values).roll(1, 0)


def _counted_twice(original):
    def count(*of):
        original(*of)
        return original(*of)

    return count


SOURCE_FAULTS = (
    Fault(
        "parent-not-chosen",
        "a node gets one of the shared rows and its parent does not",
        "espalier.kernels.ops.tree:Tree.best_nodes",
        _nodes_without_parents,
    ),
    Fault(
        "rows-of-neighbour",
        "a request reads the shared rows of the request before it",
        "espalier.attention.forward:ChosenRows.to_tree_rows",
        _sources_of_request_before,
    ),
    Fault(
        "path-counted-twice",
        "what became of a path is counted twice",
        "espalier.engine.guesses:GuessSources._count_correct_guesses",
        _counted_twice,
    ),
    Fault(
        "picks-counted-twice",
        "what became of the draft's nodes is counted twice",
        "espalier.speculate.sources.survival:SurvivalCounts.count_draft_nodes",
        _counted_twice,
    ),
)
