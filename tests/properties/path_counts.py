"""What became of the guesses that sources and draft proposed, counted from the launches: each once, the older ones
less."""

from collections import Counter, defaultdict
from collections.abc import Sequence

from espalier.engine.launch_input import LaunchInput, RequestResult
from espalier.slots import PATH_KINDS, UNDRAFTED_OFFSET
from espalier.speculate.sources.survival import GUESS_HALF_LIFE, SurvivalCounts

# Sums of at most a hundred terms, none above 1.
EXACT = 1e-9


class PathCounts:
    """steps: tokens of a path that are counted.

    by_kind: of each part of a path, the first of its depths, how many tokens of the path were followed, and the end of
    the part that was compared with what was emitted.
    drafted: of each launch, the draft's nodes whose parent came true, by (kind, depth, whether it came true too).
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.by_kind: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
        self.drafted: list[Counter[tuple[int, int, bool]]] = []

    def note(self, launch: LaunchInput, before: Sequence[Sequence[int]], rows: Sequence[RequestResult]) -> None:
        """before: the tokens that were decided before the round, by row."""
        sent = dict(launch.guesses)
        self.drafted.append(Counter(node for row in rows for node in _of_draft(row)))
        for slot, tokens, row in zip(launch.slots, before, rows, strict=True):
            said = {path for path, kind in _lineage(row).values() if kind >= PATH_KINDS}
            for kind, path in row.own_text_paths:
                self._note(kind, path, row.tokens, said)
            for guess in sent.get(slot, ()):
                since = tuple(tokens[guess.start + 1 :])
                if guess.tokens[: len(since)] == since:
                    self._note(guess.kind, guess.tokens[len(since) :], row.tokens, said)

    def _note(self, kind: int, path: Sequence[int], emitted: Sequence[int], drafted: set[tuple[int, ...]]) -> None:
        """drafted: what the draft said in this round; nothing without a draft."""
        compared = min(len(path), len(emitted), self.steps)
        parts = (at for at in range(compared) if path[at] != emitted[at])
        followed, alone = next(parts, compared), compared
        while drafted and alone and tuple(path[:alone]) not in drafted:
            alone -= 1
        if min(followed + 1, alone):
            self.by_kind[kind].append((0, min(followed, alone), min(followed + 1, alone)))
        if alone < min(followed + 1, compared):
            self.by_kind[kind + UNDRAFTED_OFFSET].append((alone, followed, min(followed + 1, compared)))

    def check(self, survival: SurvivalCounts | None) -> None:
        """In lock-step: a request that ends leaves no round in flight.  Raises AssertionError."""
        for kind in () if survival is None else range(len(survival.num_tried)):
            for depth in range(self.steps):
                due, got = self._due(kind, depth), (survival.num_tried[kind, depth], survival.num_right[kind, depth])
                assert max(abs(a - b) for a, b in zip(due, got, strict=True)) < EXACT, (
                    f"of the paths of kind {kind}, {got} were tried and followed at depth {depth + 1}, not {due}"
                )

    def _due(self, kind: int, depth: int) -> tuple[float, float]:
        if kind >= PATH_KINDS:
            return self._due_of_draft(kind, depth + 1)
        paths = self.by_kind[kind]
        weights = [0.5 ** (age / GUESS_HALF_LIFE) for age in reversed(range(len(paths)))]
        weighed = [(weight, *path) for weight, path in zip(weights, paths, strict=True)]
        tried = sum(weight for weight, begin, _, end in weighed if begin <= depth < end)
        return tried, sum(weight for weight, begin, followed, _ in weighed if begin <= depth < followed)

    def _due_of_draft(self, kind: int, depth: int) -> tuple[float, float]:
        tried = found = 0.0
        for nodes in self.drafted:
            of_kind = {at: count for at, count in nodes.items() if at[0] == kind}
            fades = 0.5 ** (sum(of_kind.values()) / GUESS_HALF_LIFE)
            found = found * fades + of_kind.get((kind, depth, True), 0)
            tried = tried * fades + sum(of_kind.get((kind, depth, is_true), 0) for is_true in (True, False))
        return tried, found


def _of_draft(row: RequestResult) -> list[tuple[int, int, bool]]:
    made = []
    for path, kind in _lineage(row).values():
        emitted = tuple(row.tokens[: len(path)])
        if kind >= PATH_KINDS and len(emitted) == len(path) and emitted[:-1] == path[:-1]:
            made.append((kind, len(path), emitted == path))
    return made


def _lineage(row: RequestResult) -> dict[int, tuple[tuple[int, ...], int]]:
    """By candidate, the tokens down to it and its kind."""
    made: dict[int, tuple[tuple[int, ...], int]] = {}
    for node, cell in enumerate([] if row.candidates is None else row.candidates.tolist()):
        token, parent, depth, kind = cell >> 40, cell >> 24 & 0xFFFF, cell >> 12 & 0xFFF, cell & 0xFFF
        if cell >= 0:
            made[node] = ((*(made[parent][0] if parent else ()), token), kind)
            assert len(made[node][0]) == depth
    return made
