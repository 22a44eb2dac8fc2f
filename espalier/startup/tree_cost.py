"""Predicts the fastest tree at each batch for a mixture of experts, where nothing was measured.

A verify pass of a dense model reads the same weights however many nodes it has.  With experts, more rows touch more
experts: at one request, plain decoding reads 8 of 128 experts, and a tree of 64 nodes reads 126.  So plain decoding is
fastest at few requests, trees where plain decoding touches most experts already, and plain decoding again where
products take longer than reading.

The model: each pass takes the longer of reading its weights once and of its products; routing is uniform, and rows are
independent.  Text whose neighbouring tokens share experts makes trees faster than predicted; `espalier bench round
--choose` measures.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from espalier.layout import PLAIN, TreeShape
from espalier.models.config import ModelConfig
from espalier.models.draft import DraftConfig

# FLOPs that a GPU computes in the time in which it reads a byte: 690 TFLOP/s and 4.4 TB/s, measured on an H200.
FLOPS_PER_BYTE = 157
# Smaller trees that are tried beside the configured one.
SMALLER = (TreeShape(5, 4, 16), TreeShape(3, 2, 8))
# Accept length by number of nodes: EAGLE-3 on the shape of Llama-3.1-8B (crossovers.json).
ACCEPT_LENGTHS = ((1, 1.0), (8, 2.8), (16, 3.5), (64, 4.0))


@dataclass(frozen=True)
class MixtureWeights:
    """Numbers of weights.

    dense: of the target, that every row is multiplied with; expert: of one expert, summed over the layers; draft: that
    a draft pass reads.
    """

    dense: int
    expert: int
    num_experts: int
    top_k: int
    draft: int

    def target_cost(self, rows: int) -> float:
        """The time of a target pass, in bytes read meanwhile."""
        touched = self.num_experts * (1 - (1 - self.top_k / self.num_experts) ** rows)
        return _cost(self.dense, rows) + max(2 * self.expert * touched, _products(self.expert * self.top_k, rows))

    def round_cost(self, tree: TreeShape, batch: int) -> float:
        """The time of a round, in bytes read meanwhile."""
        verify = self.target_cost(batch * tree.num_draft_tokens)
        if tree == PLAIN:
            return verify
        levels = (tree.steps - 1) * _cost(self.draft, batch * tree.topk)
        return verify + levels + _cost(self.draft, batch * (tree.steps + 1))


def mixture_weights(target: ModelConfig, draft: DraftConfig | None) -> MixtureWeights | None:
    """None for a dense target.  draft: None for a drafter without weights."""
    experts, hidden = target.experts, target.hidden_size
    if experts is None:
        return None
    every = _attention(target) * target.num_layers + target.vocab_size * hidden
    dense_mlps = (target.num_layers - len(experts.layers)) * target.intermediate_size
    shared = len(experts.layers) * experts.shared_size
    return MixtureWeights(
        dense=every + 3 * hidden * (dense_mlps + shared),
        expert=len(experts.layers) * 3 * hidden * experts.size,
        num_experts=experts.routing.num_experts,
        top_k=experts.routing.top_k,
        draft=0 if draft is None else _draft(draft.layer, draft.spec.vocab_size),
    )


def _draft(layer: ModelConfig, vocab_size: int) -> int:
    """The attention reads embedding and hidden state, so it is about twice as large as a target layer's."""
    return 2 * _attention(layer) + layer.hidden_size * (3 * layer.intermediate_size + vocab_size)


def _attention(config: ModelConfig) -> int:
    """Weights of one layer's attention."""
    latent, hidden, heads = config.latent, config.hidden_size, config.heads
    if latent is None:
        return 2 * hidden * (heads + config.kv_heads) * config.head_size
    rank = latent.q_rank or hidden
    queries = (hidden * rank if latent.q_rank else 0) + rank * heads * latent.head_size
    up = heads * latent.kv_rank * (latent.nope_size + latent.v_size)
    return queries + hidden * latent.row_size + up + hidden * heads * latent.v_size


def trees_by_cost(configured: TreeShape, weights: MixtureWeights, max_batch: int) -> dict[int, TreeShape]:
    """The tree that is predicted to be fastest, by the least number of requests; none where that is the configured one
    at every batch."""
    trees = [configured, *(tree for tree in SMALLER if _fits(configured, tree)), PLAIN]
    chosen: dict[int, TreeShape] = {}
    current = configured
    for batch in _doublings(max_batch):
        best = max(trees, key=lambda tree: accept_length(tree) / weights.round_cost(tree, batch))
        if best != current:
            chosen[batch] = current = best
    return chosen


def accept_length(tree: TreeShape) -> float:
    """By ACCEPT_LENGTHS, linear in the doublings of nodes."""
    nodes = min(tree.num_draft_tokens, ACCEPT_LENGTHS[-1][0])
    low, high = next((low, high) for low, high in pairwise(ACCEPT_LENGTHS) if nodes <= high[0])
    share = math.log2(nodes / low[0]) / math.log2(high[0] / low[0])
    return min(low[1] + share * (high[1] - low[1]), tree.steps + 1)


def _fits(configured: TreeShape, tree: TreeShape) -> bool:
    return (
        tree != configured
        and tree.steps <= configured.steps
        and tree.topk <= configured.topk
        and tree.num_draft_tokens <= configured.num_draft_tokens
    )


def _doublings(most: int) -> Sequence[int]:
    return [1 << power for power in range(most.bit_length())]


def _cost(weights: int, rows: int) -> float:
    return max(2 * weights, _products(weights, rows))


def _products(weights: int, rows: int) -> float:
    return 2 * weights * rows / FLOPS_PER_BYTE
