"""Builds the responses of /v1/chat/completions, with tool calls and reasoning read from the tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from espalier.inputs import message_stream
from espalier.logprobs import TokenLogprob
from espalier.request import OutputChunk, ResolvedParams
from espalier.server.answers import Answer, Choice
from espalier.server.openai import Generating
from espalier.server.protocol import Part
from espalier.text import Tokenizer
from espalier.tool_calls import base
from espalier.tool_calls.message_stream import MessageStream
from espalier.tool_calls.parser import message_of
from espalier.tool_calls.plan import ChatPlan


@dataclass
class ChatChoice(Choice):
    """A choice whose tokens are read as a message.

    make_stream: makes what reads them, None if all text is content.  parts: the deltas of the last chunk; deltas: all
    so far, if the response is whole; calls: indices of the calls so far that are not broken.
    """

    make_stream: Callable[[], MessageStream] | None = None
    is_whole: bool = True
    parts: list[base.Delta] = field(default_factory=list)
    deltas: list[base.Delta] = field(default_factory=list)
    calls: set[int] = field(default_factory=set)

    @cached_property
    def stream(self) -> MessageStream:
        """Made with the first part: before, the request would wait for it."""
        assert self.make_stream is not None
        return self.make_stream()

    @property
    def num_reasoning(self) -> int:
        """Tokens of the reasoning."""
        return 0 if self.make_stream is None else self.stream.num_reasoning

    def new_text(self, output: OutputChunk) -> str:
        """The text of a chunk, "" where it is read as parts."""
        if self.make_stream is None:
            return super().new_text(output)
        self.parts = self.stream.read(output)
        for part in self.parts:
            if part.kind == "call":
                self.calls.add(part.index)
            elif part.kind == "broken":
                self.calls.discard(part.index)
        if self.is_whole:
            self.deltas += self.parts
        return ""

    def ends(self, output: OutputChunk) -> tuple[str | None, int | str | None]:
        return super().ends(output) if self.make_stream is None else self.stream.ends(output)

    def ending(self, reason: str | None) -> str | None:
        """The finish_reason: "tool_calls" for an output that ended by itself and has calls."""
        return "tool_calls" if reason == "stop" and self.calls else reason


class ChatAnswer(Answer):
    """/v1/chat/completions.  plan: None if all of the text is content."""

    object_whole = "chat.completion"
    object_chunk = "chat.completion.chunk"

    def __init__(
        self,
        id: str,
        body: Generating,
        params: ResolvedParams,
        prompts: Sequence[list[int]],
        tokenizer: Tokenizer | None,
        plan: ChatPlan | None = None,
    ):
        self.plan = plan
        super().__init__(id, body, params, prompts, tokenizer)
        self.shows_reasoning = getattr(body, "include_reasoning", None) is not False
        self.text_only = self.text_only and not (plan is not None and plan.has_parser)

    def _choice(self, index: int, prompt: list[int]) -> Choice:
        choice = ChatChoice(index, prompt, partial(self._sink, prompt), self.params.include_stop_str_in_output)
        if self.plan is not None and self.plan.has_parser and self.tokenizer is not None:
            choice.make_stream = partial(self._stream, self.tokenizer, self.plan, prompt)
        choice.is_whole = not self.body.stream
        return choice

    def _stream(self, tokenizer: Tokenizer, plan: ChatPlan, prompt: list[int]) -> MessageStream:
        parser = plan.parser(prompt)
        assert parser is not None
        return message_stream(tokenizer, prompt, self.params, parser)

    def take(self, prompt_index: int, part: Part) -> tuple[Choice, OutputChunk]:
        choice, output = super().take(prompt_index, part)
        if isinstance(choice, ChatChoice) and choice.make_stream is not None:
            text = "".join(part.text for part in choice.parts if self._is_shown(part))
            output = replace(output, text=text, finish_reason=choice.ending(output.finish_reason))
        return choice, output

    def _is_shown(self, part: base.Delta) -> bool:
        """Whether a stream's chunk shows a part."""
        return part.kind != "called" and (part.kind != "reasoning" or self.shows_reasoning)

    def opening(self) -> list[dict[str, Any]]:
        first_delta = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        first_delta |= self._beyond_openai(OutputChunk(""))
        return [self._chunk([{"index": choice.index, **first_delta}]) for choice in self.choices]

    def _chunk_choice(self, choice: Choice, output: OutputChunk) -> dict[str, Any]:
        assert isinstance(choice, ChatChoice)
        has_parser = choice.make_stream is not None
        chunk = {
            "index": choice.index,
            "delta": self._parts(choice.parts) if has_parser else {"content": output.text} if output.text else {},
            "logprobs": self._logprobs(output.logprobs),
            "finish_reason": output.finish_reason,
        }
        errors = [{"index": part.index, "message": part.text} for part in choice.parts if part.kind == "broken"]
        return {**chunk, "tool_call_errors": errors} if errors else chunk

    def _parts(self, parts: Sequence[base.Delta]) -> dict[str, Any]:
        """The delta of a chunk."""
        delta: dict[str, Any] = {}
        calls: dict[int, dict[str, Any]] = {}
        for part in parts:
            if part.kind == "content":
                delta["content"] = delta.get("content", "") + part.text
            elif part.kind == "reasoning" and self.shows_reasoning:
                delta["reasoning_content"] = delta.get("reasoning_content", "") + part.text
            elif part.kind == "call":
                function = {"name": part.text, "arguments": ""}
                calls[part.index] = {"index": part.index, "id": part.id, "type": "function", "function": function}
            elif part.kind == "arguments":
                call = calls.setdefault(part.index, {"index": part.index, "function": {"arguments": ""}})
                call["function"]["arguments"] += part.text
        return {**delta, "tool_calls": list(calls.values())} if calls else delta

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        assert isinstance(choice, ChatChoice)
        whole = {
            "index": choice.index,
            "message": {"role": "assistant", "content": "".join(choice.texts), "refusal": None},
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": choice.ending(choice.finish_reason),
        }
        if choice.make_stream is None:
            return whole
        message = message_of(choice.deltas)
        whole["message"]["content"] = message.content or (None if message.tool_calls else "")
        if message.reasoning and self.shows_reasoning:
            whole["message"]["reasoning_content"] = message.reasoning
        if message.tool_calls:
            whole["message"]["tool_calls"] = [call.as_dict() for call in message.tool_calls]
        if message.errors:
            whole["tool_call_errors"] = [{"message": error} for error in message.errors]
        return whole

    def whole(self) -> dict[str, Any]:
        return {**super().whole(), **self._of_prompt(self.choices[0])}

    @property
    def num_reasoning(self) -> int:
        """Tokens of the reasoning in all choices."""
        return sum(choice.num_reasoning for choice in self.choices if isinstance(choice, ChatChoice))

    def completion_details(self) -> dict[str, int]:
        details = super().completion_details()
        if self.plan is None or self.plan.formats.reasoning is None:
            return details
        return {**details, "reasoning_tokens": self.num_reasoning}

    def _logprobs(self, entries: Sequence[TokenLogprob] | None) -> Any:
        if entries is None:
            return None
        content = []
        for entry in entries:
            top = [self._token(token, value) for token, value in entry.top]
            content.append(self._token(entry.token_id, entry.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        part = None if self.tokenizer is None else list(self.tokenizer.bytes_of(token).bytes)
        return {"token": self._token_text(token), "logprob": logprob, "bytes": part}
