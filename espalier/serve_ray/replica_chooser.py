"""Chooses the replica for a prompt: the replica that got the longest prefix of the prompt, unless it is too busy.

Each API server chooses alone.  It remembers which replica got a prefix, and counts its open samples.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

# At most this number of pages is hashed, from the start of a prompt.
MAX_HASHED_PAGES = 512
# The default limit of remembered prefixes.  A prompt has a prefix for each whole page.
MAX_PREFIXES = 2**18


class RoutingHint(NamedTuple):
    """The data of a prompt for the router.  prefix_hashes: see below.  num_samples: the number of its outputs (n)."""

    prefix_hashes: tuple[int, ...]
    num_samples: int


def prefix_hashes(prompt: Sequence[int], page_size: int) -> tuple[int, ...]:
    """Returns a hash of each prefix of whole pages, shortest first.  All processes compute equal hashes."""
    hashes: list[int] = []
    key = 0
    for start in range(0, min(len(prompt), MAX_HASHED_PAGES * page_size) - page_size + 1, page_size):
        # Python's hash of integers does not depend on the process.
        key = hash((key, *prompt[start : start + page_size]))
        hashes.append(key)
    return tuple(hashes)


class ReplicaChooser:
    """Ranks replicas for prompts.

    imbalance: a replica with over `imbalance` more open samples than the least busy replica is not preferred for the
    prefixes that it has.  max_prefixes: the limit of remembered prefixes; the least recently used is forgotten first.
    """

    def __init__(self, imbalance: int = 8, max_prefixes: int = MAX_PREFIXES):
        self.imbalance = imbalance
        self.max_prefixes = max_prefixes
        # By prefix hash: the replica that last got a prompt with this prefix.
        self._replica_of_prefix: OrderedDict[int, str] = OrderedDict()
        # The number of open samples by replica.  By (replica, request): the number of samples of each open prompt.
        self.num_open_samples: Counter[str] = Counter()
        self._open_samples: dict[tuple[str, str], list[int]] = {}

    def rank_replicas(self, prefix_hashes: Sequence[int], replicas: Collection[str]) -> list[str]:
        """Returns the replicas, best first.  prefix_hashes: of the prompt."""
        if not replicas:
            return []
        fewest = min(self.num_open_samples[each] for each in replicas)
        held = self._pages_held(prefix_hashes, replicas)

        def sort_key(replica: str) -> tuple[int, int, int, str]:
            is_free = self.num_open_samples[replica] - fewest <= self.imbalance
            pages = held.get(replica, 0) if is_free else 0
            # So among equally busy replicas, all API servers choose the same one for a new prefix.
            tie_break = hash((prefix_hashes[0], *replica.encode())) if prefix_hashes else 0
            return -pages, self.num_open_samples[replica], tie_break, replica

        return sorted(replicas, key=sort_key)

    def _pages_held(self, prefix_hashes: Sequence[int], replicas: Collection[str]) -> dict[str, int]:
        """Returns, by replica, how many of the prompt's first pages the replica is known to have."""
        held: dict[str, int] = {}
        for count, key in enumerate(prefix_hashes, 1):
            replica = self._replica_of_prefix.get(key)
            if replica is None:
                break
            if replica in replicas:
                held[replica] = count
        return held

    def record_sent(self, prefix_hashes: Sequence[int], num_samples: int, replica: str, request: str) -> None:
        """Record a prompt that was sent to a replica.  request: the name that record_ended gets too."""
        self._open_samples.setdefault((replica, request), []).append(num_samples)
        self.num_open_samples[replica] += num_samples
        # The shortest prefix is recorded last and so forgotten last, because longer prefixes are found through it.
        for key in reversed(prefix_hashes):
            self._replica_of_prefix[key] = replica
            self._replica_of_prefix.move_to_end(key)
        while len(self._replica_of_prefix) > self.max_prefixes:
            self._replica_of_prefix.popitem(last=False)

    def record_ended(self, replica: str, request: str) -> None:
        """Record that one prompt of this request has ended.  Unknown requests are ignored."""
        if open_samples := self._open_samples.get((replica, request)):
            self.num_open_samples[replica] -= open_samples.pop()
            if not open_samples:
                del self._open_samples[replica, request]

    def forget_other_replicas(self, replicas: Collection[str]) -> None:
        """Forget the open samples of all replicas except `replicas`."""
        for replica, request in [key for key in self._open_samples if key[0] not in replicas]:
            del self._open_samples[replica, request]
        for replica in [each for each in self.num_open_samples if each not in replicas]:
            del self.num_open_samples[replica]


@dataclass(frozen=True)
class OpenTokensPolicy:
    """An autoscaling policy of Ray Serve.  tokens_per_replica: the average open tokens of a replica to aim at."""

    tokens_per_replica: int

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """Returns (wanted number of replicas, state).  Without metrics, the number of replicas does not change."""
        figures = (context.aggregated_metrics or {}).get("open_tokens")
        if not figures:
            return context.target_num_replicas, {}
        return sum(figures.values()) / self.tokens_per_replica, {}
