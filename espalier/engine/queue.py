"""The queue of waiting requests: by priority, then by arrival."""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from espalier.request import Request

# Removed entries that may stay in any heap.
FEW = 4


class Entry(NamedTuple):
    """number: counts the entries, so that requests with equal places leave in the order of arrival."""

    place: tuple[int, int]
    number: int
    request: Request


class WaitingQueue:
    """A heap.  add and take cost O(log n), remove costs O(1) on average."""

    def __init__(self) -> None:
        self._heap: list[Entry] = []
        # The valid entry of each request.  A heap entry with another number was removed, and is dropped when found.
        self._numbers: dict[Request, int] = {}
        self._next_number = 0

    def add(self, request: Request) -> None:
        self.put_back(Entry(request.place, self._next_number, request))
        self._next_number += 1

    def first(self) -> Request | None:
        while self._heap:
            entry = self._heap[0]
            if self._numbers.get(entry.request) == entry.number:
                return entry.request
            heappop(self._heap)
        return None

    def take(self) -> Entry:
        """Remove and return the entry whose request `first` returned."""
        entry = heappop(self._heap)
        del self._numbers[entry.request]
        return entry

    def put_back(self, entry: Entry) -> None:
        """Return a taken entry to its old place in the queue."""
        self._numbers[entry.request] = entry.number
        heappush(self._heap, entry)

    def remove(self, request: Request) -> None:
        del self._numbers[request]
        # Removed entries behind requests that never end would stay for good.
        if len(self._heap) > 2 * len(self._numbers) + FEW:
            self._heap = self._valid()
            heapify(self._heap)

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[Request]:
        """Requests in queue order.  O(n log n)."""
        return (entry.request for entry in sorted(self._valid()))

    def _valid(self) -> list[Entry]:
        return [entry for entry in self._heap if self._numbers.get(entry.request) == entry.number]
