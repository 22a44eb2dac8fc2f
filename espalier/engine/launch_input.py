"""What the host sends to launch something, and what it reads back: plain values, so that both can cross a process."""

from dataclasses import dataclass, field

import numpy as np

from espalier.attention import CommittedLengths
from espalier.request import Request, TokenLogprob
from espalier.sampling.logit_processors import SamplingNeeds
from espalier.sampling.prompt import PromptRows
from espalier.slots import SlotInit

NOTHING_COMMITTED = CommittedLengths((), exact=True)


@dataclass(frozen=True)
class LaunchInput:
    """One launch.

    slots: the batch, in order; lengths: tokens each slot enters in a prefill pass, empty for a round; width: of the
    prefill pass; slot_inits: requests that enter their slots, only with a prefill pass that runs them; appended_pages:
    (slot, column, page) for requests already in their slot; traced: whether somebody looks at the trees; prompt_rows:
    of a prefill pass, None where no prompt's log-probabilities are asked for; num_logprobs: the most alternatives that
    a request of the batch wants, None where nobody wants log-probabilities; is_staged: a round that stops between its
    stages for masks; masks: [B, 1, words] int32 of the tokens that a prefill pass may pick, None for all; committed:
    what is known of the slots' committed rows, of dummies none.
    """

    slots: tuple[int, ...]
    needs: SamplingNeeds
    num_logprobs: int | None = None
    lengths: tuple[int, ...] = ()
    width: int = 0
    slot_inits: tuple[SlotInit, ...] = ()
    appended_pages: tuple[tuple[int, int, int], ...] = ()
    traced: bool = False
    prompt_rows: PromptRows | None = None
    is_staged: bool = False
    masks: np.ndarray | None = None
    committed: CommittedLengths = NOTHING_COMMITTED

    @property
    def is_prefill(self) -> bool:
        return self.width > 0


@dataclass(frozen=True)
class DraftTree:
    """The tree of one request and round: lists by node; path_rows from the root down."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    scores: list[float]
    path_rows: list[int]


@dataclass(frozen=True)
class RoundTrace:
    """One request's round, for those who look.

    Committed rows prefix_len .. prefix_len + len(emitted) - 1 stand in `pages`, page_size of them in each.
    """

    request_id: str
    tree: DraftTree
    prefix_len: int
    emitted: list[int]
    pages: list[int]
    page_size: int


@dataclass(frozen=True)
class TreeSize:
    """What a round's tree held: draft tokens, and the depth of the deepest."""

    drafted: int = 0
    depth: int = 0


@dataclass(frozen=True)
class Row:
    """What a launch decided for one request; tokens is empty where a prompt goes on.

    finite: False if, past these tokens, one was picked from logits that were not finite; prompt_logprobs: of the prompt
    tokens after the rows that a prefill pass was asked for.
    """

    tokens: list[int]
    finite: bool
    tree_size: TreeSize = TreeSize()
    tree: DraftTree | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)


def sampling_needs_of(requests: list[Request]) -> SamplingNeeds:
    """What the picks of this batch need, known on the host."""
    params = [r.params for r in requests]
    return SamplingNeeds(
        sampled=any(p.temperature > 0 for p in params),
        filtered=any(p.has_filters for p in params),
        penalised=any(p.has_penalties for p in params),
        biased=any(p.logit_bias or p.min_tokens for p in params),
    )


def prompt_rows_of(batch: list[Request], lengths: tuple[int, ...]) -> PromptRows | None:
    """Of the rows about to be entered, those whose next token is of the prompt, asked for, and not read yet.

    In one stay in a slot rows are entered once: what was read of it lies below, what was read in an earlier one is not
    asked for again.
    """
    spans, counts = [], []
    for request, length in zip(batch, lengths, strict=True):
        begin = max(request.num_prefilled, len(request.prompt_logprobs))
        end = min(request.num_prefilled + length, len(request.prompt) - 1)
        if not request.lacks_prompt_logprobs or begin >= end:
            spans.append((0, 0))
            continue
        spans.append((begin - request.num_prefilled, end - request.num_prefilled))
        counts.append(request.params.prompt_logprobs or 0)
    return PromptRows(tuple(spans), max(counts)) if counts else None


def slot_init(request: Request, tokens: list[int], start: int, commit_from: int, end: int, steps: int) -> SlotInit:
    """What the device must know of a request that enters its slot."""
    params = request.params
    assert request.slot is not None
    return SlotInit(
        slot=request.slot,
        tokens=tuple(tokens),
        prompt_len=len(request.prompt),
        pages=tuple(request.pages),
        start=start,
        commit_from=commit_from,
        end=end,
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
