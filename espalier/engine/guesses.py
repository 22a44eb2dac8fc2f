"""Asks the sources on the host (such as the text that a client predicts) for guesses of the next tokens, and counts
which guesses were correct."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from espalier.engine.launch_input import Launch, RequestResult
from espalier.engine.tree_choice import LookupGain
from espalier.layout import RoundLayout, TreeShape
from espalier.request import Request
from espalier.slots import ALL_SOURCES, Guess, max_guess_length
from espalier.speculate.sources.base import HostSource
from espalier.speculate.sources.calibrate import CandidateNodes
from espalier.speculate.sources.survival import SurvivalCounts

# For a round with a draft, a guess is sent to the device only if its first token is correct with at least this
# probability.  Less probable guesses seldom get nodes in the tree.
MIN_REACH_PROBABILITY_WITH_DRAFT = 0.6
# A token of a guess gets a row of the verify pass if, with at least this probability, the guess is correct up to and
# including the token.  Verifying one more row takes about this share of the time per emitted token.
MIN_REACH_PROBABILITY = 0.06
# The counts of correct guesses are logged after this many rounds, and each time that the number of rounds has doubled.
FIRST_LOGGED_ROUND = 256
log = logging.getLogger("espalier")

GuessesBySlot = tuple[tuple[int, tuple[Guess, ...]], ...]


class GuessFields(NamedTuple):
    """The fields of a round's LaunchInput that come from guesses, under the same names."""

    guesses: GuessesBySlot = ()
    survival: np.ndarray | None = None
    draft_skill: tuple[float, ...] = ()


class SourceGuesses(NamedTuple):
    """The guesses that the sources made for a round.  lookup_gain: the expected gain of a round that verifies these
    guesses alone, without a tree of the draft; None if unknown."""

    guesses_by_slot: GuessesBySlot = ()
    lookup_gain: LookupGain | None = None


# Passed to `launch_fields` for a prefill pass, which has no guesses.
NO_GUESSES = SourceGuesses()


class GuessSources:
    """The sources of guesses, and the counts of correct guesses.

    sources: in order of preference.  If a request has more guesses than a round can verify, the guesses of the first
    sources are kept.
    survival: counts how often guesses are correct; None if scores are not calibrated (sources/calibrate.py).
    counts_by_source: [ALL_SOURCES, 3], the sums of RequestResult.counts_by_source over `num_counted_rounds` rounds."""

    def __init__(self, layout: RoundLayout, sources: Sequence[HostSource]):
        self.layout = layout
        self.sources = sources
        self.survival = SurvivalCounts(layout.steps) if layout.calibrates_scores else None
        self.counts_by_source = np.zeros((len(ALL_SOURCES), 3))
        self.num_counted_rounds = 0

    def add_request(self, request: Request) -> None:
        for source in self.sources:
            source.add_request(request)

    def add_tokens(self, request: Request, tokens: Sequence[int]) -> None:
        """Called when tokens were appended to the request."""
        for source in self.sources:
            source.add_tokens(request, tokens)

    def remove_request(self, request: Request) -> None:
        for source in self.sources:
            source.remove_request(request)
        if self.survival is not None:
            self.survival.counts_of_request.pop(request.id, None)

    def ask_sources(self, batch: Sequence[Request]) -> SourceGuesses:
        """Asks the sources for guesses for the next round of these requests."""
        if self.survival is None or not self.sources:
            return SourceGuesses()
        guesses_of_slots = ((request.slot, self._guesses_of(request)) for request in batch if request.slot is not None)
        guesses = tuple((slot, slot_guesses) for slot, slot_guesses in guesses_of_slots if slot_guesses)
        return SourceGuesses(guesses, self._lookup_gain(batch, guesses))

    def _guesses_of(self, request: Request) -> tuple[Guess, ...]:
        """Returns the sources' guesses for a request: at most one for each first token, at most num_sent_paths."""
        if not request.params.depth_limit(self.layout.steps):
            return ()
        width = max_guess_length(self.layout) if request.rounds_in_flight else self.layout.steps
        guesses = chain.from_iterable(source.guesses(request, width) for source in self.sources)
        guess_by_first_token: dict[int, Guess] = {}
        for guess in guesses:
            guess_by_first_token.setdefault(guess.tokens[0], guess)
        return tuple(guess_by_first_token.values())[: self.layout.num_sent_paths]

    def _lookup_gain(self, batch: Sequence[Request], guesses: GuessesBySlot) -> LookupGain | None:
        """Returns the expected gain of the next round if it verifies these guesses alone.

        None if the gain is unknown, because a round is in flight, or because a source on the device guesses too."""
        if self.layout.num_text_paths or any(request.rounds_in_flight for request in batch):
            return None
        gained, rows = 0.0, len(batch)
        samples = {request.slot: request.params.temperature > 0 for request in batch}
        for slot, slot_guesses in guesses:
            none_before = 1.0
            for guess in slot_guesses:
                reach = self._reach_probabilities(guess, samples[slot])
                gained += none_before * sum(reach)
                none_before *= 1 - reach[0] if reach else 1.0
                rows += len(reach)
        return LookupGain(gained / len(batch), rows)

    def _reach_probabilities(self, guess: Guess, is_sampled: bool) -> list[float]:
        """Returns, for each token that is worth a row of the verify pass (MIN_REACH_PROBABILITY), the probability that
        the guess is correct up to and including this token."""
        assert self.survival is not None
        reached = self.survival.path_probabilities(guess.kind, is_sampled)[: len(guess.tokens)]
        return [reach for reach in reached if reach >= MIN_REACH_PROBABILITY]

    def launch_fields(
        self, batch: Sequence[Request], source_guesses: SourceGuesses, tree: TreeShape | None
    ) -> GuessFields:
        """Returns the fields of LaunchInput that hold the guesses, for a round with this tree.

        If lookup_gain is known, only guesses that are worth their rows in the verify pass are sent."""
        if self.survival is None or source_guesses is NO_GUESSES or (tree is not None and not tree.steps):
            return GuessFields()
        guesses = source_guesses.guesses_by_slot
        if source_guesses.lookup_gain is not None and tree is not None:
            samples = {request.slot: request.params.temperature > 0 for request in batch}
            kept = (
                (slot, self._guesses_worth_sending(slot_guesses, tree, samples[slot])) for slot, slot_guesses in guesses
            )
            guesses = tuple((slot, slot_guesses) for slot, slot_guesses in kept if slot_guesses)
        return GuessFields(
            guesses, self.survival.table_to_send(), tuple(self.survival.draft_skill(request.id) for request in batch)
        )

    def _guesses_worth_sending(self, guesses: Sequence[Guess], tree: TreeShape, is_sampled: bool) -> tuple[Guess, ...]:
        """Returns the guesses of one request that are likely enough, each cut after its last likely token."""
        kept = []
        for guess in guesses:
            reach = self._reach_probabilities(guess, is_sampled)
            if reach and (not tree.drafts or reach[0] >= MIN_REACH_PROBABILITY_WITH_DRAFT):
                kept.append(replace(guess, tokens=guess.tokens[: len(reach)]))
        return tuple(kept)

    def count_correct_guesses(self, launch: Launch, results: Sequence[RequestResult]) -> list[int]:
        """Counts the correct guesses of a launch, before the launch's tokens are appended to the requests.

        Returns for each request the largest number of correct tokens in one guess of a source other than the draft."""
        if self.survival is None:
            return [0] * len(results)
        guesses_by_slot = dict(launch.guesses)
        num_correct = [0] * len(results)
        request_ids: list[str] = []
        candidates: list[np.ndarray] = []
        emitted_tokens: list[Sequence[int]] = []
        for place, ((request, generation, _), result) in enumerate(zip(launch.launched_requests, results, strict=True)):
            if generation != request.generation or request.slot is None:
                continue
            num_correct[place] = self._count_correct_guesses(guesses_by_slot.get(request.slot, ()), request, result)
            # For a request that never speculates, the draft does not run over all tokens, so its guesses are noise.
            speculates = request.params.depth_limit(self.layout.steps) > 0
            if speculates and result.candidates is not None and result.counts_by_source is not None:
                request_ids.append(request.id)
                candidates.append(result.candidates)
                emitted_tokens.append(result.tokens)
                self.counts_by_source += result.counts_by_source
        if request_ids:
            self._log_counts()
            self.survival.count_draft_nodes(request_ids, np.stack(candidates), emitted_tokens)
        return num_correct

    def _log_counts(self) -> None:
        self.num_counted_rounds += 1
        if self.num_counted_rounds < FIRST_LOGGED_ROUND or self.num_counted_rounds & (self.num_counted_rounds - 1):
            return
        source_texts = (
            f"{name} {num_rows:.0f} rows, {num_accepted:.0f} accepted of {num_expected:.0f} expected"
            for name, (num_rows, num_expected, num_accepted) in zip(ALL_SOURCES, self.counts_by_source, strict=True)
            if num_rows
        )
        log.info("guesses of %d rounds: %s", self.num_counted_rounds, "; ".join(source_texts))

    def _count_correct_guesses(self, guesses: Sequence[Guess], request: Request, result: RequestResult) -> int:
        """Counts the guesses of one request.  Returns the largest number of correct tokens in one guess."""
        assert self.survival is not None
        draft_sequences = (
            None if result.candidates is None else CandidateNodes.unpack(result.candidates).draft_sequences
        )
        paths = list(result.own_text_paths)
        for guess in guesses:
            decided_tokens = tuple(request.output[guess.start + 1 - len(request.prompt) :])
            if guess.tokens[: len(decided_tokens)] == decided_tokens:
                paths.append((guess.kind, guess.tokens[len(decided_tokens) :]))
        samples = request.params.temperature > 0
        num_correct = [
            self.survival.count_path(kind, tokens, result.tokens, _num_also_drafted(tokens, draft_sequences), samples)
            for kind, tokens in paths
        ]
        return max(num_correct, default=0)


def _num_also_drafted(path: Sequence[int], draft_sequences: set[tuple[int, ...]] | None) -> int | None:
    """Returns how many tokens at the start of a guessed path the draft proposed too; None without a draft.

    draft_sequences: the token sequences of the draft's nodes (CandidateNodes)."""
    if not draft_sequences:
        return None
    return next((at for at in range(len(path)) if tuple(path[: at + 1]) not in draft_sequences), len(path))
