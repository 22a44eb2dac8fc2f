"""Clients and their shares of the queue: one that fills it leaves room for others.

A client is the API key that it sent, where the server has several keys, and else its address.  A key that nobody checks
is no name: whoever sends many would have many shares.
"""

from collections import Counter
from contextvars import ContextVar

from espalier.server.engines import Generation

# Of the request in this context.
client: ContextVar[str] = ContextVar("client", default="")
# Requests of the server's own batches.
BATCHES = "batches"
# One part in so many of the queue is kept, beside it, for clients that hold no more than this part.
PARTS = 4


class Shares:
    """The samples that each client has in the server."""

    def __init__(self) -> None:
        self._generations: dict[str, set[Generation]] = {}
        self._entering: Counter[str] = Counter()

    def admits(self, num_samples: int, num_held: int, capacity: int, max_queue: int) -> bool:
        """Whether samples of the current client may enter.

        num_held: samples in the server; capacity: those that all clients together may have, and that one may have
        alone.  Above it, a client may enter that has little itself.
        """
        if num_held + num_samples <= capacity:
            return True
        share, name = -(-max_queue // PARTS), client.get()
        is_small = self.held_by(name) + num_samples <= share
        return is_small and name != BATCHES and num_held + num_samples <= capacity + share

    def held_by(self, name: str) -> int:
        """Samples of a client that are being tokenized, wait or run."""
        running = sum(sum(each.num_running.values()) for each in self._generations.get(name, ()))
        return running + self._entering[name]

    def enter(self, num_samples: int) -> None:
        self._entering[client.get()] += num_samples

    def entered(self, num_samples: int) -> None:
        """The end of `enter`."""
        name = client.get()
        self._entering[name] -= num_samples
        if not self._entering[name]:
            del self._entering[name]

    @property
    def num_entering(self) -> int:
        return self._entering.total()

    def add(self, name: str, generation: Generation) -> None:
        self._generations.setdefault(name, set()).add(generation)

    def remove(self, name: str, generation: Generation) -> None:
        if (found := self._generations.get(name)) is not None:
            found.discard(generation)
            if not found:
                del self._generations[name]
