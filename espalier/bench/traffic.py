"""Draws the conversations of an open-loop load, with one turn or several, and optional shared beginnings.

A prompt is a random sequence of words of the held-out texts, or of token ids.  So prompts share no prefix except these
beginnings.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from espalier.bench.drive import heldout_texts
from espalier.bench.flags import CHAT, COMPLETIONS

# The variables of chat templates that switch reasoning on.
REASONING_SWITCHES = ("enable_thinking", "thinking")
ENDPOINT_PATHS = {CHAT: "/v1/chat/completions", COMPLETIONS: "/v1/completions"}


@dataclass(frozen=True)
class Turn:
    """One user message.  max_tokens: of its answer.  token_ids: the whole prompt as token ids, instead of `text`."""

    text: str
    max_tokens: int
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Conversation:
    """One conversation of a load.  prefix: the beginning that it shares with other conversations, or "".  index: index
    in the order of arrival.  category: the record's category in the dataset, or ""."""

    index: int
    prefix: str
    turns: tuple[Turn, ...]
    category: str = ""


@dataclass(frozen=True)
class Traffic:
    """The parameters of random conversations.

    input_bounds: the fewest and most words of a turn.  output_bounds: the smallest and largest max_tokens.
    num_prefixes: the number of different shared beginnings, of prefix_words words.  vocab_size: prompts are token ids
    below this number; None for prompts of words."""

    input_bounds: tuple[int, int]
    output_bounds: tuple[int, int]
    num_turns: int = 1
    num_prefixes: int = 0
    prefix_words: int = 0
    vocab_size: int | None = None

    def conversations(self, count: int, seed: int) -> list[Conversation]:
        """Draw `count` conversations.  Equal arguments give equal conversations."""
        rng = random.Random(seed)
        words = _heldout_words() if self.vocab_size is None else range(self.vocab_size)
        beginnings = [rng.choices(words, k=self.prefix_words) for _ in range(self.num_prefixes)] or [[]]
        return [self._conversation(i, rng, words, rng.choice(beginnings)) for i in range(count)]

    def _conversation(self, index: int, rng: random.Random, words: Sequence[Any], prefix: list[Any]) -> Conversation:
        """Draws a conversation.  words: words or token ids to draw from.  prefix: its shared beginning."""
        drawn_turns = [
            (rng.choices(words, k=rng.randint(*self.input_bounds)), rng.randint(*self.output_bounds))
            for _ in range(self.num_turns)
        ]
        if self.vocab_size is None:
            turns = tuple(Turn(" ".join(text), limit) for text, limit in drawn_turns)
            return Conversation(index, " ".join(prefix), turns)
        return Conversation(index, "", tuple(Turn("", limit, token_ids=(*prefix, *ids)) for ids, limit in drawn_turns))


def _heldout_words() -> list[str]:
    return sorted({word for text in heldout_texts() for word in text["reference"].split() if word.isidentifier()})


def request_bodies(
    conversation: Conversation, endpoint: str, answers: Sequence[str], shared_fields: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yields the request body of each turn.  answers: the server's answers so far; the caller appends each answer
    before it takes the next body.  shared_fields: the fields that all bodies share.  endpoint: COMPLETIONS or CHAT."""
    stream = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
    for turn in conversation.turns:
        fields = {**stream, "max_tokens": turn.max_tokens, **shared_fields}
        if endpoint == COMPLETIONS:
            yield {**fields, "prompt": list(turn.token_ids) or plain_prompt(conversation, answers)}
        else:
            yield {**fields, "messages": messages_until_turn(conversation, answers)}


def messages_until_turn(conversation: Conversation, answers: Sequence[str]) -> list[dict[str, str]]:
    """Returns the messages of the conversation, up to the user's turn that follows the last of `answers`."""
    messages = [{"role": "system", "content": conversation.prefix}] if conversation.prefix else []
    for turn, answer in zip(conversation.turns, [*answers, None], strict=False):
        messages.append({"role": "user", "content": turn.text})
        messages += [] if answer is None else [{"role": "assistant", "content": answer}]
    return messages


def plain_prompt(conversation: Conversation, answers: Sequence[str]) -> str:
    """Returns the conversation up to the next user's turn as one text, for a model without a chat template."""
    return " ".join(filter(None, (message["content"] for message in messages_until_turn(conversation, answers))))
