"""From what a user writes to what the engine takes: texts and conversations to tokens, parameters to resolved ones.

LLM and the server's front both go through here, so that a prompt means the same offline and over HTTP.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack

from espalier.errors import EspalierError, prompt_too_long
from espalier.request import ResolvedParams, SamplingParams, check_prompt
from espalier.text import ChatOptions, TextStream, Tokenizer
from espalier.text_bound import TextBound

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
    """tokenizer: None where the model has none; prompts are then token ids."""

    def __init__(self, facts: ModelFacts, tokenizer: Tokenizer | None):
        self.facts = facts
        self.tokenizer = tokenizer
        self.bound = TextBound(None if tokenizer is None else tokenizer.backend)

    def for_another_thread(self) -> "Intake":
        """The same with a tokenizer of its own: one is used by one thread at a time."""
        other = copy.copy(self)
        other.tokenizer = copy.deepcopy(self.tokenizer)
        return other

    def tokens(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, which the model can start from.  Raises EspalierError."""
        if isinstance(prompt, str):
            tokenizer = self.text_of("a text prompt")
            self.require_fit(prompt)
            tokens = tokenizer.encode(prompt)
        else:
            tokens = list(prompt)
        check_prompt(tokens, self.facts.vocab_size, self.facts.max_context)
        return tokens

    def require_fit(self, text: str) -> None:
        """Refuse a text that surely has more tokens than a prompt may.  Raises EspalierError."""
        if self.bound.exceeds(text, self.facts.max_context - 1):
            raise prompt_too_long(f"{len(text)} characters", self.facts.max_context)

    def chat(
        self, messages: Messages, check: Callable[[str], None] | None = None, **options: Unpack[ChatOptions]
    ) -> list[int]:
        """Token ids of a conversation (text.ChatOptions).  check: called with its text.  Raises EspalierError."""
        return self.text_of("chat").chat(messages, check=check, **options)

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


def text_sink(tokenizer: Tokenizer | None, prompt: Sequence[int], params: ResolvedParams) -> TextStream | None:
    """Where a request's tokens become text, in whichever process; None without a tokenizer."""
    if tokenizer is None:
        return None
    keep, skip = params.include_stop_str_in_output, params.skip_special_tokens
    return tokenizer.sink(prompt, params.stop, params.min_tokens, keep_stop=keep, skip_special_tokens=skip)
