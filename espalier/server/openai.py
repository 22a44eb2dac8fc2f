"""The request bodies: OpenAI's fields, the fields of SamplingParams, and fields without effect (hints.py).

A field is honoured, accepted without effect, or refused.  A refused field accepts only its neutral values, for clients
that always send it; any other value is an error that says why.  The tables of docs/server.md come from these models.
"""

import json
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model, model_validator

from espalier.chat import ChatOptions
from espalier.errors import EspalierError, require_int
from espalier.limits import MAX_BIAS, MAX_COUNT, MAX_LOGPROBS
from espalier.request import SPELLED_ALIKE, SamplingParams
from espalier.server.formats import Constrained
from espalier.server.hints import HINTS
from espalier.tools.definitions import MAX_TOOLS, Tools, checked_tools


@dataclass(frozen=True)
class Refused:
    """why: the end of the error message, with what to do."""

    why: str


@dataclass(frozen=True)
class NoEffect:
    why: str


Nothing = Annotated[list[Any], Field(max_length=0)]
# Checking stops at the first wrong entry: an error for each of a million entries would block the server.
FIRST: Any = Field(fail_fast=True)
Tokens = Annotated[list[int], FIRST]
NUMBERS = frozenset((int, float))
PLAIN = frozenset((int, float, bool, type(None)))
MAX_METADATA = 16
MOST_TEMPLATE_KWARGS = 64


def at_most(most: int) -> BeforeValidator:
    """Refuse an object with more entries, before they are checked: pydantic has no fail_fast for objects."""

    def count(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            raise ValueError(f"an object with {len(value)} entries is not supported; use at most {most}")
        return value

    return BeforeValidator(count)


TemplateKwargs = Annotated[dict[str, Any], at_most(MOST_TEMPLATE_KWARGS)]
# JSON keys are strings, so the key's type is not strict.
Bias = Annotated[dict[Annotated[int, Field(strict=False)], float], at_most(MAX_BIAS)]

FUNCTIONS = Refused("OpenAI replaced it by tools; use tools and tool_choice, or leave it out")
TEXT_ONLY = Refused("this server supports only text; leave it out")
STATELESS = Refused(
    "the server stores nothing between requests; leave it out, and send the whole conversation each time"
)


def _whole_text(value: Any) -> None:
    """Refuse a lone surrogate anywhere in a value: JSON can hold one, but UTF-8 cannot encode it."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError("text contains a lone surrogate (\\ud800 to \\udfff); send whole characters") from None
    elif isinstance(value, dict):
        for name, inner in value.items():
            # A bias that was read once has token ids as names.
            if not (isinstance(name, int) or name.isascii()):
                _whole_text(name)
            if type(inner) not in PLAIN:
                _whole_text(inner)
    elif isinstance(value, list) and not {*map(type, value)} <= NUMBERS:
        for inner in value:
            _whole_text(inner)


class Body(BaseModel):
    """Types are strict ("1" is not a number), and unknown fields are errors."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _check_text(cls, value: Any) -> Any:
        try:
            _whole_text(value)
        except RecursionError:
            raise ValueError("the body is nested too deeply; use fewer levels") from None
        if not isinstance(value, dict):
            return value
        known = cls.model_fields
        unknown = [name for name in value if name not in known]
        if not unknown:
            return value
        # One unknown field is enough for the error.
        return {name: each for name, each in value.items() if name in known or name == unknown[0]}


def _json_type(annotation: Any) -> Any:
    """The JSON type of a SamplingParams field."""
    if get_origin(annotation) in (Union, types.UnionType):
        return Union[tuple(_json_type(part) for part in get_args(annotation))]  # noqa: UP007
    if get_origin(annotation) is Sequence:
        return Annotated[list[get_args(annotation)[0]], FIRST]  # type: ignore[misc]
    return Bias if get_origin(annotation) is Mapping else annotation


# The engine honours these.  Their descriptions are the help texts in espalier/request.py.
SAMPLING_FIELDS: Mapping[str, Any] = {
    f.name: (_json_type(f.type), Field(None, description=f.metadata["help"])) for f in SPELLED_ALIKE
}
Sampling: Any = create_model("Sampling", __base__=Body, **SAMPLING_FIELDS)
HINT_FIELDS: Mapping[str, Any] = {name: (Annotated[Any, NoEffect(why)], None) for name, why in HINTS.items()}
Hinted: Any = create_model("Hinted", __base__=Sampling, **HINT_FIELDS)


@lru_cache(maxsize=256)
def _params_of(values: frozenset[tuple[str, Any]]) -> SamplingParams:
    """Bodies with equal values share one object: to check it takes as long as to read the body.

    Each field has values of one type, so equal values are alike.
    """
    return SamplingParams(**dict(values))


class StreamOptions(Body):
    include_usage: bool | None = Field(None, description="send a last chunk with the usage and no choices")
    continuous_usage_stats: bool | None = Field(
        None, description="add the usage so far, over all choices, to each chunk"
    )
    include_obfuscation: Annotated[Literal[False] | None, Refused("chunks are never padded; leave it out")] = None


class Generating(Hinted, Constrained):
    """The fields that completions and chat completions share."""

    model: str = Field(description="a name from /v1/models")
    stream: bool | None = Field(None, description="send tokens as server-sent events while they are generated")
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
    priority: int | None = Field(
        None,
        ge=-(2**31),
        lt=2**31,
        description="a lower value starts first (default 0); running requests are not preempted for it",
    )
    from_draft: bool | None = Field(None, description="return, for each token, whether it came from the draft")
    return_token_ids: bool | None = Field(None, description="return the token ids of each choice")

    metadata: Annotated[
        Annotated[dict[str, Any], at_most(MAX_METADATA)] | None,
        NoEffect("the server stores no responses, so there is nothing to look up by it"),
    ] = None

    @property
    def limit_name(self) -> str:
        """The name of the limit of the output that was sent."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def sampling(self, **values: Any) -> SamplingParams:
        """SamplingParams from the fields of the same names.  `values` are those that the endpoint names differently."""
        given = {name: getattr(self, name) for name in self.model_fields_set if name in SAMPLING_FIELDS}
        if self.max_completion_tokens is not None:
            given["max_tokens"] = self.max_completion_tokens
        given |= values
        grammar = self.asked_grammar()
        if grammar is None and all(type(value) in PLAIN for value in given.values()):
            return _params_of(frozenset(given.items()))
        return SamplingParams(**given, grammar=grammar)

    def check(self) -> None:
        """Refuse combinations of fields that are not supported.  Raises EspalierError."""
        if self.stream_options is not None and not self.stream:
            raise EspalierError("stream_options needs stream=true; set it, or leave stream_options out")
        if self.prompt_logprobs is not None and self.stream:
            raise EspalierError("prompt_logprobs are not streamed; leave stream out")
        # Checked here so that the error has the name that was sent; resolve checks it again as max_tokens.
        require_int("max_completion_tokens", self.max_completion_tokens, 1, MAX_COUNT, optional=True)
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise EspalierError("max_tokens and max_completion_tokens are the same limit but differ; send only one")


def without_effect(body: BaseModel) -> list[str]:
    """Names of the fields of a body that were sent and have no effect, in the order of the model."""
    given = body.model_fields_set
    return [name for name in _names_without_effect(type(body)) if name in given and getattr(body, name) is not None]


@cache
def _names_without_effect(model: type[BaseModel]) -> list[str]:
    fields = model.model_fields.items()
    return [name for name, info in fields if any(isinstance(note, NoEffect) for note in info.metadata)]


class CompletionRequest(Generating):
    """POST /v1/completions"""

    prompt: str | Tokens | Annotated[list[str], FIRST] | Annotated[list[Tokens], FIRST] = Field(
        description="text or token ids, one or several"
    )
    echo: bool | None = Field(
        None, description="begin the text with the prompt; with logprobs, also return logprobs of the prompt's tokens"
    )
    best_of: Annotated[Literal[1] | None, Refused("the server does not rank outputs; use n and choose one")] = None
    suffix: Annotated[Literal[""] | None, Refused("insertion is not supported; put all text into the prompt")] = None

    @property
    def echoes_logprobs(self) -> bool:
        return bool(self.echo) and self.logprobs is not None

    def check(self) -> None:
        super().check()
        if self.echoes_logprobs and self.stream and (self.n or 1) > 1:
            raise EspalierError("echo with logprobs and stream needs n=1; lower n, or leave stream out")

    def params(self) -> SamplingParams:
        if not self.echoes_logprobs:
            return self.sampling()
        return self.sampling(prompt_logprobs=max(self.logprobs, self.prompt_logprobs or 0))

    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt.  Raises EspalierError if there is none."""
        if isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int)):
            return [self.prompt]
        if not self.prompt:
            raise EspalierError("prompt=[] is not supported; use text or token ids, one or several")
        return list(self.prompt)  # type: ignore[arg-type]


class TextPart(Body):
    type: Literal["text"] = Field(description="this server supports only text")
    text: str


class FunctionCall(Body):
    name: str
    arguments: str | None = Field(None, description="a JSON object, as text")

    def parsed(self) -> dict[str, Any]:
        """In the form that chat templates read.  Raises EspalierError if the arguments are not a JSON object."""
        try:
            arguments = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise EspalierError(
                f"messages with a call of {self.name!r} whose arguments are not a JSON object are not supported; "
                "send an object"
            )
        return {"name": self.name, "arguments": arguments}


class ToolCall(Body):
    """A tool call in an earlier assistant message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: Annotated[int | None, NoEffect("the order of the list is used")] = None

    def turn(self) -> dict[str, Any]:
        return {"id": self.id, "type": self.type, "function": self.function.parsed()}


class Message(Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(
        description="developer is passed to the chat template as system; tool needs a template that supports it"
    )
    content: str | Annotated[list[TextPart], FIRST] | None = Field(
        None, description="text, or a list of text parts, which are joined; null is empty text"
    )
    name: str | None = Field(None, description="passed to the chat template")
    tool_calls: Annotated[list[ToolCall], FIRST, Field(max_length=MAX_TOOLS)] | None = Field(
        None, description="the assistant's tool calls, passed to the chat template"
    )
    tool_call_id: str | None = Field(
        None, description="the call that a tool message answers, passed to the chat template"
    )
    reasoning_content: str | None = Field(
        None, description="the reasoning of an earlier answer, passed to the chat template"
    )
    function_call: Annotated[None, FUNCTIONS] = None
    refusal: Annotated[None, Refused("messages here have no refusal; leave it out")] = None
    audio: Annotated[None, TEXT_ONLY] = None
    annotations: Annotated[Nothing | None, TEXT_ONLY] = None

    @model_validator(mode="before")
    @classmethod
    def _check_content(cls, value: Any) -> Any:
        """Only a message with tool_calls may leave content out."""
        if isinstance(value, dict) and "content" not in value and not value.get("tool_calls"):
            raise ValueError("content is missing; give text, or null for none")
        return value

    @property
    def text(self) -> str:
        parts = self.content or ""
        return parts if isinstance(parts, str) else "".join(part.text for part in parts)

    def turn(self) -> dict[str, Any]:
        """In the form that chat templates read.  Raises EspalierError for a bad tool call."""
        turn: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.text}
        if self.tool_calls:
            turn["tool_calls"] = [call.turn() for call in self.tool_calls]
        optional = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content,
        }
        return turn | {name: value for name, value in optional.items() if value is not None}


class Conversing(Body):
    """The fields of ChatOptions that say how a conversation becomes a prompt."""

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
        return {
            "chat_template_kwargs": self.chat_template_kwargs,
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
        }


class ChatRequest(Conversing, Generating):
    """POST /v1/chat/completions"""

    messages: Annotated[list[Message], FIRST] = Field(min_length=1, description="the conversation so far")
    logprobs: bool | None = Field(
        None, description="true: return log-probabilities of the output tokens; top_logprobs adds the likeliest ones"
    )
    top_logprobs: int | None = Field(
        None, description="number of likeliest tokens to return at each position; needs logprobs"
    )
    tools: Annotated[list[dict[str, Any]], FIRST, Field(max_length=MAX_TOOLS)] | None = Field(
        None, description="functions that the model may call, passed to the chat template"
    )
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = Field(
        None, description="whether the answer may be a call, must be one, or must be one of the function that it names"
    )
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call in an answer")
    include_reasoning: bool | None = Field(None, description="false: leave reasoning_content out of the answer")
    reasoning_effort: str | None = Field(
        None, description="passed to the chat template; refused if it does not read this variable"
    )
    functions: Annotated[Nothing | None, FUNCTIONS] = None
    function_call: Annotated[Literal["none", "auto"] | None, FUNCTIONS] = None
    modalities: Annotated[Annotated[list[Literal["text"]], FIRST] | None, TEXT_ONLY] = None
    audio: Annotated[None, TEXT_ONLY] = None
    prediction: Annotated[None, Refused("the engine's drafter makes the drafts; leave it out")] = None
    verbosity: Annotated[None, Refused("ask for short or long answers in the messages; leave it out")] = None
    web_search_options: Annotated[None, Refused("the server has no web search; leave it out")] = None
    store: Annotated[Literal[False] | None, STATELESS] = None

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise EspalierError("top_logprobs needs logprobs=true; set it, or leave top_logprobs out")
        # Checked here so that the error has the name that was sent; resolve checks it again as logprobs.
        require_int("top_logprobs", self.top_logprobs, 0, MAX_LOGPROBS, optional=True)

    def params(self) -> SamplingParams:
        return self.sampling(logprobs=(self.top_logprobs or 0) if self.logprobs else None)

    def options(self) -> ChatOptions:
        options = super().options()
        if self.reasoning_effort is not None:
            variables = options.get("chat_template_kwargs") or {}
            options["chat_template_kwargs"] = {"reasoning_effort": self.reasoning_effort, **variables}
        return {**options, "tools": self.tools, "add_special_tokens": self.add_special_tokens}

    def tool_use(self) -> Tools:
        """The tools that the model may call.  Raises EspalierError."""
        return checked_tools(self.tools, self.tool_choice, self.parallel_tool_calls)


class TokenizeRequest(Conversing):
    """POST /tokenize: tokenizes a prompt like /v1/completions, or messages like /v1/chat/completions."""

    model: str | None = Field(None, description="a name from /v1/models")
    prompt: str | None = Field(None, description="text; give this or messages")
    add_special_tokens: bool | None = Field(None, description="as for completions and chats")
    messages: Annotated[list[Message], FIRST] | None = Field(
        None, min_length=1, description="a conversation; give this or a prompt"
    )


class DetokenizeRequest(Body):
    """POST /detokenize"""

    model: str | None = Field(None, description="a name from /v1/models")
    tokens: Tokens = Field(description="token ids; special tokens are left out of the text")


def field_rows(model: type[BaseModel]) -> list[tuple[str, str, str]]:
    """(field, "honoured" / "no effect" / "refused", description or reason), in the order of the model."""
    rows = []
    for name, info in model.model_fields.items():
        notes = [note for note in info.metadata if isinstance(note, Refused | NoEffect)]
        if not notes:
            rows.append((name, "honoured", info.description or ""))
        else:
            rows.append((name, "refused" if isinstance(notes[0], Refused) else "no effect", notes[0].why))
    return rows
