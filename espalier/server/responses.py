"""The body of POST /v1/responses, for a server that stores nothing, and its conversion to a chat completion's body."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, create_model

from espalier.errors import EspalierError, shown, unknown_name_error
from espalier.server.errors import ApiError, validation_error
from espalier.server.fields import (
    CACHE_FIELDS,
    FAIL_FAST,
    NO_EFFECT_STORE,
    NO_EFFECT_VERBOSITY,
    REFUSED_NON_TEXT,
    REFUSED_STATE,
    EmptyList,
    Metadata,
    RefusedField,
    RequestBody,
    nested_fields_without_effect,
)
from espalier.server.openai import (
    NO_EFFECT_FIELDS,
    SAMPLING_FIELDS,
    ChatRequest,
    CommonFields,
    ToolFields,
)

INCLUDE_LOGPROBS, ENCRYPTED_REASONING = "message.output_text.logprobs", "reasoning.encrypted_content"
# Fields of SamplingParams that /v1/responses lacks, or has under another name.
CHAT_ONLY_PARAMS = ("n", "max_tokens", "logprobs", "prompt_logprobs")
_RESPONSES_PARAMS = {name: each for name, each in SAMPLING_FIELDS.items() if name not in CHAT_ONLY_PARAMS}
_ResponsesParams: Any = create_model("ResponsesSampling", __base__=RequestBody, **_RESPONSES_PARAMS, **NO_EFFECT_FIELDS)
# Fields with the same name and meaning at /v1/chat/completions.
SHARED_FIELDS = (
    *(*_RESPONSES_PARAMS, *CommonFields.model_fields, "chat_template_kwargs", "top_logprobs"),
    *("tool_choice", "parallel_tool_calls"),
)
# For a field of /v1/chat/completions: the name of the same field at /v1/responses.
RESPONSES_FIELD_NAMES: Mapping[str, str] = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}


@contextmanager
def renaming_error_fields() -> Iterator[None]:
    """In an ApiError that leaves the block, replaces a field name of chat completions by the name at /v1/responses."""
    try:
        yield
    except ApiError as error:
        if (chat_name := error.param) is not None and chat_name in RESPONSES_FIELD_NAMES:
            if error.detail.startswith(chat_name):
                error.detail = RESPONSES_FIELD_NAMES[chat_name] + error.detail.removeprefix(chat_name).removeprefix(
                    ".json_schema"
                )
            error.param = RESPONSES_FIELD_NAMES[chat_name].partition(".")[0]
        raise


class Reasoning(RequestBody):
    effort: str | None = Field(None, description="passed to the chat template as reasoning_effort")
    summary: str | None = Field(None, description="accepted; the answer has the reasoning itself")


class TextOptions(RequestBody):
    format: dict[str, Any] | None = Field(None, description="text, json_schema or json_object")
    verbosity: Annotated[str | None, NO_EFFECT_VERBOSITY] = None


class StreamOptions(RequestBody):
    include_obfuscation: Annotated[Literal[False] | None, RefusedField("events are never padded; leave it out")] = None


class ResponsesRequest(_ResponsesParams, ToolFields, CommonFields):
    """POST /v1/responses"""

    input: str | Annotated[list[dict[str, Any]], FAIL_FAST] = Field(
        description="text, or messages, function_call, function_call_output and reasoning items"
    )
    instructions: str | None = Field(None, description="a system message before the input")
    stream_options: StreamOptions | None = Field(None, description="include_obfuscation=false")
    max_output_tokens: int | None = Field(None, description="tokens to generate at most")
    reasoning: Reasoning | None = Field(None, description="effort, for the chat template")
    text: TextOptions | None = Field(None, description="format: the form of the answer")
    top_logprobs: int | None = Field(
        None, description=f"number of likeliest tokens to return; needs include {INCLUDE_LOGPROBS}"
    )
    include: (
        Annotated[list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]], FAIL_FAST] | None
    ) = Field(
        None,
        description=f"{INCLUDE_LOGPROBS}, unless the model's tool calls or reasoning are parsed; {ENCRYPTED_REASONING} "
        "is accepted, and reasoning items have their text",
    )
    metadata: Metadata = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="variables of the chat template")
    truncation: Annotated[Literal["disabled"] | None, RefusedField("send a shorter input, or leave it out")] = None
    store: Annotated[bool | None, NO_EFFECT_STORE] = None
    previous_response_id: Annotated[None, REFUSED_STATE] = None
    conversation: Annotated[None, REFUSED_STATE] = None
    prompt: Annotated[None, REFUSED_STATE] = None
    background: Annotated[Literal[False] | None, REFUSED_STATE] = None
    max_tool_calls: Annotated[None, RefusedField("the server has no tools of its own; leave it out")] = None
    max_tokens: Annotated[None, RefusedField("use max_output_tokens")] = None
    messages: Annotated[None, RefusedField("use input")] = None
    response_format: Annotated[None, RefusedField("use text.format")] = None
    modalities: Annotated[EmptyList | None, REFUSED_NON_TEXT] = None

    def fields_without_effect(self) -> list[str]:
        in_text = nested_fields_without_effect("text", [self.text] if self.text else [])
        return super().fields_without_effect() + in_text + [f"input.{name}" for name in _no_effect_names(self.input)]

    def as_chat_request(self) -> ChatRequest:
        """Returns the request as the body of a chat completion.  Raises EspalierError or ApiError."""
        fields = {name: value for name in SHARED_FIELDS if (value := getattr(self, name)) is not None}
        fields["messages"] = messages_of(self.input, self.instructions)
        fields["max_completion_tokens"] = self.max_output_tokens
        if self.store is False:  # store=true has no effect, and fields_without_effect reports it
            fields["store"] = False
        if self.tools is not None:
            fields["tools"] = [_chat_tool(f"tools[{i}]", tool) for i, tool in enumerate(self.tools)]
        fields["reasoning_effort"] = None if self.reasoning is None else self.reasoning.effort
        if self.text is not None and (form := self.text.format) is not None:
            is_schema = form.get("type") == "json_schema"
            fields["response_format"] = {"type": "json_schema", "json_schema": _drop_type(form)} if is_schema else form
        if INCLUDE_LOGPROBS in (self.include or ()):
            fields["logprobs"] = True
        elif self.top_logprobs:
            raise EspalierError(f'top_logprobs needs include=["{INCLUDE_LOGPROBS}"]; set it, or leave top_logprobs out')
        try:
            return _ChatOfResponse.model_validate(fields)
        except ValidationError as error:
            raise validation_error(error.errors(include_url=False, include_input=False), ChatRequest) from None


class _ChatOfResponse(ChatRequest):
    """A chat request made from a ResponsesRequest.  Its errors name the fields of /v1/responses."""

    @property
    def grammar_field(self) -> str | None:
        name = super().grammar_field
        return None if name is None else RESPONSES_FIELD_NAMES.get(name, name).partition(".")[0]


def _chat_tool(location: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a tool in the form of chat completions: its fields are in an object `function`.  location: its path."""
    if tool.get("type") != "function":
        raise EspalierError(f"{location}.type={shown(tool.get('type'))} is not supported; use 'function'")
    return {"type": "function", "function": _drop_type(tool)}


def _drop_type(value: Mapping[str, Any]) -> dict[str, Any]:
    return {name: each for name, each in value.items() if name != "type"}


# For each type of input item: (required fields, optional fields).
ITEM_FIELDS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "message": (("role", "content"), ("id", "status", "phase")),
    "function_call": (("call_id", "name", "arguments"), ("id", "status")),
    "function_call_output": (("call_id", "output"), ("id", "status", "name")),
    "reasoning": ((), ("id", "summary", "content", "encrypted_content", "status")),
}
# Fields without effect in an input item or its content parts.  The field phase marks commentary or the final answer.
NO_EFFECT_ITEM_FIELDS = (*CACHE_FIELDS, "phase")
MESSAGE_ROLES = ("user", "assistant", "system", "developer")
TEXT_PART_TYPES = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def _no_effect_names(response_input: str | Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns which fields of NO_EFFECT_ITEM_FIELDS the client has sent, in items or in their content parts."""
    items = [] if isinstance(response_input, str) else response_input
    parts = [part for item in items for part in _text_parts_of(item)]
    return [name for name in NO_EFFECT_ITEM_FIELDS if any(each.get(name) is not None for each in (*items, *parts))]


def _text_parts_of(item: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    lists = [parts for name in ("content", "output", "summary") if isinstance(parts := item.get(name), list)]
    return [part for parts in lists for part in parts if isinstance(part, Mapping)]


def messages_of(response_input: str | Sequence[Mapping[str, Any]], instructions: str | None) -> list[dict[str, Any]]:
    """Returns the input as chat messages.  The assistant's items are joined if possible.  Raises EspalierError."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(response_input, str):
        return [*messages, {"role": "user", "content": response_input}]
    name_of_call_id: dict[str, str] = {}
    for i, item in enumerate(response_input):
        location = f"input[{i}]"
        kind = _checked_item_type(location, item)
        if kind == "function_call_output":
            output = _joined_text(f"{location}.output", item["output"])
            name_field = {"name": name_of_call_id[item["call_id"]]} if item["call_id"] in name_of_call_id else {}
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": output, **name_field})
        elif kind == "message" and item["role"] != "assistant":
            messages.append({"role": item["role"], "content": _joined_text(f"{location}.content", item["content"])})
        else:
            if kind == "function_call":
                name_of_call_id[item["call_id"]] = item["name"]
            if not _is_repeated_by_next(item, f"input[{i + 1}]", response_input[i + 1 : i + 2]):
                _add_to_answer(messages, location, kind, item)
    return messages


def _checked_item_type(location: str, item: Mapping[str, Any]) -> str:
    """Check an input item's fields and return its type.  location: such as input[3].  Raises EspalierError."""
    kind = item.get("type", "message" if "role" in item else None)
    if not isinstance(kind, str) or kind not in ITEM_FIELDS:
        raise EspalierError(f"{location}.type={shown(kind)} is not supported; use {', '.join(ITEM_FIELDS)}")
    needed, optional = ITEM_FIELDS[kind]
    for name in item:
        # Null is allowed in any field, because OpenAI's client sends earlier answers with all fields, many null.
        if item[name] is not None and name not in ("type", *needed, *optional, *CACHE_FIELDS):
            raise unknown_name_error(location, name, (*needed, *optional))
    for name in needed:
        if item.get(name) is None:
            raise EspalierError(f"{location}.{name} is missing; a {kind} item needs it")
        if name not in ("content", "output") and not isinstance(item[name], str):
            raise EspalierError(f"{location}.{name}={shown(item[name])} is not supported; use text")
    if kind == "message" and item["role"] not in MESSAGE_ROLES:
        raise EspalierError(f"{location}.role={shown(item['role'])} is not supported; use {', '.join(MESSAGE_ROLES)}")
    return kind


def _add_to_answer(messages: list[dict[str, Any]], location: str, kind: str, item: Mapping[str, Any]) -> None:
    """Add an assistant's item to the last message, or to a new message if it cannot follow that message's items."""
    answer = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    has_content = answer is not None and (answer["content"] is not None or "tool_calls" in answer)
    # The order inside a message: at most one reasoning item, then at most one content, then tool calls.
    is_late = has_content or (kind == "reasoning" and answer is not None and "reasoning_content" in answer)
    if answer is None or (kind in ("message", "reasoning") and is_late):
        messages.append(answer := {"role": "assistant", "content": None})
    if kind == "message":
        answer["content"] = _joined_text(f"{location}.content", item["content"])
    elif kind == "reasoning":
        content = item.get("content") or item.get("summary") or ""
        answer["reasoning_content"] = _joined_text(f"{location}.content", content)
    else:
        function = {"name": item["name"], "arguments": item["arguments"]}
        answer.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})


def _is_repeated_by_next(item: Mapping[str, Any], location: str, next_items: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether an item is a cut-off call whose text the next item repeats.  location: of the next item, for
    errors, such as input[3].  next_items: the next item; empty after the last item."""
    if item.get("type") != "function_call" or item.get("status") != "incomplete":
        return False
    messages = (each for each in next_items if each.get("role") == "assistant")
    return any(item["arguments"] in _joined_text(f"{location}.content", each.get("content") or "") for each in messages)


def _joined_text(location: str, content: Any) -> str:
    """Returns an item's content as one text.  content: a text, or text parts to be joined.  Raises EspalierError."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise EspalierError(f"{location}={shown(content)} is not supported; use text or a list of text parts")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in TEXT_PART_TYPES or not isinstance(part.get("text"), str):
            raise EspalierError(f"{location}[{i}]={shown(part)} is not supported; this server supports only text parts")
        texts.append(part["text"])
    return "".join(texts)
