"""Predicts the fastest tree at each batch for a mixture of experts, where nothing was measured.

A verify pass of a dense model reads the same weights however many nodes it has.  With experts, more rows touch more
experts: at one request, plain decoding reads 8 of 128 experts, and a tree of 64 nodes reads 126.  So plain decoding is
fastest at few requests.  Trees are fastest once plain decoding touches most experts too.  At very many requests plain
decoding is fastest again, because products take longer than reading.

The prediction assumes that a pass takes the longer of two times, for reading its weights once and for its products;
that routing is uniform; and that rows are independent.  If neighbouring tokens share experts, trees are faster than
predicted; `espalier bench round --choose` measures.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from espalier.kernels.layers.experts_plan import expected_touched
from espalier.layout import PLAIN, TreeShape
from espalier.models.config import ModelConfig
from espalier.models.draft import DraftConfig

# Smaller trees that are compared with the configured one.  Of a block draft only their numbers of nodes count.
SMALLER_TREES = (TreeShape(5, 4, 16), TreeShape(3, 2, 8))
# Accept length by number of nodes (crossovers.json), and whose they are.
ACCEPT_LENGTHS = ((1, 1.0), (8, 2.8), (16, 3.5), (64, 4.0))
ACCEPTED_BY = "an EAGLE-3 head of llama-3.1-8b"


@dataclass(frozen=True)
class ChipFigures:
    """What a GPU was measured to do (`espalier bench floor`): bytes read a second, FLOPs of a bf16 product a second."""

    gpu: str
    bandwidth: float
    peak: float

    @property
    def flops_per_byte(self) -> float:
        """FLOPs that it computes in the time in which it reads a byte."""
        return self.peak / self.bandwidth


@dataclass(frozen=True)
class MixtureWeights:
    """Numbers of weights.

    dense: weights of the target that every row is multiplied with.  expert: weights of one expert, summed over the
    layers.  draft: weights that a draft pass reads.  block_rows: rows of a block draft's one pass; 0 for other drafts,
    which run a pass for each level.  extends: whether a draft runs its layers over decided tokens, too.
    """

    dense: int
    expert: int
    num_experts: int
    top_k: int
    draft: int
    block_rows: int = 0
    extends: bool = True

    def target_cost(self, rows: int, chip: ChipFigures) -> float:
        """The time of a target pass, in the bytes that could be read in that time."""
        touched = expected_touched(self.num_experts, self.top_k, rows)
        products = _product_cost(self.expert * self.top_k, rows, chip)
        return _cost(self.dense, rows, chip) + max(2 * self.expert * touched, products)

    def round_cost(self, tree: TreeShape, batch: int, chip: ChipFigures) -> float:
        """The time of a round, as target_cost."""
        verify = self.target_cost(batch * tree.num_draft_tokens, chip)
        if tree == PLAIN:
            return verify
        if self.block_rows:
            # Depth is free.
            proposal = _cost(self.draft, batch * self.block_rows, chip)
        else:
            proposal = (tree.steps - 1) * _cost(self.draft, batch * tree.topk, chip)
        return verify + proposal + (_cost(self.draft, batch * (tree.steps + 1), chip) if self.extends else 0)


def mixture_weights(target: ModelConfig, draft: DraftConfig | None) -> MixtureWeights | None:
    """The numbers of weights of a target and its draft; None for a dense target.

    draft: None for a drafter without weights.
    """
    experts, hidden = target.experts, target.hidden_size
    if experts is None:
        return None
    attention_and_head = _attention_weights(target) * target.num_layers + target.vocab_size * hidden
    dense_mlps = (target.num_layers - len(experts.layers)) * target.intermediate_size
    shared = len(experts.layers) * experts.shared_size
    return MixtureWeights(
        dense=attention_and_head + 3 * hidden * (dense_mlps + shared),
        expert=len(experts.layers) * 3 * hidden * experts.size,
        num_experts=experts.routing.num_experts,
        top_k=experts.routing.top_k,
        draft=0 if draft is None else _draft_weights(draft),
        block_rows=0 if draft is None else draft.spec.block_rows,
        extends=draft is None or draft.spec.modules > 0,
    )


def _draft_weights(draft: DraftConfig) -> int:
    """Weights that a draft pass reads.

    The attention of a draft that proposes one level a pass reads embedding and hidden state, so it has about twice the
    weights of a target layer's attention.
    """
    layer, spec = draft.layer, draft.spec
    layers, inputs = (len(spec.layers), 1) if spec.block_rows else (1, 2)
    each = inputs * _attention_weights(layer) + 3 * layer.hidden_size * layer.intermediate_size
    return layers * each + layer.hidden_size * spec.vocab_size


def _attention_weights(config: ModelConfig) -> int:
    """Weights of one layer's attention."""
    latent, hidden, heads = config.latent, config.hidden_size, config.heads
    if latent is None:
        return 2 * hidden * (heads + config.kv_heads) * config.head_size
    rank = latent.q_rank or hidden
    queries = (hidden * rank if latent.q_rank else 0) + rank * heads * latent.head_size
    up = heads * latent.kv_rank * (latent.nope_size + latent.v_size)
    return queries + hidden * latent.row_size + up + hidden * heads * latent.v_size


def trees_by_cost(
    configured: TreeShape, weights: MixtureWeights, max_batch: int, chip: ChipFigures
) -> dict[int, TreeShape]:
    """The trees that are predicted to be fastest, by the least number of requests that uses each.

    Empty if the configured tree is predicted to be the fastest at every batch.
    """
    smaller = [tree for tree in SMALLER_TREES if _fits(configured, tree)]
    if weights.block_rows:
        sizes = [tree.num_draft_tokens for tree in SMALLER_TREES if tree.num_draft_tokens < configured.num_draft_tokens]
        smaller = [replace(configured, num_draft_tokens=nodes) for nodes in sizes]
    trees = [configured, *smaller, PLAIN]
    chosen: dict[int, TreeShape] = {}
    current = configured
    for batch in _doublings(max_batch):
        best = max(trees, key=lambda tree: accept_length(tree) / weights.round_cost(tree, batch, chip))
        if best != current:
            chosen[batch] = current = best
    return chosen


def accept_length(tree: TreeShape) -> float:
    """The accept length of a tree: ACCEPT_LENGTHS, interpolated over the logarithm of the number of nodes."""
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
    """1, 2, 4, ..., up to `most`."""
    return [1 << power for power in range(most.bit_length())]


def _cost(weights: int, rows: int, chip: ChipFigures) -> float:
    """The time of a pass that multiplies each row with all `weights`, of two bytes each."""
    return max(2 * weights, _product_cost(weights, rows, chip))


def _product_cost(weights: int, rows: int, chip: ChipFigures) -> float:
    return 2 * weights * rows / chip.flops_per_byte
