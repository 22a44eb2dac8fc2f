"""Accept length by place: after a prefix hit, and after a rejected path, each compared with rounds that started afresh.

A draft that reads a stale hidden state or a wrong row still drafts well on average.  In these places it does not.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from espalier.bench.drive import Driven, drive
from espalier.engine.engine import Engine
from espalier.engine.launch_input import RoundTrace
from espalier.request import Request, SamplingParams

# Rounds after a prefix hit, and rounds compared for each depth of rejection.
ROUNDS_AFTER_HIT = 3
ROUNDS_PER_DEPTH = 32


@dataclass(frozen=True)
class Place:
    """Rounds of one kind.

    accept_length: their mean; afresh: that of rounds with the same roots, which no other round or cached page came
    before; differing: rounds that proposed other tokens than those.  Exact arithmetic has none; rounding has few, where
    two candidates are nearly as likely.
    """

    name: str
    rounds: int
    accept_length: float
    afresh: float
    differing: int


T = TypeVar("T")
# A round, and the round with the same root that began afresh.
Pair = tuple[RoundTrace, RoundTrace]


def tokens_of_first_rounds(steps: int) -> int:
    """A max_tokens that limits none of the first ROUNDS_AFTER_HIT rounds."""
    return 1 + (ROUNDS_AFTER_HIT + 1) * (steps + 1)


def after_hit(engine: Engine, prompts: Sequence[Sequence[int]], cold: Driven, params: SamplingParams) -> list[Place]:
    """The first rounds of the prompts when pages of them are cached, compared with the same rounds of `cold`.

    cold: these prompts in this engine, when nothing was cached.  Prompts without a hit do not count; the result is
    empty if there is none.
    """
    hit = drive(engine, prompts, params)
    with_hit = [request.id for request in hit.requests if request.cached_tokens]
    places = []
    for number in range(ROUNDS_AFTER_HIT):
        runs = [(hit.traces[id][number : number + 1], cold.traces[id][number : number + 1]) for id in with_hit]
        pairs = [(one, two) for ones, twos in runs for one, two in zip(ones, twos, strict=False)]
        pairs = [(one, two) for one, two in pairs if one.prefix_len == two.prefix_len]
        if pairs:
            places.append(_place(f"round {number + 1} after a prefix hit", pairs))
    return places


def after_rejection(
    driven: Driven, steps: int, fresh_engine: Callable[[], AbstractContextManager[Engine]]
) -> list[Place]:
    """Rounds by how far the round before got, compared with the first round of a new request at the same root.

    fresh_engine: opens an engine of the same tree without a prefix cache.
    """
    found: dict[str, list[tuple[Request, RoundTrace]]] = {}
    for request in driven.requests:
        for before, trace in pairwise(driven.traces[request.id]):
            # Rounds at a request's end may be limited by the tokens that it has left.
            if request.num_tokens - trace.prefix_len - 1 > steps:
                found.setdefault(_ending(before), []).append((request, trace))
    kept = [(name, *one) for name in sorted(found) for one in _evenly(found[name])]
    contexts = [request.tokens[: trace.prefix_len] for _, request, trace in kept]
    roots = [request.tokens[trace.prefix_len] for _, request, trace in kept]
    with fresh_engine() as engine:
        fresh = drive(engine, contexts, SamplingParams(temperature=0.0, max_tokens=steps + 2), roots=roots)
    pairs: dict[str, list[Pair]] = {}
    for (name, _, trace), request in zip(kept, fresh.requests, strict=True):
        pairs.setdefault(name, []).append((trace, fresh.traces[request.id][0]))
    return [_place(name, of_name) for name, of_name in pairs.items()]


def _ending(trace: RoundTrace) -> str:
    accepted, depth = len(trace.emitted) - 1, max(trace.tree.depths)
    return "after a path accepted whole" if accepted == depth else f"after a rejection at depth {accepted + 1}"


def _evenly(rounds: list[T]) -> list[T]:
    """At most ROUNDS_PER_DEPTH of them."""
    return rounds[:: -(-len(rounds) // ROUNDS_PER_DEPTH)]


def _place(name: str, pairs: Sequence[Pair]) -> Place:
    own, afresh = (sum(len(trace.emitted) for trace in traces) / len(pairs) for traces in zip(*pairs, strict=True))
    differing = sum((a.tree.tokens, a.tree.parents) != (b.tree.tokens, b.tree.parents) for a, b in pairs)
    return Place(name, len(pairs), own, afresh, differing)
