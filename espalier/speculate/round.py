"""One round of speculative decoding for a batch, in three stages: propose, verify, settle.

`propose` drafts a tree under each root.  `verify` runs the target over the trees.  `settle` samples the target's token
at every node, accepts the longest matching path, commits its K/V and extends the draft.  A round runs as one CUDA
graph, or as a graph a stage where the host must mask tokens by the trees that were proposed.  The same lines run
eagerly and under capture: shapes are static, and only the slot table and the pages carry data from one launch to the
next.  A prefill pass is the same with a chain of known tokens.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from espalier.attention import Attention, CommittedLengths, GroupedBackend, Nodes, Prefix
from espalier.attention.staged import StagedPass
from espalier.cache.kv import PagedKV, StagedKV
from espalier.kernels.state.advance import NodeRows, advance
from espalier.kernels.state.batch_state import chain, gather
from espalier.kernels.tree.gather_rows import gather_rows
from espalier.layout import RoundLayout, logit_rows
from espalier.models.base import CausalLM, ModelOutput
from espalier.sampling.logit_processors import SamplingNeeds
from espalier.sampling.pick import Logprobs
from espalier.sampling.prompt import PromptRows, prompt_logprobs
from espalier.slots import BatchState, SlotTable
from espalier.speculate.accept import Path, accept
from espalier.speculate.drafters.base import Drafter
from espalier.speculate.sampler import Sampler
from espalier.speculate.tree import Tree


@dataclass(frozen=True)
class ModelRunner:
    """What every launch runs on: the layout and the buffers that follow from it, the models, the target's backends.

    coupled_scores: whether the draft scores children with the noise that the target will draw with.  Without it fewer
    sampled tokens are accepted; False exists to measure how many.
    """

    layout: RoundLayout
    table: SlotTable
    pages: PagedKV
    staging: StagedKV
    target: CausalLM
    drafter: Drafter
    backend: GroupedBackend
    coupled_scores: bool = True

    def at(self, batch: int) -> "ModelRunner":
        """The round of so many requests: all but the tree's sizes is shared.  Raises EspalierError for too many."""
        self.layout.require_batch(batch)
        layout = self.layout.at(batch)
        return self if layout is self.layout else replace(self, layout=layout, drafter=self.drafter.sized(layout))

    def prepare(self, lengths: CommittedLengths) -> None:
        """Before a launch, on the host: what is known of the target's committed rows; the draft has one more."""
        self.backend.prepare(lengths)
        self.drafter.prepare(CommittedLengths(tuple(length + 1 for length in lengths.at_most), lengths.exact))

    def plan(self, slots: BatchState, nodes: Nodes) -> Attention:
        """Attention of the target over what each slot has committed, and over its nodes."""
        prefix = Prefix(slots.page_table, slots.prefix_len)
        return self.backend.plan(self.pages, self.target.geometry, prefix, nodes)

    def sampler(self, slots: BatchState, needs: SamplingNeeds, first: Tensor, width: int) -> Sampler:
        """Sampling of the tokens at positions first .. first + width - 1, first [B]."""
        dtype = torch.promote_types(self.pages.dtype, torch.float32)
        sampler = Sampler.of(slots, needs, first, width, self.target.config.vocab_size, dtype)
        return sampler if self.coupled_scores else replace(sampler, coupled=False)


@dataclass(frozen=True)
class RoundOutput:
    """What a launch gives back.

    tokens [B, W], length [B] emitted; num_finite [B]: how many of them, from the first, were picked from finite logits;
    logits [B, D, V] and rows [B, W], the row of the logits that each token was picked from; num_logprobs [B], as in
    BatchState; tree and path of a round; prompt_logprobs of the rows of a prefill pass, [N], where they were asked for.
    """

    tokens: Tensor
    length: Tensor
    num_finite: Tensor
    logits: Tensor
    rows: Tensor
    num_logprobs: Tensor
    tree: Tree | None = None
    path: Path | None = None
    prompt_logprobs: Logprobs | None = None


@dataclass(frozen=True)
class Proposed:
    """A round after its first stage: the runner of this batch, the batch, its sampler, and a tree under each root."""

    runner: ModelRunner
    slots: BatchState
    sampler: Sampler
    tree: Tree


@dataclass(frozen=True)
class Verified:
    """A round after its second stage: the target's output and logits [B, D, V] at every node."""

    proposed: Proposed
    out: ModelOutput
    logits: Tensor


def run(r: ModelRunner, index: Tensor, needs: SamplingNeeds) -> RoundOutput:
    """A whole round of the slots `index` [B]."""
    return settle(verify(propose(r, index, needs)))


def propose(r: ModelRunner, index: Tensor, needs: SamplingNeeds) -> Proposed:
    """First stage: draft a tree for each of the slots `index` [B]."""
    r = r.at(index.shape[0])
    slots = gather(r.table, index)
    sampler = r.sampler(slots, needs, slots.num_tokens, r.layout.extend_width)
    tree = r.drafter.propose(slots, sampler)
    check_tree(r.layout, tree, slots.batch)
    return Proposed(r, slots, sampler, tree)


def verify(proposed: Proposed) -> Verified:
    """Second stage: one pass of the target over the trees; the nodes' K/V go to staging."""
    r, slots, tree = proposed.runner, proposed.slots, proposed.tree
    positions = tree.positions(slots.prefix_len)
    plan = r.plan(slots, Nodes(positions, positions, tree.ancestors))
    # A void node runs as the root, so that nothing runs but what the request holds or the draft proposed.
    out = r.target(tree.tokens, positions, StagedPass(plan, r.staging, r.layout.num_draft_tokens))
    return Verified(proposed, out, r.target.logits(out.hidden))


def settle(verified: Verified, mask: Tensor | None = None) -> RoundOutput:
    """Last stage: sample, accept, commit, extend.

    mask: [B, D, ceil(V / 32)] int32, a bit for each token that may follow each node (sampling/mask.py); None allows
    all.
    """
    proposed, out = verified.proposed, verified.out
    r, slots, tree = proposed.runner, proposed.slots, proposed.tree
    picked = proposed.sampler.pick_nodes(verified.logits, tree, mask)
    path = accept(tree, picked, slots.max_accept_depth, slots.real, r.layout.steps)
    commit(r, slots, path, proposed.sampler.needs.penalised)
    r.drafter.extend(slots, features(read_by(r.drafter, out), path.rows), path.length)
    emitted = (path.tokens, path.length, path.num_finite)
    return RoundOutput(*emitted, verified.logits, path.rows, slots.num_logprobs, tree, path)


def prefill(
    r: ModelRunner,
    index: Tensor,
    length: Tensor,
    width: int,
    needs: SamplingNeeds,
    prompt_rows: PromptRows | None = None,
    mask: Tensor | None = None,
) -> RoundOutput:
    """Enter `length` [B] known tokens of each slot, from its root on, as a chain of uniform width.

    mask: [B, 1, ceil(V / 32)] int32 of the token after the last, as `settle` has it.
    """
    r.layout.require_chunk(index.shape[0], width)
    slots = gather(r.table, index)
    positions, tokens, rows = chain(slots, 0, length, width)
    attend = StagedPass(r.plan(slots, Nodes.chain(positions)), r.staging, width)
    out = r.target(tokens, positions, attend)
    r.pages.commit(r.staging, attend.rows, rows.flatten())
    of_prompt = None if prompt_rows is None else read_prompt(r, slots, positions, out.hidden, prompt_rows)
    logits = r.target.logits(gather_rows(out.hidden, (length - 1).clamp(min=0)[:, None]))
    picked = r.sampler(slots, needs, slots.prefix_len + length, 1).pick_last(logits, mask)
    num_picked, _ = advance(slots, length, picked.tokens, needs.penalised)
    r.drafter.extend(slots, read_by(r.drafter, out), length)
    emitted = (picked.tokens, num_picked, num_picked * picked.finite[:, 0])
    return RoundOutput(*emitted, logits, torch.zeros_like(picked.tokens), slots.num_logprobs, prompt_logprobs=of_prompt)


def read_prompt(r: ModelRunner, slots: BatchState, positions: Tensor, hidden: Tensor, asked: PromptRows) -> Logprobs:
    """Log-probabilities of the known tokens that follow the rows asked for, the next chunk's first token included."""
    following = asked.of(slots.history_at(positions + 1))
    most = logit_rows(r.target.config.vocab_size)
    return prompt_logprobs(r.target.logits, asked.of(hidden), following, most, asked.count)


def check_tree(layout: RoundLayout, tree: Tree, batch: int) -> None:
    """What a drafter hands over fits the buffers that follow from the layout."""
    for name in ("tokens", "parents", "depths", "scores"):
        layout.require(f"tree.{name}", getattr(tree, name), batch, layout.num_draft_tokens)
    layout.require("tree.ancestors", tree.ancestors, batch, layout.num_draft_tokens, layout.ancestor_words)


def commit(r: ModelRunner, slots: BatchState, path: Path, count_tokens: bool) -> None:
    """The path's rows go to positions n .. n + length - 1, in order, and the slots move on to the new root."""
    nodes = NodeRows(path.rows, r.layout.num_draft_tokens)
    copies = advance(slots, path.length, path.tokens, count_tokens, nodes).copies
    assert copies is not None
    r.pages.commit(r.staging, copies.source.flatten(), copies.destination.flatten())


def read_by(drafter: Drafter, out: ModelOutput) -> Tensor | None:
    """[B, Q, F]: what the draft declares to read of the target."""
    return None if drafter.spec.reads is None else getattr(out, drafter.spec.reads)


def features(read: Tensor | None, rows: Tensor) -> Tensor | None:
    """What is read at nodes `rows` [B, W]."""
    return None if read is None else gather_rows(read, rows)
