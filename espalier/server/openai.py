"""The bodies of requests: OpenAI's fields, those of SamplingParams beside them, and nothing else.

A field is honoured, taken without effect, or refused.  A refused field's type is its neutral values, so that clients
that always send it are served; any other value is an error that says why.  docs/server.md's table is made of these.
"""

import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model, model_validator

from espalier.chat import ChatOptions
from espalier.errors import EspalierError, require_int
from espalier.request import MAX_BIAS, MAX_COUNT, MAX_LOGPROBS, SamplingParams


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

TOOLS = Refused("tools need output that follows a grammar, which is not supported yet; leave it out")
FUNCTIONS = Refused("OpenAI deprecated it for tools, which are not supported yet; leave it out")
TEXT_ONLY = Refused("models here read and write text; leave it out")
STATELESS = Refused("nothing is kept between requests; leave it out, and send what is needed each time")
UNSEEN = NoEffect("about the sender; nothing here depends on it")


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


class StreamOptions(Body):
    include_usage: bool | None = Field(None, description="a last chunk with the usage and no choices")
    include_obfuscation: Annotated[Literal[False] | None, Refused("chunks are not padded; leave it out")] = None


class Generating(Sampling):
    """What completions and chat completions share."""

    model: str = Field(description="a served name, as /v1/models lists them")
    stream: bool | None = Field(None, description="server-sent events as tokens are decided")
    stream_options: StreamOptions | None = Field(None, description="only with stream")
    user: Annotated[str | None, UNSEEN] = None
    priority: int | None = Field(
        None, ge=-(2**31), lt=2**31, description="lower goes first; 0 unless set; nobody who runs is stopped for it"
    )
    from_draft: bool | None = Field(None, description="for each token, whether it came from the draft")
    return_token_ids: bool | None = Field(None, description="the ids of each choice's tokens")

    def sampling(self, **values: Any) -> SamplingParams:
        """The fields of SamplingParams, with `values` in place of what this API calls otherwise."""
        return SamplingParams(**{f.name: getattr(self, f.name) for f in fields(SamplingParams)} | values)

    def check(self) -> None:
        """Refuse what no single field shows.  Raises EspalierError."""
        if self.stream_options is not None and not self.stream:
            raise EspalierError("stream_options is for stream=true; set it, or leave stream_options out")


class CompletionRequest(Generating):
    """POST /v1/completions"""

    prompt: str | Tokens | Annotated[list[str], FIRST] | Annotated[list[Tokens], FIRST] = Field(
        description="text or token ids, one or several"
    )
    echo: bool | None = Field(None, description="begin the text with the prompt; not with logprobs")
    best_of: Annotated[Literal[1] | None, Refused("outputs are not ranked; use n and choose among them")] = None
    suffix: Annotated[Literal[""] | None, Refused("text is not filled in; put all of it into the prompt")] = None

    def check(self) -> None:
        super().check()
        if self.echo and self.logprobs is not None:
            raise EspalierError("echo with logprobs is not supported: prompts have no log-probabilities; drop one")

    def params(self) -> SamplingParams:
        return self.sampling()

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


class Message(Body):
    """One turn of a conversation, as the model's chat template reads it."""

    role: Literal["system", "developer", "user", "assistant"] = Field(description="developer is read as system")
    content: str | Annotated[list[TextPart], FIRST] = Field(description="text, or parts of type text, which are joined")
    name: Annotated[None, Refused("chat templates know roles alone; leave it out")] = None
    tool_calls: Annotated[Nothing | None, TOOLS] = None
    function_call: Annotated[None, FUNCTIONS] = None
    refusal: Annotated[None, Refused("answers are plain text; leave it out")] = None
    audio: Annotated[None, TEXT_ONLY] = None
    annotations: Annotated[Nothing | None, TEXT_ONLY] = None

    def turn(self) -> dict[str, str]:
        """As templates take it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


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
    max_completion_tokens: int | None = Field(None, description="OpenAI's later name of max_tokens")
    logprobs: bool | None = Field(None, description="log-probabilities of the chosen tokens")
    top_logprobs: int | None = Field(None, description="of so many others at each place; needs logprobs")
    response_format: Annotated[
        TextFormat | None, Refused("output that follows a grammar is not supported yet; leave it out")
    ] = None
    tools: Annotated[Nothing | None, TOOLS] = None
    tool_choice: Annotated[Literal["none", "auto"] | None, TOOLS] = None
    parallel_tool_calls: Annotated[None, TOOLS] = None
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
    service_tier: Annotated[
        Literal["auto", "default"] | None, Refused("all requests are served alike; leave it out, or use priority")
    ] = None
    metadata: Annotated[Annotated[dict[str, str], _at_most(MOST_METADATA)] | None, UNSEEN] = None
    safety_identifier: Annotated[str | None, UNSEEN] = None
    prompt_cache_key: Annotated[str | None, NoEffect("equal beginnings of prompts are shared whatever it says")] = None
    prompt_cache_retention: Annotated[None, STATELESS] = None

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise EspalierError("top_logprobs is for logprobs=true; set it, or leave top_logprobs out")
        # By the names that were sent: they are checked again as max_tokens and logprobs.
        require_int("top_logprobs", self.top_logprobs, 0, MAX_LOGPROBS, optional=True)
        require_int("max_completion_tokens", self.max_completion_tokens, 1, MAX_COUNT, optional=True)
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise EspalierError("max_tokens and max_completion_tokens are one limit and differ; send one of them")

    def params(self) -> SamplingParams:
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self.sampling(logprobs=(self.top_logprobs or 0) if self.logprobs else None, max_tokens=limit)

    def turns(self) -> list[dict[str, str]]:
        return [message.turn() for message in self.messages]


class TokenizeRequest(Conversing):
    """POST /tokenize: a prompt as a completion reads it, or messages as a chat does."""

    model: str | None = Field(None, description="a served name, if any")
    prompt: str | None = Field(None, description="text; or give messages")
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
