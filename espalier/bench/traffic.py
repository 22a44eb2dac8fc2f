"""The conversations that an open loop sends, of one turn or several, with shared beginnings on request.

Prompts are words of the held-out texts, or token ids, in random order.  So no two prompts share more than they should.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from espalier.bench.drive import heldout_json
from espalier.bench.flags import CHAT, COMPLETIONS

# The variables with which chat templates switch reasoning on.
REASONING_SWITCHES = ("enable_thinking", "thinking")
ENDPOINT_PATHS = {CHAT: "/v1/chat/completions", COMPLETIONS: "/v1/completions"}


@dataclass(frozen=True)
class Turn:
    """One turn of the user.  ids: the whole prompt as token ids, instead of `text`."""

    text: str
    max_tokens: int
    ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Conversation:
    """A conversation of the load.

    prefix: the beginning that it shares with others, "" for none; number: in the order of arrival; category: of a
    dataset.
    """

    number: int
    prefix: str
    turns: tuple[Turn, ...]
    category: str = ""


@dataclass(frozen=True)
class Traffic:
    """The kind of conversations to draw.

    inputs: fewest and most words of a turn; outputs: fewest and most max_tokens; turns: of a conversation.
    prefixes: number of different beginnings, of prefix_words words each; 0 for none.  token_ids: prompts are token ids
    below this number; None: prompts are words.
    """

    inputs: tuple[int, int]
    outputs: tuple[int, int]
    turns: int = 1
    prefixes: int = 0
    prefix_words: int = 0
    token_ids: int | None = None

    def conversations(self, count: int, seed: int) -> list[Conversation]:
        """Draw conversations.  Equal arguments give equal conversations, so servers can be compared."""
        chance = random.Random(seed)
        words = _words() if self.token_ids is None else range(self.token_ids)
        beginnings = [chance.choices(words, k=self.prefix_words) for _ in range(self.prefixes)] or [[]]
        return [self._conversation(i, chance, words, chance.choice(beginnings)) for i in range(count)]

    def _conversation(
        self, number: int, chance: random.Random, words: Sequence[Any], beginning: list[Any]
    ) -> Conversation:
        drawn = [
            (chance.choices(words, k=chance.randint(*self.inputs)), chance.randint(*self.outputs))
            for _ in range(self.turns)
        ]
        if self.token_ids is None:
            return Conversation(number, " ".join(beginning), tuple(Turn(" ".join(text), most) for text, most in drawn))
        return Conversation(number, "", tuple(Turn("", most, ids=(*beginning, *ids)) for ids, most in drawn))


def _words() -> list[str]:
    return sorted({word for text in heldout_json() for word in text["reference"].split() if word.isidentifier()})


def request_bodies(
    talk: Conversation, endpoint: str, answers: Sequence[str], same: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yields the request body of each turn.

    answers: the caller adds the server's answer before it takes the next body; same: fields of every request.
    """
    stream = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
    for turn in talk.turns:
        fields = {**stream, "max_tokens": turn.max_tokens, **same}
        if endpoint == COMPLETIONS:
            yield {**fields, "prompt": list(turn.ids) or plain_prompt(talk, answers)}
        else:
            yield {**fields, "messages": messages_until_turn(talk, answers)}


def messages_until_turn(talk: Conversation, answers: Sequence[str]) -> list[dict[str, str]]:
    """The messages of the conversation, up to the turn after these answers."""
    made = [{"role": "system", "content": talk.prefix}] if talk.prefix else []
    for turn, answer in zip(talk.turns, [*answers, None], strict=False):
        made.append({"role": "user", "content": turn.text})
        made += [] if answer is None else [{"role": "assistant", "content": answer}]
    return made


def plain_prompt(talk: Conversation, answers: Sequence[str]) -> str:
    """The conversation up to the turn after these answers, as one text for a model without a chat template."""
    return " ".join(filter(None, (message["content"] for message in messages_until_turn(talk, answers))))
