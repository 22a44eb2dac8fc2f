"""How many rows of logits are held at a time."""

# Prompt log-probabilities: the most bytes of float32 logits computed at a time.  With a vocabulary of 128,256 that is
# 261 rows, which take about as long to compute as the head's weight takes to read.
LOGITS_BYTES = 2**27
# A verify pass: the same.  With that vocabulary it is 4185 rows, more than trees have by default
# (startup/tree_policy.py).
NODE_LOGITS_BYTES = 2**31


def logit_rows(vocab_size: int) -> int:
    """Rows of a prompt whose logits are computed at a time."""
    return max(1, LOGITS_BYTES // (4 * vocab_size))


def node_slices(batch: int, nodes: int, vocab_size: int) -> list[slice]:
    """Nodes of each request's tree whose logits are computed at a time, in order; one slice where all fit."""
    width = max(1, NODE_LOGITS_BYTES // (4 * vocab_size * max(batch, 1)))
    return [slice(first, min(first + width, nodes)) for first in range(0, nodes, width)]
