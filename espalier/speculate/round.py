"""One turn of the crank for a batch: draft, verify, accept, commit, extend.

A prefill pass is the same with a chain that was decided before it ran.  The same lines run eagerly and under capture:
static shapes, nothing kept from one launch to the next but what the slot table and the pages hold, and no length read
on the host.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from espalier.attention import Attention, CommittedLengths, GroupedBackend, Nodes, Prefix
from espalier.attention.staged import StagedPass
from espalier.cache.kv import PagedKV, StagedKV
from espalier.kernels.advance import NodeRows, advance
from espalier.kernels.along import along
from espalier.kernels.slots import chain, gather
from espalier.layout import RoundLayout
from espalier.models.base import CausalLM, ModelOutput
from espalier.sampling.pick import Logprobs, logprobs
from espalier.sampling.shape import Shaping
from espalier.slots import Slots, SlotTable
from espalier.speculate.accept import Path, accept
from espalier.speculate.drafters.base import Drafter
from espalier.speculate.draws import Draws
from espalier.speculate.tree import Tree


@dataclass(frozen=True)
class Round:
    """What every launch runs on: the layout and the buffers that follow from it, the models, the target's backends."""

    layout: RoundLayout
    table: SlotTable
    pages: PagedKV
    staging: StagedKV
    target: CausalLM
    drafter: Drafter
    backend: GroupedBackend

    def at(self, batch: int) -> "Round":
        """The round of so many requests: all but the tree's sizes is shared.  Raises EspalierError for too many."""
        self.layout.require_batch(batch)
        layout = self.layout.at(batch)
        return self if layout is self.layout else replace(self, layout=layout, drafter=self.drafter.sized(layout))

    def prepare(self, lengths: CommittedLengths) -> None:
        """Before a launch, on the host: what is known of the target's committed rows; the draft has one more."""
        self.backend.prepare(lengths)
        self.drafter.prepare(CommittedLengths(tuple(length + 1 for length in lengths.at_most), lengths.exact))

    def plan(self, slots: Slots, nodes: Nodes) -> Attention:
        """Attention of the target over what each slot has committed, and over its nodes."""
        prefix = Prefix(slots.page_table, slots.prefix_len)
        return self.backend.plan(self.pages, self.target.geometry, prefix, nodes)

    def draws(self, slots: Slots, shaping: Shaping, first: Tensor, width: int) -> Draws:
        """Sampling of the tokens at positions first .. first + width - 1, first [B]."""
        dtype = torch.promote_types(self.pages.dtype, torch.float32)
        return Draws.of(slots, shaping, first, width, self.target.config.vocab_size, dtype)


@dataclass(frozen=True)
class Outcome:
    """What a launch gives back.  tokens [B, W], length [B] emitted; sound [B]: how many of them, from the first, were
    picked from finite logits; tree and path of a round; logprobs of the emitted tokens where they were asked for."""

    tokens: Tensor
    length: Tensor
    sound: Tensor
    logprobs: Logprobs | None
    tree: Tree | None = None
    path: Path | None = None


def run(r: Round, index: Tensor, shaping: Shaping, num_logprobs: int | None) -> Outcome:
    """A round of the slots `index` [B]; num_logprobs: alternatives to report a token, None for no logprobs at all."""
    r = r.at(index.shape[0])
    slots = gather(r.table, index)
    draws = r.draws(slots, shaping, slots.num_tokens, r.layout.extend_width)
    tree = r.drafter.propose(slots, draws)
    out = verify(r, slots, tree)
    logits = r.target.logits(out.hidden)
    picked = draws.pick_nodes(logits, tree)
    path = accept(tree, picked, slots.room, slots.real, r.layout.steps)
    commit(r, slots, path, shaping.penalised)
    r.drafter.extend(slots, features(out, path.rows), path.length)
    return report(tree, path, logits, num_logprobs)


def prefill(r: Round, index: Tensor, length: Tensor, width: int, shaping: Shaping, num_logprobs: int | None) -> Outcome:
    """Enter `length` [B] known tokens of each slot, from its root on, as a chain of uniform width."""
    r.layout.require_chunk(index.shape[0], width)
    slots = gather(r.table, index)
    positions, tokens, rows = chain(slots, 0, length, width)
    attend = StagedPass(r.plan(slots, Nodes.chain(positions)), r.staging, width)
    out = r.target(tokens, positions, attend)
    r.pages.commit(r.staging, attend.rows, rows.flatten())
    logits = r.target.logits(along(out.hidden, (length - 1).clamp(min=0)[:, None]))
    picked = r.draws(slots, shaping, slots.prefix_len + length, 1).pick_last(logits)
    num_picked, _ = advance(slots, length, picked.tokens, shaping.penalised)
    r.drafter.extend(slots, out.captured, length)
    reported = None if num_logprobs is None else logprobs(logits, picked.tokens, num_logprobs)
    return Outcome(picked.tokens, num_picked, num_picked * picked.finite[:, 0], reported)


def verify(r: Round, slots: Slots, tree: Tree) -> ModelOutput:
    """One pass of the target over the tree, hanging off the committed rows; the nodes' own K/V go to staging."""
    check_tree(r.layout, tree, slots.batch)
    positions = tree.positions(slots.prefix_len)
    plan = r.plan(slots, Nodes(positions, positions, tree.ancestors))
    # A void node runs as the root, so that nothing runs but what the request holds or the draft proposed.
    return r.target(tree.tokens, positions, StagedPass(plan, r.staging, r.layout.num_draft_tokens))


def check_tree(layout: RoundLayout, tree: Tree, batch: int) -> None:
    """What a drafter hands over fits the buffers that follow from the layout."""
    for name in ("tokens", "parents", "depths", "scores"):
        layout.require(f"tree.{name}", getattr(tree, name), batch, layout.num_draft_tokens)
    layout.require("tree.ancestors", tree.ancestors, batch, layout.num_draft_tokens, layout.ancestor_words)


def commit(r: Round, slots: Slots, path: Path, count_tokens: bool) -> None:
    """The path's rows go to positions n .. n + length - 1, in order, and the slots move on to the new root."""
    nodes = NodeRows(path.rows, r.layout.num_draft_tokens)
    copies = advance(slots, path.length, path.tokens, count_tokens, nodes).copies
    assert copies is not None
    r.pages.commit(r.staging, copies.source.flatten(), copies.destination.flatten())


def features(out: ModelOutput, rows: Tensor) -> Tensor | None:
    """What was captured at nodes `rows` [B, W]."""
    return None if out.captured is None else along(out.captured, rows)


def report(tree: Tree, path: Path, logits: Tensor, num_logprobs: int | None) -> Outcome:
    reported = None if num_logprobs is None else logprobs(along(logits, path.rows), path.tokens, num_logprobs)
    return Outcome(path.tokens, path.length, path.sound, reported, tree, path)
