"""Accept length by place: after a prefix hit, and after a rejected path, each compared with rounds that started afresh.

A draft that reads a stale hidden state or a wrong row still drafts well on average.  In these places it does not.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

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
    before; differing: rounds whose own accept length differs from that.
    """

    name: str
    rounds: int
    accept_length: float
    afresh: float
    differing: int


@dataclass(frozen=True)
class _Rejection:
    """A round that followed a round of the same request, and the tokens up to its root."""

    context: list[int]
    accept_length: int


def tokens_of_first_rounds(steps: int) -> int:
    """A max_tokens that limits none of the first ROUNDS_AFTER_HIT rounds."""
    return 1 + (ROUNDS_AFTER_HIT + 1) * (steps + 1)


def after_hit(engine: Engine, prompts: Sequence[Sequence[int]], cold: Driven, params: SamplingParams) -> list[Place]:
    """The first rounds of the prompts when pages of them are cached, compared with the same rounds of `cold`.

    cold: these prompts in this engine, when nothing was cached.  Prompts without a hit do not count; the result is
    empty if there is none.
    """
    hit = drive(engine, prompts, params)
    places = []
    for number in range(ROUNDS_AFTER_HIT):
        pairs = [
            (len(hit.traces[request.id][number].emitted), len(cold.traces[request.id][number].emitted))
            for request in hit.requests
            if request.cached_tokens
            and min(len(run.traces[request.id]) for run in (hit, cold)) > number
            and hit.traces[request.id][number].prefix_len == cold.traces[request.id][number].prefix_len
        ]
        if pairs:
            places.append(_place(f"round {number + 1} after a prefix hit", pairs))
    return places


def after_rejection(
    driven: Driven, steps: int, fresh_engine: Callable[[], AbstractContextManager[Engine]]
) -> list[Place]:
    """Rounds by how far the round before got, compared with the first round of a new request at the same root.

    fresh_engine: opens an engine of the same tree without a prefix cache.
    """
    found: dict[str, list[_Rejection]] = {}
    for request in driven.requests:
        for before, trace in zip(driven.traces[request.id], driven.traces[request.id][1:], strict=False):
            if request.num_tokens - trace.prefix_len - 1 > steps:
                found.setdefault(_ending(before), []).append(_rejection(request, trace))
    kept = [(name, each) for name in sorted(found) for each in _evenly(found[name])]
    params = SamplingParams(temperature=0.0, max_tokens=steps + 2)
    with fresh_engine() as engine:
        contexts, roots = [each.context[:-1] for _, each in kept], [each.context[-1] for _, each in kept]
        fresh = drive(engine, contexts, params, roots=roots)
    pairs: dict[str, list[tuple[int, int]]] = {}
    for (name, each), request in zip(kept, fresh.requests, strict=True):
        pairs.setdefault(name, []).append((each.accept_length, len(fresh.traces[request.id][0].emitted)))
    return [_place(name, of_name) for name, of_name in pairs.items()]


def _ending(trace: RoundTrace) -> str:
    accepted, depth = len(trace.emitted) - 1, max(trace.tree.depths)
    return "after a path accepted whole" if accepted == depth else f"after a rejection at depth {accepted + 1}"


def _rejection(request: Request, trace: RoundTrace) -> _Rejection:
    return _Rejection(request.tokens[: trace.prefix_len + 1], len(trace.emitted))


def _evenly(rounds: list[_Rejection]) -> list[_Rejection]:
    """At most ROUNDS_PER_DEPTH of them."""
    return rounds[:: -(-len(rounds) // ROUNDS_PER_DEPTH)]


def _place(name: str, pairs: Sequence[tuple[int, int]]) -> Place:
    own, afresh = (sum(lengths) / len(pairs) for lengths in zip(*pairs, strict=True))
    return Place(name, len(pairs), own, afresh, sum(a != b for a, b in pairs))
