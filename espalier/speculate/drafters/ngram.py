"""N-gram lookup on the device (prompt lookup decoding, Saxena 2023): proposes tokens that followed the same text.

The drafter needs no model and no K/V, because its tokens come from the history in the slot table.  Each branch of the
tree copies the text after an earlier occurrence of the history's suffix.  The longest suffixes come first; among equal
lengths, the latest occurrence.  Branches start with distinct tokens, so siblings are distinct.
"""

import torch
from torch import Tensor

from espalier.kernels.ops.drafts import find_matches
from espalier.models.draft import DraftSpec
from espalier.sampling.mask import DraftGuide, allows, force_only_children
from espalier.slots import BatchState
from espalier.speculate.drafters.base import DrafterWithoutFiles
from espalier.speculate.sampler import Sampler
from espalier.speculate.tree import CandidatePool, Tree


class NgramDrafter(DrafterWithoutFiles):
    spec = DraftSpec("ngram")

    def propose(self, slots: BatchState, sampler: Sampler) -> Tree:
        """Returns trees with topk branches: each copies the text after an earlier match of the last tokens."""
        topk = self.layout.topk
        if sampler.guide is not None:
            return self._propose_guided(slots, sampler.guide)
        length, match_ends = find_matches(slots.table.history, slots.index, slots.prefix_len, topk)
        logp = match_log_probability(length)
        pool = CandidatePool(topk)
        branches = torch.arange(topk, device=match_ends.device).expand_as(match_ends)
        pool.add_level(
            slots.history_at(continuation_positions(match_ends, slots.prefix_len, 1))[:, None], logp[:, None]
        )
        for level in range(2, self.layout.steps + 1):
            # Branches keep their order.  From level 2 on, a branch is the first of its beam's topk candidates.
            pool.set_beams(branches if level == 2 else branches * topk)
            tokens = slots.history_at(continuation_positions(match_ends, slots.prefix_len, level))
            pool.add_level(*only_children(tokens, logp * level))
        return pool.select(slots.root, self.layout.num_draft_tokens)

    def _propose_guided(self, slots: BatchState, guide: DraftGuide) -> Tree:
        """Returns the tree for a request with a grammar: a chain of the tokens that the grammar forces, then branches
        that copy the text after earlier occurrences of these tokens."""
        steps, topk, num_forced = self.layout.steps, self.layout.topk, guide.num_forced[:, None]
        forced_tokens = guide.forced_tokens[:, :steps]
        # History holds no decided token after the root, so the forced tokens may be written there.
        places = slots.index[:, None], slots.prefix_len[:, None] + 1 + torch.arange(steps, device=forced_tokens.device)
        history = slots.table.history
        history[places] = torch.where(forced_tokens >= 0, forced_tokens, history[places])
        end = slots.prefix_len + num_forced[:, 0].clamp(max=steps)
        length, match_ends = find_matches(history, slots.index, end, topk)
        logp = match_log_probability(length)
        allowed = allows(guide.mask, slots.history_at(continuation_positions(match_ends, end, 1)).clamp(min=0))
        logp = logp.masked_fill(~(allowed | (guide.level == 0)[:, None]), -torch.inf)
        pool, branches = CandidatePool(topk), torch.arange(topk, device=match_ends.device).expand_as(match_ends)
        for level in range(1, steps + 1):
            # [B, 1]: how far this level is below the last forced token; 0 or less if its own token is forced.
            depth = level - num_forced
            if level > 1:
                # All branches begin as children of one beam.  From then on, each branch has its own beam, and goes on
                # as the first child of this beam.
                pool.set_beams(torch.where(depth <= 2, branches, branches * topk))
            tokens = slots.history_at(continuation_positions(match_ends, end, depth.clamp(min=1)))
            tokens, scores = only_children(tokens, logp * depth) if level > 1 else (tokens[:, None], logp[:, None])
            if level > 1:
                first_scores = torch.full_like(scores, -torch.inf)
                first_scores[:, 0] = logp
                is_first = (depth == 1)[..., None]
                tokens = torch.where(is_first, tokens.mT, tokens)
                scores = torch.where(is_first, first_scores, scores)
            forced_scores = scores.new_full(scores.shape[:2], -torch.inf)
            forced_scores[:, 0] = 0
            pool.add_level(*force_only_children(forced_tokens[:, level - 1, None], tokens, scores, forced_scores))
        return pool.select(slots.root, self.layout.num_draft_tokens)


def match_log_probability(match_length: Tensor) -> Tensor:
    """Returns [B, K] float32: after a match of m tokens, each proposed token has probability m / (m + 1).

    Without a match the value is -inf, which makes a void node."""
    return torch.where(match_length > 0, torch.log(match_length / (match_length + 1.0)), -torch.inf).float()


def only_children(tokens: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (tokens, scores) [B, K, K] of candidates: each of K branches gets one child, from tokens and scores
    [B, K].  The other K - 1 children have score -inf."""
    batch, topk = tokens.shape
    padded = scores.new_full((batch, topk, topk), -torch.inf)
    padded[..., 0] = scores
    return tokens[..., None].expand(-1, -1, topk), padded


def continuation_positions(match_ends: Tensor, root: Tensor, level: int | Tensor) -> Tensor:
    """Returns [B, K]: the position of the token that comes `level` tokens after position `match_ends` [B, K].

    level: int or [B, 1].  root: [B], the root's position.  Past the root, the text from match to root is repeated."""
    period = (root[:, None] - match_ends).clamp(min=1)
    return match_ends + 1 + (level - 1) % period
