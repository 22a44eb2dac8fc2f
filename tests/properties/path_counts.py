"""What became of the guesses that sources and draft proposed, counted from the launches: each once, the older ones
less."""

from collections import Counter, defaultdict
from collections.abc import Sequence

from espalier.engine.launch_input import LaunchInput, RequestResult
from espalier.slots import PATH_KINDS
from espalier.speculate.sources.survival import HALF_LIFE, Survival

# Sums of at most a hundred terms, none above 1.
EXACT = 1e-9


class PathCounts:
    """steps: tokens of a path that are counted.

    by_kind: of each path, how many of its tokens were followed, and how many were compared with what was emitted.
    drafted: of each launch, the draft's nodes whose parent came true, by (kind, depth, whether it came true too).
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.by_kind: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        self.drafted: list[Counter[tuple[int, int, bool]]] = []

    def note(self, launch: LaunchInput, before: Sequence[Sequence[int]], rows: Sequence[RequestResult]) -> None:
        """before: the tokens that were decided before the round, by row."""
        sent = dict(launch.guesses)
        self.drafted.append(Counter(node for row in rows for node in _of_draft(row)))
        for slot, tokens, row in zip(launch.slots, before, rows, strict=True):
            for kind, path in row.said:
                self._note(kind, path, row.tokens)
            for guess in sent.get(slot, ()):
                since = tuple(tokens[guess.start + 1 :])
                if guess.tokens[: len(since)] == since:
                    self._note(guess.kind, guess.tokens[len(since) :], row.tokens)

    def _note(self, kind: int, path: Sequence[int], emitted: Sequence[int]) -> None:
        compared = min(len(path), len(emitted), self.steps)
        parts = (at for at in range(compared) if path[at] != emitted[at])
        self.by_kind[kind].append((next(parts, compared), compared))

    def check(self, survival: Survival | None) -> None:
        """In lock-step: a request that ends leaves no round in flight.  Raises AssertionError."""
        for kind in () if survival is None else range(len(survival.tried)):
            for depth in range(self.steps):
                due, got = self._due(kind, depth), (survival.tried[kind, depth], survival.followed[kind, depth])
                assert max(abs(a - b) for a, b in zip(due, got, strict=True)) < EXACT, (
                    f"of the paths of kind {kind}, {got} were tried and followed at depth {depth + 1}, not {due}"
                )

    def _due(self, kind: int, depth: int) -> tuple[float, float]:
        if kind >= PATH_KINDS:
            return self._due_of_draft(kind, depth + 1)
        paths = self.by_kind[kind]
        weights = [0.5 ** (age / HALF_LIFE) for age in reversed(range(len(paths)))]
        weighed = [(weight, *path) for weight, path in zip(weights, paths, strict=True)]
        tried = sum(weight for weight, followed, compared in weighed if depth < min(followed + 1, compared))
        return tried, sum(weight for weight, followed, _ in weighed if depth < followed)

    def _due_of_draft(self, kind: int, depth: int) -> tuple[float, float]:
        tried = found = 0.0
        for nodes in self.drafted:
            of_kind = {at: count for at, count in nodes.items() if at[0] == kind}
            fades = 0.5 ** (sum(of_kind.values()) / HALF_LIFE)
            found = found * fades + of_kind.get((kind, depth, True), 0)
            tried = tried * fades + sum(of_kind.get((kind, depth, is_true), 0) for is_true in (True, False))
        return tried, found


def _of_draft(row: RequestResult) -> list[tuple[int, int, bool]]:
    cells = [] if row.candidates is None else row.candidates.tolist()
    true, made = {0}, []
    for node, cell in enumerate(cells):
        token, parent, depth, kind = cell >> 40, cell >> 24 & 0xFFFF, cell >> 12 & 0xFFF, cell & 0xFFF
        if cell < 0 or parent not in true or depth > len(row.tokens):
            continue
        if row.tokens[depth - 1] == token:
            true.add(node)
        if kind >= PATH_KINDS:
            made.append((kind, depth, node in true))
    return made
