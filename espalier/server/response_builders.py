"""Builds whole responses and stream chunks in OpenAI's format from the engine's output."""

import codecs
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import msgspec

from espalier.inputs import text_stream
from espalier.logprobs import PromptLogprobs, TokenLogprob
from espalier.request import OutputChunk, ResolvedParams
from espalier.server.openai import GenerationRequest
from espalier.server.protocol import OutputPart
from espalier.stats import SpeculationStats, Usage
from espalier.text import TextStream, Tokenizer

to_json = msgspec.json.Encoder().encode
# An example event is made with this text.  The bytes before and after the text become Choice.event_affixes.
TEXT_PLACEHOLDER = "\0"


def sse_event(chunk: dict[str, Any]) -> bytes:
    """Returns one server-sent event."""
    return b"data: " + to_json(chunk) + b"\n\n"


def engine_detokenizes(params: ResolvedParams) -> bool:
    """Returns whether the engine process makes the text, because it must find stop strings."""
    return bool(params.stop)


@dataclass
class Choice:
    """One sample of one prompt.

    prompt: token ids.  make_text_stream: returns the stream that makes the text, or None if the engine process makes
    the text.  keep_stop: whether the text includes the stop token's text.  chunks: all chunks so far; empty for a
    stream.  event_affixes: the bytes before and after the text in a stream event that has only new text; None before
    the first such event.  Three fields are for text_offset of log-probabilities: text_length, the number of characters
    so far; has_text, whether a token had text; character_decoder, which decodes the bytes of the tokens.
    """

    index: int
    prompt: Sequence[int]
    make_text_stream: Callable[[], TextStream | None]
    keep_stop: bool = False
    chunks: list[OutputChunk] = field(default_factory=list)
    num_tokens: int = 0
    text_length: int = 0
    has_text: bool = False
    character_decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )
    event_affixes: tuple[bytes, bytes] | None = None

    @cached_property
    def text_stream(self) -> TextStream | None:
        """The stream that makes the text.  Created for the first chunk, so that the request starts sooner."""
        return self.make_text_stream()

    def add_chunk(self, output: OutputChunk, accumulate: bool) -> OutputChunk:
        """Returns the chunk with its text and finish reasons.  accumulate: also keep the chunk in `chunks`."""
        self.num_tokens += len(output.token_ids)
        text = self.new_text(output)
        finish_reason, stop_reason = self.finish_reasons(output)
        chunk = replace(output, text=text, finish_reason=finish_reason, stop_reason=stop_reason)
        if accumulate:
            self.chunks.append(chunk)
        return chunk

    @cached_property
    def output(self) -> OutputChunk:
        """All `chunks`, joined into one chunk.  Read this property only after the last chunk, because it is cached."""
        logprobs = [each.logprobs for each in self.chunks if each.logprobs is not None]
        entries: Any = [entry for part in logprobs for entry in part] if logprobs else None
        return replace(
            self.chunks[-1],
            text="".join(each.text for each in self.chunks),
            token_ids=[token for each in self.chunks for token in each.token_ids],
            from_draft=[is_drafted for each in self.chunks for is_drafted in each.from_draft],
            logprobs=entries,
            prompt_logprobs=next((p for each in self.chunks if (p := each.prompt_logprobs) is not None), None),
        )

    def finish_reasons(self, output: OutputChunk) -> tuple[str | None, int | str | None]:
        """Returns (finish_reason, stop_reason) of a chunk.  First call new_text for this chunk."""
        return output.finish_reason, output.stop_reason

    def new_text(self, output: OutputChunk) -> str:
        """Returns the text that a chunk adds, without the text of the stop token unless keep_stop is set."""
        if self.text_stream is None:
            return output.text
        ends_with_stop_token = output.finish_reason == "stop" and not self.keep_stop
        self.text_stream.push_tokens(output.token_ids[:-1] if ends_with_stop_token else output.token_ids)
        return self.text_stream.take_text(final=output.finish_reason is not None)


class ResponseBuilder:
    """Builds the response of one HTTP request.  The response has n choices for each prompt, in the prompts' order.

    id: the id of the response.  prompts: token ids.  tokenizer: None if the model has no tokenizer; all texts are then
    empty.  echoed_prompts: the prompts' texts, if the response repeats them (the field echo).
    """

    response_object = ""
    chunk_object = ""
    end_event = b"data: [DONE]\n\n"

    def __init__(
        self,
        id: str,
        body: GenerationRequest,
        params: ResolvedParams,
        prompts: Sequence[list[int]],
        tokenizer: Tokenizer | None,
        echoed_prompts: Sequence[str] = (),
    ):
        self.body = body
        self.params = params
        self.tokenizer = tokenizer
        self.echoed_prompts = echoed_prompts
        self.include_usage = bool(body.stream_options and body.stream_options.include_usage)
        self.reports_usage_in_chunks = bool(body.stream_options and body.stream_options.continuous_usage_stats)
        # Whether a choice's events, except the last and events with log-probabilities, differ only in their text.
        self.events_differ_only_in_text = not (self.reports_usage_in_chunks or body.return_token_ids or body.from_draft)
        self.num_prompt_tokens = sum(len(prompt) for prompt in prompts)
        self.common_fields = {"id": id, "created": int(time.time()), "model": body.model}
        self.choices = [
            self._make_choice(number * params.n + i, prompt)
            for number, prompt in enumerate(prompts)
            for i in range(params.n)
        ]
        self.usages: list[Usage] = []
        self.stats = SpeculationStats()

    def _make_choice(self, index: int, prompt: list[int]) -> Choice:
        """Returns a new choice.  index: its number in the response.  prompt: token ids."""
        return Choice(index, prompt, partial(self._make_text_stream, prompt), self.params.include_stop_str_in_output)

    def _make_text_stream(self, prompt: list[int]) -> TextStream | None:
        """Returns a stream that makes an output's text; None if the engine makes the text."""
        if self.tokenizer is None or engine_detokenizes(self.params):
            return None
        return text_stream(self.tokenizer, prompt, self.params, ())

    def add_output(self, prompt_index: int, part: OutputPart) -> tuple[Choice, OutputChunk]:
        """Add a part of a prompt's output.  Returns (the sample's choice, the part's chunk with its text)."""
        choice = self.choices[prompt_index * self.params.n + part.output.index]
        if part.usage is not None:
            # All n samples share the prompt, so its tokens are counted only in the usage of the first sample.
            is_first = part.output.index == 0
            self.usages.append(part.usage if is_first else replace(part.usage, prompt_tokens=0, cached_tokens=0))
        if part.speculation is not None:
            self.stats.merge(part.speculation)
        return choice, choice.add_chunk(part.output, accumulate=not self.body.stream)

    def add_output_as_event(self, prompt_index: int, part: OutputPart) -> bytes:
        """Add a part of a prompt's output.  Returns the part's stream event; b"" for an empty part."""
        output = part.output
        has_other_fields = output.finish_reason or output.logprobs is not None or output.prompt_logprobs is not None
        if self.events_differ_only_in_text and not has_other_fields:
            choice = self.choices[prompt_index * self.params.n + output.index]
            text = choice.new_text(output)
            return self._text_event(choice, text) if text else b""
        chunk = self.make_chunk(*self.add_output(prompt_index, part))
        return b"" if chunk is None else sse_event(chunk)

    def _text_event(self, choice: Choice, text: str) -> bytes:
        """Returns the event of a chunk that has only text.  The bytes around the text are made once per choice."""
        if choice.event_affixes is None:
            chunk = self.make_chunk(choice, OutputChunk("", text=TEXT_PLACEHOLDER))
            assert chunk is not None
            # The last placeholder is the text.  Values from the client, such as the model's name, may contain others.
            before, _, after = sse_event(chunk).rpartition(to_json(TEXT_PLACEHOLDER))
            choice.event_affixes = before, after
        before, after = choice.event_affixes
        return before + to_json(text) + after

    def make_chunk(self, choice: Choice, output: OutputChunk) -> dict[str, Any] | None:
        """Returns the stream chunk for `output`, which `add_output` returned; None if it would be empty."""
        is_empty = not (output.text or output.finish_reason or output.logprobs or output.prompt_logprobs)
        if is_empty and not (self.body.return_token_ids or self.body.from_draft):
            return None
        return self._wrap_choices([self._chunk_choice(choice, output) | self._espalier_fields(output)])

    def encode_event(self, chunk: dict[str, Any]) -> bytes:
        """Returns the event of a chunk that `first_chunks` or `last_chunks` returned."""
        return sse_event(chunk)

    def error_event(self, error: dict[str, Any]) -> bytes:
        """Returns the event of an error after the start of a stream.  error: the body of an error response."""
        return sse_event(error)

    def first_chunks(self) -> list[dict[str, Any]]:
        """Returns the chunks that come before the first token."""
        return []

    def last_chunks(self) -> list[dict[str, Any]]:
        """Returns the chunks that come after the last token."""
        return [{**self._wrap_choices([]), "usage": self.usage()}] if self.include_usage else []

    def full_response(self) -> dict[str, Any]:
        """Returns the whole response, after all choices have ended."""
        choices = [self._full_choice(choice) | self._espalier_fields(choice.output) for choice in self.choices]
        return {**self.common_fields, "object": self.response_object, "choices": choices, "usage": self.usage()}

    def _first_choice_of_same_prompt(self, choice: Choice) -> Choice:
        """Returns the first choice of the same prompt.  Only this choice has the prompt's log-probabilities."""
        return self.choices[choice.index // self.params.n * self.params.n]

    def _prompt_logprobs_field(self, choice: Choice) -> dict[str, Any]:
        """Returns the field prompt_logprobs in vLLM's form: null for the first token, then an object for each token."""
        count, entries = self.body.prompt_logprobs, self._first_choice_of_same_prompt(choice).output.prompt_logprobs
        if count is None or entries is None:
            return {}
        return {
            "prompt_logprobs": [None if entry is None else self._ranked_logprobs(entry, count) for entry in entries]
        }

    def _ranked_logprobs(self, entry: TokenLogprob, count: int) -> dict[int, dict[str, Any]]:
        """Returns log-probabilities by token id: the prompt's token first, then the `count` likeliest tokens."""
        ranked = {entry.token_id: (entry.logprob, entry.rank)}
        for rank, (token, value) in enumerate(entry.top[:count], 1):
            ranked.setdefault(token, (value, rank))
        return {
            token: {"logprob": value, "rank": rank, "decoded_token": self._token_text(token)}
            for token, (value, rank) in ranked.items()
        }

    def usage(self) -> dict[str, Any]:
        prompt = sum(usage.prompt_tokens for usage in self.usages)
        completion = sum(usage.completion_tokens for usage in self.usages)
        details = self.completion_details()
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in self.usages)},
            **({"completion_tokens_details": details} if details else {}),
            "speculation": self.stats.as_dict(),
        }

    def completion_details(self) -> dict[str, int]:
        """Returns the field completion_tokens_details, which may be empty."""
        if not self.params.prediction:
            return {}
        names = ("accepted_prediction_tokens", "rejected_prediction_tokens")
        return {name: sum(getattr(usage, name) for usage in self.usages) for name in names}

    def _wrap_choices(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Returns a stream chunk with these choices."""
        chunk = {**self.common_fields, "object": self.chunk_object, "choices": choices}
        if not self.reports_usage_in_chunks:
            return {**chunk, "usage": None} if self.include_usage else chunk
        # The usage in a chunk has no cached tokens and no speculation.  Only the usage at the end has them.
        prompt, completion = self.num_prompt_tokens, sum(choice.num_tokens for choice in self.choices)
        usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        return {**chunk, "usage": usage}

    def _espalier_fields(self, output: OutputChunk) -> dict[str, Any]:
        """Returns Espalier's own fields of a choice, which OpenAI's API does not have."""
        fields: dict[str, Any] = {"stop_reason": output.stop_reason}
        if self.body.return_token_ids:
            fields["token_ids"] = output.token_ids
        if self.body.from_draft:
            fields["from_draft"] = output.from_draft
        return fields

    def _chunk_choice(self, choice: Choice, output: OutputChunk) -> dict[str, Any]:
        """Returns the choice's entry in a stream chunk with `output`."""
        raise NotImplementedError

    def _full_choice(self, choice: Choice) -> dict[str, Any]:
        """Returns the choice's entry in the whole response."""
        raise NotImplementedError

    def _token_text(self, token: int) -> str:
        """Returns one token's text, or token_id:ID if the model has no tokenizer.

        Bytes that are no whole character are written in OpenAI's form: bytes:\\xe6\\x97.
        """
        if self.tokenizer is None:
            return f"token_id:{token}"
        part = self.tokenizer.bytes_of(token).bytes
        try:
            return part.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in part)


class CompletionResponseBuilder(ResponseBuilder):
    """Builds the answers of /v1/completions."""

    response_object = chunk_object = "text_completion"

    @property
    def echoes_logprobs(self) -> bool:
        """Whether the echoed prompt has log-probabilities.  If so, a stream sends the prompt's text with them."""
        return bool(self.body.echoes_logprobs)

    def first_chunks(self) -> list[dict[str, Any]]:
        if not self.echoed_prompts or self.echoes_logprobs:
            return []
        echoes = [(choice, OutputChunk("", text=self._echoed_prompt(choice))) for choice in self.choices]
        return [
            self._wrap_choices([self._chunk_choice(choice, echo) | self._espalier_fields(echo)])
            for choice, echo in echoes
        ]

    def _echoed_prompt(self, choice: Choice) -> str:
        """Returns the text of the choice's prompt if the response repeats it, else ""."""
        return self.echoed_prompts[choice.index // self.params.n] if self.echoed_prompts else ""

    def _chunk_choice(self, choice: Choice, output: OutputChunk) -> dict[str, Any]:
        """Returns the entry of `choices` in the stream chunk for `output`."""
        return {
            "index": choice.index,
            "text": (self._echoed_prompt(choice) if output.prompt_logprobs and self.echoes_logprobs else "")
            + output.text,
            "logprobs": self._logprobs(choice, output.prompt_logprobs, output.logprobs),
            "finish_reason": output.finish_reason,
        }

    def _full_choice(self, choice: Choice) -> dict[str, Any]:
        """Returns the entry of `choices` in a response that is not streamed."""
        output = replace(
            choice.output, prompt_logprobs=self._first_choice_of_same_prompt(choice).output.prompt_logprobs
        )
        text = self._echoed_prompt(choice) + output.text
        return {**self._chunk_choice(choice, output), "text": text, **self._prompt_logprobs_field(choice)}

    def _logprobs(
        self, choice: Choice, prompt_entries: PromptLogprobs | None, output_entries: Sequence[TokenLogprob] | None
    ) -> dict[str, Any] | None:
        """Returns the field `logprobs` of a choice.  prompt_entries: used only if the response echoes the prompt."""
        echoed_entries: Sequence[TokenLogprob | None] = []
        if prompt_entries is not None and self.echoes_logprobs:
            echoed_entries = prompt_entries
        if not echoed_entries and output_entries is None:
            return None
        entries = [*echoed_entries, *(output_entries or ())]
        # A prompt's first token has no log-probability, so its entry is None.
        tokens = [choice.prompt[0] if entry is None else entry.token_id for entry in entries]
        return {
            "tokens": [self._token_text(token) for token in tokens],
            "token_logprobs": [None if entry is None else entry.logprob for entry in entries],
            "top_logprobs": [None if entry is None else self._top_logprobs(entry) for entry in entries],
            "text_offset": [
                self._advance_text_offset(choice, token, i < len(echoed_entries)) for i, token in enumerate(tokens)
            ],
        }

    def _top_logprobs(self, entry: TokenLogprob) -> dict[str, float]:
        """Returns log-probabilities by token text.  If a likelier token has the same text, the key is token_id:ID."""
        by_text: dict[str, float] = {}
        for token, value in entry.top[: self.body.logprobs]:
            text = self._token_text(token)
            by_text[f"token_id:{token}" if text in by_text else text] = value
        return by_text

    def _advance_text_offset(self, choice: Choice, token: int, is_echoed: bool) -> int:
        """Returns the token's offset in the text, in characters.  Adds the token's length to choice.text_length.

        A token that continues an incomplete character has the offset of this character.  is_echoed: whether the token
        is in the prompt that the response repeats.
        """
        offset, skip = choice.text_length, self.params.skip_special_tokens
        if self.tokenizer is None:
            return offset
        part = self.tokenizer.bytes_of(token)
        if is_echoed and not part.is_text:
            # The echo has the special tokens that the client wrote, but not those that the tokenizer added.
            skip = not self._echoed_prompt(choice).startswith(part.bytes.decode(), offset)
        if part.is_text or not skip:
            length = len(choice.character_decoder.decode(part.bytes))
            if not choice.has_text:
                # Some tokenizers strip the space before the first token of a text, so decode the token in its context.
                prior_tokens = () if self.echoes_logprobs else choice.prompt
                token_stream = self.tokenizer.text_stream(prior_tokens, skip_special_tokens=skip)
                token_stream.push_token(token)
                length = min(length, len(token_stream.take_text(final=True)))
            choice.text_length, choice.has_text = offset + length, True
        return offset
