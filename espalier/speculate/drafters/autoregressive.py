"""A drafter whose draft model grows the tree level by level, one forward pass over beams for each level (EAGLE, MTP).

A draft has one or more modules, such as MTP layers.  Row q of every module belongs to token q.  The row's inputs are
token q and a hidden state (see feeds.py).  In module k, the RoPE position of row q is q - k, as in training, and rows
0 .. k-1 do not exist.  Inside a tree, a beam attends to its ancestors in the tree.

Module l proposes level l of the tree.  Module l has run over no beam before, so it runs over the beams of all earlier
levels, [B, (l-1) · K].  The last module also proposes all deeper levels.  At these levels, the hidden state that a beam
reads is the last module's own output at the beam's parent.
"""

from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from espalier.attention import CommittedLengths, Nodes
from espalier.kernels.attention.ancestor_bits import self_only_bits
from espalier.kernels.ops.state import TokenChain, load_carried_field, read_chain, store_carried_field
from espalier.kernels.ops.tree import SelectedBeams, select_beams
from espalier.models.draft import DraftModel, DraftModule, DraftOutput
from espalier.sampling.logit_processors import DraftedAncestors
from espalier.slots import BatchState
from espalier.speculate.drafters.base import GrowTree
from espalier.speculate.drafters.feeds import Feed, ModuleRows, feed_name, feeds_class, module_rows
from espalier.speculate.drafters.model_drafter import ModelDrafter
from espalier.speculate.pieces import LastTokens
from espalier.speculate.sampler import DraftRows, Sampler
from espalier.speculate.tree import VOID, CandidatePool, Tree


@dataclass(frozen=True)
class TreeRows:
    """All draft rows of a tree, level after level.

    slots: the batch.  positions: [B, beam_rows], the rows' positions in the text.  parent_positions: [B, beam_rows],
    the positions of the rows' parents.  tokens: [B, beam_rows], each written when its beam is chosen.
    modules: the committed rows of each module.  beam_levels: the beams of each level, from level 1 on."""

    slots: BatchState
    positions: Tensor
    parent_positions: Tensor
    tokens: Tensor
    modules: list[ModuleRows]
    beam_levels: list[SelectedBeams] = field(default_factory=list)

    @property
    def parents(self) -> Tensor:
        """[B, number of beams so far]: the parent of each beam: 0 for the root, else 1 + the row of the parent."""
        topk = self.beam_levels[0].parents.shape[1]
        first = [0, *(1 + topk * level for level in range(len(self.beam_levels) - 1))]
        return torch.cat([beams.parents + at for beams, at in zip(self.beam_levels, first, strict=True)], 1)

    @property
    def ancestor_bits(self) -> Tensor:
        """[B, number of beams so far, words]: the ancestor bits of the beams of all levels."""
        return torch.cat([beams.ancestor_bits for beams in self.beam_levels], 1)


class AutoregressiveDrafter(ModelDrafter[DraftModel]):
    def allocate_tensors(self) -> None:
        layout, device = self.layout, self.device
        self.feeds = feeds_class(self.spec.hidden_source)
        # The depth of each draft row of a tree, after `topk` entries of depth 0.
        self.row_depths = torch.arange(layout.topk + layout.beam_rows, device=device) // layout.topk
        # [beam_rows, words]: for each draft row, ancestor bits in which only this row's own bit is set.
        self.row_bits = self_only_bits(0, layout.beam_rows, layout.beam_ancestor_words, device)
        # Entry d: the bits of all draft rows at depths greater than d.
        depths = range(self.spec.num_modules)
        self.deeper_row_bits = torch.stack(
            [self.row_bits[layout.draft_rows_above(depth + 1) :].sum(0) for depth in depths]
        )

    def prepare(self, lengths: CommittedLengths) -> None:
        """lengths: how many rows of the draft's first module each request has committed."""
        # After a prefix hit, module k attends to k - 1 more cached rows than module 1 (see feeds.py).
        more = self.spec.num_modules - 1
        super().prepare(replace(lengths.with_more_rows(more), exact=False) if more else lengths)

    def begin(self, slots: BatchState) -> GrowTree:
        """Computes the logits of depth 1.  Returns the function that grows the trees from them."""
        at, topk, num_modules = slots.prefix_len[:, None] + self.row_depths, self.layout.topk, self.spec.num_modules
        positions, above = at[:, topk:], at[:, : self.layout.beam_rows]
        rows = TreeRows(slots, positions, above, torch.empty_like(positions), module_rows(slots, num_modules))
        out = self._module(1).output_from_hidden(load_carried_field(slots, "hidden"))
        return partial(self._grow_tree, rows, out, self._logits(out, 1))

    def _grow_tree(self, rows: TreeRows, out: DraftOutput, logits: Tensor, sampler: Sampler) -> Tree:
        """Grows the tree level by level.  out, logits: the draft's output and logits that propose level 1."""
        pool, path_scores = CandidatePool(self.layout.topk), self.root_trees.scores[: logits.shape[0]]
        above: DraftedAncestors | None = None
        for level in range(1, self.layout.steps + 1):
            tokens, scores = sampler.best_children(
                DraftRows(logits, self.draft.d2t, level - 1, path_scores, above), self.layout.topk
            )
            pool.add_level(tokens, scores)
            if level < self.layout.steps:
                first, end = self.layout.draft_rows_above(level), self.layout.draft_rows_above(level + 1)
                bits = None if above is None else above.ancestor_bits
                beams = select_beams(tokens, scores, bits, rows.tokens, first, self.layout.beam_ancestor_words)
                pool.set_beams(beams.candidate_indices)
                rows.beam_levels.append(beams)
                path_scores, above = beams.scores, DraftedAncestors(rows.tokens[:, :end], beams.ancestor_bits)
                out = self._forward(out, rows, level + 1)
                logits = self._logits(out, level + 1)
        return pool.select(rows.slots.root, self.layout.num_draft_tokens)

    def _module(self, level: int) -> DraftModule:
        """Returns the module that proposes this level."""
        return self.draft.modules[self._module_index(level) - 1]

    def _module_index(self, level: int) -> int:
        """Returns the number, from 1 on, of the module that proposes this level of the tree."""
        return min(level, self.spec.num_modules)

    def _logits(self, out: DraftOutput, level: int) -> Tensor:
        """Returns [B, Q, draft vocabulary]: the logits of the children at this level, from the last rows of `out`."""
        return self._module(level).logits(out.last_rows(self.layout.topk))

    def _forward(self, out: DraftOutput, rows: TreeRows, level: int) -> DraftOutput:
        """Runs the forward pass that proposes `level`, over the beams over which the level's module has not run.

        out: the output of the pass that proposed the level before.  Returns the output of Q rows of each request.  The
        last of these rows are the beams of the level before."""
        module, end = self._module_index(level), self.layout.draft_rows_above(level)
        first = 0 if level <= self.spec.num_modules else self.layout.draft_rows_above(level - 1)
        feed, bits = self._tree_feed(out, rows, level)
        nodes = Nodes(rows.positions[:, first:end], rows.positions[:, :end], bits)
        tokens = rows.tokens[:, first:end]
        if self.draft.has_experts:
            tokens = tokens.masked_fill(~rows.slots.is_real[:, None], VOID)
        # Module 1's positions are computed already, which saves a launch for each level.
        rope = rows.parent_positions[:, first:end] if module == 1 else rope_positions(nodes.positions, module)
        p = self.cache.begin_pass(
            rows.modules[module - 1].prefix,
            nodes,
            tokens,
            rope,
            width=self.layout.beam_rows,
            first_staged=first,
            layers=self._module_layers(module),
        )
        return self._module(level)(p, *feed)

    def _tree_feed(self, out: DraftOutput, rows: TreeRows, level: int) -> tuple[Feed, Tensor]:
        """Returns the beams' input hidden states and ancestor bits, to propose `level`.  out: of the pass before."""
        beams, module, topk = rows.beam_levels[-1], self._module_index(level), self.layout.topk
        feed: Feed = out.last_rows(topk).hidden, beams.parents
        bits, end = beams.ancestor_bits, self.layout.draft_rows_above(level)
        if level <= self.spec.num_modules:
            feed = self.feeds.tree_feed(rows.slots, self.spec.num_modules, level, out.hidden, rows.parents, topk)
            bits = rows.ancestor_bits
        if module > 2:
            # After a prompt shorter than the number of modules, the first rows have no inputs.  They attend only to
            # themselves, and no other row attends to them.
            num_missing = rows.modules[module - 1].num_missing
            assert num_missing is not None
            bits = bits & self.deeper_row_bits[num_missing][:, None] | self.row_bits[end - bits.shape[1] : end]
        return feed, bits

    def extend(
        self, slots: BatchState, target_features: Tensor | None, length: Tensor, last_tokens: LastTokens | None = None
    ) -> None:
        """Runs all modules over the new tokens.  length: [B], their number.  target_features: [B, W, F]."""
        assert target_features is not None
        features, modules = self.draft.fuse(target_features), module_rows(slots, self.spec.num_modules)
        is_split = last_tokens is not None and last_tokens.piece is not None
        feeds = self.feeds(slots, modules, features, length, is_split) if self.spec.num_modules > 1 else None
        # In a prefill pass, only the output at the last token is needed, unless a further module reads all outputs.
        needed = None if last_tokens is None or feeds is not None else last_tokens.row
        hidden = self._extend_module(1, modules[0], (features, None), length, is_split, needed)
        kept = {"hidden": (hidden, length if needed is None else torch.ones_like(length))}
        if feeds is not None:
            feeds.outputs.append(hidden)
            for module in range(2, self.spec.num_modules + 1):
                feed = feeds.feed_of(module)
                feeds.outputs.append(self._extend_module(module, modules[module - 1], feed, length, is_split))
                kept[feed_name(module)] = feeds.state_to_carry(module)
        if last_tokens is not None:
            slots = replace(slots, index=last_tokens.slots)
            kept = {
                name: (last_tokens.of_last_pieces(values), last_tokens.of_last_pieces(count))
                for name, (values, count) in kept.items()
            }
        for name, (values, count) in kept.items():
            store_carried_field(slots, name, values, count)

    def _extend_module(
        self,
        module: int,
        rows: ModuleRows,
        feed: Feed,
        length: Tensor,
        is_split: bool,
        needed_row: Tensor | None = None,
    ) -> Tensor:
        """Runs one module over the `length` [B] new tokens.  Each request has as many rows as `feed` has.

        Returns the output [B, W, H]; row i belongs to token prefix_len + 1 + i of `rows.slots`.  needed_row: [B], the
        only row of each request whose output is read (Pass.needed_row); None if all outputs are read."""
        hidden, parents = feed
        width = hidden.shape[1] if parents is None else parents.shape[1]
        length = rows.module_length(length)
        positions, tokens, page_rows = extend_rows(rows.slots, length, width)
        if self.draft.has_experts:
            tokens = tokens.masked_fill(positions > rows.slots.prefix_len[:, None] + length[:, None], VOID)
        p = self.cache.begin_pass(
            rows.prefix,
            Nodes.chain(positions),
            tokens,
            rope_positions(positions, module),
            layers=self._module_layers(module),
            page_rows=page_rows.flatten(),
            # Modules fill different rows, so each module commits its own rows.
            commits_by_layer=is_split or self.spec.num_modules > 1,
            needed_row=needed_row,
        )
        out = self.draft.modules[module - 1](p, hidden, parents)
        p.commit()
        return out.hidden

    def _module_layers(self, module: int) -> range:
        """Returns the numbers of a module's layers in the cache.  module: from 1 on."""
        first, count = self.cache.layers.start, self.spec.layers_per_module
        return range(first + (module - 1) * count, first + module * count)


def rope_positions(positions: Tensor, module: int) -> Tensor:
    """Returns the RoPE positions of a module's rows.  Rows that do not exist get 0."""
    return positions - 1 if module == 1 else (positions - module).clamp(min=0)


def extend_rows(slots: BatchState, length: Tensor, width: int) -> TokenChain:
    """Returns the draft rows of tokens n+1 .. n+length, where token n is the root, padded to `width`.  The padding is
    not committed."""
    return read_chain(slots, 1, length, width)
