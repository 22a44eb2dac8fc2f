"""A drafter whose draft model proposes every depth in one forward pass (block drafts: DFlash 1 and 2, JetSpec, DSpark).

A token's context row (its K and V in the draft's layers) is computed from the target's features (hidden states) at that
token.  The root's features come only with the next verify pass, so the root has no context row yet.  If the root is at
position n, rows 0 .. n-1 are committed, as in the target.  `begin` runs the block (the root and mask tokens), which
attends to the committed rows.  The rows of the block are not kept.  `extend` only projects features to context rows.

In some drafts, the score of a token also depends on the previous token, or on all previous tokens of its path.  Such a
draft has edges (kernels/tree/edges.py).  Its depths are scored one after another: the tokens of a depth are scored for
each of the best tokens, or of the best paths, of the depth before.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from espalier.attention import Nodes, Prefix
from espalier.kernels.attention.ancestor_bits import pack_bits
from espalier.kernels.ops.drafts import Candidates, select_paths
from espalier.kernels.ops.state import TokenChain, read_chain
from espalier.kernels.tree.edges import DepthRows, LowRankEdges
from espalier.layout import RoundLayout
from espalier.models.draft import BlockModel
from espalier.slots import BatchState
from espalier.speculate.drafters.base import GrowTree
from espalier.speculate.drafters.model_drafter import ModelDrafter
from espalier.speculate.pieces import LastTokens
from espalier.speculate.sampler import DraftRows, Sampler
from espalier.speculate.tree import Tree


class OnePassDrafter(ModelDrafter[BlockModel]):
    def allocate_tensors(self) -> None:
        # Without causal attention, each row sees the whole block, as in training.  So the block keeps its full width,
        # even if the tree has fewer levels.
        spec, layout, device = self.spec, self.layout, self.device
        self.block_width = spec.first_proposing_row + layout.steps if all(spec.is_causal_layer) else layout.block_rows
        self.num_known = torch.ones(layout.max_batch, dtype=torch.int64, device=device)
        all_visible = torch.ones(self.block_width, self.block_width, dtype=torch.bool, device=device)
        self.ancestor_bits = {
            is_causal: pack_bits(all_visible.tril() if is_causal else all_visible) for is_causal in (False, True)
        }

    def begin(self, slots: BatchState) -> GrowTree:
        """Computes the logits of all depths.  Returns the function that grows the trees from them."""
        hidden = self._run_block(slots)
        logits = self.draft.block_logits(hidden)
        edges = None if self.draft.edge_scorer is None else self.draft.edge_scorer.score_edges(logits, hidden)
        roots = DepthRows(slots.root[:, None], self.root_trees.scores[: slots.batch])
        return partial(best_paths, roots, logits, edges, self.draft.d2t, self.layout)

    def _run_block(self, slots: BatchState) -> Tensor:
        """Runs the block.  Returns the hidden states of the rows that propose depths 1 to steps: [B, steps, H]."""
        first = self.spec.first_proposing_row
        rows = block_rows(slots, 0, self.num_known[: slots.batch], self.block_width, self.spec.mask_token_id)
        prefix = Prefix(slots.page_table, slots.prefix_len)
        nodes = self._block_nodes(slots, rows.positions)
        hidden = self.draft(self.cache.begin_pass(prefix, nodes, rows.tokens, rows.positions))
        return hidden[:, first : first + self.layout.steps]

    def _block_nodes(self, slots: BatchState, positions: Tensor) -> list[Nodes]:
        """Returns, for each layer, which rows of the block a row attends to.  positions: [B, rows of the block]."""
        # Here attention reads positions only to apply sliding windows.
        at = slots.prefix_len[:, None].expand(-1, self.block_width) if self.spec.windows_end_at_root else positions
        nodes = {
            is_causal: Nodes(at, at, self.ancestor_bits[is_causal].expand(slots.batch, -1, -1))
            for is_causal in sorted(set(self.spec.is_causal_layer))
        }
        return [nodes[is_causal] for is_causal in self.spec.is_causal_layer]

    def extend(
        self, slots: BatchState, target_features: Tensor | None, length: Tensor, last_tokens: LastTokens | None = None
    ) -> None:
        """Computes the draft's context rows from target_features [B, W, F].  length: [B], the new tokens."""
        assert target_features is not None
        # Computes the context rows of tokens n .. n+length-1.  The rows after them are padding and are not committed.
        positions, tokens, page_rows = read_chain(slots, 0, length, target_features.shape[1])
        prefix = Prefix(slots.page_table, slots.prefix_len)
        p = self.cache.begin_pass(prefix, Nodes.chain(positions), tokens, page_rows=page_rows.flatten())
        self.draft.write_context(target_features, p)
        p.commit()


def best_paths(
    roots: DepthRows,
    logits: Tensor,
    edges: LowRankEdges | None,
    d2t: Tensor | None,
    layout: RoundLayout,
    sampler: Sampler,
) -> Tree:
    """Returns the tree of the best paths.

    roots: [B, 1].  logits: [B, steps, draft vocabulary].  edges: give logits that depend on the previous tokens; None
    to use `logits`.  d2t: the target id of each draft id; None if both vocabularies are the same."""
    if edges is None:
        no_scores = roots.scores.expand(-1, logits.shape[1])
        candidates = plain_candidates(
            *sampler.best_children(DraftRows(logits, d2t, 0, no_scores, position_stride=1), layout.topk)
        )
    else:
        candidates = edge_candidates(roots, layout.steps, layout.topk, partial(sampler.next_depth, edges, d2t))
    return select_paths(roots.tokens[:, 0], candidates, layout.num_draft_tokens)


def plain_candidates(tokens: Tensor, scores: Tensor) -> Candidates:
    """Returns the candidates of S depths, from tokens and scores [B, S, K] that do not depend on the previous tokens.
    So all candidates of a depth have the same K candidates of the next depth as children."""
    return Candidates(tokens[:, :, None], scores[:, :, None], torch.zeros_like(tokens, dtype=torch.int32)[:, :, None])


def edge_candidates(
    rows: DepthRows, steps: int, topk: int, next_depth: Callable[[int, DepthRows, Candidates], DepthRows]
) -> Candidates:
    """Returns candidates whose scores depend on the previous tokens.

    rows: the roots.  next_depth: a function of (depth, from 0 on; the rows whose children have this depth; the
    candidates of this depth, which it fills).  It returns the rows of the next depth."""
    candidates = Candidates.empty(rows.tokens[:, 0], steps, topk)
    for depth in range(steps):
        rows = next_depth(depth, rows, candidates.at_depth(depth, rows.tokens.shape[1]))
    return candidates


def block_rows(slots: BatchState, offset: int, num_known: Tensor, width: int, mask_token: int) -> TokenChain:
    """Returns the `width` input rows of a block, from position prefix_len + `offset` on.

    num_known: [B], how many rows at the start hold tokens of the request's history; the others hold `mask_token`."""
    return read_chain(slots, offset, num_known, width, mask_token)
