"""The queue of waiting requests.  The queue is ordered by priority.  Within a priority, clients take turns; the
requests of one client run in the order of arrival.

Turns are numbered (start-time fair queueing).  A client's next turn is one higher than its last turn.  The first turn
of a new client is the turn that is being served.  So a client with a thousand requests and a client with two are served
alternately."""

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from espalier.request import Request

# The number of removed entries that may stay in any heap.
MAX_STALE_ENTRIES = 4


class QueueEntry(NamedTuple):
    """A request in the queue.

    number: the number of entries added before.  It orders requests with equal arrival_index."""

    arrival_index: int
    number: int
    request: Request


class ClientQueue:
    """One client's requests of one priority.

    start_tag: the turn of the client's next request.  num_waiting: the number of entries that are still valid."""

    def __init__(self, start_tag: int):
        self.start_tag = start_tag
        self.num_waiting = 0
        self.heap: list[QueueEntry] = []


# Preempted requests wait as if they all came from this client, which comes before all others.  So a preempted request
# does not use a turn of its own client.
PREEMPTED_CLIENT = None


class FairQueue:
    """The requests of one priority.  virtual_time: the start tag of the last request that got a slot.

    is_valid: returns whether an entry still waits; invalid entries are dropped when they reach the front."""

    def __init__(self, is_valid: Callable[[QueueEntry], bool]):
        self.is_valid = is_valid
        self.virtual_time = 0
        self._queues: dict[str | None, ClientQueue] = {}
        self._next_queue: ClientQueue | None = None

    @property
    def num_waiting(self) -> int:
        return sum(queue.num_waiting for queue in self._queues.values())

    def add(self, entry: QueueEntry) -> None:
        client = _client_of(entry.request)
        queue = self._queues.get(client)
        if queue is None:
            queue = self._queues[client] = ClientQueue(self.virtual_time if client is not PREEMPTED_CLIENT else -1)
        queue.num_waiting += 1
        heappush(queue.heap, entry)
        self._next_queue = None

    def peek(self) -> QueueEntry | None:
        if self._next_queue is None:
            waiting = []
            for client, queue in list(self._queues.items()):
                while queue.heap and not self.is_valid(queue.heap[0]):
                    heappop(queue.heap)
                if queue.heap:
                    waiting.append((queue.start_tag, queue.heap[0], queue))
                elif queue.start_tag <= self.virtual_time:
                    # If this client comes back, its start tag is `virtual_time` in any case.
                    del self._queues[client]
            if not waiting:
                return None
            self._next_queue = min(waiting)[2]
        return self._next_queue.heap[0]

    def pop(self, gets_slot: bool) -> QueueEntry:
        """Removes and returns the entry that `peek` returned.  gets_slot: whether its request gets a slot."""
        queue = self._next_queue
        assert queue is not None
        entry = heappop(queue.heap)
        queue.num_waiting -= 1
        if gets_slot and queue.start_tag >= 0:
            self.virtual_time = queue.start_tag
            queue.start_tag += 1
        self._next_queue = None
        return entry

    def remove(self, request: Request) -> None:
        """Notes that the entry of a request is no longer valid."""
        queue = self._queues[_client_of(request)]
        queue.num_waiting -= 1
        # Removed entries leave the heap here, because behind an entry that never gets a slot they would stay forever.
        if len(queue.heap) > 2 * queue.num_waiting + MAX_STALE_ENTRIES:
            queue.heap = list(filter(self.is_valid, queue.heap))
            heapify(queue.heap)
        self._next_queue = None

    def __iter__(self) -> Iterator[QueueEntry]:
        return (entry for queue in self._queues.values() for entry in queue.heap if self.is_valid(entry))


def _client_of(request: Request) -> str | None:
    """Returns the client in whose queue the request waits."""
    return PREEMPTED_CLIENT if request.generation else request.client


class WaitingQueue:
    """All waiting requests, in heaps.  `add` takes O(log n), `pop` O(log n + clients), `remove` O(1) on average."""

    def __init__(self) -> None:
        self._by_priority: dict[int, FairQueue] = {}
        # The number of each request's valid entry.  Entries with other numbers were removed.
        self._valid_numbers: dict[Request, int] = {}
        self._next_number = 0

    def add(self, request: Request) -> None:
        self.put_back(QueueEntry(request.arrival_index, self._next_number, request))
        self._next_number += 1

    def peek(self) -> Request | None:
        entry = None if not self._valid_numbers else self._by_priority[self._first_priority].peek()
        return None if entry is None else entry.request

    def put_back(self, entry: QueueEntry) -> None:
        """Puts an entry that `pop` returned back into its old place in the queue."""
        self._valid_numbers[entry.request] = entry.number
        priority = entry.request.priority
        if priority not in self._by_priority:
            self._by_priority[priority] = FairQueue(self._is_valid)
        self._by_priority[priority].add(entry)

    def remove(self, request: Request) -> None:
        del self._valid_numbers[request]
        self._by_priority[request.priority].remove(request)
        self._drop_if_empty(request.priority)

    @property
    def _first_priority(self) -> int:
        return min(self._by_priority)

    def pop(self, gets_slot: bool) -> QueueEntry:
        """Removes and returns the entry of the request that `peek` returned.

        gets_slot: whether the request gets a slot.  If False, the caller later puts the entry back (`put_back`)."""
        priority = self._first_priority
        entry = self._by_priority[priority].pop(gets_slot)
        del self._valid_numbers[entry.request]
        self._drop_if_empty(priority)
        return entry

    def _drop_if_empty(self, priority: int) -> None:
        """Drops the queue of a priority with which no request waits."""
        if not self._by_priority[priority].num_waiting:
            del self._by_priority[priority]

    def _is_valid(self, entry: QueueEntry) -> bool:
        """Returns whether the entry is the newest of its request, and the request still waits."""
        return self._valid_numbers.get(entry.request) == entry.number

    def __len__(self) -> int:
        return len(self._valid_numbers)

    def __iter__(self) -> Iterator[Request]:
        """Yields requests by priority and arrival, in O(n log n).  The order of service differs, because clients take
        turns."""
        for _, queue in sorted(self._by_priority.items()):
            yield from (entry.request for entry in sorted(queue))
