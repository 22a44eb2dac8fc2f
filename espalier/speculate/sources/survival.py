"""Counts how often paths are right, by kind and depth, over all requests.  Older counts fade.

The counts come from results that the host reads anyway.  Each guess is counted once, when the result of its round is
read.  So equal requests in equal order give equal numbers.
"""

from collections.abc import Sequence

import numpy as np

from espalier.slots import PATH_KINDS, SOURCES, STRENGTHS

# The assumed survival (the share of paths that are right) of each source, by strength.  For "text" a match of m tokens
# has m / (m + 1).
FIRST = {"text": (1 / 2, 2 / 3, 3 / 4, 4 / 5), "prediction": (0.6, 0.8, 0.9, 0.95), "index": (0.5, 0.7, 0.85, 0.92)}
# The assumption counts as PRIOR paths.  A path's weight is halved after HALF_LIFE more paths of its kind.
PRIOR = 4.0
HALF_LIFE = 256.0
# The table is sent again when one probability has changed by this much.
WORTH_SENDING = 0.02


class Survival:
    """tried: [PATH_KINDS, S], how many paths were right above a depth; followed: how many of them were right there."""

    def __init__(self, steps: int) -> None:
        by_kind = [1.0, *(FIRST[source][strength] for source in SOURCES for strength in range(STRENGTHS))]
        self.first = np.array(by_kind)
        self.tried = np.zeros((PATH_KINDS, steps))
        self.followed = np.zeros((PATH_KINDS, steps))
        self._sent: np.ndarray | None = None
        self._is_counted = True

    @property
    def probabilities(self) -> np.ndarray:
        """[PATH_KINDS, S]: the probability that a path is right at a depth if it was right above.

        Few paths reach a great depth, so the probability of the depth above counts as PRIOR paths.
        """
        made = np.empty_like(self.tried)
        above = self.first
        for depth in range(made.shape[1]):
            above = (self.followed[:, depth] + PRIOR * above) / (self.tried[:, depth] + PRIOR)
            made[:, depth] = above
        return made

    def add(self, kind: int, path: Sequence[int], emitted: Sequence[int]) -> None:
        """Count a path.  emitted: the tokens that the target picked at the depths of the path."""
        self._is_counted = True
        pairs = list(zip(path, emitted, strict=False))[: self.tried.shape[1]]
        followed = next((at for at, (said, got) in enumerate(pairs) if said != got), len(pairs))
        fades = 0.5 ** (1 / HALF_LIFE)
        for counts, depth in ((self.tried, min(followed + 1, len(pairs))), (self.followed, followed)):
            counts[kind] *= fades
            counts[kind, :depth] += 1

    def to_send(self) -> np.ndarray | None:
        """[PATH_KINDS, S] float32: log-probabilities.  None if they have hardly changed since they were sent."""
        if not self._is_counted:
            return None
        now, self._is_counted = self.probabilities, False
        if self._sent is not None and np.abs(now - self._sent).max() < WORTH_SENDING:
            return None
        self._sent = now
        return np.log(now).astype(np.float32)
