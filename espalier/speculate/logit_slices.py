"""Limits the number of rows of logits that are held at a time."""

# For prompt log-probabilities: the most bytes of float32 logits that are computed at a time.  With a vocabulary of
# 128,256 these are 261 rows.  Computing them takes about as long as reading the weight of the output head.
MAX_PROMPT_LOGIT_BYTES = 2**27
# For a verify pass: the most bytes of float32 logits that are computed at a time.  With the same vocabulary these are
# 4185 rows, more than all trees of a batch have by default (startup/tree_policy.py).
MAX_NODE_LOGIT_BYTES = 2**31


def max_logit_rows(vocab_size: int) -> int:
    """Returns the number of rows of a prompt whose logits are computed at a time."""
    return max(1, MAX_PROMPT_LOGIT_BYTES // (4 * vocab_size))


def node_slices(batch: int, num_nodes: int, vocab_size: int) -> list[slice]:
    """Returns slices of a tree's nodes, in order.  The logits of one slice of all trees are computed at a time.

    Returns one slice if all logits fit into MAX_NODE_LOGIT_BYTES."""
    width = max(1, MAX_NODE_LOGIT_BYTES // (4 * vocab_size * max(batch, 1)))
    return [slice(first, min(first + width, num_nodes)) for first in range(0, num_nodes, width)]
