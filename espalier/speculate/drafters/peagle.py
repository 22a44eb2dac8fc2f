"""P-EAGLE heads, in the forms of vLLM's speculators and of vLLM.

`extend` is EAGLE-3's: it commits the rows of decided tokens up to the root, and the slot carries the root's output.
`begin` runs one pass over the mask rows, one for each depth from 2 on, and selects the best paths.
"""

from functools import partial

import torch

from espalier.attention import Nodes, Prefix
from espalier.attention.staged import StagedPass
from espalier.models.draft import DraftOutput
from espalier.models.peagle import PEagleDraft
from espalier.slots import BatchState
from espalier.speculate.drafters import one_pass
from espalier.speculate.drafters.autoregressive import AutoregressiveDrafter, rope_positions
from espalier.speculate.drafters.base import Grow
from espalier.speculate.tree import root_only


class PEagleDrafter(AutoregressiveDrafter):
    draft: PEagleDraft

    def allocate(self) -> None:
        super().allocate()
        # Distances of the mask rows from the root.
        self.offsets = torch.arange(1, max(self.layout.steps, 1), device=self.pages.device)

    def begin(self, slots: BatchState) -> Grow:
        if self.layout.num_draft_tokens == 1:
            return lambda sampler: root_only(slots.root)
        out = self.draft.output_of(slots.carried("hidden")[:, None])
        if self.layout.steps > 1:
            normed = torch.cat((out.normed, self._mask_rows(slots).normed), 1)
            out = DraftOutput(normed, normed)
        return partial(one_pass.best_paths, slots.root, self.draft.logits(out), None, self.draft.d2t, self.layout)

    def _mask_rows(self, slots: BatchState) -> DraftOutput:
        positions = one_pass.block_positions(slots, self.offsets)
        # The rows of tokens 1 .. n are committed; token n is the root.
        plan = self.plan(Prefix(slots.page_table, slots.num_tokens, first=1), Nodes.chain(positions))
        attend = StagedPass(plan, self.staging, len(self.offsets), first_layer=self.first_layer)
        return self.draft.mask_rows(rope_positions(positions, 1), attend)
