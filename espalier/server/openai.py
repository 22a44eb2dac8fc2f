"""The request bodies of completions, chats and tokenization: OpenAI's fields, and the fields of SamplingParams.

fields.py declares which fields have no effect.  The tables of docs/server.md are made from these pydantic models.
"""

import types
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BeforeValidator, Field, PrivateAttr, create_model, model_validator

from espalier.chat import ChatOptions
from espalier.errors import EspalierError, require_int, whole_number
from espalier.limits import MAX_BIASES, MAX_INT32, MAX_LOGPROBS
from espalier.request import PARAMS_WITH_FLAGS, SamplingParams
from espalier.server.fields import (
    CACHE_FIELDS,
    CACHE_REASON,
    FAIL_FAST,
    MAX_METADATA,
    NO_EFFECT_FIELD_REASONS,
    NO_EFFECT_STORE,
    NO_EFFECT_VERBOSITY,
    REFUSED_FUNCTIONS,
    REFUSED_NON_TEXT,
    SCALAR_TYPES,
    EmptyList,
    GrammarFields,
    NoEffect,
    RefusedField,
    RequestBody,
    max_entries,
    nested_fields_without_effect,
)
from espalier.tool_calls.definitions import MAX_TOOLS, RequestTools, checked_tools

CacheControl: Any = Annotated[Any, NoEffect(CACHE_REASON)]
NO_EFFECT_REASONING = NoEffect("the text of the reasoning is read from reasoning_content")
TokenIds = Annotated[list[int], FAIL_FAST]
MAX_TEMPLATE_KWARGS = 64
TemplateKwargs = Annotated[dict[str, Any], max_entries(MAX_TEMPLATE_KWARGS)]
# In JSON, the keys are strings, which are converted.  In a body made from a parsed body, the keys are already ints.
TokenKey = Annotated[int, BeforeValidator(lambda key: whole_number(key) if isinstance(key, str) else key)]
LogitBias = Annotated[dict[TokenKey, float], max_entries(MAX_BIASES)]


class TextPart(RequestBody):
    type: Literal["text"] = Field(description="this server supports only text")
    text: str
    cache_control: CacheControl = None
    prompt_cache_breakpoint: CacheControl = None


def _join_text_parts(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class FunctionCall(RequestBody):
    """The called function.  arguments: JSON text; only the beginning of JSON text if the call was cut off."""

    name: str
    arguments: str | None = None


class ToolCall(RequestBody):
    """A tool call in an assistant message of the conversation."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: Annotated[int | None, NoEffect("the order of the list is used")] = None

    def as_template_dict(self) -> dict[str, Any]:
        return {"id": self.id, "type": self.type, "function": self.function.model_dump()}


class Message(RequestBody):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(
        description="developer is passed to the chat template as system; tool needs a template that supports it"
    )
    content: str | Annotated[list[TextPart], FAIL_FAST] | None = Field(
        None, description="text, or a list of text parts, which are joined; null is empty text"
    )
    name: str | None = Field(None, description="passed to the chat template")
    tool_calls: Annotated[list[ToolCall], FAIL_FAST, Field(max_length=MAX_TOOLS)] | None = Field(
        None, description="the assistant's tool calls, passed to the chat template"
    )
    tool_call_id: str | None = Field(
        None, description="the call that a tool message answers, passed to the chat template"
    )
    reasoning_content: str | None = Field(
        None, description="the reasoning of an earlier answer, passed to the chat template"
    )
    reasoning: str | None = Field(None, description="another name of reasoning_content")
    refusal: str | None = Field(None, description="an earlier refusal; the text of a message without content")
    cache_control: CacheControl = None
    prompt_cache_breakpoint: CacheControl = None
    reasoning_details: Annotated[Any, NO_EFFECT_REASONING] = None
    thinking_blocks: Annotated[Any, NO_EFFECT_REASONING] = None
    provider_specific_fields: Annotated[Any, NoEffect("describes the answer of another server")] = None
    function_call: Annotated[None, REFUSED_FUNCTIONS] = None
    audio: Annotated[None, REFUSED_NON_TEXT] = None
    annotations: Annotated[EmptyList | None, REFUSED_NON_TEXT] = None

    @model_validator(mode="before")
    @classmethod
    def _check_content(cls, value: Any) -> Any:
        """Refuse a message that has neither content nor tool_calls."""
        if isinstance(value, dict) and "content" not in value and not value.get("tool_calls"):
            raise ValueError("content is missing; give text, or null for none")
        return value

    @model_validator(mode="after")
    def _check_reasoning(self) -> "Message":
        if None not in (self.reasoning, self.reasoning_content) and self.reasoning != self.reasoning_content:
            raise ValueError("reasoning and reasoning_content are the same text but differ; send only one")
        return self

    @property
    def text(self) -> str:
        """The content as one text; without content, the refusal."""
        return _join_text_parts(self.content or self.refusal or "")

    def join_parts(self) -> None:
        """Replace a list of text parts by the joined text."""
        if isinstance(self.content, list):
            for name in CACHE_FIELDS:
                values = [cache_field for part in self.content if (cache_field := getattr(part, name)) is not None]
                if values and getattr(self, name) is None:
                    setattr(self, name, values[0])
            self.content = self.text

    def as_template_dict(self) -> dict[str, Any]:
        """Returns the message as a dict for chat templates.  The arguments of calls are still JSON text."""
        turn: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.text}
        if self.tool_calls:
            turn["tool_calls"] = [call.as_template_dict() for call in self.tool_calls]
        turn |= self.model_dump(include={"name", "tool_call_id"}, exclude_none=True)
        reasoning = self.reasoning_content or self.reasoning
        return turn if reasoning is None else {**turn, "reasoning_content": reasoning}


def _json_type(annotation: Any) -> Any:
    """Returns the type of a body's field.  annotation: the type of the same field in SamplingParams."""
    if get_origin(annotation) in (Union, types.UnionType):
        return Union[tuple(_json_type(part) for part in get_args(annotation))]  # noqa: UP007
    if get_origin(annotation) is Sequence:
        return Annotated[list[get_args(annotation)[0]], FAIL_FAST]  # type: ignore[misc]
    return LogitBias if get_origin(annotation) is Mapping else annotation


# The fields of SamplingParams.  Their descriptions are the help texts in espalier/request.py.
SAMPLING_FIELDS: Mapping[str, Any] = {
    f.name: (_json_type(f.type), Field(None, description=f.metadata["help"])) for f in PARAMS_WITH_FLAGS
}
SamplingFields: Any = create_model("Sampling", __base__=RequestBody, **SAMPLING_FIELDS)
NO_EFFECT_FIELDS: Mapping[str, Any] = {
    name: (Annotated[Any, NoEffect(why)], None) for name, why in NO_EFFECT_FIELD_REASONS.items()
}
SamplingAndNoEffectFields: Any = create_model("SamplingAndNoEffectFields", __base__=SamplingFields, **NO_EFFECT_FIELDS)


@lru_cache(maxsize=256)
def _shared_params(values: frozenset[tuple[str, Any]]) -> SamplingParams:
    """Returns SamplingParams from pairs (field name, value).  Equal pairs get the same object, because making and
    checking a new object takes as long as parsing the body.

    Each field has only one type, so values that Python counts as equal (such as 1 and 1.0) are never mixed up.
    """
    return SamplingParams(**dict(values))


class StreamOptions(RequestBody):
    include_usage: bool | None = Field(None, description="send a last chunk with the usage and no choices")
    continuous_usage_stats: bool | None = Field(
        None, description="add the usage so far, over all choices, to each chunk"
    )
    include_obfuscation: Annotated[Literal[False] | None, RefusedField("chunks are never padded; leave it out")] = None


class CommonFields(RequestBody):
    """The fields that all generating endpoints share."""

    model: str = Field(description="a name from /v1/models")
    stream: bool | None = Field(None, description="send tokens as server-sent events while they are generated")
    priority: int | None = Field(
        None,
        ge=-(2**31),
        lt=2**31,
        description="a lower value starts first (default 0); running requests are not preempted for it",
    )


class ToolFields(RequestBody):
    """The fields about tools that chat completions and responses share."""

    tools: Annotated[list[dict[str, Any]], FAIL_FAST, Field(max_length=MAX_TOOLS)] | None = Field(
        None, description="functions that the model may call, passed to the chat template"
    )
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = Field(
        None, description="whether the answer may be a call, must be one, or must be one of the function that it names"
    )
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call in an answer")


class GenerationRequest(SamplingAndNoEffectFields, GrammarFields, CommonFields):
    """The fields that completions and chat completions share."""

    stream_options: StreamOptions | None = Field(
        None, description="include_usage and continuous_usage_stats; needs stream=true"
    )
    max_completion_tokens: int | None = Field(None, description="OpenAI's newer name for max_tokens")
    add_special_tokens: bool | None = Field(
        None,
        description="add the tokenizer's special tokens, such as a BOS token, to the text; "
        "by default true for completions, and false for chats because the chat template writes them",
    )
    truncate_prompt_tokens: int | None = Field(
        None, ge=1, description="keep only this number of tokens, from the prompt's end"
    )
    from_draft: bool | None = Field(None, description="return, for each token, whether it came from the draft")
    return_token_ids: bool | None = Field(None, description="return the token ids of each choice")

    metadata: Annotated[
        Annotated[dict[str, Any], max_entries(MAX_METADATA)] | None,
        NoEffect("the server stores no responses, so there is nothing to look up by it"),
    ] = None

    @property
    def output_limit_field(self) -> str:
        """The name of the field with which the client limits the output."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def sampling_params(self, **values: Any) -> SamplingParams:
        """Returns the body's SamplingParams.  values: fields of SamplingParams that have other names in the body."""
        param_values = {name: getattr(self, name) for name in self.model_fields_set if name in SAMPLING_FIELDS}
        if self.max_completion_tokens is not None:
            param_values["max_tokens"] = self.max_completion_tokens
        param_values |= values
        grammar = self.requested_grammar()
        if grammar is None and all(type(value) in SCALAR_TYPES for value in param_values.values()):
            return _shared_params(frozenset(param_values.items()))
        return SamplingParams(**param_values, grammar=grammar)

    def require_compatible_fields(self) -> None:
        """Refuse combinations of fields that are not supported.  Raises EspalierError."""
        if self.stream_options is not None and not self.stream:
            raise EspalierError("stream_options needs stream=true; set it, or leave stream_options out")
        if self.prompt_logprobs is not None and self.stream:
            raise EspalierError("prompt_logprobs are not streamed; leave stream out")
        # max_completion_tokens is checked here, because a later check (`resolve`) would name max_tokens in its error.
        require_int("max_completion_tokens", self.max_completion_tokens, 1, MAX_INT32, optional=True)
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise EspalierError("max_tokens and max_completion_tokens are the same limit but differ; send only one")


class CompletionRequest(GenerationRequest):
    """POST /v1/completions"""

    prompt: str | TokenIds | Annotated[list[str], FAIL_FAST] | Annotated[list[TokenIds], FAIL_FAST] = Field(
        description="text or token ids, one or several"
    )
    echo: bool | None = Field(
        None, description="begin the text with the prompt; with logprobs, also return logprobs of the prompt's tokens"
    )
    best_of: Annotated[Literal[1] | None, RefusedField("the server does not rank outputs; use n and choose one")] = None
    suffix: Annotated[Literal[""] | None, RefusedField("insertion is not supported; put all text into the prompt")] = (
        None
    )

    @property
    def echoes_logprobs(self) -> bool:
        return bool(self.echo) and self.logprobs is not None

    def require_compatible_fields(self) -> None:
        super().require_compatible_fields()
        if self.echoes_logprobs and self.stream and (self.n or 1) > 1:
            raise EspalierError("echo with logprobs and stream needs n=1; lower n, or leave stream out")

    def params(self) -> SamplingParams:
        if not self.echoes_logprobs:
            return self.sampling_params()
        return self.sampling_params(prompt_logprobs=max(self.logprobs, self.prompt_logprobs or 0))

    def prompts(self) -> list[str | list[int]]:
        """Returns the prompts.  Raises EspalierError for an empty list."""
        if isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int)):
            return [self.prompt]
        if not self.prompt:
            raise EspalierError("prompt=[] is not supported; use text or token ids, one or several")
        return list(self.prompt)  # type: ignore[arg-type]


class ChatTemplateFields(RequestBody):
    """The fields of ChatOptions, which define how the chat template turns messages into a prompt."""

    chat_template_kwargs: TemplateKwargs | None = Field(
        None,
        description="variables of the chat template, such as enable_thinking; one that the template does not read is "
        "refused",
    )
    add_generation_prompt: bool | None = Field(
        None,
        description="end the prompt with the start of an assistant turn; by default true, unless "
        "continue_final_message is set",
    )
    continue_final_message: bool | None = Field(None, description="continue the last message")

    def options(self) -> ChatOptions:
        options: Any = {name: getattr(self, name) for name in ChatTemplateFields.model_fields}
        return options


class Prediction(RequestBody):
    """The client's prediction of the answer, for speculative decoding."""

    type: Literal["content"]
    content: str | Annotated[list[TextPart], FAIL_FAST] = Field(description="text, or a list of text parts, joined")

    @property
    def text(self) -> str:
        return _join_text_parts(self.content)

    def fields_without_effect(self) -> list[str]:
        return [] if isinstance(self.content, str) else nested_fields_without_effect("content", self.content)


class ChatRequest(ToolFields, ChatTemplateFields, GenerationRequest):
    """POST /v1/chat/completions"""

    messages: Annotated[list[Message], FAIL_FAST] = Field(min_length=1, description="the conversation so far")
    logprobs: bool | None = Field(
        None, description="true: return log-probabilities of the output tokens; top_logprobs adds the likeliest ones"
    )
    top_logprobs: int | None = Field(
        None, description="number of likeliest tokens to return at each position; needs logprobs"
    )
    include_reasoning: bool | None = Field(None, description="false: leave reasoning_content out of the answer")
    reasoning_effort: str | None = Field(
        None, description="passed to the chat template; no effect if it does not read this variable"
    )
    prediction: Prediction | None = Field(
        None,
        description="the likely answer, such as the file that is edited: while answer and prediction agree, more "
        "tokens are verified at once; needs the engine's source prediction, as on a CPU by default",
    )
    functions: Annotated[EmptyList | None, REFUSED_FUNCTIONS] = None
    function_call: Annotated[Literal["none", "auto"] | None, REFUSED_FUNCTIONS] = None
    modalities: Annotated[Annotated[list[Literal["text"]], FAIL_FAST] | None, REFUSED_NON_TEXT] = None
    audio: Annotated[None, REFUSED_NON_TEXT] = None
    verbosity: Annotated[str | None, NO_EFFECT_VERBOSITY] = None
    web_search_options: Annotated[None, RefusedField("the server has no web search; leave it out")] = None
    store: Annotated[bool | None, NO_EFFECT_STORE] = None
    # The names of the fields that _remove_cache_fields has removed from the tools.
    _removed_fields: list[str] = PrivateAttr(default=[])

    @model_validator(mode="after")
    def _remove_cache_fields(self) -> "ChatRequest":
        """Remove fields about caching from the tools, because the chat template would show them to the model."""
        tools = self.tools or []
        self._removed_fields = [name for name in CACHE_FIELDS if any(_has_cache_field(tool, name) for tool in tools)]
        if self._removed_fields:
            self.tools = [_without_cache_fields(tool) for tool in tools]
        return self

    def require_compatible_fields(self) -> None:
        super().require_compatible_fields()
        if self.top_logprobs and not self.logprobs:
            raise EspalierError("top_logprobs needs logprobs=true; set it, or leave top_logprobs out")
        # top_logprobs is checked here, because a later check (`resolve`) would name logprobs in its error.
        require_int("top_logprobs", self.top_logprobs, 0, MAX_LOGPROBS, optional=True)

    def params(self) -> SamplingParams:
        return self.sampling_params(logprobs=(self.top_logprobs or 0) if self.logprobs else None)

    def options(self) -> ChatOptions:
        options = super().options()
        if self.reasoning_effort is not None:
            variables = options.get("chat_template_kwargs") or {}
            options["chat_template_kwargs"] = {"reasoning_effort": self.reasoning_effort, **variables}
        return {**options, "tools": self.tools, "add_special_tokens": self.add_special_tokens}

    @property
    def grammar_field(self) -> str | None:
        return super().grammar_field or ("tools" if self.tools else None)

    def checked_request_tools(self) -> RequestTools:
        """Returns the request's checked tools and tool_choice.  Raises EspalierError."""
        return checked_tools(self.tools, self.tool_choice, self.parallel_tool_calls)

    def fields_without_effect(self) -> list[str]:
        tool_fields = [f"tools.{name}" for name in self._removed_fields]
        predicted = [] if self.prediction is None else nested_fields_without_effect("prediction", [self.prediction])
        return (
            super().fields_without_effect()
            + nested_fields_without_effect("messages", self.messages)
            + tool_fields
            + predicted
        )


def _has_cache_field(tool: dict[str, Any], cache_field: str) -> bool:
    return cache_field in tool or (isinstance(tool.get("function"), dict) and cache_field in tool["function"])


def _without_cache_fields(tool: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy of a tool without the fields about caching, which may be beside `function` or inside it."""
    return {
        name: _without_cache_fields(value) if name == "function" and isinstance(value, dict) else value
        for name, value in tool.items()
        if name not in CACHE_FIELDS
    }


class TokenizeRequest(ChatTemplateFields):
    """POST /tokenize: tokenizes a prompt like /v1/completions, or messages like /v1/chat/completions."""

    model: str | None = Field(None, description="a name from /v1/models")
    prompt: str | None = Field(None, description="text; give this or messages")
    add_special_tokens: bool | None = Field(None, description="as for completions and chats")
    messages: Annotated[list[Message], FAIL_FAST] | None = Field(
        None, min_length=1, description="a conversation; give this or a prompt"
    )


class DetokenizeRequest(RequestBody):
    """POST /detokenize"""

    model: str | None = Field(None, description="a name from /v1/models")
    tokens: TokenIds = Field(description="token ids; special tokens are left out of the text")
