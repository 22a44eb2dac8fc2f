"""Runs tickets, in order, on one stream: `launch(ticket) -> handle; handle.result()` is the whole interface.

On a CPU the stream of an overlapped engine is one worker thread, and that of a lock-step engine is the caller's own.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

from espalier.engine.ticket import DraftTree, Row, Ticket
from espalier.request import TokenLogprob
from espalier.speculate.round import Decided, Round, prefill, run
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
            return read(prefill(r, index, lengths, ticket.width, ticket.shaping, ticket.num_logprobs))
        return read(run(r, index, ticket.shaping, ticket.num_logprobs))

    def close(self) -> None:
        if self.worker is not None:
            self.worker.shutdown()


def read(decided: Decided) -> list[Row]:
    """Bring a launch's results to the host."""
    lengths = decided.length.tolist()
    tokens = decided.tokens.tolist()
    sound = decided.sound.tolist()
    tree_of = _trees(decided, lengths)
    logprobs_of = _logprobs(decided, tokens, lengths)
    return [Row(tokens[b][: sound[b]], sound[b] == lengths[b], tree_of(b), logprobs_of(b)) for b in range(len(lengths))]


def _trees(decided: Decided, lengths: list[int]) -> Callable[[int], DraftTree | None]:
    if decided.tree is None or decided.path is None:
        return lambda b: None
    tree = decided.tree
    tokens, parents, depths, scores = (
        value.tolist() for value in (tree.tokens, tree.parents, tree.depths, tree.scores)
    )
    rows = decided.path.rows.tolist()
    return lambda b: DraftTree(tokens[b], parents[b], depths[b], scores[b], rows[b][: lengths[b]])


def _logprobs(decided: Decided, tokens: list[list[int]], lengths: list[int]) -> Callable[[int], list[TokenLogprob]]:
    if decided.logprobs is None:
        return lambda b: []
    chosen, ids, values = (part.tolist() for part in decided.logprobs)
    return lambda b: [
        TokenLogprob(tokens[b][i], chosen[b][i], list(zip(ids[b][i], values[b][i], strict=True)))
        for i in range(lengths[b])
    ]


def num_drafted(tree: DraftTree) -> int:
    """Draft tokens that were verified: nodes that are neither the root nor void."""
    return sum(token != VOID for token in tree.tokens) - 1
