"""A drafter whose draft model grows the tree level by level, one forward pass over the beams for each level (EAGLE).

Row q of every draft layer belongs to token q.  Its inputs are token q and the target's features at token q-1
(DraftSpec.reads); its RoPE position is q-1, as trained.  Row 0 does not exist.  Inside a tree, a beam reads its
parent's output instead of target features, and attends to its true ancestors.  All draft layers run over the same rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from espalier.attention import Attention, CommittedLengths, GroupedBackend, Nodes, Prefix
from espalier.attention.staged import Commit, StagedPass
from espalier.cache.kv import PagedKV, StagedKV
from espalier.cache.layer_spec import LayerSpec
from espalier.errors import EspalierError
from espalier.kernels.state.batch_state import Chain, carry, chain
from espalier.kernels.tree.select_beams import grow
from espalier.layout import RoundLayout
from espalier.models.draft import DraftModel, DraftOutput, DraftSpec
from espalier.sampling.logit_processors import Above
from espalier.slots import BatchState
from espalier.speculate.sampler import Sampler
from espalier.speculate.tree import Pool, Tree, root_only

FIRST_ROW = 1


@dataclass(frozen=True)
class Beams:
    """The beams of one level.

    scores: [B, K], path scores; parents: [B, K], index of each beam's parent among the beams of the level before.
    above: the tokens of all draft rows so far, this level's at the end, and for each beam the ancestor bits over these
    rows, its own bit included.
    """

    scores: Tensor
    parents: Tensor
    above: Above


@dataclass(frozen=True)
class TreeRows:
    """All draft rows of a tree, level after level.

    positions: [B, beam_rows], page positions; rope_positions: [B, beam_rows], RoPE positions; tokens: [B, beam_rows],
    written when beams are chosen; prefix: the draft's committed rows.
    """

    positions: Tensor
    rope_positions: Tensor
    tokens: Tensor
    prefix: Prefix


class AutoregressiveDrafter:
    def __init__(
        self,
        draft: DraftModel,
        layout: RoundLayout,
        pages: PagedKV,
        backend: GroupedBackend,
        layer_specs: Sequence[LayerSpec],
        staging: StagedKV | None = None,
    ):
        """layer_specs: specs of all layers, the target's first, the draft's last.

        staging: a buffer that is large enough for this layout; by default a new one.
        Raises EspalierError for a DraftSpec that this drafter does not run.
        """
        self.spec = _require_supported(draft.spec)
        self.draft = draft
        self.layout = layout
        self.pages = pages
        self.backend = backend
        self.layer_specs = layer_specs
        self.first_layer = len(layer_specs) - len(self.spec.layers)
        layers = range(self.first_layer, len(layer_specs))
        # The depth of each draft row of a tree.
        self.depths = torch.arange(layout.beam_rows, device=pages.device) // layout.topk + 1
        # The path score of the root is log 1.
        self.root_scores = torch.zeros(layout.max_batch, 1, device=pages.device)
        self.staging = staging or StagedKV(layer_specs, layers, layout.draft_rows, pages.dtype, pages.device)
        self.by_layout: dict[RoundLayout, Self] = {}

    def for_layout(self, layout: RoundLayout) -> Self:
        # Kept, because a CUDA graph replays with the tensors of its capture.
        if layout not in self.by_layout:
            drafter = type(self)(self.draft, layout, self.pages, self.backend, self.layer_specs, self.staging)
            self.by_layout[layout] = drafter
        return self.by_layout[layout]

    def prepare(self, lengths: CommittedLengths) -> None:
        self.backend.prepare(lengths)

    def propose(self, slots: BatchState, sampler: Sampler) -> Tree:
        if self.layout.num_draft_tokens == 1:
            return root_only(slots.root)
        positions = slots.prefix_len[:, None] + self.depths
        rows = TreeRows(positions, positions - FIRST_ROW, torch.empty_like(positions), self._prefix(slots))
        pool, out, beams = Pool(self.layout.topk), self.draft.output_of(slots.carried("hidden")[:, None]), None
        for level in range(1, self.layout.steps + 1):
            tokens, scores = self._children(out, sampler, level, beams)
            pool.add(tokens, scores)
            if level < self.layout.steps:
                places, beams = self._next_beams(tokens, scores, rows, beams, level)
                pool.keep(places)
                out = self._forward(out, rows, beams, level)
        return pool.select(slots.root, self.layout.num_draft_tokens)

    def _children(self, out: DraftOutput, sampler: Sampler, level: int, beams: Beams | None) -> tuple[Tensor, Tensor]:
        """The topk best children of each row [B, Q] of `out`: target token ids and path scores, [B, Q, K] each."""
        above = None if beams is None else beams.above
        scores = self.root_scores[: out.hidden.shape[0]] if beams is None else beams.scores
        return sampler.children(self.draft.logits(out), self.draft.d2t, level - 1, scores, self.layout.topk, above)

    def _next_beams(
        self, tokens: Tensor, scores: Tensor, rows: TreeRows, beams: Beams | None, level: int
    ) -> tuple[Tensor, Beams]:
        """Select the topk best candidates of a level.  Returns their indices [B, K] in the level, and the new beams."""
        ancestor_bits = None if beams is None else beams.above.ancestor_bits
        first, end = self.layout.beams_above(level), self.layout.beams_above(level + 1)
        selected = grow(tokens, scores, ancestor_bits, rows.tokens, first, self.layout.beam_words)
        above = Above(rows.tokens[:, :end], selected.ancestor_bits)
        return selected.places, Beams(selected.scores, selected.parents, above)

    def _forward(self, out: DraftOutput, rows: TreeRows, beams: Beams, level: int) -> DraftOutput:
        """One forward pass of the draft over the beams [B, K] of depth `level`.  out: of the level before."""
        first, end = self.layout.beams_above(level), self.layout.beams_above(level + 1)
        nodes = Nodes(rows.positions[:, first:end], rows.positions[:, :end], beams.above.ancestor_bits)
        plan = self._plan(rows.prefix, nodes)
        attend = StagedPass(plan, self.staging, self.layout.beam_rows, first, self.first_layer)
        tokens, rope_positions = beams.above.tokens[:, first:end], rows.rope_positions[:, first:end]
        return self.draft(tokens, out.hidden, rope_positions, attend, beams.parents)

    def extend(
        self, slots: BatchState, target_features: Tensor | None, length: Tensor, last_pieces: Tensor | None = None
    ) -> None:
        assert target_features is not None
        width = target_features.shape[1]
        positions, tokens, page_rows = extend_rows(slots, length, width)
        plan = self._plan(self._prefix(slots), Nodes.chain(positions))
        commit = Commit(self.pages, page_rows.flatten(), by_layer=last_pieces is not None)
        attend = StagedPass(plan, self.staging, width, first_layer=self.first_layer, commit=commit)
        out = self.draft(tokens, self.draft.fuse(target_features), positions - FIRST_ROW, attend)
        attend.end()
        hidden = out.hidden
        if last_pieces is not None:
            slots = replace(slots, index=slots.index[last_pieces])
            hidden, length = hidden[last_pieces], length[last_pieces]
        carry(slots, "hidden", hidden, length)

    def _prefix(self, slots: BatchState) -> Prefix:
        """The draft's committed rows: those of tokens 1 .. n, where token n is the root."""
        return Prefix(slots.page_table, slots.num_tokens, FIRST_ROW)

    def _plan(self, prefix: Prefix, nodes: Nodes) -> Attention:
        return self.backend.plan(self.pages, self.layer_specs, prefix, nodes)


def _require_supported(spec: DraftSpec) -> DraftSpec:
    """Check that this drafter can run a draft of this form.  Raises EspalierError."""
    form = (spec.hidden_from, spec.reentry, tuple(spec.carried), spec.reads is None)
    if not spec.layers or form != ("target", FIRST_ROW, ("hidden",), False):
        raise EspalierError(
            f"AutoregressiveDrafter does not run a draft of the form {spec}; it needs layers, reads, "
            f"hidden_from='target', reentry={FIRST_ROW}, and to carry 'hidden'"
        )
    return spec


def extend_rows(slots: BatchState, length: Tensor, width: int) -> Chain:
    """The draft rows of tokens n+1 .. n+length, padded to `width`.  The padding is not committed."""
    return chain(slots, 1, length, width)
