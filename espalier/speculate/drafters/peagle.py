"""A drafter for P-EAGLE heads, in the checkpoint forms of the library speculators and of vLLM.

`extend` works as for EAGLE-3: it commits the rows of decided tokens up to the root, and stores the root's output in the
slot.  `begin` computes the logits of depth 1 from this output.  For the other depths, `begin` runs one pass with a mask
token for each depth.  The best paths become the tree.
"""

from functools import partial

import torch

from espalier.attention import Nodes, Prefix
from espalier.kernels.ops.state import load_carried_field
from espalier.kernels.tree.edges import DepthRows
from espalier.models.draft import DraftOutput
from espalier.models.eagle3 import PEagleDraft
from espalier.slots import BatchState
from espalier.speculate.drafters import one_pass
from espalier.speculate.drafters.autoregressive import AutoregressiveDrafter, rope_positions
from espalier.speculate.drafters.base import GrowTree


class PEagleDrafter(AutoregressiveDrafter):
    draft: PEagleDraft

    def allocate_tensors(self) -> None:
        super().allocate_tensors()
        self.num_known = torch.zeros(self.layout.max_batch, dtype=torch.int64, device=self.device)

    def begin(self, slots: BatchState) -> GrowTree:
        """Computes the logits of all depths.  Returns the function that grows the trees from them."""
        out = self.draft.output_from_hidden(load_carried_field(slots, "hidden"))
        if self.layout.steps > 1:
            normed = torch.cat((out.normed, self._mask_rows(slots).normed), 1)
            out = DraftOutput(normed, normed)
        roots = DepthRows(slots.root[:, None], self.root_trees.scores[: slots.batch])
        return partial(one_pass.best_paths, roots, self.draft.logits(out), None, self.draft.d2t, self.layout)

    def _mask_rows(self, slots: BatchState) -> DraftOutput:
        """Runs the draft over the S - 1 mask tokens that propose depths 2 to S.  Returns their output."""
        width = self.layout.steps - 1
        rows = one_pass.block_rows(slots, 1, self.num_known[: slots.batch], width, self.spec.mask_token_id)
        # The rows of tokens 1 .. n are committed; token n is the root.
        prefix = Prefix(slots.page_table, slots.num_tokens, first_position=1)
        p = self.cache.begin_pass(prefix, Nodes.chain(rows.positions), rows.tokens, rope_positions(rows.positions, 1))
        return self.draft.run_mask_rows(p)
