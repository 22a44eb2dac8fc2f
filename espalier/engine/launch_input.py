"""What the host sends to start a launch (a prefill pass or a round), and the results that it reads back.

Inputs and results are plain values, so they can be sent to another process."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from espalier.attention import CommittedLengths
from espalier.engine.prefill_policy import PrefillPass
from espalier.layout import LaunchForm, TreeShape, captured_form
from espalier.request import Request
from espalier.sampling.logit_processors import SamplingFeatures
from espalier.sampling.prompt import PromptRows
from espalier.slots import Guess, SlotInit

# Kernels read all sampling parameters on the device, so one graph serves all requests.
ALL_SAMPLING_FEATURES = SamplingFeatures(sampled=True, filtered=True, penalised=True, biased=True)
NOTHING_COMMITTED = CommittedLengths((), exact=True)
# The error of a request whose RequestResult is not finite.
NOT_FINITE_ERROR = (
    "the target's logits are not finite (NaN) for this request or for a token drafted for it; its tokens so far are "
    "valid and other requests continue: check the checkpoint, or use a wider dtype"
)


@dataclass(frozen=True)
class LaunchInput:
    """The input of one launch: a prefill pass or a round.

    slots: the slots of the batch, in order.  Below, "by slot" means in this order.
    sampling_features: which parts of sampling (such as penalties) the batch needs.
    num_logprobs: by slot, how many of the likeliest tokens are reported beside each emitted token; None for a request
    that wants no log-probabilities; empty for dummies.
    appended_pages: (slot, column of the page table, page), for requests that already have their slot.
    cleared_pages: free pages of requests whose logits were not finite.  These pages are set to zero before the launch.
    state_copies: (source row, destination row) in the table of recurrent states, copied in order before the launch.
    snapshots: by slot, the copy that the launch makes of the request's recurrent state: (the number of tokens after
    which the state is copied, the table row that gets the copy); row 0 for no copy; empty if the launch makes none.
    committed_lengths: upper bounds of the number of committed rows, by slot for a round, by piece for a prefill pass;
    empty for dummy slots.
    tree: the tree of a round; None for the layout's tree.  A prefill pass of requests that never speculate has
    RoundLayout.tree_without_draft.

    Only for a prefill pass:
    lengths: by slot, the number of tokens to compute.  width: the rows of each piece; 0 for a round.
    pieces: for each piece (speculate/pieces.py), (row of the batch, offset of the piece's first token in the request's
    tokens of this pass); empty if each slot has one piece.
    slot_inits: requests that get a slot.  A round has none, because the launch input of a round has a fixed size.
    prompt_rows: the rows whose log-probabilities are wanted; None if none are wanted.
    masks: [B, 1, words] int32, the tokens that may be picked; None if all may be picked.

    Only for a round:
    is_staged: whether the round runs in stages, because one of its requests has a grammar.
    reports_trees: whether results contain the trees.
    guesses: (slot, guesses of the host's sources for this slot).
    survival: [NODE_KINDS, S] float32, by kind and depth: the log-probability that a node is right if its parent is
    right; None if the device already has the same values.  draft_skill: by slot, added to this log-probability for the
    draft's nodes.  Both are missing unless scores are calibrated (speculate/sources/calibrate.py)."""

    slots: tuple[int, ...]
    sampling_features: SamplingFeatures
    num_logprobs: tuple[int | None, ...] = ()
    lengths: tuple[int, ...] = ()
    width: int = 0
    pieces: tuple[tuple[int, int], ...] = ()
    slot_inits: tuple[SlotInit, ...] = ()
    appended_pages: tuple[tuple[int, int, int], ...] = ()
    cleared_pages: tuple[int, ...] = ()
    reports_trees: bool = False
    prompt_rows: PromptRows | None = None
    tree: TreeShape | None = None
    is_staged: bool = False
    masks: np.ndarray | None = None
    state_copies: tuple[tuple[int, int], ...] = ()
    snapshots: tuple[tuple[int, int], ...] = ()
    guesses: tuple[tuple[int, tuple[Guess, ...]], ...] = ()
    survival: np.ndarray | None = None
    draft_skill: tuple[float, ...] = ()
    committed_lengths: CommittedLengths = NOTHING_COMMITTED

    @property
    def is_prefill(self) -> bool:
        return self.width > 0

    @property
    def is_eager_only(self) -> bool:
        """Whether no CUDA graph can run the launch, because it is a prefill pass with masks or prompt rows."""
        return self.masks is not None or self.prompt_rows is not None

    def form(self, captured_forms: Sequence[LaunchForm] = ()) -> LaunchForm:
        """Returns the form of the launch; for a prefill pass, the first captured form that the pass fits into.

        captured_forms: the forms of prefill passes that are CUDA graphs.  A pass that fits none has its own form."""
        own = LaunchForm(len(self.slots), self.width, len(self.pieces), self.tree)
        if self.is_eager_only:
            return own
        return captured_form(captured_forms, self.width, own.pieces or own.batch) or own


@dataclass(frozen=True)
class Launch:
    """A launch and its requests.

    launched_requests: (request, the request's generation at the launch, whether its whole prefill was launched), in the
    order of LaunchInput.slots.
    guesses: all guesses of the host's sources.  LaunchInput.guesses may have only some of these guesses."""

    launch_input: LaunchInput
    launched_requests: list[tuple[Request, int, bool]]
    guesses: tuple[tuple[int, tuple[Guess, ...]], ...] = ()


@dataclass(frozen=True)
class DraftTree:
    """The tree of one request in one round.

    path_rows: the node indices of the accepted path, from the root down.  Other lists have an entry for each node."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    scores: list[float]
    path_rows: list[int]


@dataclass(frozen=True)
class RoundTrace:
    """One round of one request, passed to `Scheduler.on_round`.

    prefix_len: the number of rows committed before the round.  emitted: the emitted tokens.  pages: the request's
    pages, of page_size rows each, which hold the committed rows in order."""

    request_id: str
    tree: DraftTree
    prefix_len: int
    emitted: list[int]
    pages: list[int]
    page_size: int


@dataclass(frozen=True)
class TreeSize:
    """The size of a tree.  tokens_by_depth: the number of draft tokens at depths 1, 2, ..."""

    tokens_by_depth: tuple[int, ...] = ()

    @property
    def depth(self) -> int:
        """The depth of the deepest draft token."""
        return len(self.tokens_by_depth)

    def num_tokens_to_depth(self, depth: int) -> int:
        """Returns the number of draft tokens at depths 1 to `depth`."""
        return sum(self.tokens_by_depth[:depth])


@dataclass(frozen=True)
class RequestResult:
    """The result of a launch for one request.

    tokens: the emitted tokens; empty after a prefill pass that does not end the prompt.
    is_finite: False if the next token was dropped, because it was picked from logits that were not finite.
    tree: the tree, if LaunchInput.reports_trees.  tree_checksum: a number that almost surely differs if trees differ.
    logprobs: a packed row (espalier/logprobs.py) for each emitted token; None if the request wants none.
    prompt_logprobs: a packed row for each prompt token whose log-probability LaunchInput.prompt_rows asks for; None if
    the launch reports none for this request.
    sibling_ranks: for each accepted node its rank among its siblings, 0 for the most probable.  is_leaf: whether the
    last accepted node has no child.  They are () and True if LaunchInput.tree is None or has no steps.
    own_text_paths: (kind, tokens) of the paths that the device found in the request's prompt and output.
    candidates: [D] int64, all nodes of the request's tree, even those that got none of the batch's shared rows, packed
    by `pack_nodes`; None if no tree of the batch has such nodes.
    counts_by_source: [ALL_SOURCES, 3], for each source the number of verified nodes, the number of acceptances that
    the scores of these nodes predict, and the number of accepted nodes; None without candidates."""

    tokens: list[int]
    is_finite: bool
    tree_size: TreeSize = TreeSize()
    tree: DraftTree | None = None
    logprobs: np.ndarray | None = None
    prompt_logprobs: np.ndarray | None = None
    tree_checksum: int = field(default=0, compare=False)
    sibling_ranks: tuple[int, ...] = ()
    is_leaf: bool = True
    own_text_paths: tuple[tuple[int, tuple[int, ...]], ...] = ()
    candidates: np.ndarray | None = field(default=None, compare=False)
    counts_by_source: np.ndarray | None = field(default=None, compare=False)


def dummy_launch(batch: int, width: int = 0, pieces: int = 0, tree: TreeShape | None = None) -> LaunchInput:
    """Returns a launch of dummy slots in the form LaunchForm(batch, width, pieces, tree).  No request changes.

    The pieces are spread evenly over the dummy requests."""
    dummies = (0,) * batch
    spread = tuple((i * batch // pieces, 0) for i in range(pieces))
    lengths = dummies if width else ()
    return LaunchInput(dummies, ALL_SAMPLING_FEATURES, lengths=lengths, width=width, pieces=spread, tree=tree)


def sampling_features_of(requests: list[Request]) -> SamplingFeatures:
    """Returns which parts of sampling these requests need."""
    params = [r.params for r in requests]
    return SamplingFeatures(
        sampled=any(p.temperature > 0 for p in params),
        filtered=any(p.has_filters for p in params),
        penalised=any(p.has_penalties for p in params),
        biased=any(p.logit_bias or p.min_tokens for p in params),
    )


def prompt_rows_of(batch: list[Request], prefill: PrefillPass) -> PromptRows | None:
    """Returns the rows of a prefill pass whose prompt log-probabilities are still missing; None if there are none.

    prefill: the pass.  batch: its requests.  A row is included if the next token belongs to the prompt and the next
    token's log-probabilities were not read yet.  A preempted request computes its rows again, but log-probabilities
    that were read before the preemption are kept and not computed again."""
    spans, num_top_by_request, first_row = [], [], 0
    for request, length in zip(batch, prefill.lengths, strict=True):
        row, first_row = first_row, first_row + -(-length // prefill.width) * prefill.width
        begin = max(request.num_prefilled, len(request.prompt_logprobs))
        end = min(request.num_prefilled + length, len(request.prompt) - 1)
        num_top = request.num_prompt_logprobs if request.lacks_prompt_logprobs and begin < end else None
        first = row - request.num_prefilled
        spans.append((0, 0) if num_top is None else (first + begin, first + end))
        num_top_by_request.append(num_top)
    if all(num_top is None for num_top in num_top_by_request):
        return None
    return PromptRows(tuple(spans), tuple(num_top or 0 for num_top in num_top_by_request))


def slot_init(
    request: Request, tokens: list[int], start: int, commit_from: int, max_num_tokens: int, steps: int
) -> SlotInit:
    """Returns the values that fill the slot of a request when the request gets the slot.

    tokens: the prompt and the output so far.  start: the index of the first row to compute.
    commit_from: the number of rows in shared pages, which are never written.
    max_num_tokens: the number of tokens at which the request ends.  steps: the depth of the deepest tree."""
    params = request.params
    assert request.slot is not None
    return SlotInit(
        slot=request.slot,
        tokens=tuple(tokens),
        prompt_len=len(request.prompt),
        pages=tuple(request.pages),
        start=start,
        commit_from=commit_from,
        end=max_num_tokens,
        depth_limit=params.depth_limit(steps),
        sampling={
            **params.slot_values(),
            "seed": request.seed,
            "min_position": len(request.prompt) + params.min_tokens,
            "num_logprobs": -1 if params.logprobs is None else params.logprobs,
        },
        bias=dict(params.logit_bias),
        stop_ids=tuple(sorted(request.stop_ids)),
        counts_tokens=params.has_penalties,
    )
