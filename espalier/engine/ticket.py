"""What the host sends to launch something, and what it reads back: plain values, so that both can cross a process."""

from dataclasses import dataclass, field

from espalier.request import TokenLogprob
from espalier.sampling.shape import Shaping
from espalier.slots import Admission


@dataclass(frozen=True)
class Ticket:
    """One launch.

    slots: the batch, in order; lengths: tokens each slot enters in a prefill pass, empty for a round; width: of the
    prefill pass; fresh: pages handed out since the last launch; appended: (slot, column, page) for requests already in
    their slot.
    """

    slots: tuple[int, ...]
    shaping: Shaping
    num_logprobs: int | None = None
    lengths: tuple[int, ...] = ()
    width: int = 0
    admitted: tuple[Admission, ...] = ()
    appended: tuple[tuple[int, int, int], ...] = ()
    fresh: tuple[int, ...] = ()

    @property
    def is_prefill(self) -> bool:
        return self.width > 0


@dataclass(frozen=True)
class DraftTree:
    """The tree of one request and round, for those who look: lists by node; path_rows from the root down."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    scores: list[float]
    path_rows: list[int]


@dataclass(frozen=True)
class Row:
    """What a launch decided for one request; tokens is empty where a prompt goes on.

    finite: False if, past these tokens, one was picked from logits that were not finite.
    """

    tokens: list[int]
    finite: bool
    tree: DraftTree | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
