"""Runs tickets, in order, on one stream: `launch(ticket) -> handle; handle.result()` is all that others need.

On a CPU the stream of an overlapped engine is one worker thread, and that of a lock-step engine is the caller's own.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

from espalier.engine.ticket import DraftTree, Row, Ticket, Tried
from espalier.request import TokenLogprob
from espalier.speculate.round import Outcome, Round, prefill, run
from espalier.speculate.tree import VOID


class Handle(Protocol):
    def result(self) -> list[Row]:
        """What was decided, a row a slot of the ticket; waits for the launch."""
        ...


class Executor:
    """Owns the order in which device state is written."""

    def __init__(self, round: Round, overlap: bool):
        self.round = round
        threads = torch.get_num_threads()
        self.worker = ThreadPoolExecutor(1, "espalier-stream", torch.set_num_threads, (threads,)) if overlap else None

    def launch(self, ticket: Ticket) -> Handle:
        if self.worker is not None:
            return self.worker.submit(self.run, ticket)
        done: Future[list[Row]] = Future()
        done.set_result(self.run(ticket))
        return done

    @torch.inference_mode()
    def run(self, ticket: Ticket) -> list[Row]:
        """Apply the ticket, then run its body."""
        r = self.round
        r.pages.zero(ticket.fresh)
        for admission in ticket.admitted:
            r.table.admit(admission)
        r.table.append_pages(ticket.appended)
        index = torch.tensor(ticket.slots, dtype=torch.int64, device=r.pages.device)
        if ticket.is_prefill:
            lengths = torch.tensor(ticket.lengths, dtype=torch.int64, device=index.device)
            outcome = prefill(r, index, lengths, ticket.width, ticket.shaping, ticket.num_logprobs)
        else:
            outcome = run(r, index, ticket.shaping, ticket.num_logprobs)
        return read(outcome, ticket.traced)

    def close(self) -> None:
        if self.worker is not None:
            self.worker.shutdown()


def read(outcome: Outcome, traced: bool) -> list[Row]:
    """Bring a launch's results to the host; traced: the trees as well."""
    lengths, sound, tokens = outcome.length.tolist(), outcome.sound.tolist(), outcome.tokens.tolist()
    tried_by, tree_of, logprobs_of = _tried(outcome), _trees(outcome, traced), _logprobs(outcome, tokens)
    return [
        Row(tokens[b][: sound[b]], sound[b] == lengths[b], tried_by(b), tree_of(b), logprobs_of(b, sound[b]))
        for b in range(len(lengths))
    ]


def _tried(outcome: Outcome) -> Callable[[int], Tried]:
    if outcome.tree is None:
        return lambda b: Tried()
    there = outcome.tree.tokens != VOID
    drafted = (there.sum(1) - 1).tolist()
    depth = (outcome.tree.depths * there).amax(1).tolist()
    return lambda b: Tried(drafted[b], depth[b])


def _trees(outcome: Outcome, traced: bool) -> Callable[[int], DraftTree | None]:
    if not traced or outcome.tree is None or outcome.path is None:
        return lambda b: None
    tree = outcome.tree
    tokens, parents, depths, scores = (
        value.tolist() for value in (tree.tokens, tree.parents, tree.depths, tree.scores)
    )
    rows, lengths = outcome.path.rows.tolist(), outcome.path.length.tolist()
    return lambda b: DraftTree(tokens[b], parents[b], depths[b], scores[b], rows[b][: lengths[b]])


def _logprobs(outcome: Outcome, tokens: list[list[int]]) -> Callable[[int, int], list[TokenLogprob]]:
    if outcome.logprobs is None:
        return lambda b, count: []
    chosen, ids, values = (part.tolist() for part in outcome.logprobs)
    return lambda b, count: [
        TokenLogprob(tokens[b][i], chosen[b][i], list(zip(ids[b][i], values[b][i], strict=True))) for i in range(count)
    ]
