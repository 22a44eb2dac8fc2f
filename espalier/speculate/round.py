"""One round of speculative decoding for a batch, in four stages: begin, propose, verify, settle.

On a GPU, a round is one CUDA graph.  If the host computes token masks from the proposed trees, each stage has graphs of
its own.  Eager launches run the code that is captured.  Captured shapes are static.  Only the slot table, the pages and
the recurrent states keep data from one launch to the next.
`prefill` does the same work for a chain of known tokens instead of a tree.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from espalier.attention import ChosenRows, CommittedLengths, ModelCache, Nodes, Prefix
from espalier.cache.kv import PagedKV
from espalier.cache.states import SnapshotTargets, StateAccess
from espalier.kernels.ops.state import AcceptedNodes, advance, gather_slots, read_chain
from espalier.kernels.ops.tree import AcceptedPath, accept, gather_rows
from espalier.layout import LaunchForm, RoundLayout, TreeShape
from espalier.models.base import CausalLM, ModelOutput
from espalier.sampling.logit_processors import SamplingFeatures
from espalier.sampling.mask import DraftGuide
from espalier.sampling.pick import Logprobs, SampledTokens
from espalier.sampling.prompt import PromptRows, prompt_logprobs
from espalier.slots import BatchState, ScatterUpdate, SlotTable
from espalier.speculate.drafters.base import Drafter, GrowTree
from espalier.speculate.logit_slices import max_logit_rows, node_slices
from espalier.speculate.pieces import PieceRows, Pieces
from espalier.speculate.sampler import Sampler, make_sampler
from espalier.speculate.tree import VOID, Tree


@dataclass(frozen=True)
class ModelRunner:
    """Everything that a launch runs on: layout, slot table, target, drafter.

    cache: the KV cache and recurrent states of the target's layers.
    shares_noise: whether the draft scores tokens with the random noise that the target samples with, so that more
    sampled tokens are accepted; False only for measurements.
    trims_trees: whether the last nodes of the trees are left out of the verify pass if no tree of the batch uses them.
    Then the host waits for the trees, and shapes differ from round to round, so no CUDA graph is possible.
    """

    layout: RoundLayout
    table: SlotTable
    cache: ModelCache
    target: CausalLM
    drafter: Drafter
    shares_noise: bool = True
    trims_trees: bool = False

    def for_batch(self, batch: int) -> "ModelRunner":
        """Returns the runner for rounds of `batch` requests, with the tree of this batch size (RoundLayout.for_batch).

        The returned runner has the same models and buffers.

        Raises EspalierError if batch is above max_batch."""
        self.layout.require_batch(batch)
        return self._for_layout(self.layout.for_batch(batch))

    @property
    def pages(self) -> PagedKV:
        return self.cache.pages

    @property
    def captured_passes(self) -> tuple[LaunchForm, ...]:
        """The forms of prefill passes that can be CUDA graphs.

        If layers keep recurrent states, passes of about chunk_size rows are captured too.  Such layers have so many
        kernels that a host would launch the kernels of a pass more slowly than a GPU runs them."""
        if not (self.cache.backend.captures_prefill and self.drafter.captures_prefill):
            return ()
        full = () if self.cache.states is None else self.layout.captured_full_passes
        return self.layout.captured_passes + full

    def for_tree(self, tree: TreeShape | None) -> "ModelRunner":
        """Returns a runner for rounds with this tree at every batch size; this runner if `tree` is None.  Both share
        models and buffers."""
        return self if tree is None else self._for_layout(self.layout.with_tree(tree))

    def _for_layout(self, layout: RoundLayout) -> "ModelRunner":
        return self if layout is self.layout else replace(self, layout=layout, drafter=self.drafter.for_layout(layout))

    def prepare(self, lengths: CommittedLengths) -> None:
        """Prepares the attention backends of target and draft.  Called on the host before each launch.

        lengths: for each request, how many of the target's rows are committed."""
        self.cache.backend.prepare(lengths)
        self.drafter.prepare(lengths.with_more_rows(self.drafter.spec.num_root_rows))

    @property
    def reads_all_hidden(self) -> bool:
        """Whether the draft reads the output of the target's last layer, normed or not, at every token of a prompt."""
        return (
            self.drafter.spec.target_output == "hidden" or self.target.config.num_layers in self.target.captured_layers
        )

    def shared_rows(self, batch: int) -> int:
        """Returns how many rows of a verify pass the batch shares; 0 if each request has a fixed number of rows."""
        shared = self.layout.shared_rows
        return batch * shared if batch and shared < self.layout.num_draft_tokens else 0

    def node_slices(self, batch: int) -> list[slice]:
        """Returns slices of each tree's nodes.  The logits of one slice are computed at a time.  Call this on the
        runner for this batch (`for_batch`)."""
        return node_slices(batch, self.layout.num_draft_tokens, self.target.config.vocab_size)

    def sampler(
        self, slots: BatchState, sampling_features: SamplingFeatures, first_position: Tensor, width: int
    ) -> Sampler:
        """Returns the sampler for the tokens at `width` positions from `first_position` [B] on."""
        dtype = torch.promote_types(self.pages.dtype, torch.float32)
        return make_sampler(
            slots, sampling_features, first_position, width, self.target.config.vocab_size, dtype, self.shares_noise
        )


@dataclass(frozen=True)
class RoundOutput:
    """The output of a launch.  W is 1 for a prefill pass, and S + 1 for a round.

    path: the accepted nodes and the emitted tokens.  num_logprobs: [B], how many likeliest tokens to report beside each
    emitted token; -1 to report no log-probabilities.
    logits: [B, R, V], for R rows of each request.  logit_rows: [B, W], the row in [0, R) from whose logits each emitted
    token was picked.
    tree: the tree of a round; None for a prefill pass.
    prompt_logprobs: [N], for the prompt rows whose log-probabilities are wanted; None without such rows.
    own_text_paths: [B, P · (1 + S)], kind and tokens of the P paths that the device found in the request's own text.
    candidates: [B, D], all drafted nodes, also those that got none of the batch's shared rows, packed by `pack_nodes`.
    Both are None unless scores are calibrated (speculate/sources/calibrate.py)."""

    path: AcceptedPath
    logits: Tensor
    num_logprobs: Tensor
    logit_rows: Tensor
    tree: Tree | None = None
    prompt_logprobs: Logprobs | None = None
    own_text_paths: Tensor | None = None
    candidates: Tensor | None = None


@dataclass(frozen=True)
class RoundStage:
    """The data that all stages of a round have.

    runner: the runner for this batch size.  After the propose stage, its layout has the size of the proposed trees.
    slots: the slot-table rows of the batch.  snapshots: the copies of recurrent states that `commit` makes."""

    runner: ModelRunner
    slots: BatchState
    sampler: Sampler
    snapshots: SnapshotTargets | None


@dataclass(frozen=True)
class BegunRound(RoundStage):
    """The state after the begin stage.  grow_tree: the function that proposes the tree."""

    grow_tree: GrowTree


@dataclass(frozen=True)
class ProposedRound(RoundStage):
    """The state after the propose stage.  tree: the trees of all slots."""

    tree: Tree


@dataclass(frozen=True)
class VerifiedRound:
    """The state after the verify stage.

    target_output: the target's output.  logits: [B, D, V], at every node; None if these would take too much memory, in
    which case `sample_nodes` computes them slice by slice."""

    proposed: ProposedRound
    target_output: ModelOutput
    logits: Tensor | None


def decode_round(
    runner: ModelRunner,
    slot_ids: Tensor,
    sampling_features: SamplingFeatures,
    appended_pages: ScatterUpdate | None = None,
    snapshots: SnapshotTargets | None = None,
) -> RoundOutput:
    """Runs a whole round.

    slot_ids: [B] int64, the slots of the batch.  appended_pages: new entries of the page table.  snapshots: for each
    request, the copy of its recurrent state that `commit` makes."""
    return settle(verify(propose(begin(runner, slot_ids, sampling_features, appended_pages, snapshots))))


def begin(
    runner: ModelRunner,
    slot_ids: Tensor,
    sampling_features: SamplingFeatures,
    appended_pages: ScatterUpdate | None = None,
    snapshots: SnapshotTargets | None = None,
) -> BegunRound:
    """Runs the first stage: computes the draft's first logits for each request.  Arguments: see `decode_round`."""
    runner = runner.for_batch(slot_ids.shape[0])
    drafter = runner.drafter
    slots = gather_slots(runner.table, slot_ids, appended_pages)
    sampler = runner.sampler(slots, sampling_features, slots.num_tokens, runner.layout.extend_width)
    is_plain = runner.layout.num_draft_tokens == 1
    grow_tree = (lambda sampler: drafter.root_trees(slots.root)) if is_plain else drafter.begin(slots)
    return BegunRound(runner, slots, sampler, snapshots, grow_tree)


def propose(begun: BegunRound, guide: DraftGuide | None = None) -> ProposedRound:
    """Runs the second stage: drafts a tree for each slot.  guide: the forced and the allowed next tokens of grammars;
    None without grammars."""
    sampler = replace(begun.sampler, guide=guide)
    tree = begun.grow_tree(sampler)
    check_tree(begun.runner.layout, tree, begun.slots.batch)
    runner = begun.runner
    if runner.shared_rows(begun.slots.batch):
        # Nodes that are too deep to be accepted are dropped first, so that they take no shared row from other nodes.
        tree = tree.limit_depth(begun.slots.max_accept_depth)
        tree = tree.keep_nodes(tree.best_nodes(runner.shared_rows(begun.slots.batch)))
    if runner.trims_trees:
        nodes = num_nodes_to_run(tree, begun.slots.max_accept_depth)
        if nodes < runner.layout.num_draft_tokens:
            # Only the later stages use the smaller trees.  The drafter keeps the original layout.
            layout = runner.layout.with_tree(replace(runner.layout.tree, num_draft_tokens=nodes))
            runner, tree = replace(runner, layout=layout), tree.first_nodes(nodes)
    return ProposedRound(runner, begun.slots, sampler, begun.snapshots, tree)


def verify(proposed: ProposedRound) -> VerifiedRound:
    """Runs the third stage: runs the target over all nodes in one pass.  The nodes' K/V go to the staging buffers."""
    runner, slots, tree = proposed.runner, proposed.slots, proposed.tree
    positions = tree.positions(slots.prefix_len)
    nodes = Nodes(positions, positions, tree.ancestors, tree.parents)
    # A void node has token -1.  For such a node, the model reads the embedding of the request's root.
    tokens = void_padding(runner, tree.tokens, slots.is_real[:, None])
    access = StateAccess(slots.index, slots.prefix_len)
    chosen, prefix = chosen_rows(proposed), Prefix(slots.page_table, slots.prefix_len)
    out = runner.target(runner.cache.begin_pass(prefix, nodes, tokens, state_access=access, chosen_rows=chosen))
    logits = runner.target.logits(out.hidden) if len(runner.node_slices(slots.batch)) == 1 else None
    if chosen is not None:
        out = ModelOutput(chosen.to_tree_rows(out.hidden), tuple(map(chosen.to_tree_rows, out.captured_inputs)))
        logits = None if logits is None else chosen.to_tree_rows(logits)
    return VerifiedRound(proposed, out, logits)


def chosen_rows(proposed: ProposedRound) -> ChosenRows | None:
    """Returns the nodes of the whole batch that get a row of the verify pass; None if requests share no rows."""
    batch, nodes = proposed.tree.tokens.shape
    rows = min(proposed.runner.shared_rows(batch), batch * nodes)
    if rows and proposed.runner.trims_trees:
        rows = min(rows, int((proposed.tree.scores > -torch.inf).sum()))
    return ChosenRows.from_pass_rows(proposed.tree.best_nodes(rows), batch, nodes) if rows else None


def settle(verified: VerifiedRound, mask: Tensor | None = None) -> RoundOutput:
    """Runs the last stage: samples the target's tokens, accepts and commits a path, and runs the draft over its tokens.

    mask: [B, D, ceil(V / 32)] int32, with a bit for each token that says whether the token may follow the node
    (sampling/mask.py).  None allows all tokens."""
    proposed, out = verified.proposed, verified.target_output
    runner, slots, tree = proposed.runner, proposed.slots, proposed.tree
    sampled = sample_nodes(verified, mask)
    path = accept(tree, *sampled, slots.max_accept_depth, slots.is_real, runner.layout.steps)
    commit(runner, slots, path, proposed.sampler.sampling_features.penalised, proposed.snapshots)
    if runner.layout.extends:
        runner.drafter.extend(slots, path_features(runner.drafter, out, path), path.length)
    source_outputs: dict[str, Any] = {}
    if runner.table.layout.calibrates_scores and runner.layout.num_draft_tokens > 1:
        table_fields = {"own_text_paths": slots.table.own_text_paths, "candidates": slots.table.candidates}
        source_outputs = {
            name: field.index_select(0, slots.index).flatten(1)
            for name, field in table_fields.items()
            if field.shape[1]
        }
    if verified.logits is not None:
        return RoundOutput(path, verified.logits, slots.num_logprobs, path.rows, tree, **source_outputs)
    logits = runner.target.logits(gather_rows(path.rows, out.hidden))
    logit_rows = torch.arange(path.rows.shape[1], device=path.rows.device).repeat(slots.batch, 1)
    return RoundOutput(path, logits, slots.num_logprobs, logit_rows, tree, **source_outputs)


def sample_nodes(verified: VerifiedRound, mask: Tensor | None) -> SampledTokens:
    """Samples the target's token at every node.  Without `verified.logits`, computes them in slices."""
    proposed = verified.proposed
    if verified.logits is not None:
        return proposed.sampler.sample_at_nodes(verified.logits, proposed.tree, mask)
    target, hidden = proposed.runner.target, verified.target_output.hidden
    samples_of_slices = [
        proposed.sampler.sample_at_nodes(target.logits(hidden[:, nodes]), proposed.tree, mask, nodes)
        for nodes in proposed.runner.node_slices(proposed.slots.batch)
    ]
    return SampledTokens(*(torch.cat(values, 1) for values in zip(*samples_of_slices, strict=True)))


def prefill(
    runner: ModelRunner,
    slot_ids: Tensor,
    length: Tensor,
    width: int,
    sampling_features: SamplingFeatures,
    pieces: Pieces | None = None,
    prompt_rows: PromptRows | None = None,
    mask: Tensor | None = None,
    snapshots: SnapshotTargets | None = None,
) -> RoundOutput:
    """Runs target and draft over the next `length` [B] known tokens of each slot in `slot_ids` [B].

    The tokens are divided into pieces of `width` rows, and the first token is the slot's root.  If a request's known
    tokens end in this pass, its next token is sampled and emitted.
    pieces: None if each request has one piece.  mask: [B, 1, ceil(V / 32)] int32, with a bit for each token that says
    whether it may be sampled; None if all may be.
    prompt_rows: the rows whose log-probabilities are wanted.  snapshots: as in `decode_round`."""
    slots = gather_slots(runner.table, slot_ids)
    rows = PieceRows.of_pass(slots, length, width, pieces)
    if snapshots is not None and pieces is not None:
        snapshots = SnapshotTargets(*(values[pieces.request_row] for values in snapshots))
    runner.layout.require_chunk(rows.slots.batch, width)
    positions, tokens, page_rows = read_chain(rows.slots, 0, rows.length, width)
    exists = torch.arange(width, device=tokens.device) < rows.length[:, None]
    last = rows.last_tokens
    reads_all = prompt_rows is not None or runner.reads_all_hidden
    p = runner.cache.begin_pass(
        Prefix(rows.slots.page_table, rows.slots.prefix_len),
        Nodes.chain(positions),
        void_padding(runner, tokens, exists),
        page_rows=page_rows.flatten(),
        commits_by_layer=pieces is not None,
        needed_row=None if reads_all else last.row,
        state_access=StateAccess(rows.slots.index, rows.slots.prefix_len, rows.length, snapshots, pieces is not None),
    )
    out = runner.target(p)
    p.commit()
    logprobs = None
    if prompt_rows is not None:
        logprobs = compute_prompt_logprobs(runner, rows.slots, positions, out.hidden, prompt_rows)
    hidden = gather_rows(last.row[:, None], out.hidden) if reads_all else out.hidden
    logits = runner.target.logits(last.of_last_pieces(hidden))
    sampled = runner.sampler(slots, sampling_features, slots.prefix_len + length, 1).sample_last(logits, mask)
    num_emitted, _ = advance(slots, length, sampled.tokens, sampling_features.penalised)
    if runner.layout.extends:
        runner.drafter.extend(rows.slots, draft_features(runner.drafter, out), rows.length, last)
    path = AcceptedPath(
        torch.zeros_like(sampled.tokens), num_emitted, sampled.tokens, num_emitted * sampled.finite[:, 0]
    )
    return RoundOutput(path, logits, slots.num_logprobs, path.rows, prompt_logprobs=logprobs)


def void_padding(runner: ModelRunner, tokens: Tensor, exists: Tensor) -> Tensor:
    """Returns the tokens [B, Q] that the target runs.  exists: [B, Q] or [B, 1] bool, False for padding.

    For a target with experts, padding gets token -1, so that padding reads no expert's weights."""
    if runner.target.config.experts is None:
        return tokens
    return torch.where(exists, tokens, -1)


def compute_prompt_logprobs(
    runner: ModelRunner, slots: BatchState, positions: Tensor, hidden: Tensor, rows: PromptRows
) -> Logprobs:
    """Returns the log-probabilities of the prompt tokens that follow `rows`.

    positions, hidden: [P, W] and [P, W, H], the positions and hidden states of a prefill pass of P pieces with W rows
    each.  The last of these prompt tokens may be the first token of the next pass."""
    following = rows.select(slots.history_at(positions + 1))
    max_rows = max_logit_rows(runner.target.config.vocab_size)
    return prompt_logprobs(runner.target.logits, rows.select(hidden), following, max_rows, rows.max_top_logprobs)


def num_nodes_to_run(tree: Tree, max_accept_depth: Tensor) -> int:
    """Returns n: the verify pass must run the first n nodes of each tree.  In every tree of the batch, the later nodes
    are void, or too deep to be accepted."""
    is_offered = ((tree.tokens != VOID) & (tree.depths <= max_accept_depth[:, None])).any(0)
    is_offered[0] = True
    return 1 + int(is_offered.nonzero()[-1])


def check_tree(layout: RoundLayout, tree: Tree, batch: int) -> None:
    """Checks that a drafter's tree fits the buffers of the layout.  Raises EspalierError."""
    for name in ("tokens", "parents", "depths", "scores"):
        layout.require_shape(f"tree.{name}", getattr(tree, name), batch, layout.num_draft_tokens)
    layout.require_shape("tree.ancestors", tree.ancestors, batch, layout.num_draft_tokens, layout.ancestor_words)


def commit(
    runner: ModelRunner,
    slots: BatchState,
    path: AcceptedPath,
    count_tokens: bool,
    snapshots: SnapshotTargets | None = None,
) -> None:
    """Appends the path's tokens to the slots, and copies the K/V of the path's nodes from staging to the pages, at
    positions prefix_len .. prefix_len + length - 1.

    The last token of the path becomes the root of the next tree.  Recurrent states are advanced over the path, and
    copied as `snapshots` says.  count_tokens: whether the slots count the tokens, for penalties."""
    nodes = AcceptedNodes(path.rows, runner.layout.num_draft_tokens)
    copies = advance(slots, path.length, path.tokens, count_tokens, nodes).copies
    assert copies is not None
    access = StateAccess(slots.index, slots.prefix_len, path.length, snapshots)
    runner.cache.commit(copies.source.flatten(), copies.destination.flatten(), access)


def draft_features(drafter: Drafter, out: ModelOutput) -> Tensor | None:
    """Returns [B, Q, F]: the field of the target's output that the draft reads (`DraftSpec.target_output`); None if
    the draft reads no field."""
    return None if drafter.spec.target_output is None else getattr(out, drafter.spec.target_output)


def path_features(drafter: Drafter, out: ModelOutput, path: AcceptedPath) -> Tensor | None:
    """Returns [B, W, F]: `draft_features` at the nodes of the accepted path.

    The inputs of several layers are concatenated only for the path's nodes, not for the whole tree."""
    if drafter.spec.target_output is None:
        return None
    return gather_rows(path.rows, *(out.captured_inputs if drafter.spec.target_output == "captured" else (out.hidden,)))
