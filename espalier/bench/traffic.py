"""What an open loop sends: conversations of one turn or several, whose beginnings may be shared.

Prompts are words of the held-out texts in random order, so that no two share more than they should.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from espalier.bench.drive import heldout
from espalier.bench.flags import CHAT, COMPLETIONS

PATHS = {CHAT: "/v1/chat/completions", COMPLETIONS: "/v1/completions"}


@dataclass(frozen=True)
class Turn:
    text: str
    max_tokens: int


@dataclass(frozen=True)
class Conversation:
    """prefix: what others begin with too, "" for nothing; number: in the order of arrival."""

    number: int
    prefix: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Traffic:
    """inputs: fewest and most words of a turn; outputs: fewest and most max_tokens; turns: of a conversation.

    prefixes: number of different beginnings, of prefix_words words; 0 for none.
    """

    inputs: tuple[int, int]
    outputs: tuple[int, int]
    turns: int = 1
    prefixes: int = 0
    prefix_words: int = 0

    def conversations(self, count: int, seed: int) -> list[Conversation]:
        """Equal arguments give equal conversations, so servers can be compared."""
        chance, words = random.Random(seed), _words()
        beginnings = [" ".join(chance.choices(words, k=self.prefix_words)) for _ in range(self.prefixes)] or [""]
        return [
            Conversation(i, chance.choice(beginnings), tuple(self._turn(chance, words) for _ in range(self.turns)))
            for i in range(count)
        ]

    def _turn(self, chance: random.Random, words: Sequence[str]) -> Turn:
        return Turn(" ".join(chance.choices(words, k=chance.randint(*self.inputs))), chance.randint(*self.outputs))


def _words() -> list[str]:
    return sorted({word for text in heldout() for word in text["reference"].split() if word.isidentifier()})


def bodies(
    talk: Conversation, endpoint: str, answers: Sequence[str], same: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """The request of each turn.  answers: grows by the server's answer before the next turn is taken; same: further
    fields of every request."""
    stream = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
    for i, turn in enumerate(talk.turns):
        said = [each.text for each in talk.turns[: i + 1]]
        fields = {**stream, "max_tokens": turn.max_tokens, **same}
        if endpoint == COMPLETIONS:
            mixed = [part for pair in zip(said, [*answers, ""], strict=True) for part in pair]
            yield {**fields, "prompt": " ".join(filter(None, [talk.prefix, *mixed]))}
            continue
        messages = [{"role": "system", "content": talk.prefix}] if talk.prefix else []
        for text, answer in zip(said, [*answers, None], strict=True):
            messages.append({"role": "user", "content": text})
            messages += [] if answer is None else [{"role": "assistant", "content": answer}]
        yield {**fields, "messages": messages}
