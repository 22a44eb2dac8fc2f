"""What the models of request bodies share: how a field is declared, and the checks of a whole body.

A field is honoured, accepted without effect, or refused.  A refused field accepts only its neutral values, for clients
that always send it; any other value is an error that says why.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

_SENDER = "describes the sender; the server does not use it"
CACHE = "the prefix cache always shares equal prompt prefixes"
# Marks of a message, an item, a part of one or a tool: Anthropic's, and OpenAI's.
CACHE_MARKS = ("cache_control", "prompt_cache_breakpoint")
_ROUTING = "the server chooses the engine"

# Fields of other servers and clients that are accepted without effect and named in a response header.  A field belongs
# here if the response is the same without it.  One that changes tokens, adds something to the response, or separates
# users (such as vLLM's cache_salt) does not: the server refuses it by name.
HINTS: Mapping[str, str] = {
    # OpenAI
    "user": _SENDER,
    "safety_identifier": _SENDER,
    "prompt_cache_key": CACHE,
    "prompt_cache_retention": CACHE,
    "service_tier": "there is only one tier; use priority",
    # Ollama
    "keep_alive": "the model stays loaded while the server runs",
    # llama.cpp
    "cache_prompt": CACHE,
    "id_slot": "the engine chooses the slot",
    # vLLM and SGLang
    "request_id": "send the id as the header x-request-id",
    "rid": "send the id as the header x-request-id",
    "data_parallel_rank": _ROUTING,
    # LiteLLM
    "litellm_call_id": _SENDER,
    "litellm_session_id": _SENDER,
    "litellm_trace_id": _SENDER,
    "litellm_metadata": _SENDER,
    "num_retries": "retries are the client's; the server makes none",
    "tags": _SENDER,
    # OpenRouter
    "provider": _ROUTING,
    "session_id": _SENDER,
    "trace": _SENDER,
    "usage": "a response always has it; for a stream use stream_options",
}


@dataclass(frozen=True)
class Refused:
    """why: the end of the error message, with what to do."""

    why: str


@dataclass(frozen=True)
class NoEffect:
    """neutral: a value that asks for nothing, so that it is not named in the answer's header."""

    why: str
    neutral: Any = None


Nothing = Annotated[list[Any], Field(max_length=0)]
# Checking stops at the first wrong entry: an error for each of a million entries would block the server.
FIRST: Any = Field(fail_fast=True)
NUMBERS = frozenset((int, float))
PLAIN = frozenset((int, float, bool, type(None)))


def at_most(most: int) -> BeforeValidator:
    """Refuse an object with more entries, before they are checked: pydantic has no fail_fast for objects."""

    def count(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            raise ValueError(f"an object with {len(value)} entries is not supported; use at most {most}")
        return value

    return BeforeValidator(count)


FUNCTIONS = Refused("OpenAI replaced it by tools; use tools and tool_choice, or leave it out")
TEXT_ONLY = Refused("this server supports only text; leave it out")
STATELESS = Refused(
    "the server stores nothing between requests; leave it out, and send the whole conversation each time"
)
NOT_STORED = NoEffect(
    "the server stores nothing between requests: send the whole conversation each time", neutral=False
)
VERBOSITY = NoEffect("ask for short or long answers in the messages")


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

    def without_effect(self) -> list[str]:
        """Names of the fields that were sent and have no effect, in the order of the model."""
        given = self.model_fields_set
        return [
            name
            for name, neutral in _neutral_values(type(self)).items()
            if name in given and (value := getattr(self, name)) is not None and value != neutral
        ]


def inside(name: str, bodies: Iterable[Body]) -> list[str]:
    """The names of fields without effect in the bodies that field `name` holds, each once."""
    return [f"{name}.{each}" for each in dict.fromkeys(each for body in bodies for each in body.without_effect())]


@cache
def _neutral_values(model: type[BaseModel]) -> dict[str, Any]:
    """The neutral value of each field without effect."""
    return {
        name: note.neutral
        for name, info in model.model_fields.items()
        for note in info.metadata
        if isinstance(note, NoEffect)
    }


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
