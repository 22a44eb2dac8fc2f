"""For a round without a draft pass, on a CPU: makes the trees from the host's guesses alone.

merge_paths.py would make the same trees from the paths of sent.py.  These trees have so few nodes that a loop over
single nodes is faster than operations on tensors."""

import math

import torch
from torch import Tensor

from espalier.kernels.ops.tree import VOID, Tree
from espalier.layout import ANCESTOR_BITS
from espalier.slots import NO_TOKEN, BatchState

# A node's token, parent, depth, score, kind, and the bits of its ancestors, which `_best_nodes` sets.
GuessNode = tuple[int, int, int, float, int, int]
VOID_NODE = (VOID, 0, 1, -math.inf, 0)


def trees_of_guesses(slots: BatchState, num_nodes: int, steps: int, num_ancestor_words: int) -> tuple[Tree, Tensor]:
    """Returns (trees, kinds), [B, nodes] each.  The trees are made of the guessed paths in the slot table.  A node's
    kind is the number that stands for its source and match strength (espalier/slots.py)."""
    table, survival = slots.table, slots.table.survival.tolist()
    rows = table.guesses.index_select(0, slots.index).tolist()
    trees = []
    for slot, guesses, root, length in zip(
        slots.index.tolist(), rows, slots.root.tolist(), slots.prefix_len.tolist(), strict=True
    ):
        tree_nodes: list[GuessNode] = [(root, 0, 0, 0.0, 0, 0)]
        node_indices: dict[tuple[int, int], int] = {}
        for start, kind, *tokens in guesses:
            num_decided = length - start
            decided_tokens = table.history[slot, start + 1 : length + 1].tolist() if num_decided > 0 else []
            if kind and num_decided >= 0 and tokens[:num_decided] == decided_tokens:
                _add_guess_path(
                    tree_nodes, node_indices, tokens[num_decided : num_decided + steps], kind, survival[kind]
                )
        trees.append(_best_nodes(tree_nodes, num_nodes))
    tokens, parents, depths, scores, kinds = (
        torch.tensor([[node[part] for node in tree] for tree in trees]) for part in range(5)
    )
    words = torch.tensor(
        [
            [[_ancestor_word(node[5], word_index) for word_index in range(num_ancestor_words)] for node in tree]
            for tree in trees
        ]
    )
    return Tree(tokens, parents, depths, scores, words), kinds


def _add_guess_path(
    tree_nodes: list[GuessNode],
    node_indices: dict[tuple[int, int], int],
    tokens: list[int],
    kind: int,
    survival: list[float],
) -> None:
    """Adds a path.  Nodes with the same tokens from the root down become one node, with the higher of their scores.

    survival: a score for each depth.  node_indices: each node's index in `tree_nodes`, by its token and parent."""
    parent, score = 0, 0.0
    for depth, token in enumerate(tokens):
        if token == NO_TOKEN:
            return
        score += survival[depth]
        same = node_indices.setdefault((token, parent), len(tree_nodes))
        if same == len(tree_nodes):
            tree_nodes.append((token, parent, depth + 1, score, kind, 0))
        elif score > tree_nodes[same][3]:
            tree_nodes[same] = (*tree_nodes[same][:3], score, tree_nodes[same][4], 0)
        parent = same


def _best_nodes(tree_nodes: list[GuessNode], num_nodes: int) -> list[GuessNode]:
    """Returns the root and the best other nodes, in the order of their scores, padded with void nodes."""
    order = [0, *sorted(range(1, len(tree_nodes)), key=lambda at: -tree_nodes[at][3])][:num_nodes]
    place = {at: i for i, at in enumerate(order)}
    nodes: list[GuessNode] = []
    for at in order:
        token, parent, depth, score, kind, _ = tree_nodes[at]
        above = nodes[place[parent]][5] if at else 0
        nodes.append((token, place[parent], depth, score, kind, above | 1 << place[at]))
    return nodes + [(*VOID_NODE, 1 << at) for at in range(len(nodes), num_nodes)]


def _ancestor_word(ancestor_bits: int, word_index: int) -> int:
    """Returns word `word_index` of a node's ancestor bits, as a signed 64-bit number."""
    unsigned = ancestor_bits >> word_index * ANCESTOR_BITS & (1 << ANCESTOR_BITS) - 1
    return unsigned - (unsigned >> ANCESTOR_BITS - 1 << ANCESTOR_BITS)
