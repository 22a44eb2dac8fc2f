"""Builds the answers of the chat endpoints.  Tool calls and reasoning are parsed from the output tokens.

/v1/chat/completions returns a message; /v1/responses returns a list of items.  Both endpoints can stream the answer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from espalier.errors import EspalierError
from espalier.inputs import message_stream
from espalier.logprobs import TokenLogprob
from espalier.request import OutputChunk, ResolvedParams
from espalier.server.errors import bad_request_error
from espalier.server.openai import ChatRequest
from espalier.server.protocol import OutputPart
from espalier.server.response_builders import Choice, ResponseBuilder, to_json
from espalier.server.responses import ResponsesRequest
from espalier.text import Tokenizer
from espalier.tool_calls import base
from espalier.tool_calls.message_stream import MessageStream
from espalier.tool_calls.parser import message_of
from espalier.tool_calls.plan import ChatPlan

Event = dict[str, Any]


@dataclass
class ChatChoice(Choice):
    """A choice whose tokens are parsed into a chat message.

    A delta is a piece of the message.  make_message_stream: returns the stream that parses the tokens; None if all text
    is content.  new_deltas: the deltas of the last chunk.  deltas: all deltas so far if keeps_deltas, else empty.
    valid_calls: the indices of tool calls without errors.
    """

    make_message_stream: Callable[[], MessageStream] | None = None
    keeps_deltas: bool = True
    new_deltas: list[base.Delta] = field(default_factory=list)
    deltas: list[base.Delta] = field(default_factory=list)
    valid_calls: set[int] = field(default_factory=set)

    @cached_property
    def stream(self) -> MessageStream:
        """The stream that parses the tokens.  Created with the first chunk, so that the request starts sooner."""
        assert self.make_message_stream is not None
        return self.make_message_stream()

    @property
    def num_reasoning_tokens(self) -> int:
        """The number of reasoning tokens in this choice."""
        return 0 if self.make_message_stream is None else self.stream.num_reasoning_tokens

    def new_text(self, output: OutputChunk) -> str:
        """Returns the text of a chunk.  If the chunk is parsed, sets new_deltas instead and returns ""."""
        if self.make_message_stream is None:
            return super().new_text(output)
        self.new_deltas = self.stream.read_deltas(output)
        for part in self.new_deltas:
            if part.kind == "call":
                self.valid_calls.add(part.index)
            elif part.kind == "broken":
                self.valid_calls.discard(part.index)
        if self.keeps_deltas:
            self.deltas += self.new_deltas
        return ""

    def finish_reasons(self, output: OutputChunk) -> tuple[str | None, int | str | None]:
        """Returns (finish_reason, stop_reason) of a chunk.  First call new_text for this chunk."""
        return (
            super().finish_reasons(output) if self.make_message_stream is None else self.stream.finish_reasons(output)
        )

    def finish_reason_with_calls(self, reason: str | None) -> str | None:
        """Returns "tool_calls" instead of "stop" for an output with tool calls; else `reason` unchanged."""
        return "tool_calls" if reason == "stop" and self.valid_calls else reason


class ChatResponseBuilder(ResponseBuilder):
    """Builds the answer of /v1/chat/completions.  id: the response's id.  prompt: token ids."""

    response_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, id: str, body: ChatRequest, params: ResolvedParams, prompt: list[int], plan: ChatPlan):
        self.plan = plan
        super().__init__(id, body, params, [prompt], plan.tokenizer)
        self.shows_reasoning = body.include_reasoning is not False
        self.events_differ_only_in_text = self.events_differ_only_in_text and not plan.has_parser

    def _make_choice(self, index: int, prompt: list[int]) -> Choice:
        """Returns a new choice.  index: its number in the response.  prompt: token ids."""
        choice = ChatChoice(
            index, prompt, partial(self._make_text_stream, prompt), self.params.include_stop_str_in_output
        )
        if self.plan.has_parser and self.tokenizer is not None:
            choice.make_message_stream = partial(self._make_message_stream, self.tokenizer, prompt)
        choice.keeps_deltas = not self.body.stream
        return choice

    def _make_message_stream(self, tokenizer: Tokenizer, prompt: list[int]) -> MessageStream:
        """Returns a stream that parses an output's tokens as a message.  prompt: token ids."""
        parser = self.plan.new_parser(prompt)
        assert parser is not None
        return message_stream(tokenizer, prompt, self.params, parser)

    def add_output(self, prompt_index: int, part: OutputPart) -> tuple[Choice, OutputChunk]:
        """Add a part of the output.  Returns (choice, chunk).  The text of a parsed chunk joins its visible deltas."""
        choice, output = super().add_output(prompt_index, part)
        if isinstance(choice, ChatChoice) and choice.make_message_stream is not None:
            hidden_kinds = ("called",) if self.shows_reasoning else ("called", "reasoning")
            text = "".join(part.text for part in choice.new_deltas if part.kind not in hidden_kinds)
            output = replace(output, text=text, finish_reason=choice.finish_reason_with_calls(output.finish_reason))
        return choice, output

    def first_chunks(self) -> list[dict[str, Any]]:
        first_delta = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        first_delta |= self._espalier_fields(OutputChunk(""))
        return [self._wrap_choices([{"index": choice.index, **first_delta}]) for choice in self.choices]

    def _chunk_choice(self, choice: Choice, output: OutputChunk) -> dict[str, Any]:
        """Returns the entry of `choices` in the stream chunk for `output`."""
        assert isinstance(choice, ChatChoice)
        has_parser = choice.make_message_stream is not None
        chunk = {
            "index": choice.index,
            "delta": self._delta_field(choice.new_deltas)
            if has_parser
            else {"content": output.text}
            if output.text
            else {},
            "logprobs": self._logprobs(output.logprobs),
            "finish_reason": output.finish_reason,
        }
        errors = [{"index": part.index, "message": part.text} for part in choice.new_deltas if part.kind == "broken"]
        return {**chunk, "tool_call_errors": errors} if errors else chunk

    def _delta_field(self, parts: Sequence[base.Delta]) -> dict[str, Any]:
        """Returns the `delta` field of a chunk.  parts: the new pieces of the message."""
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

    def _full_choice(self, choice: Choice) -> dict[str, Any]:
        """Returns the entry of `choices` in a response that is not streamed."""
        assert isinstance(choice, ChatChoice)
        choice_fields = {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.output.text, "refusal": None},
            "logprobs": self._logprobs(choice.output.logprobs),
            "finish_reason": choice.finish_reason_with_calls(choice.output.finish_reason),
        }
        if choice.make_message_stream is None:
            return choice_fields
        message = message_of(choice.deltas)
        choice_fields["message"]["content"] = message.content or (None if message.tool_calls else "")
        if message.reasoning and self.shows_reasoning:
            choice_fields["message"]["reasoning_content"] = message.reasoning
        if message.tool_calls:
            choice_fields["message"]["tool_calls"] = [call.as_dict() for call in message.tool_calls]
        if message.errors:
            choice_fields["tool_call_errors"] = [{"message": error} for error in message.errors]
        return choice_fields

    def full_response(self) -> dict[str, Any]:
        return {**super().full_response(), **self._prompt_logprobs_field(self.choices[0])}

    @property
    def num_reasoning_tokens(self) -> int:
        """The number of reasoning tokens in all choices."""
        return sum(choice.num_reasoning_tokens for choice in self.choices if isinstance(choice, ChatChoice))

    def completion_details(self) -> dict[str, int]:
        details = super().completion_details()
        if self.plan.formats.reasoning is None:
            return details
        return {**details, "reasoning_tokens": self.num_reasoning_tokens}

    def _logprobs(self, entries: Sequence[TokenLogprob] | None) -> Any:
        """Returns OpenAI's object `logprobs`.  entries: one for each output token; None if not requested."""
        if entries is None:
            return None
        content = []
        for entry in entries:
            top = [self._token_logprob(token, value) for token, value in entry.top]
            content.append(self._token_logprob(entry.token_id, entry.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _token_logprob(self, token_id: int, logprob: float) -> dict[str, Any]:
        token_bytes = None if self.tokenizer is None else list(self.tokenizer.bytes_of(token_id).bytes)
        return {"token": self._token_text(token_id), "logprob": logprob, "bytes": token_bytes}


class OutputItems:
    """The output items of one response, and the events that tell the client about changes of the items.

    id: the response's id, which is a part of each item's id.  is_open: whether the last item may still grow."""

    def __init__(self, id: str):
        self.id = id
        self.items: list[dict[str, Any]] = []
        self.events: list[Event] = []
        self.num_events = 0
        self.is_open = False
        # Pieces of the text of the item that may still grow.
        self._text_pieces: list[str] = []

    def pop_events(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def add_event(self, kind: str, **fields: Any) -> None:
        """Add an event.  kind: the event's type without "response.".  fields: its other fields."""
        self.events.append({"type": f"response.{kind}", "sequence_number": self.num_events, **fields})
        self.num_events += 1

    def add_delta(self, delta: base.Delta, logprobs: list[dict[str, Any]]) -> None:
        """Add a delta to the open item or to a new item, or end the open item.

        logprobs: for a content delta, the log-probabilities of its tokens."""
        if delta.kind == "content":
            self._open_text_item("message", {"role": "assistant"}, _empty_output_text)
            self._append_text(delta.text, logprobs)
        elif delta.kind == "reasoning":
            self._open_text_item("reasoning", {"summary": []}, _empty_reasoning_text)
            self._append_text(delta.text, None)
        elif delta.kind == "call":
            call = {"call_id": delta.id, "name": delta.text, "arguments": ""}
            self._open_item("function_call", call)
        elif delta.kind == "arguments":
            self._text_pieces.append(delta.text)
            self._item_event("function_call_arguments.delta", delta=delta.text)
        elif delta.kind == "called":
            self.close("completed")
        elif delta.index >= 0:
            self.close("incomplete")

    def close(self, status: str) -> None:
        """Close the open item, if any.  status: the item's final status."""
        if not self.is_open:
            return
        item, self.is_open = self.items[-1], False
        item["status"], text = status, "".join(self._text_pieces)
        self._text_pieces = []
        if item["type"] == "function_call":
            item["arguments"] = text
            self._item_event("function_call_arguments.done", name=item["name"], arguments=item["arguments"])
        else:
            part = item["content"][0]
            part["text"] = text
            name = "output_text" if item["type"] == "message" else "reasoning_text"
            logprobs = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
            self._item_event(f"{name}.done", content_index=0, text=part["text"], **logprobs)
            self._item_event("content_part.done", content_index=0, part=dict(part))
        self.add_event("output_item.done", output_index=len(self.items) - 1, item=_copy_of_item(item))

    def _open_item(self, kind: str, fields: dict[str, Any]) -> None:
        """Close the open item, and add a new one.  kind: its type.  fields: its fields besides id and type."""
        self.close("completed")
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        item = {"id": f"{prefix}_{self.id}_{len(self.items)}", "type": kind, "status": "in_progress", **fields}
        self.items.append(item)
        self.is_open = True
        self.add_event("output_item.added", output_index=len(self.items) - 1, item=_copy_of_item(item))

    def _open_text_item(self, kind: str, fields: dict[str, Any], new_part: Callable[[], dict[str, Any]]) -> None:
        """Open an item of type `kind`, unless such an item is open.  new_part: returns the item's first, empty part."""
        if self.is_open and self.items[-1]["type"] == kind:
            return
        self._open_item(kind, {**fields, "content": []})
        self.items[-1]["content"].append(new_part())
        self._item_event("content_part.added", content_index=0, part=new_part())

    def _append_text(self, text: str, logprobs: list[dict[str, Any]] | None) -> None:
        """Add text to the open item.  logprobs: one object for each token; None for a reasoning item."""
        self._text_pieces.append(text)
        if logprobs is None:
            self._item_event("reasoning_text.delta", content_index=0, delta=text)
            return
        self.items[-1]["content"][0]["logprobs"] += logprobs
        self._item_event("output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def _item_event(self, kind: str, **fields: Any) -> None:
        """Add an event about the last item.  kind, fields: as in add_event."""
        self.add_event(kind, item_id=self.items[-1]["id"], output_index=len(self.items) - 1, **fields)


def _empty_output_text() -> dict[str, Any]:
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


def _empty_reasoning_text() -> dict[str, Any]:
    return {"type": "reasoning_text", "text": ""}


def _copy_of_item(item: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy for an event, because the item itself may change later."""
    return {**item, "content": [dict(part) for part in item["content"]]} if "content" in item else dict(item)


class ResponsesApiBuilder(ChatResponseBuilder):
    """Builds the response of /v1/responses.  request: the client's body.  chat: `request`, converted to ChatRequest."""

    end_event = b""

    def __init__(self, request: ResponsesRequest, id: str, chat: ChatRequest, *chat_arguments: Any):
        super().__init__(f"resp_{id}", chat, *chat_arguments)
        if chat.logprobs and self.plan.has_parser:
            reason = "include message.output_text.logprobs is not supported where reasoning or tool calls are read"
            raise bad_request_error(EspalierError(f"{reason}; use /v1/chat/completions, or leave it out"), "include")
        self.request = request
        self.events_differ_only_in_text = False
        self.items = OutputItems(id)
        self.finish_reason: str | None = None
        # The reasons why tool calls could not be parsed.
        self.tool_call_errors: list[str] = []

    def add_output(self, prompt_index: int, part: OutputPart) -> tuple[Choice, OutputChunk]:
        """Add a part of the output, and its events.  Returns (the sample's choice, the part's chunk)."""
        choice, output = super().add_output(prompt_index, part)
        assert isinstance(choice, ChatChoice)
        logprobs = [] if output.logprobs is None else self._logprobs(output.logprobs)["content"]
        if choice.make_message_stream is not None:
            for delta in choice.new_deltas:
                self.items.add_delta(delta, [])
            self.tool_call_errors += [delta.text for delta in choice.new_deltas if delta.kind == "broken"]
        elif output.text or logprobs:
            self.items.add_delta(base.Delta("content", output.text), logprobs)
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason
            self.items.close("incomplete" if self.finish_reason == "length" else "completed")
        return choice, output

    def add_output_as_event(self, prompt_index: int, part: OutputPart) -> bytes:
        """Add a part of the prompt's output.  Returns the bytes of its events."""
        self.add_output(prompt_index, part)
        return b"".join(map(self.encode_event, self.items.pop_events()))

    def encode_event(self, chunk: dict[str, Any]) -> bytes:
        """Returns a server-sent event.  chunk: its fields, with the event's name as `type`."""
        return f"event: {chunk['type']}\n".encode() + b"data: " + to_json(chunk) + b"\n\n"

    def error_event(self, error: dict[str, Any]) -> bytes:
        """Returns OpenAI's error event.  The field `error` is added, because OpenAI's clients look for this field."""
        fields = {name: error["error"][name] for name in ("code", "message", "param")}
        return self.encode_event({"type": "error", "sequence_number": self.items.num_events, **fields, **error})

    def first_chunks(self) -> list[dict[str, Any]]:
        for kind in ("created", "in_progress"):
            self.items.add_event(kind, response=self._response_object("in_progress"))
        return self.items.pop_events()

    def last_chunks(self) -> list[dict[str, Any]]:
        response = self.full_response()
        self.items.add_event(response["status"], response=response)
        return self.items.pop_events()

    def full_response(self) -> dict[str, Any]:
        is_cut_off = self.finish_reason == "length"
        response = self._response_object("incomplete" if is_cut_off else "completed") | {"usage": self.usage()}
        if self.tool_call_errors:
            response["tool_call_errors"] = [{"message": error} for error in self.tool_call_errors]
        return response

    def _response_object(self, status: str) -> dict[str, Any]:
        """Returns the response without `usage`.  status: in_progress, completed or incomplete."""
        request, chat = self.request, self.body
        return {
            "id": self.common_fields["id"],
            "object": "response",
            "created_at": self.common_fields["created"],
            "model": self.common_fields["model"],
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [_copy_of_item(item) for item in self.items.items],
            "instructions": request.instructions,
            "metadata": request.metadata or {},
            "temperature": self.params.temperature,
            "top_p": self.params.top_p,
            "max_output_tokens": request.max_output_tokens,
            "tools": request.tools or [],
            "tool_choice": "auto" if request.tool_choice is None else request.tool_choice,
            "parallel_tool_calls": chat.parallel_tool_calls is not False,
            "reasoning": {"effort": chat.reasoning_effort, "summary": None},
            "text": {"format": (request.text and request.text.format) or {"type": "text"}},
            "truncation": "disabled",
            "previous_response_id": None,
            "store": False,
            "usage": None,
        }

    def usage(self) -> dict[str, Any]:
        usage = super().usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens},
            "total_tokens": usage["total_tokens"],
            "speculation": usage["speculation"],
        }
