"""One round of speculative decoding for a batch, in four stages: begin, propose, verify, settle.

`begin`: the drafter computes its first logits, which need neither a mask nor anything else from the host.
`propose`: the drafter grows a token tree under the root of each request.
`verify`: the target runs over all nodes of the trees in one pass.
`settle`: the target's token is sampled at every node, the longest path of matching tokens is accepted, the path's K/V
is copied to pages (commit), and the draft runs over the new tokens (extend).

A round is one CUDA graph, or graphs for each stage where the host computes token masks from the proposed trees.
Eager launches and captures run the same code: shapes are static, and only the slot table and the pages carry data from
one launch to the next.  `prefill` does the same work for a chain of known tokens in place of a tree.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from espalier.attention import ChosenRows, CommittedLengths, ModelCache, Nodes, Prefix
from espalier.cache.kv import PagedKV
from espalier.cache.states import Marks, StateAccess
from espalier.kernels.ops.state import NodeRows, advance, chain, gather
from espalier.kernels.ops.tree import Path, accept, gather_rows
from espalier.layout import RoundLayout, TreeShape
from espalier.models.base import CausalLM, ModelOutput
from espalier.sampling.logit_processors import SamplingNeeds
from espalier.sampling.mask import DraftGuide
from espalier.sampling.pick import Logprobs, SampledTokens
from espalier.sampling.prompt import PromptRows, prompt_logprobs
from espalier.slots import BatchState, ScatterUpdate, SlotTable
from espalier.speculate.drafters.base import Drafter, Grow
from espalier.speculate.logit_slices import logit_rows, node_slices
from espalier.speculate.pieces import PieceRows, Pieces
from espalier.speculate.sampler import Sampler, make_sampler
from espalier.speculate.tree import VOID, Tree


@dataclass(frozen=True)
class ModelRunner:
    """Everything that a launch runs on: layout, slot table, target, drafter.

    cache: where the target's layers keep their rows.
    coupled_scores: whether the draft scores children with the noise that the target will draw with.  Without it fewer
    sampled tokens are accepted; False exists to measure how many.
    trims_trees: whether a round runs no more nodes than it has guesses.  The host waits for the tree then, and shapes
    differ from round to round, as no CUDA graph can.
    """

    layout: RoundLayout
    table: SlotTable
    cache: ModelCache
    target: CausalLM
    drafter: Drafter
    coupled_scores: bool = True
    trims_trees: bool = False

    def at(self, batch: int) -> "ModelRunner":
        """The runner for rounds of `batch` requests, whose tree may be smaller.  Models and buffers are shared.

        Raises EspalierError above max_batch.
        """
        self.layout.require_batch(batch)
        return self._of_layout(self.layout.at(batch))

    @property
    def pages(self) -> PagedKV:
        return self.cache.pages

    @property
    def captures_prefill(self) -> bool:
        return self.cache.backend.captures_prefill and self.drafter.captures_prefill

    def with_nodes(self, nodes: int) -> "ModelRunner":
        """The same runner for trees of fewer nodes, behind the drafter."""
        return replace(self, layout=self.layout.with_tree(replace(self.layout.tree, num_draft_tokens=nodes)))

    def of_tree(self, tree: TreeShape | None) -> "ModelRunner":
        """The runner for rounds with this tree at every batch; None: with the layout's trees.  Models and buffers are
        shared."""
        return self if tree is None else self._of_layout(self.layout.with_tree(tree))

    def _of_layout(self, layout: RoundLayout) -> "ModelRunner":
        return self if layout is self.layout else replace(self, layout=layout, drafter=self.drafter.for_layout(layout))

    def prepare(self, lengths: CommittedLengths) -> None:
        """Called on the host before each launch.  lengths: the target's committed rows."""
        self.cache.backend.prepare(lengths)
        self.drafter.prepare(lengths.longer(self.drafter.spec.root_rows))

    @property
    def reads_all_hidden(self) -> bool:
        """Whether the draft reads the target's last hidden state, before or after the final norm, at every token."""
        return self.drafter.spec.reads == "hidden" or self.target.config.num_layers in self.target.capture

    def shared_rows(self, batch: int) -> int:
        """Rows of a verify pass that are shared out over the batch; 0 where each request has its own."""
        shared = self.layout.shared_rows
        return batch * shared if batch and shared < self.layout.num_draft_tokens else 0

    def node_slices(self, batch: int) -> list[slice]:
        """The nodes of each tree whose logits are computed at a time.  self: the runner for this batch (`at`)."""
        return node_slices(batch, self.layout.num_draft_tokens, self.target.config.vocab_size)

    def sampler(self, slots: BatchState, needs: SamplingNeeds, first: Tensor, width: int) -> Sampler:
        """The sampler for tokens at positions first .. first + width - 1.  first: [B]."""
        dtype = torch.promote_types(self.pages.dtype, torch.float32)
        return make_sampler(slots, needs, first, width, self.target.config.vocab_size, dtype, self.coupled_scores)


@dataclass(frozen=True)
class RoundOutput:
    """The output of a launch.

    path: what was emitted; W is 1 for a prefill pass, and S + 1 for a round.
    logits: [B, R, V]; num_logprobs: [B], as in BatchState.
    rows: [B, W], the row of the logits that each emitted token was picked from.
    tree: of a round; None for a prefill pass.
    prompt_logprobs: [N], for the prompt rows that requests asked for; None without such rows.
    said: [B, P · (1 + S)], candidates: [B, D]: of a round with guesses of an engine with sources, as in SlotTable; else
    None.
    """

    path: Path
    logits: Tensor
    num_logprobs: Tensor
    rows: Tensor
    tree: Tree | None = None
    prompt_logprobs: Logprobs | None = None
    said: Tensor | None = None
    candidates: Tensor | None = None


@dataclass(frozen=True)
class Stage:
    """What the stages of a round share.  runner: for this batch size, and for the trees once they are proposed;
    slots: the batch; marks: where the commit leaves snapshots of states."""

    runner: ModelRunner
    slots: BatchState
    sampler: Sampler
    marks: Marks | None


@dataclass(frozen=True)
class Begun(Stage):
    """The state after the begin stage.  grow: the rest of a proposal."""

    grow: Grow


@dataclass(frozen=True)
class Proposed(Stage):
    """The state after the propose stage.  tree: one for each slot."""

    tree: Tree


@dataclass(frozen=True)
class Verified:
    """The state after the verify stage.  out: the target's output; logits: [B, D, V] at every node, None where that is
    too much at a time (`sample_nodes`)."""

    proposed: Proposed
    out: ModelOutput
    logits: Tensor | None


def decode_round(
    runner: ModelRunner,
    index: Tensor,
    needs: SamplingNeeds,
    appended: ScatterUpdate | None = None,
    marks: Marks | None = None,
) -> RoundOutput:
    """Run a whole round.

    index: [B] int64, the slots of the batch; appended: new entries of the page table; marks: where states leave
    snapshots, by request.
    """
    return settle(verify(propose(begin(runner, index, needs, appended, marks))))


def begin(
    runner: ModelRunner,
    index: Tensor,
    needs: SamplingNeeds,
    appended: ScatterUpdate | None = None,
    marks: Marks | None = None,
) -> Begun:
    """First stage: the draft's first logits for each slot.  Arguments as of `decode_round`."""
    runner = runner.at(index.shape[0])
    drafter = runner.drafter
    slots = gather(runner.table, index, appended)
    sampler = runner.sampler(slots, needs, slots.num_tokens, runner.layout.extend_width)
    is_plain = runner.layout.num_draft_tokens == 1
    grow = (lambda sampler: drafter.root_trees(slots.root)) if is_plain else drafter.begin(slots)
    return Begun(runner, slots, sampler, marks, grow)


def propose(begun: Begun, guide: DraftGuide | None = None) -> Proposed:
    """Second stage: draft a tree for each slot.  guide: what grammars say of the next tokens."""
    sampler = replace(begun.sampler, guide=guide)
    tree = begun.grow(sampler)
    check_tree(begun.runner.layout, tree, begun.slots.batch)
    runner = begun.runner
    if runner.shared_rows(begun.slots.batch):
        # A node that cannot be accepted takes no row from another request.
        tree = tree.within(begun.slots.max_accept_depth)
        tree = tree.only(tree.best(runner.shared_rows(begun.slots.batch)))
    if runner.trims_trees:
        nodes = num_offered(tree, begun.slots.max_accept_depth)
        if nodes < runner.layout.num_draft_tokens:
            runner, tree = runner.with_nodes(nodes), tree.first(nodes)
    return Proposed(runner, begun.slots, sampler, begun.marks, tree)


def verify(proposed: Proposed) -> Verified:
    """Third stage: run the target over all nodes in one pass.  The nodes' K/V go to staging."""
    runner, slots, tree = proposed.runner, proposed.slots, proposed.tree
    positions = tree.positions(slots.prefix_len)
    nodes = Nodes(positions, positions, tree.ancestors, tree.parents)
    # Void nodes have token -1: the model reads the embedding of their request's root in its place.
    tokens = void_padding(runner, tree.tokens, slots.real[:, None])
    access = StateAccess(slots.index, slots.prefix_len)
    chosen, prefix = chosen_rows(proposed), Prefix(slots.page_table, slots.prefix_len)
    out = runner.target(runner.cache.begin(prefix, nodes, tokens, access=access, chosen=chosen))
    logits = runner.target.logits(out.hidden) if len(runner.node_slices(slots.batch)) == 1 else None
    if chosen is not None:
        out = ModelOutput(chosen.spread(out.hidden), tuple(map(chosen.spread, out.inputs)))
        logits = None if logits is None else chosen.spread(logits)
    return Verified(proposed, out, logits)


def chosen_rows(proposed: Proposed) -> ChosenRows | None:
    """The rows of the verify pass, where they are shared out over the batch."""
    batch, nodes = proposed.tree.tokens.shape
    rows = min(proposed.runner.shared_rows(batch), batch * nodes)
    if rows and proposed.runner.trims_trees:
        rows = min(rows, int((proposed.tree.scores > -torch.inf).sum()))
    return ChosenRows.at(proposed.tree.best(rows), batch, nodes) if rows else None


def settle(verified: Verified, mask: Tensor | None = None) -> RoundOutput:
    """Last stage: sample, accept, commit, extend.

    mask: [B, D, ceil(V / 32)] int32, one bit for each token: whether it may follow the node (sampling/mask.py).
    None allows all tokens.
    """
    proposed, out = verified.proposed, verified.out
    runner, slots, tree = proposed.runner, proposed.slots, proposed.tree
    sampled = sample_nodes(verified, mask)
    path = accept(tree, *sampled, slots.max_accept_depth, slots.real, runner.layout.steps)
    commit(runner, slots, path, proposed.sampler.needs.penalised, proposed.marks)
    if runner.layout.extends:
        runner.drafter.extend(slots, rows_of_path(runner.drafter, out, path), path.length)
    told: dict[str, Any] = {}
    if runner.table.layout.calibrates and runner.layout.num_draft_tokens > 1:
        fields = {"said": slots.table.said, "candidates": slots.table.candidates}
        told = {name: field.index_select(0, slots.index).flatten(1) for name, field in fields.items() if field.shape[1]}
    if verified.logits is not None:
        return RoundOutput(path, verified.logits, slots.num_logprobs, path.rows, tree, **told)
    logits = runner.target.logits(gather_rows(path.rows, out.hidden))
    rows = torch.arange(path.rows.shape[1], device=path.rows.device).repeat(slots.batch, 1)
    return RoundOutput(path, logits, slots.num_logprobs, rows, tree, **told)


def sample_nodes(verified: Verified, mask: Tensor | None) -> SampledTokens:
    """The target's token at every node.  Where `verified` has no logits, they are computed slice by slice."""
    proposed = verified.proposed
    if verified.logits is not None:
        return proposed.sampler.pick_nodes(verified.logits, proposed.tree, mask)
    target, hidden = proposed.runner.target, verified.out.hidden
    parts = [
        proposed.sampler.pick_nodes(target.logits(hidden[:, nodes]), proposed.tree, mask, nodes)
        for nodes in proposed.runner.node_slices(proposed.slots.batch)
    ]
    return SampledTokens(*(torch.cat(values, 1) for values in zip(*parts, strict=True)))


def prefill(
    runner: ModelRunner,
    index: Tensor,
    length: Tensor,
    width: int,
    needs: SamplingNeeds,
    pieces: Pieces | None = None,
    prompt_rows: PromptRows | None = None,
    mask: Tensor | None = None,
    marks: Marks | None = None,
) -> RoundOutput:
    """Enter `length` [B] known tokens of each slot of `index` [B], from the root on, in pieces of `width` rows.

    pieces: None where each request has one.  Where a request's known tokens end, its next token is sampled and emitted.
    mask: [B, 1, ceil(V / 32)] int32, as in `settle`, for the token after the last.  marks: by request.
    """
    slots = gather(runner.table, index)
    rows = PieceRows.of(slots, length, width, pieces)
    if marks is not None and pieces is not None:
        marks = Marks(*(values[pieces.request] for values in marks))
    runner.layout.require_chunk(rows.slots.batch, width)
    positions, tokens, page_rows = chain(rows.slots, 0, rows.length, width)
    exists = torch.arange(width, device=tokens.device) < rows.length[:, None]
    last = rows.last_tokens
    reads_all = prompt_rows is not None or runner.reads_all_hidden
    p = runner.cache.begin(
        Prefix(rows.slots.page_table, rows.slots.prefix_len),
        Nodes.chain(positions),
        void_padding(runner, tokens, exists),
        page_rows=page_rows.flatten(),
        by_layer=pieces is not None,
        needed=None if reads_all else last.row,
        access=StateAccess(rows.slots.index, rows.slots.prefix_len, rows.length, marks, pieces is not None),
    )
    out = runner.target(p)
    p.commit()
    logprobs = None
    if prompt_rows is not None:
        logprobs = logprobs_of_prompt(runner, rows.slots, positions, out.hidden, prompt_rows)
    hidden = gather_rows(last.row[:, None], out.hidden) if reads_all else out.hidden
    logits = runner.target.logits(last.of_requests(hidden))
    sampled = runner.sampler(slots, needs, slots.prefix_len + length, 1).pick_last(logits, mask)
    num_emitted, _ = advance(slots, length, sampled.tokens, needs.penalised)
    if runner.layout.extends:
        runner.drafter.extend(rows.slots, draft_features(runner.drafter, out), rows.length, last)
    path = Path(torch.zeros_like(sampled.tokens), num_emitted, sampled.tokens, num_emitted * sampled.finite[:, 0])
    return RoundOutput(path, logits, slots.num_logprobs, path.rows, prompt_logprobs=logprobs)


def void_padding(runner: ModelRunner, tokens: Tensor, exists: Tensor) -> Tensor:
    """The tokens [B, Q] that the target runs.  exists: [B, Q] or [B, 1] bool, False for padding.

    For a target with experts, padding gets token -1, so that it reads no weights of experts.
    """
    if runner.target.config.experts is None:
        return tokens
    return torch.where(exists, tokens, -1)


def logprobs_of_prompt(
    runner: ModelRunner, slots: BatchState, positions: Tensor, hidden: Tensor, rows: PromptRows
) -> Logprobs:
    """Log-probabilities of the prompt tokens that follow `rows`.  The last may be the first token of the next chunk."""
    following = rows.of(slots.history_at(positions + 1))
    max_rows = logit_rows(runner.target.config.vocab_size)
    return prompt_logprobs(runner.target.logits, rows.of(hidden), following, max_rows, rows.count)


def num_offered(tree: Tree, max_accept_depth: Tensor) -> int:
    """Nodes of the largest tree, without those at the end that are void or too deep to be accepted."""
    is_offered = ((tree.tokens != VOID) & (tree.depths <= max_accept_depth[:, None])).any(0)
    is_offered[0] = True
    return 1 + int(is_offered.nonzero()[-1])


def check_tree(layout: RoundLayout, tree: Tree, batch: int) -> None:
    """Check that a drafter's tree fits the buffers of the layout.  Raises EspalierError."""
    for name in ("tokens", "parents", "depths", "scores"):
        layout.require(f"tree.{name}", getattr(tree, name), batch, layout.num_draft_tokens)
    layout.require("tree.ancestors", tree.ancestors, batch, layout.num_draft_tokens, layout.ancestor_words)


def commit(runner: ModelRunner, slots: BatchState, path: Path, count_tokens: bool, marks: Marks | None = None) -> None:
    """Append the path's tokens to the slots and copy its K/V to positions prefix_len .. prefix_len + length - 1.

    The last token of the path is the new root.  States go on over the path, and leave snapshots at `marks`.
    """
    nodes = NodeRows(path.rows, runner.layout.num_draft_tokens)
    copies = advance(slots, path.length, path.tokens, count_tokens, nodes).copies
    assert copies is not None
    access = StateAccess(slots.index, slots.prefix_len, path.length, marks)
    runner.cache.commit(copies.source.flatten(), copies.destination.flatten(), access)


def draft_features(drafter: Drafter, out: ModelOutput) -> Tensor | None:
    """[B, Q, F]: the field of the target's output that the draft reads (`DraftSpec.reads`); None if it reads none."""
    return None if drafter.spec.reads is None else getattr(out, drafter.spec.reads)


def rows_of_path(drafter: Drafter, out: ModelOutput, path: Path) -> Tensor | None:
    """[B, W, F]: `draft_features` at the nodes of the accepted path.  Features of other nodes are not concatenated."""
    if drafter.spec.reads is None:
        return None
    return gather_rows(path.rows, *(out.inputs if drafter.spec.reads == "captured" else (out.hidden,)))
