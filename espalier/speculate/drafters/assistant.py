"""A drafter whose rows keep no K/V: each row reads the target's committed rows at the root's position (Gemma 4).

With the root at position n, rows 0 .. n-1 of the target are committed.  A draft row attends only to these rows, so the
beams of a level need no rows of the levels above.  The root's row runs first; it reads the target's hidden state at
token n-1.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from espalier.attention import CommittedLengths, Nodes, Prefix
from espalier.kernels.ops.state import load_carried_field, store_carried_field
from espalier.models.draft import DraftOutput
from espalier.slots import BatchState
from espalier.speculate.drafters.autoregressive import AutoregressiveDrafter, TreeRows
from espalier.speculate.drafters.base import GrowTree
from espalier.speculate.drafters.feeds import ModuleRows
from espalier.speculate.drafters.model_drafter import ModelDrafter
from espalier.speculate.pieces import LastTokens


class AssistantDrafter(AutoregressiveDrafter):
    def prepare(self, lengths: CommittedLengths) -> None:
        ModelDrafter.prepare(self, lengths)

    def begin(self, slots: BatchState) -> GrowTree:
        """Runs the root's row.  Returns the function that grows the trees from its logits."""
        positions = slots.prefix_len[:, None].expand(-1, self.layout.beam_rows)
        target_rows = ModuleRows(slots, Prefix(slots.page_table, slots.prefix_len))
        rows = TreeRows(slots, positions, positions, torch.empty_like(positions), [target_rows])
        out = self._run_module(rows, slots.root[:, None], load_carried_field(slots, "hidden"), None)
        return partial(self._grow_tree, rows, out, self._logits(out, 1))

    def _forward(self, out: DraftOutput, rows: TreeRows, level: int) -> DraftOutput:
        """Runs the draft over the beams of `level` - 1, to propose `level`.  out: the output of the pass before."""
        tokens = rows.tokens[:, self.layout.draft_rows_above(level - 1) : self.layout.draft_rows_above(level)]
        return self._run_module(rows, tokens, out.last_rows(self.layout.topk).hidden, rows.beam_levels[-1].parents)

    def _run_module(self, rows: TreeRows, tokens: Tensor, hidden: Tensor, parents: Tensor | None) -> DraftOutput:
        """Runs the draft's only module over tokens [B, Q] at the root's position.  hidden, parents: see DraftModule."""
        at = rows.slots.prefix_len[:, None].expand(tokens.shape)
        # No row attends to another row of the draft, so no row goes to the staging buffer.
        nodes = Nodes(at, at[:, :0], at.new_zeros(*at.shape, 1))
        return self.draft.modules[0](self.cache.begin_pass(rows.modules[0].prefix, nodes, tokens), hidden, parents)

    def extend(
        self, slots: BatchState, target_features: Tensor | None, length: Tensor, last_tokens: LastTokens | None = None
    ) -> None:
        """Stores row length - 1 of target_features [B, W, F], of the token before the new root, for the next round."""
        assert target_features is not None
        if last_tokens is not None:
            # After a prefill pass, only the features of each request's last token are kept.
            row = last_tokens.row[:, None, None].expand(-1, 1, target_features.shape[2])
            target_features, length = target_features.gather(1, row), torch.ones_like(length)
            target_features, length = last_tokens.of_last_pieces(target_features), last_tokens.of_last_pieces(length)
            slots = replace(slots, index=last_tokens.slots)
        store_carried_field(slots, "hidden", target_features, length)
