"""One turn of the crank for a batch: draft, verify, accept, commit, extend.  And a prefill pass, which is the same with
a chain that was decided before it ran.

The same lines run eagerly and under capture: static shapes, no read of the device, nothing kept from one launch to the
next but what the slot table and the pages hold.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from espalier.attention import Backend, Nodes, Prefix
from espalier.attention.staged import StagedAttention
from espalier.cache.kv import Pages, Staging
from espalier.layout import RoundLayout
from espalier.models.base import CausalLM
from espalier.sampling.pick import Logprobs, logprobs
from espalier.sampling.shape import Shaping
from espalier.slots import Slots, SlotTable
from espalier.speculate.accept import Path, accept
from espalier.speculate.drafters.base import Drafter
from espalier.speculate.draws import Draws
from espalier.speculate.tree import Tree


@dataclass(frozen=True)
class Round:
    """What every launch runs on: the layout and the buffers that follow from it, the models, the backend."""

    layout: RoundLayout
    table: SlotTable
    pages: Pages
    staging: Staging
    target: CausalLM
    drafter: Drafter
    backend: Backend

    def attend(self, prefix: Prefix, nodes: Nodes, **how: Any) -> StagedAttention:
        geometry = self.target.geometry
        return StagedAttention(self.backend.plan(self.pages, geometry, prefix, nodes), **how)


@dataclass(frozen=True)
class Decided:
    """What a launch gives back.  tokens [B, W], length [B] emitted; sound [B]: how many of them, from the first, were
    picked from finite logits; tree and path of a round; logprobs of the emitted tokens where they were asked for."""

    tokens: Tensor
    length: Tensor
    sound: Tensor
    tree: Tree | None
    path: Path | None
    logprobs: Logprobs | None


def run(r: Round, index: Tensor, shaping: Shaping, num_logprobs: int | None) -> Decided:
    """A round of the slots `index` [B]; num_logprobs: alternatives to report a token, None for no logprobs at all."""
    slots = Slots.gather(r.table, index)
    draws = draws_after(r, slots, shaping, slots.prefix_len + 1, r.layout.extend_width)
    tree = r.drafter.propose(slots, draws)
    check_tree(r.layout, tree, slots.batch)
    out = r.target(tree.tokens.clamp(min=0), tree.positions(slots.prefix_len), verify(r, slots, tree))
    logits = r.target.logits(out.hidden)
    picked = draws.pick_nodes(logits, tree)
    path = accept(tree, picked.tokens, slots.room(), slots.real, r.layout.steps)
    commit(r, slots, path)
    slots.advance(path.tokens, path.length, shaping.penalised)
    r.drafter.extend(slots, r.pages, None if out.captured is None else along(out.captured, path.rows), path.length)
    sound = (picked.finite.gather(1, path.rows) & emitted(path)).cumprod(1).sum(1)
    reported = None if num_logprobs is None else logprobs(along(logits, path.rows), path.tokens, num_logprobs)
    return Decided(path.tokens, path.length, sound, tree, path, reported)


def prefill(r: Round, index: Tensor, length: Tensor, width: int, shaping: Shaping, num_logprobs: int | None) -> Decided:
    """Enter `length` [B] known tokens of each slot, from its root on, as a chain of uniform width."""
    slots = Slots.gather(r.table, index)
    r.layout.require_rows("prefill pass", slots.batch * width, r.layout.chunk_size)
    offsets = torch.arange(width, device=index.device)
    positions = slots.prefix_len[:, None] + offsets
    new = (offsets < length[:, None]) & (positions >= r.table.commit_from[index][:, None])
    causal = (offsets <= offsets[:, None]).expand(slots.batch, -1, -1)
    attend = r.attend(
        Prefix(slots.page_table, slots.prefix_len),
        Nodes(positions, positions, causal),
        pages=r.pages,
        rows=r.pages.rows_where(slots.page_table, positions, new),
    )
    out = r.target(slots.history_at(positions), positions, attend)
    last = (length - 1).clamp(min=0)[:, None]
    logits = r.target.logits(along(out.hidden, last))
    picked = draws_after(r, slots, shaping, slots.prefix_len + length, 1).pick_last(logits)
    is_picked = slots.enter(length, picked.tokens[:, 0], shaping.penalised)
    r.drafter.extend(slots, r.pages, out.captured, length)
    reported = None if num_logprobs is None else logprobs(logits, picked.tokens, num_logprobs)
    return Decided(picked.tokens, is_picked.long(), is_picked & picked.finite[:, 0], None, None, reported)


def check_tree(layout: RoundLayout, tree: Tree, batch: int) -> None:
    """What a drafter hands over fits the buffers that follow from the layout, and the batch fits them too."""
    layout.require_rows("staging", batch * layout.num_draft_tokens, layout.verify_rows)
    for name in ("tokens", "parents", "depths", "scores"):
        layout.require(f"tree.{name}", getattr(tree, name), batch, layout.num_draft_tokens)
    layout.require("tree.ancestors", tree.ancestors, batch, layout.num_draft_tokens, layout.ancestor_words)


def draws_after(r: Round, slots: Slots, shaping: Shaping, first: Tensor, width: int) -> Draws:
    dtype = torch.promote_types(r.pages.dtype, torch.float32)
    return Draws.of(slots, shaping, first, width, r.target.config.vocab_size, dtype)


def verify(r: Round, slots: Slots, tree: Tree) -> StagedAttention:
    """The tree's nodes hang off the target's committed rows; their own K/V go to staging."""
    positions = tree.positions(slots.prefix_len)
    nodes = Nodes(positions, positions, tree.mask())
    prefix = Prefix(slots.page_table, slots.prefix_len)
    return r.attend(prefix, nodes, staging=r.staging, width=r.layout.num_draft_tokens)


def commit(r: Round, slots: Slots, path: Path) -> None:
    """The path's rows go to positions n .. n + length - 1, in order."""
    width = path.rows.shape[1]
    positions = slots.prefix_len[:, None] + torch.arange(width, device=path.rows.device)
    rows = r.pages.rows_where(slots.page_table, positions, emitted(path))
    first = torch.arange(slots.batch, device=rows.device)[:, None] * r.layout.num_draft_tokens
    r.pages.commit(r.staging, (first + path.rows).flatten(), rows.flatten())


def emitted(path: Path) -> Tensor:
    """[B, S+1] bool: entries of the path that exist."""
    return torch.arange(path.rows.shape[1], device=path.length.device) < path.length[:, None]


def along(values: Tensor, rows: Tensor) -> Tensor:
    """values [B, D, n] at rows [B, W]: [B, W, n]."""
    return values.gather(1, rows[..., None].expand(-1, -1, values.shape[2]))
