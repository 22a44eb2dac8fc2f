"""The bodies of requests: OpenAI's fields, those of SamplingParams beside them, hints without effect, nothing else.

A field is honoured, taken without effect, or refused.  A refused field's type is its neutral values, so that clients
that always send it are served; any other value is an error that says why.  docs/server.md's table is made of these.
"""

import json
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model, model_validator

from espalier.chat import ChatOptions
from espalier.errors import EspalierError, require_int
from espalier.limits import MAX_BIAS, MAX_COUNT, MAX_LOGPROBS
from espalier.request import SamplingParams
from espalier.server.hints import HINTS


@dataclass(frozen=True)
class Refused:
    """why: ends the error message, and what to do stands in it."""

    why: str


@dataclass(frozen=True)
class NoEffect:
    why: str


Nothing = Annotated[list[Any], Field(max_length=0)]
# The first wrong entry ends the check: a body may hold a million, and an error for each would hold up everyone.
FIRST: Any = Field(fail_fast=True)
Tokens = Annotated[list[int], FIRST]
MOST_METADATA = 16
MOST_TOOLS = 1024
MOST_TEMPLATE_KWARGS = 64


def _at_most(most: int) -> BeforeValidator:
    """The same for an object, where no check ends at the first: entries are counted before they are looked at."""

    def count(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            raise ValueError(f"an object with {len(value)} entries is not supported; use {most} at most")
        return value

    return BeforeValidator(count)


TemplateKwargs = Annotated[dict[str, Any], _at_most(MOST_TEMPLATE_KWARGS)]
# Keys of a JSON object are text.
Bias = Annotated[dict[Annotated[int, Field(strict=False)], float], _at_most(MAX_BIAS)]

TOOLS = Refused('tools need output that follows a grammar, which is not supported yet; use "none", or leave it out')
NO_CALLS = "calls need output that follows a grammar, which is not supported yet"
FUNCTIONS = Refused("OpenAI deprecated it for tools, which are not supported yet; leave it out")
TEXT_ONLY = Refused("models here read and write text; leave it out")
STATELESS = Refused("nothing is kept between requests; leave it out, and send what is needed each time")


def _whole_text(value: Any) -> None:
    """Refuse half a surrogate pair anywhere: JSON can write one, and no encoding of text can."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError("text holds half a surrogate pair (\\ud800 to \\udfff); send whole characters") from None
    elif isinstance(value, dict):
        for name, inner in value.items():
            _whole_text(name)
            _whole_text(inner)
    elif isinstance(value, list):
        for inner in value:
            if not isinstance(inner, int | float):
                _whole_text(inner)


class Body(BaseModel):
    """Types are exact ("1" is no number), and unknown names are errors."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _check_text(cls, value: Any) -> Any:
        try:
            _whole_text(value)
        except RecursionError:
            raise ValueError("the body is nested too deep; send plain fields") from None
        if not isinstance(value, dict):
            return value
        # Of unknown names one is enough to say.
        unknown = [name for name in value if name not in cls.model_fields]
        return {name: each for name, each in value.items() if name in cls.model_fields or name == unknown[0]}


def _json_type(annotation: Any) -> Any:
    """What JSON has for a field of SamplingParams."""
    if get_origin(annotation) in (Union, types.UnionType):
        return Union[tuple(_json_type(part) for part in get_args(annotation))]  # noqa: UP007
    if get_origin(annotation) is Sequence:
        return Annotated[list[get_args(annotation)[0]], FIRST]  # type: ignore[misc]
    return Bias if get_origin(annotation) is Mapping else annotation


# Honoured by the engine; what each does is its help text in espalier/request.py.
_sampling_fields: Mapping[str, Any] = {
    f.name: (_json_type(f.type), Field(None, description=f.metadata["help"])) for f in fields(SamplingParams)
}
Sampling: Any = create_model("Sampling", __base__=Body, **_sampling_fields)
_hint_fields: Mapping[str, Any] = {name: (Annotated[Any, NoEffect(why)], None) for name, why in HINTS.items()}
Hinted: Any = create_model("Hinted", __base__=Sampling, **_hint_fields)


class StreamOptions(Body):
    include_usage: bool | None = Field(None, description="a last chunk with the usage and no choices")
    continuous_usage_stats: bool | None = Field(None, description="each chunk with the usage so far, of all choices")
    include_obfuscation: Annotated[Literal[False] | None, Refused("chunks are not padded; leave it out")] = None


class Generating(Hinted):
    """What completions and chat completions share."""

    model: str = Field(description="a served name, as /v1/models lists them")
    stream: bool | None = Field(None, description="server-sent events as tokens are decided")
    stream_options: StreamOptions | None = Field(
        None, description="include_usage and continuous_usage_stats; only with stream"
    )
    max_completion_tokens: int | None = Field(None, description="OpenAI's later name of max_tokens")
    add_special_tokens: bool | None = Field(
        None,
        description="those that the tokenizer adds to a text, such as a first one; "
        "unless set, in a completion and not in a chat, whose template writes them",
    )
    truncate_prompt_tokens: int | None = Field(None, ge=1, description="keep so many of the prompt's last tokens")
    priority: int | None = Field(
        None, ge=-(2**31), lt=2**31, description="lower goes first; 0 unless set; nobody who runs is stopped for it"
    )
    from_draft: bool | None = Field(None, description="for each token, whether it came from the draft")
    return_token_ids: bool | None = Field(None, description="the ids of each choice's tokens")

    metadata: Annotated[
        Annotated[dict[str, Any], _at_most(MOST_METADATA)] | None,
        NoEffect("nothing is stored that it could be found by"),
    ] = None

    def sampling(self, **values: Any) -> SamplingParams:
        """The fields of SamplingParams, with `values` in place of what this API calls otherwise."""
        given = {f.name: getattr(self, f.name) for f in fields(SamplingParams)}
        if self.max_completion_tokens is not None:
            given["max_tokens"] = self.max_completion_tokens
        return SamplingParams(**given | values)

    def without_effect(self) -> list[str]:
        """Names of what was sent and changes nothing, in the order of the model."""
        return [
            name
            for name, info in type(self).model_fields.items()
            if getattr(self, name) is not None and any(isinstance(note, NoEffect) for note in info.metadata)
        ]

    def check(self) -> None:
        """Refuse what no single field shows.  Raises EspalierError."""
        if self.stream_options is not None and not self.stream:
            raise EspalierError("stream_options is for stream=true; set it, or leave stream_options out")
        if self.prompt_logprobs is not None and self.stream:
            raise EspalierError("prompt_logprobs are not streamed; leave stream out")
        # By the name that was sent: it is checked again as max_tokens.
        require_int("max_completion_tokens", self.max_completion_tokens, 1, MAX_COUNT, optional=True)
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise EspalierError("max_tokens and max_completion_tokens are one limit and differ; send one of them")


class CompletionRequest(Generating):
    """POST /v1/completions"""

    prompt: str | Tokens | Annotated[list[str], FIRST] | Annotated[list[Tokens], FIRST] = Field(
        description="text or token ids, one or several"
    )
    echo: bool | None = Field(
        None, description="begin the text with the prompt; with logprobs, its tokens have them too"
    )
    best_of: Annotated[Literal[1] | None, Refused("outputs are not ranked; use n and choose among them")] = None
    suffix: Annotated[Literal[""] | None, Refused("text is not filled in; put all of it into the prompt")] = None

    @property
    def echoes_logprobs(self) -> bool:
        return bool(self.echo) and self.logprobs is not None

    def check(self) -> None:
        super().check()
        if self.echoes_logprobs and self.stream and (self.n or 1) > 1:
            raise EspalierError("echo with logprobs is streamed for n=1 alone; lower n, or leave stream out")

    def params(self) -> SamplingParams:
        if not self.echoes_logprobs:
            return self.sampling()
        return self.sampling(prompt_logprobs=max(self.logprobs, self.prompt_logprobs or 0))

    def prompts(self) -> list[str | list[int]]:
        """One entry a prompt.  Raises EspalierError for none."""
        if isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int)):
            return [self.prompt]
        if not self.prompt:
            raise EspalierError("prompt=[] is not supported; use text or token ids, one or several")
        return list(self.prompt)  # type: ignore[arg-type]


class TextPart(Body):
    type: Literal["text"] = Field(description="models here read and write text")
    text: str


class FunctionCall(Body):
    name: str
    arguments: str | None = Field(None, description="an object as JSON")

    def parsed(self) -> dict[str, Any]:
        """As templates take it.  Raises EspalierError."""
        try:
            arguments = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise EspalierError(
                f"messages with a call of {self.name!r} whose arguments are no JSON object are not supported; send one"
            )
        return {"name": self.name, "arguments": arguments}


class ToolCall(Body):
    """A call that the assistant has made, by this model or another."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: Annotated[int | None, NoEffect("calls stand in their order")] = None

    def turn(self) -> dict[str, Any]:
        return {"id": self.id, "type": self.type, "function": self.function.parsed()}


class Message(Body):
    """One turn of a conversation, as the model's chat template reads it."""

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(
        description="developer is read as system; tool, where the template knows it"
    )
    content: str | Annotated[list[TextPart], FIRST] | None = Field(
        None, description="text, or parts of type text, which are joined; null is empty"
    )
    name: str | None = Field(None, description="handed to the chat template, which may show it")
    tool_calls: Annotated[list[ToolCall], FIRST, Field(max_length=MOST_TOOLS)] | None = Field(
        None, description="what the assistant called, where the template shows it"
    )
    tool_call_id: str | None = Field(None, description="which call a tool answers, for the template")
    function_call: Annotated[None, FUNCTIONS] = None
    refusal: Annotated[None, Refused("answers are plain text; leave it out")] = None
    audio: Annotated[None, TEXT_ONLY] = None
    annotations: Annotated[Nothing | None, TEXT_ONLY] = None

    @model_validator(mode="before")
    @classmethod
    def _check_content(cls, value: Any) -> Any:
        """Only who called a tool may say nothing at all."""
        if isinstance(value, dict) and "content" not in value and not value.get("tool_calls"):
            raise ValueError("content is missing; give text, or null for none")
        return value

    @property
    def text(self) -> str:
        parts = self.content or ""
        return parts if isinstance(parts, str) else "".join(part.text for part in parts)

    def turn(self) -> dict[str, Any]:
        """As templates take it.  Raises EspalierError."""
        said: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.text}
        if self.tool_calls:
            said["tool_calls"] = [call.turn() for call in self.tool_calls]
        beside = {"name": self.name, "tool_call_id": self.tool_call_id}
        return said | {name: value for name, value in beside.items() if value is not None}


class TextFormat(Body):
    type: Literal["text"]


class Conversing(Body):
    """How a conversation becomes a prompt: fields of ChatOptions."""

    chat_template_kwargs: TemplateKwargs | None = Field(
        None,
        description="variables of the chat template, such as enable_thinking; what it does not read is refused",
    )
    add_generation_prompt: bool | None = Field(
        None, description="end the prompt where the answer begins; true unless continue_final_message is"
    )
    continue_final_message: bool | None = Field(None, description="the answer goes on with the last message")

    def options(self) -> ChatOptions:
        return {
            "chat_template_kwargs": self.chat_template_kwargs,
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
        }


class ChatRequest(Conversing, Generating):
    """POST /v1/chat/completions"""

    messages: Annotated[list[Message], FIRST] = Field(min_length=1, description="the conversation so far")
    logprobs: bool | None = Field(None, description="log-probabilities of the chosen tokens")
    top_logprobs: int | None = Field(None, description="of so many others at each place; needs logprobs")
    response_format: Annotated[
        TextFormat | None, Refused("output that follows a grammar is not supported yet; leave it out")
    ] = None
    tools: Annotated[list[dict[str, Any]], FIRST, Field(max_length=MOST_TOOLS)] | None = Field(
        None, description='shown to the model by its chat template, if that reads them; only with tool_choice="none"'
    )
    tool_choice: Annotated[Literal["none", "auto"] | None, TOOLS] = None
    parallel_tool_calls: Annotated[bool | None, NoEffect("no tool is called")] = None
    functions: Annotated[Nothing | None, FUNCTIONS] = None
    function_call: Annotated[Literal["none", "auto"] | None, FUNCTIONS] = None
    modalities: Annotated[Annotated[list[Literal["text"]], FIRST] | None, TEXT_ONLY] = None
    audio: Annotated[None, TEXT_ONLY] = None
    prediction: Annotated[None, Refused("drafts come from the engine's own drafter; leave it out")] = None
    reasoning_effort: Annotated[
        None, Refused("how a model reasons is its chat template's: set it in chat_template_kwargs, or leave it out")
    ] = None
    verbosity: Annotated[None, Refused("ask for it in the messages; leave it out")] = None
    web_search_options: Annotated[None, Refused("nothing is looked up; leave it out")] = None
    store: Annotated[Literal[False] | None, STATELESS] = None

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise EspalierError("top_logprobs is for logprobs=true; set it, or leave top_logprobs out")
        # By the name that was sent: it is checked again as logprobs.
        require_int("top_logprobs", self.top_logprobs, 0, MAX_LOGPROBS, optional=True)
        if self.tools and self.tool_choice != "none":
            raise EspalierError(f'tools is not supported without tool_choice="none": {NO_CALLS}')

    def params(self) -> SamplingParams:
        return self.sampling(logprobs=(self.top_logprobs or 0) if self.logprobs else None)

    def options(self) -> ChatOptions:
        return {**super().options(), "tools": self.tools, "add_special_tokens": self.add_special_tokens}


class TokenizeRequest(Conversing):
    """POST /tokenize: a prompt as a completion reads it, or messages as a chat does."""

    model: str | None = Field(None, description="a served name, if any")
    prompt: str | None = Field(None, description="text; or give messages")
    add_special_tokens: bool | None = Field(None, description="as in a completion, or a chat")
    messages: Annotated[list[Message], FIRST] | None = Field(
        None, min_length=1, description="a conversation; or give a prompt"
    )


class DetokenizeRequest(Body):
    """POST /detokenize"""

    model: str | None = Field(None, description="a served name, if any")
    tokens: Tokens = Field(description="token ids; special ones have no text")


def field_rows(model: type[BaseModel]) -> list[tuple[str, str, str]]:
    """(field, "honoured", "no effect" or "refused", what it does or why not), in the order of the model."""
    rows = []
    for name, info in model.model_fields.items():
        notes = [note for note in info.metadata if isinstance(note, Refused | NoEffect)]
        if not notes:
            rows.append((name, "honoured", info.description or ""))
        else:
            rows.append((name, "refused" if isinstance(notes[0], Refused) else "no effect", notes[0].why))
    return rows
