"""Chooses the replica that was sent the longest prefix of a prompt before, unless this replica is too busy.

Each API server chooses for itself.  An API server remembers to which replica it sent a prefix, and counts its samples
that wait or run on each replica (open samples).
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

# At most this number of pages, counted from the prompt's start, are hashed.
MAX_HASHED_PAGES = 512
# The default limit of remembered prefixes.  A prompt has one prefix for each full page of tokens.
MAX_PREFIXES = 2**18


class RoutingHint(NamedTuple):
    """What the router needs to know about a prompt.  prefix_hashes: the result of the function prefix_hashes.
    num_samples: the number of outputs (n)."""

    prefix_hashes: tuple[int, ...]
    num_samples: int


def prefix_hashes(prompt: Sequence[int], page_size: int) -> tuple[int, ...]:
    """Returns a hash for each prefix of the prompt that ends with a full page, shortest first.

    page_size: tokens in a page.  The hashes are the same in all processes."""
    hashes: list[int] = []
    key = 0
    for start in range(0, min(len(prompt), MAX_HASHED_PAGES * page_size) - page_size + 1, page_size):
        # Python's hash of integers does not depend on the process.
        key = hash((key, *prompt[start : start + page_size]))
        hashes.append(key)
    return tuple(hashes)


class ReplicaChooser:
    """Ranks replicas for prompts.

    imbalance: a replica with over `imbalance` more open samples than the least busy replica is ranked as if it had no
    prefix.  max_prefixes: the limit of remembered prefixes; the least recently used prefix is forgotten first."""

    def __init__(self, imbalance: int = 8, max_prefixes: int = MAX_PREFIXES):
        self.imbalance = imbalance
        self.max_prefixes = max_prefixes
        # By prefix hash: the replica that last got a prompt with this prefix.
        self._replica_of_prefix: OrderedDict[int, str] = OrderedDict()
        # By replica: the number of open samples.
        self.num_open_samples: Counter[str] = Counter()
        # By (replica, request id): the number of samples of each open prompt.
        self._open_samples: dict[tuple[str, str], list[int]] = {}

    def rank_replicas(self, prefix_hashes: Sequence[int], replicas: Collection[str]) -> list[str]:
        """Returns the replicas, best first.  prefix_hashes: the hashes of the prompt."""
        if not replicas:
            return []
        fewest_samples = min(self.num_open_samples[each] for each in replicas)
        num_pages_held = self._num_pages_held(prefix_hashes, replicas)

        def sort_key(replica: str) -> tuple[int, int, int, str]:
            is_free = self.num_open_samples[replica] - fewest_samples <= self.imbalance
            pages = num_pages_held.get(replica, 0) if is_free else 0
            # Of equally busy replicas, all API servers choose the same one for a new prefix.
            tie_break = hash((prefix_hashes[0], *replica.encode())) if prefix_hashes else 0
            return -pages, self.num_open_samples[replica], tie_break, replica

        return sorted(replicas, key=sort_key)

    def _num_pages_held(self, prefix_hashes: Sequence[int], replicas: Collection[str]) -> dict[str, int]:
        """Returns how many pages from the prompt's start each replica probably has in its prefix cache, by replica."""
        num_pages_held: dict[str, int] = {}
        for num_pages, prefix_hash in enumerate(prefix_hashes, 1):
            replica = self._replica_of_prefix.get(prefix_hash)
            if replica is None:
                break
            if replica in replicas:
                num_pages_held[replica] = num_pages
        return num_pages_held

    def record_sent(self, prefix_hashes: Sequence[int], num_samples: int, replica: str, request_id: str) -> None:
        """Record that a prompt with num_samples samples went to a replica.  record_ended gets the same request_id."""
        self._open_samples.setdefault((replica, request_id), []).append(num_samples)
        self.num_open_samples[replica] += num_samples
        # The shortest prefix is recorded last, so that it is forgotten last, because _num_pages_held stops at a
        # forgotten prefix.
        for prefix_hash in reversed(prefix_hashes):
            self._replica_of_prefix[prefix_hash] = replica
            self._replica_of_prefix.move_to_end(prefix_hash)
        while len(self._replica_of_prefix) > self.max_prefixes:
            self._replica_of_prefix.popitem(last=False)

    def record_ended(self, replica: str, request_id: str) -> None:
        """Record that one prompt of this request has ended.  Unknown requests are ignored."""
        if open_samples := self._open_samples.get((replica, request_id)):
            self.num_open_samples[replica] -= open_samples.pop()
            if not open_samples:
                del self._open_samples[replica, request_id]

    def forget_other_replicas(self, replicas: Collection[str]) -> None:
        """Forget the open samples of all replicas except `replicas`."""
        for replica, request_id in [key for key in self._open_samples if key[0] not in replicas]:
            del self._open_samples[replica, request_id]
        for replica in [each for each in self.num_open_samples if each not in replicas]:
            del self.num_open_samples[replica]


@dataclass(frozen=True)
class OpenTokensPolicy:
    """An autoscaling policy for Ray Serve.  tokens_per_replica: how many tokens still to compute
    (EngineReplica.open_tokens) a replica should have on average."""

    tokens_per_replica: int

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """Returns (wanted number of replicas, {}).  Without metrics, the number now.  context: AutoscalingContext."""
        open_tokens_of_replicas = (context.aggregated_metrics or {}).get("open_tokens")
        if not open_tokens_of_replicas:
            return context.target_num_replicas, {}
        return sum(open_tokens_of_replicas.values()) / self.tokens_per_replica, {}
