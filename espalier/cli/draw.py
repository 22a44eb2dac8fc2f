"""Draws one round as a tree: the accepted nodes and where they were committed, the rejected nodes, and the scores."""

from collections.abc import Callable
from math import isfinite

from rich.text import Text

from espalier.engine.launch_input import RoundTrace
from espalier.terminal.console import FROM_DRAFT, QUIET, Signs

VOID = -1
Name = Callable[[int], str]


def round_tree(trace: RoundTrace, name: Name, signs: Signs) -> Text:
    """name: gives a token's text.  A node's score is the sum of log-probabilities along its branch; the tree keeps the
    nodes with the highest scores."""
    drawing = Text()
    _node(drawing, trace, 0, "", "", name, signs)
    bonus = trace.emitted[-1]
    position = trace.prefix_len + len(trace.emitted)
    drawing.append(f"next root: {name(bonus)}, picked by the target, at position {position}\n")
    drawing.append(_summary(trace), QUIET)
    return drawing


def _node(drawing: Text, trace: RoundTrace, node: int, lead: str, fork: str, name: Name, signs: Signs) -> None:
    accepted = node in trace.tree.path_rows
    label = name(trace.tree.tokens[node])
    if node == 0:
        drawing.append(f"{label}  root", "bold")
    else:
        drawing.append(lead + fork, QUIET)
        drawing.append(f"{signs.accepted if accepted else signs.rejected} {label}", FROM_DRAFT if accepted else QUIET)
        score = trace.tree.scores[node]
        drawing.append(f"  {score:.2f}" if isfinite(score) else "", QUIET)
    if accepted:
        drawing.append(f"  {signs.dot} {_place(trace, node)}", "cyan")
    drawing.append("\n")
    children = [
        i for i, parent in enumerate(trace.tree.parents) if i and parent == node and trace.tree.tokens[i] != VOID
    ]
    below = lead if node == 0 else lead + (signs.down if fork == signs.branch else "  ")
    for child in children:
        _node(drawing, trace, child, below, signs.last if child == children[-1] else signs.branch, name, signs)


def _place(trace: RoundTrace, node: int) -> str:
    """The position, page and row of an accepted node's K/V."""
    position = trace.prefix_len + trace.tree.depths[node]
    page = trace.pages[position // trace.page_size]
    return f"position {position}, page {page} row {position % trace.page_size}"


def _summary(trace: RoundTrace) -> str:
    drafted = sum(token != VOID for token in trace.tree.tokens) - 1
    accepted = len(trace.tree.path_rows) - 1
    return (
        f"{drafted} draft tokens verified in one pass, {accepted} accepted; {accepted + 1} rows committed, "
        f"{drafted - accepted} rejected that never were in the cache\n"
    )
