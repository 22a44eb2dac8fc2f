"""Limits how many rows of logits are in memory at a time."""

# For prompt log-probabilities: the most bytes of float32 logits that are computed at a time.  With a vocabulary of
# 128,256 tokens, this is 261 rows.  Computing 261 rows takes about as long as reading the weight of the output head.
MAX_PROMPT_LOGIT_BYTES = 2**27
# For a verify pass: the most bytes of float32 logits that are computed at a time.  With a vocabulary of 128,256 tokens,
# this is 4185 rows.  By default, the trees of a batch have fewer nodes together (startup/tree_policy.py).
MAX_NODE_LOGIT_BYTES = 2**31


def max_logit_rows(vocab_size: int) -> int:
    """Returns the number of rows of a prompt whose logits are computed at a time."""
    return max(1, MAX_PROMPT_LOGIT_BYTES // (4 * vocab_size))


def node_slices(batch: int, num_nodes: int, vocab_size: int) -> list[slice]:
    """Returns slices of the node indices 0 .. num_nodes - 1, in order.  The verify pass computes the logits of one
    slice of all trees at a time.  If all logits fit into MAX_NODE_LOGIT_BYTES, there is one slice."""
    width = max(1, MAX_NODE_LOGIT_BYTES // (4 * vocab_size * max(batch, 1)))
    return [slice(first, min(first + width, num_nodes)) for first in range(0, num_nodes, width)]
