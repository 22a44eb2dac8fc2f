"""Which replica a prompt goes to: one that holds the longest start of it, unless it has more to do than the others.

A replica is known by its name.  This is what a front knows by itself: it remembers where it sent what, and counts what
it sent and has not ended.  No message is exchanged for it.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from typing import NamedTuple

# The pages of a prompt that are looked at, from its start.
MAX_PAGES = 512
# Pages that are remembered.
MAX_KEYS = 2**18


class RoutingHint(NamedTuple):
    """What the router is told of a prompt.  keys: prefix_hashes; samples: those of the prompt."""

    keys: tuple[int, ...]
    samples: int


def prefix_hashes(prompt: Sequence[int], page_size: int) -> tuple[int, ...]:
    """A key for each start of the prompt that is whole pages long, equal in every process."""
    keys: list[int] = []
    key = 0
    for start in range(0, min(len(prompt), MAX_PAGES * page_size) - page_size + 1, page_size):
        # Python's hash of integers does not depend on the process.
        key = hash((key, *prompt[start : start + page_size]))
        keys.append(key)
    return tuple(keys)


class ReplicaChooser:
    """imbalance: samples that a replica may have more than the one with the fewest, and still get a prompt because of
    its pages; max_keys: pages that are remembered, those used last."""

    def __init__(self, imbalance: int = 8, max_keys: int = MAX_KEYS):
        self.imbalance = imbalance
        self.max_keys = max_keys
        # The replica that last got a prompt with this start.
        self._replica_of_prefix: OrderedDict[int, str] = OrderedDict()
        # Samples by replica, and by (replica, request).
        self.load: Counter[str] = Counter()
        self._open_samples: dict[tuple[str, str], list[int]] = {}

    def ranked(self, keys: Sequence[int], replicas: Collection[str]) -> list[str]:
        """The replicas, best first."""
        if not replicas:
            return []
        fewest = min(self.load[each] for each in replicas)
        held = self._pages_held(keys, replicas)

        def rank(replica: str) -> tuple[int, int, int, str]:
            is_free = self.load[replica] - fewest <= self.imbalance
            pages = held.get(replica, 0) if is_free else 0
            # Fronts that know nothing yet agree on where a prompt goes.
            first = hash((keys[0], *replica.encode())) if keys else 0
            return -pages, self.load[replica], first, replica

        return sorted(replicas, key=rank)

    def _pages_held(self, keys: Sequence[int], replicas: Collection[str]) -> dict[str, int]:
        """For each replica, how many pages of the prompt's start it was sent, as far as is remembered."""
        held: dict[str, int] = {}
        for count, key in enumerate(keys, 1):
            replica = self._replica_of_prefix.get(key)
            if replica is None:
                break
            if replica in replicas:
                held[replica] = count
        return held

    def record_sent(self, keys: Sequence[int], samples: int, replica: str, request: str) -> None:
        """A prompt was sent to a replica.  request: names the call, to `record_ended`."""
        self._open_samples.setdefault((replica, request), []).append(samples)
        self.load[replica] += samples
        for key in keys:
            self._replica_of_prefix[key] = replica
            self._replica_of_prefix.move_to_end(key)
        while len(self._replica_of_prefix) > self.max_keys:
            self._replica_of_prefix.popitem(last=False)

    def record_ended(self, replica: str, request: str) -> None:
        """A prompt of this request ended.  Calls that were not `record_sent` are ignored."""
        if open_samples := self._open_samples.get((replica, request)):
            self.load[replica] -= open_samples.pop()
            if not open_samples:
                del self._open_samples[replica, request]

    def forget_all_but(self, replicas: Collection[str]) -> None:
        """Forget what other replicas than these have to do."""
        for replica, request in [key for key in self._open_samples if key[0] not in replicas]:
            del self._open_samples[replica, request]
        for replica in [each for each in self.load if each not in replicas]:
            del self.load[replica]
