"""From what a user writes to what the engine takes: texts and conversations to tokens, parameters to resolved ones.

LLM and the server's front both go through here, so that a prompt means the same offline and over HTTP.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack

from espalier.chat import ChatOptions
from espalier.errors import EspalierError, shown
from espalier.request import ResolvedParams, SamplingParams, check_prompt
from espalier.text import TextStream, Tokenizer

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class ModelFacts:
    """What of a model and its engine a request is checked against.  Plain values: they cross a process.

    model: its directory; max_context: tokens of one request; generation_config: the model's own file, {} without one.
    """

    model: str
    vocab_size: int
    max_context: int
    eos_token_ids: tuple[int, ...] = ()
    generation_config: dict[str, Any] = field(default_factory=dict)


class Intake:
    """tokenizer: None where the model has none; prompts are then token ids.

    allow_special_tokens_in_messages: where chat is not told.
    """

    def __init__(self, facts: ModelFacts, tokenizer: Tokenizer | None, allow_special_tokens_in_messages: bool = False):
        self.facts = facts
        self.allow_special_tokens_in_messages = allow_special_tokens_in_messages
        self.tokenizer = tokenizer

    def tokens(self, prompt: Prompt, add_special_tokens: bool = True, keep_last: int | None = None) -> list[int]:
        """Token ids of a prompt, which the model can start from.

        add_special_tokens: to a text.  keep_last: so many of them.  Raises EspalierError.
        """
        if isinstance(prompt, str):
            check_text(prompt)
            tokens = self.text_of("a text prompt").encode(prompt, add_special_tokens)
        else:
            tokens = list(prompt)
        tokens = tokens if keep_last is None else tokens[-keep_last:]
        check_prompt(tokens, self.facts.vocab_size, self.facts.max_context)
        return tokens

    def chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> list[int]:
        """Token ids of a conversation (chat.ChatOptions).  Raises EspalierError."""
        if isinstance(messages, str) or not all(isinstance(message, Mapping) for message in messages):
            raise EspalierError(
                f'messages={shown(messages)} is not supported; use a list of {{"role": ..., "content": ...}}'
            )
        for message in messages:
            for value in message.values():
                if isinstance(value, str):
                    check_text(value)
        if options.get("allow_special_tokens_in_messages") is None:
            options["allow_special_tokens_in_messages"] = self.allow_special_tokens_in_messages
        return self.text_of("chat").chat(messages, **options)

    def resolve(self, params: SamplingParams) -> ResolvedParams:
        """Parameters with nothing left open, each within what is supported.  Raises EspalierError."""
        resolved = params.resolve(self.facts.generation_config, self.facts.eos_token_ids)
        resolved.validate(self.facts.vocab_size, self.tokenizer is not None)
        return resolved

    def text_of(self, what: str) -> Tokenizer:
        """The tokenizer.  Raises EspalierError, naming what needs it."""
        if self.tokenizer is None:
            raise EspalierError(f"{what} needs a tokenizer and {self.facts.model} has none; give token ids")
        return self.tokenizer


def check_text(text: str) -> None:
    """Refuse half a surrogate pair, which no tokenizer takes.  Raises EspalierError."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise EspalierError(
            f"the prompt holds half a surrogate pair ({text[error.start]!r} at character {error.start}), which is no "
            "text; decode its bytes with errors='replace'"
        ) from None


def text_sink(tokenizer: Tokenizer | None, prompt: Sequence[int], params: ResolvedParams) -> TextStream | None:
    """Where a request's tokens become text, in whichever process; None without a tokenizer."""
    if tokenizer is None:
        return None
    keep, skip = params.include_stop_str_in_output, params.skip_special_tokens
    return tokenizer.sink(prompt, params.stop, params.min_tokens, keep_stop=keep, skip_special_tokens=skip)
