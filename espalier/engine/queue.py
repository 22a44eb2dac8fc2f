"""The queue of waiting requests.  It is ordered by priority.  Within a priority, clients take turns; the requests of
one client run in the order of arrival.

A client's next turn comes after its last turn.  The first turn of a new client is the turn that is being served.  So a
client with a thousand requests and a client with two are served alternately (start-time fair queueing).  With one
client, requests run in the order of arrival.
"""

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from espalier.request import Request

# The number of removed entries that may stay in any heap.
FEW = 4


class Entry(NamedTuple):
    """A request in the queue.

    number: counts the entries, so that requests with equal arrivals leave in the order in which they were added.
    """

    arrival: int
    number: int
    request: Request


class Line:
    """One client's requests of one priority.

    turn: the turn of the client's next request; num_waiting: the number of entries that are still valid.
    """

    def __init__(self, turn: int):
        self.turn = turn
        self.num_waiting = 0
        self.heap: list[Entry] = []


# The key of the line of requests that had a slot before.  They go first, and do not use up a client's turn.
RETURNED = None


class Turns:
    """The requests of one priority.  now: the turn of the last request that got a slot.

    is_valid: returns whether an entry still waits; invalid entries are dropped when they reach the front.
    """

    def __init__(self, is_valid: Callable[[Entry], bool]):
        self.is_valid = is_valid
        self.now = 0
        self._lines: dict[str | None, Line] = {}
        self._next: Line | None = None

    @property
    def num_waiting(self) -> int:
        return sum(line.num_waiting for line in self._lines.values())

    def add(self, entry: Entry) -> None:
        client = _client_of(entry.request)
        line = self._lines.get(client)
        if line is None:
            line = self._lines[client] = Line(self.now if client is not RETURNED else -1)
        line.num_waiting += 1
        heappush(line.heap, entry)
        self._next = None

    def first(self) -> Entry | None:
        if self._next is None:
            waiting = []
            for client, line in list(self._lines.items()):
                while line.heap and not self.is_valid(line.heap[0]):
                    heappop(line.heap)
                if line.heap:
                    waiting.append((line.turn, line.heap[0], line))
                elif line.turn <= self.now:
                    # If this client comes back, its turn begins at `now` in any case.
                    del self._lines[client]
            if not waiting:
                return None
            self._next = min(waiting)[2]
        return self._next.heap[0]

    def pop(self, ends_turn: bool) -> Entry:
        """Removes and returns the entry that `first` returned.  ends_turn: whether it leaves to get a slot."""
        line = self._next
        assert line is not None
        entry = heappop(line.heap)
        line.num_waiting -= 1
        if ends_turn and line.turn >= 0:
            self.now = line.turn
            line.turn += 1
        self._next = None
        return entry

    def remove(self, request: Request) -> None:
        """Notes that the entry of a request is no longer valid."""
        line = self._lines[_client_of(request)]
        line.num_waiting -= 1
        # Otherwise removed entries behind a request that never gets a slot would stay forever.
        if len(line.heap) > 2 * line.num_waiting + FEW:
            line.heap = list(filter(self.is_valid, line.heap))
            heapify(line.heap)
        self._next = None

    def __iter__(self) -> Iterator[Entry]:
        return (entry for line in self._lines.values() for entry in line.heap if self.is_valid(entry))


def _client_of(request: Request) -> str | None:
    return RETURNED if request.generation else request.client


class WaitingQueue:
    """All waiting requests, in heaps.  `add` takes O(log n), `take` O(log n + clients), `remove` O(1) on average."""

    def __init__(self) -> None:
        self._turns: dict[int, Turns] = {}
        # The valid entry of each request.  An entry with another number was removed.
        self._numbers: dict[Request, int] = {}
        self._next_number = 0

    def add(self, request: Request) -> None:
        self.put_back(Entry(request.arrival, self._next_number, request))
        self._next_number += 1

    def first(self) -> Request | None:
        entry = None if not self._numbers else self._turns[self._best].first()
        return None if entry is None else entry.request

    def take(self) -> Entry:
        """Removes and returns the entry of the request that `first` returned.  The request gets a slot."""
        return self._leave(True)

    def set_aside(self) -> Entry:
        """Removes and returns the same entry as `take`, but the entry will be put back (`put_back`)."""
        return self._leave(False)

    def put_back(self, entry: Entry) -> None:
        """Puts an entry that was set aside back into its old place in the queue."""
        self._numbers[entry.request] = entry.number
        priority = entry.request.priority
        if priority not in self._turns:
            self._turns[priority] = Turns(self._is_valid)
        self._turns[priority].add(entry)

    def remove(self, request: Request) -> None:
        del self._numbers[request]
        self._turns[request.priority].remove(request)
        self._drop_if_empty(request.priority)

    @property
    def _best(self) -> int:
        return min(self._turns)

    def _leave(self, ends_turn: bool) -> Entry:
        priority = self._best
        entry = self._turns[priority].pop(ends_turn)
        del self._numbers[entry.request]
        self._drop_if_empty(priority)
        return entry

    def _drop_if_empty(self, priority: int) -> None:
        if not self._turns[priority].num_waiting:
            del self._turns[priority]

    def _is_valid(self, entry: Entry) -> bool:
        return self._numbers.get(entry.request) == entry.number

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[Request]:
        """Yields requests by priority and arrival, in O(n log n).  This is not the order of service, in which clients
        take turns."""
        for _, turns in sorted(self._turns.items()):
            yield from (entry.request for entry in sorted(turns))
