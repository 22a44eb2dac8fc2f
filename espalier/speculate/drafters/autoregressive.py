"""A draft model grows the tree level by level, each level one forward pass over the beams (EAGLE and its kin).

Row q of every draft layer stands under token q and is computed from it and from what the target's pass over token q-1
left (DraftSpec.reads), with rotary position q-1 as trained; row 0 does not exist.  Within a tree a beam reads its
parent's output instead, and attends to its true ancestors.  All layers run over the same rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from espalier.attention import Attention, CommittedLengths, GroupedBackend, Nodes, Prefix
from espalier.attention.staged import StagedPass
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
    """Draft rows of one level: scores [B, K]; parents [B, K], the rows of the level before that they continue; above,
    the tokens of all rows so far, this level's last, and the words of those, its own included, that each stands on."""

    scores: Tensor
    parents: Tensor
    above: Above


@dataclass(frozen=True)
class Rows:
    """What the draft rows of every level share, level by level.  positions [B, beam_rows] in the pages, and turned, by
    which they are rotated; tokens [B, beam_rows], written as beams are chosen; prefix, which they hang from."""

    positions: Tensor
    turned: Tensor
    tokens: Tensor
    prefix: Prefix


class AutoregressiveDrafter:
    def __init__(
        self,
        draft: DraftModel,
        layout: RoundLayout,
        pages: PagedKV,
        backend: GroupedBackend,
        geometry: Sequence[LayerSpec],
        staging: StagedKV | None = None,
    ):
        """geometry: of all layers, the target's first; the draft's are the last.  staging: of a layout that holds this
        one; by default its own.  Raises EspalierError for a declaration that it does not run."""
        self.spec = _supported(draft.spec)
        self.draft = draft
        self.layout = layout
        self.pages = pages
        self.backend = backend
        self.geometry = geometry
        self.first_layer = len(geometry) - len(self.spec.layers)
        layers = range(self.first_layer, len(geometry))
        # Of the rows of every level, level by level.
        self.depths = torch.arange(layout.beam_rows, device=pages.device) // layout.topk + 1
        # The root's own score.
        self.sure = torch.zeros(layout.max_batch, 1, device=pages.device)
        self.staging = staging or StagedKV(geometry, layers, layout.draft_rows, pages.dtype, pages.device)
        self.others: dict[RoundLayout, Self] = {}

    def sized(self, layout: RoundLayout) -> Self:
        # Made once, at a first launch, so that a captured one finds what follows from the layout.
        if layout not in self.others:
            made = type(self)(self.draft, layout, self.pages, self.backend, self.geometry, self.staging)
            self.others[layout] = made
        return self.others[layout]

    def prepare(self, lengths: CommittedLengths) -> None:
        self.backend.prepare(lengths)

    def propose(self, slots: BatchState, sampler: Sampler) -> Tree:
        if self.layout.num_draft_tokens == 1:
            return root_only(slots.root)
        positions = slots.prefix_len[:, None] + self.depths
        rows = Rows(positions, positions - FIRST_ROW, torch.empty_like(positions), self._prefix(slots))
        pool, out, beams = Pool(self.layout.topk), self.draft.output_of(slots.carried("hidden")[:, None]), None
        for level in range(1, self.layout.steps + 1):
            tokens, scores = self._children(out, sampler, level, beams)
            pool.add(tokens, scores)
            if level < self.layout.steps:
                places, beams = self._next_beams(tokens, scores, rows, beams, level)
                pool.keep(places)
                out = self._run(out, rows, beams, level)
        return pool.select(slots.root, self.layout.num_draft_tokens)

    def _children(self, out: DraftOutput, sampler: Sampler, level: int, beams: Beams | None) -> tuple[Tensor, Tensor]:
        """The topk best continuations of each row of `out`, [B, Q]: target ids and path scores [B, Q, K]."""
        above = None if beams is None else beams.above
        so_far = self.sure[: out.hidden.shape[0]] if beams is None else beams.scores
        return sampler.children(self.draft.logits(out), self.draft.d2t, level - 1, so_far, self.layout.topk, above)

    def _next_beams(
        self, tokens: Tensor, scores: Tensor, rows: Rows, beams: Beams | None, level: int
    ) -> tuple[Tensor, Beams]:
        """The topk best candidates of a level, by their places [B, K], and the beams that they become."""
        ancestor_bits = None if beams is None else beams.above.ancestor_bits
        at, end = self.layout.beams_above(level), self.layout.beams_above(level + 1)
        grown = grow(tokens, scores, ancestor_bits, rows.tokens, at, self.layout.beam_words)
        return grown.places, Beams(grown.scores, grown.parents, Above(rows.tokens[:, :end], grown.ancestor_bits))

    def _run(self, out: DraftOutput, rows: Rows, beams: Beams, level: int) -> DraftOutput:
        """One draft forward over the beams [B, K] of depth `level`, which continue rows of `out`."""
        at, end = self.layout.beams_above(level), self.layout.beams_above(level + 1)
        nodes = Nodes(rows.positions[:, at:end], rows.positions[:, :end], beams.above.ancestor_bits)
        attend = StagedPass(self._plan(rows.prefix, nodes), self.staging, self.layout.beam_rows, at, self.first_layer)
        return self.draft(beams.above.tokens[:, at:end], out.hidden, rows.turned[:, at:end], attend, beams.parents)

    def extend(self, slots: BatchState, read: Tensor | None, length: Tensor) -> None:
        assert read is not None
        positions, tokens, rows = extend_rows(slots, length, read.shape[1])
        plan, width = self._plan(self._prefix(slots), Nodes.chain(positions)), read.shape[1]
        attend = StagedPass(plan, self.staging, width, first_layer=self.first_layer)
        out = self.draft(tokens, self.draft.fuse(read), positions - FIRST_ROW, attend)
        self.pages.commit(self.staging, attend.rows, rows.flatten())
        carry(slots, "hidden", out.hidden, length)

    def _prefix(self, slots: BatchState) -> Prefix:
        """The draft's committed rows: those of tokens 1 .. n, the root's own included."""
        return Prefix(slots.page_table, slots.num_tokens, FIRST_ROW)

    def _plan(self, prefix: Prefix, nodes: Nodes) -> Attention:
        return self.backend.plan(self.pages, self.geometry, prefix, nodes)


def _supported(spec: DraftSpec) -> DraftSpec:
    """Other forms are refused, never guessed."""
    form = (spec.hidden_from, spec.reentry, tuple(spec.carried), spec.reads is None)
    if not spec.layers or form != ("target", FIRST_ROW, ("hidden",), False):
        raise EspalierError(
            f"a draft of the form {spec} is run by no AutoregressiveDrafter; it needs layers, reads, "
            f"hidden_from='target', reentry={FIRST_ROW}, and to carry 'hidden'"
        )
    return spec


def extend_rows(slots: BatchState, length: Tensor, width: int) -> Chain:
    """The rows under tokens n+1 .. n+length; those past length were not decided, and are not kept."""
    return chain(slots, 1, length, width)
