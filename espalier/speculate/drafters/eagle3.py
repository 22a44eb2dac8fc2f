"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840): one layer over fused features of the target grows the tree.

Row q of the draft stands under token q and is computed from it and the feature of token q-1, with rotary position q-1
as trained; row 0 does not exist.  Within a tree a beam reads its parent's output instead, and attends to its true
ancestors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from espalier.attention import Attention, Backend, Nodes, Prefix
from espalier.attention.staged import Decided, Undecided
from espalier.cache.geometry import LayerGeometry
from espalier.cache.kv import Pages, Staging
from espalier.kernels.grow import grow
from espalier.layout import RoundLayout
from espalier.models.eagle3 import Eagle3Draft
from espalier.sampling.shape import Above
from espalier.slots import Slots
from espalier.speculate.draws import Draws
from espalier.speculate.tree import Pool, Tree, root_only

FIRST_ROW = 1


@dataclass(frozen=True)
class Beams:
    """Draft rows of one level: scores [B, K]; hidden [B, K, H], the parent's output; above, the tokens of all rows so
    far, this level's last, and the words of those, its own included, that each beam stands on."""

    scores: Tensor
    hidden: Tensor
    above: Above


class Eagle3Drafter:
    algorithm = "eagle3"
    layers = 1
    hidden_from: str | None = "target"

    def __init__(
        self,
        draft: Eagle3Draft,
        layout: RoundLayout,
        pages: Pages,
        backend: Backend,
        geometry: Sequence[LayerGeometry],
        staging: Staging | None = None,
    ):
        """geometry: of all layers, the target's first; the draft's are the last.  staging: of a layout that holds this
        one; by default its own."""
        self.draft = draft
        self.layout = layout
        self.pages = pages
        self.backend = backend
        self.geometry = geometry
        self.first_layer = len(geometry) - self.layers
        layers = range(self.first_layer, len(geometry))
        self.staging = staging or Staging(geometry, layers, layout.staged_beams, pages.dtype, pages.device)
        self.others: dict[RoundLayout, Self] = {}
        self.carried: Mapping[str, tuple[int, ...]] = {"hidden": (draft.hidden_size,)}

    def sized(self, layout: RoundLayout) -> Self:
        # Made once, at a first launch, so that a captured one finds what follows from the layout.
        if layout not in self.others:
            made = type(self)(self.draft, layout, self.pages, self.backend, self.geometry, self.staging)
            self.others[layout] = made
        return self.others[layout]

    def propose(self, slots: Slots, draws: Draws) -> Tree:
        if self.layout.num_draft_tokens == 1:
            return root_only(slots.root)
        pool, prefix = Pool(self.layout.topk), self._prefix(slots)
        out = slots.carried("hidden")[:, None]
        beams = None
        for level in range(1, self.layout.steps + 1):
            tokens, scores = self._children(out, draws, level, beams)
            pool.add(tokens, scores)
            if level < self.layout.steps:
                places, beams = self._next_beams(tokens, scores, out, beams)
                pool.keep(places)
                out = self._run(slots, prefix, beams, level)
        return pool.select(slots.root, self.layout.num_draft_tokens)

    def _children(self, out: Tensor, draws: Draws, level: int, beams: Beams | None) -> tuple[Tensor, Tensor]:
        """The topk best continuations of each row of `out` [B, Q, H]: target ids and path scores [B, Q, K]."""
        above = None if beams is None else beams.above
        so_far = out.new_zeros(out.shape[:2], dtype=torch.float32) if beams is None else beams.scores
        return draws.children(self.draft.logits(out), self.draft.d2t, level - 1, so_far, self.layout.topk, above)

    def _next_beams(self, tokens: Tensor, scores: Tensor, out: Tensor, beams: Beams | None) -> tuple[Tensor, Beams]:
        """The topk best candidates of a level, by their places [B, K], and the beams that they become."""
        rows, words = (0, None) if beams is None else (beams.above.tokens.shape[1], beams.above.words)
        grown = grow(tokens, scores, words, rows, self.layout.beam_words)
        path = grown.tokens if beams is None else torch.cat((beams.above.tokens, grown.tokens), 1)
        hidden = out.gather(1, grown.parents[..., None].expand(-1, -1, out.shape[2]))
        return grown.places, Beams(grown.scores, hidden, Above(path, grown.words))

    def _run(self, slots: Slots, prefix: Prefix, beams: Beams, level: int) -> Tensor:
        """One draft forward over the beams of depth `level`: [B, K, H]."""
        topk, rows = self.layout.topk, self.layout.beams_above(level + 1)
        depths = torch.arange(rows, device=slots.index.device) // topk + 1
        row_positions = slots.prefix_len[:, None] + depths
        nodes = Nodes(row_positions[:, -topk:], row_positions, beams.above.words)
        width, at = self.layout.beam_rows, self.layout.beams_above(level)
        attend = Undecided(self._plan(prefix, nodes), self.staging, width, at, self.first_layer)
        return self.draft(beams.above.tokens[:, -topk:], beams.hidden, nodes.positions - FIRST_ROW, attend)

    def extend(self, slots: Slots, captured: Tensor | None, length: Tensor) -> None:
        assert captured is not None
        offsets = torch.arange(captured.shape[1], device=length.device)
        positions = slots.prefix_len[:, None] + 1 + offsets
        kept = extend_rows(offsets, length) & (positions >= slots.commit_from[:, None])
        rows = self.pages.rows_where(slots.page_table, positions, kept)
        attend = Decided(self._plan(self._prefix(slots), Nodes.chain(positions)), rows, self.first_layer)
        out = self.draft(slots.history_at(positions), self.draft.fuse(captured), positions - FIRST_ROW, attend)
        last = (length - 1).clamp(min=0)[:, None, None].expand(-1, 1, out.shape[2])
        slots.carry("hidden", out.gather(1, last)[:, 0])

    def _prefix(self, slots: Slots) -> Prefix:
        """The draft's committed rows: those of tokens 1 .. n, the root's own included."""
        return Prefix(slots.page_table, slots.prefix_len + 1, FIRST_ROW)

    def _plan(self, prefix: Prefix, nodes: Nodes) -> Attention:
        return self.backend.plan(self.pages, self.geometry, prefix, nodes)


def extend_rows(offsets: Tensor, length: Tensor) -> Tensor:
    """[B, W] bool: rows of the extend that were decided, and so are kept."""
    return offsets < length[:, None]
