"""Draws the conversations of an open-loop load, with one turn or several, and optional shared beginnings.

Prompts are words of the held-out texts, or token ids, in random order.  So prompts share no other prefixes.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from espalier.bench.drive import heldout_json
from espalier.bench.flags import CHAT, COMPLETIONS

# The variables of chat templates that switch reasoning on.
REASONING_SWITCHES = ("enable_thinking", "thinking")
ENDPOINT_PATHS = {CHAT: "/v1/chat/completions", COMPLETIONS: "/v1/completions"}


@dataclass(frozen=True)
class Turn:
    """One user message.  ids: the whole prompt as token ids, instead of `text`."""

    text: str
    max_tokens: int
    ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Conversation:
    """One conversation of a load.  prefix: the beginning that it shares with other conversations, or "".  number: index
    in the order of arrival. category: the dataset's category."""

    number: int
    prefix: str
    turns: tuple[Turn, ...]
    category: str = ""


@dataclass(frozen=True)
class Traffic:
    """The parameters of random conversations.

    inputs: the fewest and most words of a turn.  outputs: the smallest and largest max_tokens.  turns: the turns of a
    conversation.  prefixes: the number of different shared beginnings, of prefix_words words each; 0 for none.
    token_ids: prompts are token ids below this number; None for prompts of words.
    """

    inputs: tuple[int, int]
    outputs: tuple[int, int]
    turns: int = 1
    prefixes: int = 0
    prefix_words: int = 0
    token_ids: int | None = None

    def conversations(self, count: int, seed: int) -> list[Conversation]:
        """Draw `count` conversations.  Equal arguments give equal conversations, so servers can be compared."""
        chance = random.Random(seed)
        words = _words() if self.token_ids is None else range(self.token_ids)
        beginnings = [chance.choices(words, k=self.prefix_words) for _ in range(self.prefixes)] or [[]]
        return [self._conversation(i, chance, words, chance.choice(beginnings)) for i in range(count)]

    def _conversation(
        self, number: int, rng: random.Random, words: Sequence[Any], beginning: list[Any]
    ) -> Conversation:
        drawn = [
            (rng.choices(words, k=rng.randint(*self.inputs)), rng.randint(*self.outputs)) for _ in range(self.turns)
        ]
        if self.token_ids is None:
            return Conversation(number, " ".join(beginning), tuple(Turn(" ".join(text), most) for text, most in drawn))
        return Conversation(number, "", tuple(Turn("", most, ids=(*beginning, *ids)) for ids, most in drawn))


def _words() -> list[str]:
    return sorted({word for text in heldout_json() for word in text["reference"].split() if word.isidentifier()})


def request_bodies(
    talk: Conversation, endpoint: str, answers: Sequence[str], same: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yields the request body of each turn.  answers: the caller appends each answer before it takes the next body.
    same: the fields that all bodies share."""
    stream = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
    for turn in talk.turns:
        fields = {**stream, "max_tokens": turn.max_tokens, **same}
        if endpoint == COMPLETIONS:
            yield {**fields, "prompt": list(turn.ids) or plain_prompt(talk, answers)}
        else:
            yield {**fields, "messages": messages_until_turn(talk, answers)}


def messages_until_turn(talk: Conversation, answers: Sequence[str]) -> list[dict[str, str]]:
    """Returns the messages of the conversation, up to the turn that follows `answers`."""
    made = [{"role": "system", "content": talk.prefix}] if talk.prefix else []
    for turn, answer in zip(talk.turns, [*answers, None], strict=False):
        made.append({"role": "user", "content": turn.text})
        made += [] if answer is None else [{"role": "assistant", "content": answer}]
    return made


def plain_prompt(talk: Conversation, answers: Sequence[str]) -> str:
    """Returns the same messages as one text, for a model without a chat template."""
    return " ".join(filter(None, (message["content"] for message in messages_until_turn(talk, answers))))
