"""Asks the host's sources for guesses for the rounds of a batch, and counts which guesses came true."""

from collections.abc import Sequence
from itertools import chain

import numpy as np

from espalier.engine.launch_input import Launch, RequestResult
from espalier.layout import RoundLayout
from espalier.request import Request
from espalier.slots import Guess, guess_width
from espalier.speculate.sources.base import HostSource
from espalier.speculate.sources.survival import Survival

OfSlots = tuple[tuple[int, tuple[Guess, ...]], ...]


class Guesses:
    """sources: in order of preference.  If there are more guesses than a round carries, the first ones are taken."""

    def __init__(self, layout: RoundLayout, sources: Sequence[HostSource]):
        self.layout = layout
        self.sources = sources
        self.survival = Survival(layout.steps) if layout.text_paths or layout.sent_paths else None

    def enter(self, request: Request) -> None:
        for source in self.sources:
            source.enter(request)

    def read(self, request: Request, tokens: Sequence[int]) -> None:
        """Called when tokens were appended to the request."""
        for source in self.sources:
            source.read(request, tokens)

    def leave(self, request: Request) -> None:
        for source in self.sources:
            source.leave(request)

    def next(self, batch: Sequence[Request]) -> tuple[OfSlots, np.ndarray | None]:
        """LaunchInput.guesses and LaunchInput.survival for a round of these requests.  Both empty without requests."""
        survival = None if self.survival is None or not batch else self.survival.to_send()
        found = ((request.slot, self._guesses_of(request)) for request in batch if request.slot is not None)
        return tuple((slot, guesses) for slot, guesses in found if guesses), survival

    def _guesses_of(self, request: Request) -> tuple[Guess, ...]:
        if not request.params.depth_limit(self.layout.steps):
            return ()
        width = guess_width(self.layout)
        guesses = chain.from_iterable(source.guesses(request, width) for source in self.sources)
        by_token: dict[int, Guess] = {}
        for guess in guesses:
            by_token.setdefault(guess.tokens[0], guess)
        return tuple(by_token.values())[: self.layout.sent_paths]

    def count(self, launch: Launch, rows: Sequence[RequestResult]) -> None:
        """Count the guesses of a launch that came true.  Called before its tokens are appended.  rows: the launch's
        results."""
        by_slot = dict(launch.launch_input.guesses)
        for (request, generation, _), row in zip(launch.members, rows, strict=True):
            if generation == request.generation and request.slot is not None:
                self._count(by_slot.get(request.slot, ()), request, row)

    def _count(self, guesses: Sequence[Guess], request: Request, row: RequestResult) -> None:
        if self.survival is None:
            return
        for kind, tokens in row.said:
            self.survival.add(kind, tokens, row.tokens)
        for guess in guesses:
            known = tuple(request.output[guess.start + 1 - len(request.prompt) :])
            if guess.tokens[: len(known)] == known:
                self.survival.add(guess.kind, guess.tokens[len(known) :], row.tokens)
