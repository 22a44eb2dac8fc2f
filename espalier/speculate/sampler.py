"""Sampling in one launch: parameters and noise for the target's tokens and for the draft's scores.

A token's noise depends only on the request's seed, the token's position and its id.  So all nodes of one depth have the
same noise, and plain decoding samples the same token.  The draft uses this noise too, so it proposes tokens that the
target is likely to sample.
On a GPU the kernels read the parameters of each slot and compute the noise in place.  On a CPU plain torch does the
same, and skips the work that no request of the batch needs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from espalier.kernels.ops.drafts import Candidates
from espalier.kernels.tree.edges import DepthRows, LowRankEdges, choose_next_rows
from espalier.sampling.logit_processors import DraftedAncestors, SamplingFeatures, SlotSamplingParams, process_logits
from espalier.sampling.mask import DraftGuide, apply_mask, force_only_children, unpack_mask
from espalier.sampling.pick import SampledTokens, divide_by_temperature, gumbel, pick, scores_with_shared_noise
from espalier.slots import BatchState
from espalier.speculate.tree import VOID, Tree, ordered_topk

if TYPE_CHECKING:
    from espalier.kernels.sampling.logit_processors import GatheredSlots

ALL_NODES = slice(None)


class DraftRows(NamedTuple):
    """The draft's logits in Q rows of each request.  A row belongs to a node; the best tokens become its children.

    logits: [B, Q, draft vocabulary].  d2t: the target id of each draft id; None if both vocabularies are the same.
    position_offset, position_stride: the children of row q have position Sampler.first_position + position_offset + q ·
    position_stride.  path_scores: [B, Q] float32, for each row the sum of scores on the path to its node.
    drafted_ancestors: the drafted tokens on the path from the root to each row's node."""

    logits: Tensor
    d2t: Tensor | None
    position_offset: int
    path_scores: Tensor
    drafted_ancestors: DraftedAncestors | None = None
    position_stride: int = 0

    @property
    def num_rows(self) -> int:
        """The number of rows, Q."""
        return self.logits.shape[1]


@dataclass(frozen=True)
class Sampler(ABC):
    """The sampler of one launch: in plain torch, or with the GPU's kernels.

    first_position: [B], the position of the first token that this launch may sample.
    shares_noise: whether the draft's scores contain the random noise with which the target samples.
    guide: the forced and the allowed next tokens of grammars; None if no request of the batch has a grammar."""

    first_position: Tensor
    sampling_features: SamplingFeatures
    shares_noise: bool
    guide: DraftGuide | None

    def sample_at_nodes(
        self, logits: Tensor, tree: Tree, mask: Tensor | None = None, nodes: slice = ALL_NODES
    ) -> SampledTokens:
        """Samples the target's token at every node of `nodes`.

        logits: [B, n, V], of these nodes.  mask: [B, D, words], of all nodes (sampling/mask.py)."""
        mask = None if mask is None else mask[:, nodes]
        return self._pick(
            logits, noise_offsets(tree)[:, nodes], mask, DraftedAncestors(tree.tokens, tree.ancestors[:, nodes])
        )

    def sample_last(self, logits: Tensor, mask: Tensor | None = None) -> SampledTokens:
        """Samples the token after the last token of a prefill pass.  logits: [B, 1, V].
        mask: [B, 1, words] int32, one bit for each token, set if the token is allowed; None allows all."""
        return self._pick(logits, torch.zeros_like(self.first_position[:, None]), mask, None)

    @abstractmethod
    def _pick(
        self, logits: Tensor, offsets: Tensor, mask: Tensor | None, drafted_ancestors: DraftedAncestors | None
    ) -> SampledTokens:
        """Samples a token for each row of logits [B, n, V], at position `first_position` + offsets [B, n].

        Penalties count the tokens of `drafted_ancestors`, except the root (node 0), which the slot has counted."""

    def best_children(self, rows: DraftRows, topk: int) -> tuple[Tensor, Tensor]:
        """Returns the topk best children of each row: target token ids [B, Q, K] and path scores [B, Q, K] float32."""
        forced, mask = None, None
        if self.guide is not None:
            level = rows.position_offset + 1
            at_levels = self.guide.allowed_at_levels(level, rows.num_rows) if rows.position_stride else None
            forced, mask = at_levels or self.guide.allowed_children(level, *(rows.drafted_ancestors or (None, None)))
            mask = mask.expand(-1, rows.num_rows, -1)
        children = self._best_allowed_children(rows, topk, mask)
        return children if forced is None else force_only_children(forced, *children, rows.path_scores)

    @abstractmethod
    def _best_allowed_children(self, rows: DraftRows, topk: int, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns the topk best children among the target ids that `mask` allows, as `best_children` does.

        mask: [B, Q, words]; None allows all ids."""

    @abstractmethod
    def next_depth(
        self, edges: LowRankEdges, d2t: Tensor | None, depth: int, rows: DepthRows, out: Candidates
    ) -> DepthRows:
        """Writes the K best children of each of R rows to `out`, whose tensors are [B, R, K].  Returns the rows of the
        next depth.

        edges: give the logits of a draft whose logits at a depth depend on the tokens drafted at earlier depths.
        depth: from 0 on; the children have position `first_position` + depth.  d2t: see DraftRows."""


@dataclass(frozen=True)
class TorchSampler(Sampler):
    """The sampler in plain torch.

    vocab_size: size of the target's vocabulary.  params: the sampling parameters of each request.  noise: [B, width,
    V], Gumbel noise for `width` positions from first_position on.  Both are None if no request needs them."""

    vocab_size: int
    params: SlotSamplingParams | None
    noise: Tensor | None

    def _pick(
        self, logits: Tensor, offsets: Tensor, mask: Tensor | None, drafted_ancestors: DraftedAncestors | None
    ) -> SampledTokens:
        """Samples a token for each row of logits [B, n, V], at position first_position + offsets [B, n]."""
        if not self.sampling_features.penalised:
            drafted_ancestors = None
        elif drafted_ancestors is not None:
            tokens = drafted_ancestors.tokens
            drafted_ancestors = drafted_ancestors._replace(tokens=tokens.index_fill(1, tokens.new_zeros(1), VOID))
        features, positions = self.sampling_features, self.first_position[:, None] + offsets
        return pick(apply_mask(logits, mask), self.params, features, positions, self._noise(offsets), drafted_ancestors)

    def _best_allowed_children(self, rows: DraftRows, topk: int, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns (ids, path scores), [B, Q, K] each, of the best children that `mask` allows; None allows all."""
        logp, ids = self._child_scores(rows, mask)
        best, index = ordered_topk(logp.float(), topk)
        return (index if ids is None else ids[index]), rows.path_scores[..., None] + best.clamp(max=0)

    def next_depth(
        self, edges: LowRankEdges, d2t: Tensor | None, depth: int, rows: DepthRows, out: Candidates
    ) -> DepthRows:
        """Writes the best children of `rows` to `out`.  depth: from 0 on.  d2t: the target ids of the draft ids."""
        factors, states = edges.factors(depth, rows)
        drafted = DraftRows(edges.logits(depth, factors), d2t, depth, torch.zeros_like(rows.scores))
        children = self.best_children(drafted, out.tokens.shape[2])
        return choose_next_rows(*children, rows, out, edges.is_recurrent)._replace(states=states)

    def _child_scores(self, rows: DraftRows, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Returns the scores of all children, [B, Q, columns], and the target id of each column.

        mask: [B, Q, words], the target ids that may be drafted.  The returned ids are None if the columns are the
        target ids in order.  If a request has sampling parameters, they always are."""
        d2t, logits = rows.d2t, rows.logits.to(torch.promote_types(rows.logits.dtype, torch.float32))
        if mask is not None:
            allowed = unpack_mask(mask, self.vocab_size)
            logits = logits.masked_fill(~(allowed if d2t is None else allowed[..., d2t]), -torch.inf)
        if self.params is None:
            return torch.log_softmax(logits, -1), d2t
        if d2t is not None:
            logits = logits.new_full((*logits.shape[:-1], self.vocab_size), -torch.inf).index_copy_(-1, d2t, logits)
        steps = torch.arange(rows.num_rows, device=logits.device)
        offsets = (rows.position_offset + rows.position_stride * steps).expand(logits.shape[:2])
        processed = process_logits(
            logits, self.params, self.sampling_features, self.first_position[:, None] + offsets, rows.drafted_ancestors
        )
        noise = self._noise(offsets)
        if noise is None:
            return torch.log_softmax(processed, -1), None
        if not self.shares_noise:
            return torch.log_softmax(divide_by_temperature(processed, self.params), -1), None
        return scores_with_shared_noise(processed, self.params, noise), None

    def _noise(self, offsets: Tensor) -> Tensor | None:
        """Returns the noise [B, n, V] at positions first_position + offsets [B, n]; None if no request samples."""
        if self.noise is None:
            return None
        batch = torch.arange(offsets.shape[0], device=offsets.device)[:, None]
        return self.noise[batch, offsets]


@dataclass(frozen=True)
class KernelSampler(Sampler):
    """The sampler with the GPU's kernels.

    slot_rows: the slots' sampling parameters.  The kernels read all of them, so `sampling_features` is not used."""

    slot_rows: GatheredSlots

    def _pick(
        self, logits: Tensor, offsets: Tensor, mask: Tensor | None, drafted_ancestors: DraftedAncestors | None
    ) -> SampledTokens:
        """Samples a token for each row of logits [B, n, V], at position first_position + offsets [B, n]."""
        from espalier.kernels.sampling.pick import sample_triton

        first_output = 0 if drafted_ancestors is None else 1
        sampled = sample_triton(
            logits,
            self.slot_rows,
            self.first_position,
            offsets,
            drafted_ancestors,
            first_output=first_output,
            mask=mask,
        )
        return SampledTokens(*sampled)

    def _best_allowed_children(self, rows: DraftRows, topk: int, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns (ids, path scores), [B, Q, K] each, of the best children that `mask` allows; None allows all."""
        from espalier.kernels.tree.draft_topk import draft_topk_triton

        logits, d2t, offset, scores, ancestors, stride = rows
        return draft_topk_triton(
            *(logits, d2t, self.slot_rows, self.first_position, offset, scores, topk),
            *(ancestors, self.shares_noise, mask, stride),
        )

    def next_depth(
        self, edges: LowRankEdges, d2t: Tensor | None, depth: int, rows: DepthRows, out: Candidates
    ) -> DepthRows:
        """Writes the best children of `rows` to `out`.  depth: from 0 on.  d2t: the target ids of the draft ids."""
        from espalier.kernels.tree.edge_factors import edge_factors_triton
        from espalier.kernels.tree.edge_topk import edge_topk_triton

        # Without a projection, the kernel reads the factors from the table itself.
        factors = None if edges.projection is None else edge_factors_triton(edges, depth, rows)
        forced, mask = (None, None) if self.guide is None else self.guide.allowed_children(depth + 1, None, None)
        return edge_topk_triton(
            edges, depth, rows, factors, d2t, self.slot_rows, self.first_position, out, self.shares_noise, mask, forced
        )


def make_sampler(
    slots: BatchState,
    sampling_features: SamplingFeatures,
    first_position: Tensor,
    width: int,
    vocab_size: int,
    dtype: torch.dtype,
    shares_noise: bool = True,
) -> Sampler:
    """Returns the sampler for tokens at `width` positions from `first_position` [B] on.  dtype: the noise's dtype."""
    if first_position.is_cuda:
        return make_kernel_sampler(slots, sampling_features, first_position, shares_noise)
    if not sampling_features.any:
        return TorchSampler(first_position, sampling_features, shares_noise, None, vocab_size, None, None)
    params = SlotSamplingParams.gather(slots, sampling_features)
    positions = first_position[:, None] + torch.arange(width, device=first_position.device)
    noise = gumbel(params.seed, positions, vocab_size, dtype) if sampling_features.sampled else None
    return TorchSampler(first_position, sampling_features, shares_noise, None, vocab_size, params, noise)


def make_kernel_sampler(
    slots: BatchState, sampling_features: SamplingFeatures, first_position: Tensor, shares_noise: bool = True
) -> KernelSampler:
    """Returns the GPU's sampler.  first_position: [B], the position of the first token that the launch may sample."""
    from espalier.kernels.sampling.logit_processors import GatheredSlots

    return KernelSampler(
        first_position, sampling_features, shares_noise, None, GatheredSlots.gather(slots.table, slots.index)
    )


def noise_offsets(tree: Tree) -> Tensor:
    """Returns [B, D]: the position of the token that follows each node, counted from `first_position`.

    `first_position` is the position after the root, so the offset is the node's depth."""
    return tree.depths
