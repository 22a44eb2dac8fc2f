"""Predicts the fastest tree at each batch size from the sizes of the models and the speed of the GPU.

The speed (bandwidth and peak FLOP rate) is measured at startup, which takes about 0.1 s.

The time of a pass is a sum: the time to read weights and to multiply (these two overlap), the time to read the KV
cache, a fixed time for each layer, and a fixed time for the pass.
With a tree, a round emits more tokens, but its verify pass has more rows.  So deep trees are fastest for few requests,
small trees and chains for more requests, and plain decoding for very many.  With experts, more rows read more experts:
at one request, plain decoding reads 8 of 128 experts, and a tree of 64 nodes reads 126.

The prediction assumes uniform routing, independent rows and, if no context is given, ASSUMED_CONTEXT tokens a request.
If neighbouring tokens share experts, trees are faster than predicted.  `espalier bench choose` measures instead.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from espalier.cache.states import bytes_per_state
from espalier.engine.acceptance import assumed_accept_length
from espalier.kernels.layers.experts_plan import expected_active_experts
from espalier.layout import PLAIN_TREE, TreeShape, next_bucket
from espalier.models.config import ModelConfig
from espalier.models.declared_weights import num_dense_values, num_expert_values, num_mixer_values
from espalier.models.draft import DraftConfig
from espalier.models.layer_loading import layer_specs_of

# Smaller trees that are compared with the configured tree.  For a block draft, only their numbers of nodes are used.
SMALLER_TREES = (TreeShape(5, 4, 16), TreeShape(3, 2, 8), TreeShape(3, 1, 4), TreeShape(1, 1, 2))
# Four numbers, fitted to 25 rounds of an 8B model on an H100 (docs/log.md): the fixed seconds of a layer and of a pass,
# the share of the bandwidth at which the KV cache is read, and OVERLAP_EXPONENT.  With r for the time to read and m for
# the time to multiply, both together take (r^e + m^e)^(1/e).  With e = 1 this is r + m; with infinity, the longer one.
LAYER_OVERHEAD_S, PASS_OVERHEAD_S, CACHE_BANDWIDTH_SHARE, OVERLAP_EXPONENT = 1.3e-5, 1e-4, 0.8, 2.25
# From a batch size on, another tree is used if it is predicted to be at least this many times as fast.
MIN_SPEEDUP = 1.03
# The assumed number of tokens of a request so far.  A round reads the K/V of these tokens once.
ASSUMED_CONTEXT = 1024


@dataclass(frozen=True)
class ChipFigures:
    """The measured speed of a GPU.  gpu: its name.  bandwidth: bytes a second.  peak_flops: bf16 FLOPs a second."""

    gpu: str
    bandwidth: float
    peak_flops: float


@dataclass(frozen=True)
class PassWeights:
    """The sizes of target and draft that determine the time of a pass.

    dense: weights of the target that every row is multiplied with.  expert: weights of one expert, summed over the
    layers; 0 without experts.  num_layers: layers of the target.  kv_values: values of a token in the target's cache.
    state_bytes: bytes of a request's recurrent states, which a round reads twice and writes once.
    top_k: how many of the num_experts experts a row uses.
    draft: weights that a draft pass reads.  num_draft_layers: the layers of that pass.
    block_rows: rows of the only pass of a block draft; 0 for other drafts, which run a pass for each level of the tree.
    extends: whether the draft also runs over the round's output tokens.  value_bytes: mean bytes of a weight."""

    dense: int
    draft: int
    expert: int = 0
    num_experts: int = 1
    top_k: int = 1
    num_layers: int = 0
    num_draft_layers: int = 0
    kv_values: int = 0
    state_bytes: int = 0
    block_rows: int = 0
    extends: bool = True
    value_bytes: float = 2.0

    def of_rank(self, num_ranks: int, num_draft_ranks: int) -> "PassWeights":
        """Returns the weights of each rank if `num_ranks` ranks share the target.  Communication is left out.
        num_draft_ranks: the number of ranks that share the draft."""
        return replace(
            self,
            dense=self.dense // num_ranks,
            expert=self.expert // num_ranks,
            draft=self.draft // num_draft_ranks,
            kv_values=self.kv_values // num_ranks,
        )

    def target_seconds(self, rows: int, chip: ChipFigures) -> float:
        """Seconds of a target pass over `rows` rows, without the time to read the KV cache."""
        num_experts_read = expected_active_experts(self.num_experts, self.top_k, rows) if self.expert else 0
        num_read = self.dense + self.expert * num_experts_read
        return self._seconds(num_read, (self.dense + self.expert * self.top_k) * rows, self.num_layers, chip)

    def draft_seconds(self, rows: int, chip: ChipFigures) -> float:
        """Seconds of a draft pass over `rows` rows."""
        return self._seconds(self.draft, self.draft * rows, self.num_draft_layers, chip)

    def _seconds(self, num_read: float, num_products: float, num_layers: int, chip: ChipFigures) -> float:
        """Seconds of a pass.  num_read: weights to read.  num_products: number of multiplications by a weight."""
        reading, multiplying = self.value_bytes * num_read / chip.bandwidth, 2 * num_products / chip.peak_flops
        overlapped = (reading**OVERLAP_EXPONENT + multiplying**OVERLAP_EXPONENT) ** (1 / OVERLAP_EXPONENT)
        return overlapped + num_layers * LAYER_OVERHEAD_S + PASS_OVERHEAD_S

    def round_seconds(self, tree: TreeShape, batch: int, chip: ChipFigures, context: float = ASSUMED_CONTEXT) -> float:
        """Seconds of a round of `batch` requests.  context: the mean number of tokens that a request has so far."""
        cache = (2 * self.kv_values * context + 3 * self.state_bytes) * batch / (CACHE_BANDWIDTH_SHARE * chip.bandwidth)
        verify = self.target_seconds(batch * tree.rows, chip) + cache
        if not tree.steps:
            return verify
        if not tree.drafts:
            proposal = 0.0
        elif self.block_rows:
            # One pass proposes all depths.
            proposal = self.draft_seconds(batch * self.block_rows, chip)
        else:
            proposal = (tree.steps - 1) * self.draft_seconds(batch * tree.topk, chip)
        return verify + proposal + (self.draft_seconds(batch * (tree.steps + 1), chip) if self.extends else 0)


def pass_weights(target: ModelConfig, draft: DraftConfig | None, stored_bytes: int = 0) -> PassWeights:
    """Returns the PassWeights of a target and its draft.

    draft: None for a drafter without weights.  stored_bytes: the memory of the weights of both models, with the
    embedding; 0 if unknown, in which case a weight has two bytes."""
    weights = _count_weights(target, draft)
    # A pass reads only a few rows of an embedding, unless the embedding is also the LM head.
    read_bytes = stored_bytes - (0 if target.tie_word_embeddings else 2 * target.vocab_size * target.hidden_size)
    num_values = weights.dense + weights.expert * weights.num_experts + weights.draft
    return replace(weights, value_bytes=min(read_bytes / num_values, 2.0)) if read_bytes > 0 and num_values else weights


def _count_weights(target: ModelConfig, draft: DraftConfig | None) -> PassWeights:
    """Returns the numbers of weights and row values that a pass reads.  draft: None without a draft model."""
    specs = layer_specs_of(target)
    experts = target.experts
    routing = target.probe_result or (None if experts is None else experts.routing)
    return PassWeights(
        dense=num_dense_values(target),
        expert=num_expert_values(target),
        num_experts=1 if routing is None else routing.num_experts,
        top_k=1 if routing is None else routing.top_k,
        num_layers=target.num_layers,
        kv_values=sum(spec.values_per_token for spec in specs),
        state_bytes=bytes_per_state(specs, torch.bfloat16),
        draft=0 if draft is None else _draft_weights(draft),
        num_draft_layers=0 if draft is None else len(draft.spec.layer_specs) if draft.spec.block_rows else 1,
        block_rows=0 if draft is None else draft.spec.block_rows,
        extends=draft is None or draft.spec.num_modules > 0,
    )


def _draft_weights(draft: DraftConfig) -> int:
    """Returns how many weights a draft pass reads.

    In a draft that proposes one level of the tree per pass, attention reads embedding and hidden state side by side.
    So it has about twice the weights of a target layer's attention."""
    layer, spec = draft.layer, draft.spec
    layers, inputs = (len(spec.layer_specs), 1) if spec.block_rows else (1, 2)
    of_layer = inputs * num_mixer_values(layer) + 3 * layer.hidden_size * layer.intermediate_size
    return layers * of_layer + layer.hidden_size * spec.vocab_size


def trees_by_cost(
    configured_tree: TreeShape, weights: PassWeights, max_batch: int, chip: ChipFigures
) -> dict[int, TreeShape]:
    """Returns the trees that are predicted to be fastest, as {least number of requests: tree from this number on}.

    Empty if the configured tree is predicted to be fastest at every batch size."""
    trees = [configured_tree, *smaller_trees(configured_tree, weights), PLAIN_TREE]
    chosen_trees: dict[int, TreeShape] = {}
    current = configured_tree
    for batch in _batch_buckets(max_batch):
        rates = {tree: assumed_accept_length(tree) / weights.round_seconds(tree, batch, chip) for tree in trees}
        best = max(trees, key=lambda tree: rates[tree])
        if rates[best] > MIN_SPEEDUP * rates[current]:
            chosen_trees[batch] = current = best
    return chosen_trees


def smaller_trees(configured_tree: TreeShape, weights: PassWeights) -> list[TreeShape]:
    """Returns the trees that are compared with the configured tree, apart from plain decoding."""
    if not weights.block_rows:
        return [tree for tree in SMALLER_TREES if fits_in(configured_tree, tree)]
    nodes_of_trees = [tree.num_draft_tokens for tree in SMALLER_TREES]
    sizes = [nodes for nodes in nodes_of_trees if nodes < configured_tree.num_draft_tokens]
    return [replace(configured_tree, num_draft_tokens=nodes) for nodes in sizes]


def fits_in(configured_tree: TreeShape, tree: TreeShape) -> bool:
    """Whether a tree differs from the configured tree and exceeds it in no size."""
    return (
        tree != configured_tree
        and tree.steps <= configured_tree.steps
        and tree.topk <= configured_tree.topk
        and tree.num_draft_tokens <= configured_tree.num_draft_tokens
    )


def _batch_buckets(max_batch: int) -> Sequence[int]:
    """Returns the batch sizes 1, 2, 3, 4, 6, 8, 12, ..., up to `max_batch` (next_bucket)."""
    return sorted({next_bucket(batch) for batch in range(1, max_batch + 1) if next_bucket(batch) <= max_batch})


# Bytes of a copy that is too large for the L2 cache, and the side of square matrices whose product uses the whole GPU.
COPIED_BYTES, PRODUCT_SIZE = 2**27, 4096
# Work that is timed runs for at least WARM_UP_S, because an idle GPU needs some ms to raise its clock.  Only the last
# REPEATS runs count.
WARM_UP_S, REPEATS = 0.05, 16


@cache
def measure_chip(device: torch.device) -> ChipFigures:
    """Measures the bandwidth of a copy (bytes read plus bytes written) and the FLOP rate of a bfloat16 matmul."""
    with torch.cuda.device(device):
        source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=device)
        matrix = torch.randn(PRODUCT_SIZE, PRODUCT_SIZE, dtype=torch.bfloat16, device=device)
        into, product = torch.empty_like(source), torch.empty_like(matrix)
        bandwidth = 2 * COPIED_BYTES / _seconds_of(lambda: into.copy_(source))
        peak = 2 * PRODUCT_SIZE**3 / _seconds_of(lambda: torch.mm(matrix, matrix, out=product))
    return ChipFigures(torch.cuda.get_device_name(device), bandwidth, peak)


def _seconds_of(work: Callable[[], object]) -> float:
    """Returns the time of `work` in seconds: the lower quartile of several runs.

    If the host is busy, it launches some runs late, and their times are several times as long (docs/log.md)."""
    times: list[float] = []
    begun_s = time.perf_counter()
    while time.perf_counter() - begun_s < WARM_UP_S or len(times) < 2 * REPEATS:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return sorted(times[-REPEATS:])[REPEATS // 4]
