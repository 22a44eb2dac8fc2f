"""How likely paths go on, counted by kind and depth over all requests; older counts fade.

The counts come from results that the host reads anyway, and each guess is counted once: when the round that it was sent
with is read.  So equal requests in equal order give equal numbers.
"""

from collections.abc import Sequence

import numpy as np

from espalier.slots import PATH_KINDS, SOURCES, STRENGTHS

# The first survival of each source, by strength.  Of text, a match of m tokens: m / (m + 1).
FIRST = {"text": (1 / 2, 2 / 3, 3 / 4, 4 / 5), "prediction": (0.6, 0.8, 0.9, 0.95), "index": (0.5, 0.7, 0.85, 0.92)}
# The first survival counts as much as PRIOR paths.  A path counts half after HALF_LIFE others of its kind.
PRIOR = 4.0
HALF_LIFE = 256.0
# Numbers are sent again when one has moved by so much.
WORTH_SENDING = 0.02


class Survival:
    """tried, followed: [PATH_KINDS, S], paths that agreed down to a depth, and how many of them agreed there too."""

    def __init__(self, steps: int) -> None:
        by_kind = [1.0, *(FIRST[source][strength] for source in SOURCES for strength in range(STRENGTHS))]
        self.first = np.array(by_kind)
        self.tried = np.zeros((PATH_KINDS, steps))
        self.followed = np.zeros((PATH_KINDS, steps))
        self._sent: np.ndarray | None = None
        self._is_counted = True

    @property
    def probabilities(self) -> np.ndarray:
        """[PATH_KINDS, S]: that a path goes on at a depth, if it did down to there.

        Few paths come to a great depth, so the depth above counts too: as PRIOR paths.
        """
        made = np.empty_like(self.tried)
        above = self.first
        for depth in range(made.shape[1]):
            above = (self.followed[:, depth] + PRIOR * above) / (self.tried[:, depth] + PRIOR)
            made[:, depth] = above
        return made

    def add(self, kind: int, path: Sequence[int], emitted: Sequence[int]) -> None:
        """Count a path.  emitted: the tokens that were decided in its place, all of which the target has picked."""
        self._is_counted = True
        pairs = list(zip(path, emitted, strict=False))[: self.tried.shape[1]]
        followed = next((at for at, (said, got) in enumerate(pairs) if said != got), len(pairs))
        fades = 0.5 ** (1 / HALF_LIFE)
        for counts, depth in ((self.tried, min(followed + 1, len(pairs))), (self.followed, followed)):
            counts[kind] *= fades
            counts[kind, :depth] += 1

    def to_send(self) -> np.ndarray | None:
        """[PATH_KINDS, S] float32: log-probabilities, if they have changed since they were sent; else None."""
        if not self._is_counted:
            return None
        now, self._is_counted = self.probabilities, False
        if self._sent is not None and np.abs(now - self._sent).max() < WORTH_SENDING:
            return None
        self._sent = now
        return np.log(now).astype(np.float32)
