"""Base classes of the pydantic models of request bodies, and the fields for structured outputs.

A field is honoured, accepted without effect (NoEffect), or refused (RefusedField).  Some clients always send all
fields, so a refused field still accepts values that request nothing, such as null.  OpenAI, vLLM and SGLang have
different fields for structured outputs.  All these fields are converted to a Grammar.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from espalier.errors import EspalierError
from espalier.grammar.spec import Grammar, GrammarKind

_SENDER_REASON = "describes the sender; the server does not use it"
CACHE_REASON = "the prefix cache always shares equal prompt prefixes"
# Fields by which a client requests caching of a message, part or tool: Anthropic's name, and OpenAI's name.
CACHE_FIELDS = ("cache_control", "prompt_cache_breakpoint")
_ROUTING_REASON = "the server chooses the engine"

# Fields of other servers and clients that are accepted without effect, each with the reason.  A response header tells
# the client which of its fields had no effect.  A field may stand here only if the response is right without it.  So a
# field that changes tokens, extends the response or separates users (vLLM's cache_salt) must be refused by name.
NO_EFFECT_FIELD_REASONS: Mapping[str, str] = {
    # OpenAI
    "user": _SENDER_REASON,
    "safety_identifier": _SENDER_REASON,
    "prompt_cache_key": CACHE_REASON,
    "prompt_cache_retention": CACHE_REASON,
    "service_tier": "there is only one tier; use priority",
    # Ollama
    "keep_alive": "the model stays loaded while the server runs",
    # llama.cpp
    "cache_prompt": CACHE_REASON,
    "id_slot": "the engine chooses the slot",
    # vLLM and SGLang
    "request_id": "send the id as the header x-request-id",
    "rid": "send the id as the header x-request-id",
    "data_parallel_rank": _ROUTING_REASON,
    # LiteLLM
    "litellm_call_id": _SENDER_REASON,
    "litellm_session_id": _SENDER_REASON,
    "litellm_trace_id": _SENDER_REASON,
    "litellm_metadata": _SENDER_REASON,
    "num_retries": "retries are the client's; the server makes none",
    "tags": _SENDER_REASON,
    # OpenRouter
    "provider": _ROUTING_REASON,
    "session_id": _SENDER_REASON,
    "trace": _SENDER_REASON,
    "usage": "a response always has it; for a stream use stream_options",
}


@dataclass(frozen=True)
class RefusedField:
    """Marks a refused field.  reason: the end of the error message, which says what to
    send instead."""

    reason: str


@dataclass(frozen=True)
class NoEffect:
    """Marks a field without effect.  neutral: a value that requests nothing, and so is not reported to the client."""

    reason: str
    neutral: Any = None


EmptyList = Annotated[list[Any], Field(max_length=0)]
# The check of a list stops at the first wrong entry, because a million errors would block the server.
FAIL_FAST: Any = Field(fail_fast=True)
NUMBER_TYPES = frozenset((int, float))
SCALAR_TYPES = frozenset((int, float, bool, type(None)))


def max_entries(max_count: int) -> BeforeValidator:
    """Returns a pydantic check that refuses a dict with too many entries.  (FAIL_FAST works only for lists.)"""

    def check_count(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > max_count:
            raise ValueError(f"an object with {len(value)} entries is not supported; use at most {max_count}")
        return value

    return BeforeValidator(check_count)


MAX_METADATA, MAX_METADATA_NAME, MAX_METADATA_TEXT = 16, 64, 512
MetadataName = Annotated[str, Field(max_length=MAX_METADATA_NAME)]
MetadataText = Annotated[str, Field(max_length=MAX_METADATA_TEXT)]
# The field `metadata` where the server returns it, with OpenAI's limits.
Metadata = Annotated[
    dict[MetadataName, MetadataText] | None,
    max_entries(MAX_METADATA),
    Field(
        description=f"returned as it is; at most {MAX_METADATA} names of at most {MAX_METADATA_NAME} characters, with "
        f"texts of at most {MAX_METADATA_TEXT}"
    ),
]
REFUSED_FUNCTIONS = RefusedField("OpenAI replaced it by tools; use tools and tool_choice, or leave it out")
REFUSED_NON_TEXT = RefusedField("this server supports only text; leave it out")
REFUSED_STATE = RefusedField(
    "the server stores nothing between requests; leave it out, and send the whole conversation each time"
)
NO_EFFECT_STORE = NoEffect(
    "the server stores nothing between requests: send the whole conversation each time; with --learn, false keeps a "
    "request out of the sample",
    neutral=False,
)
NO_EFFECT_VERBOSITY = NoEffect("ask for short or long answers in the messages")


def _refuse_lone_surrogates(value: Any) -> None:
    """Refuse a lone surrogate (half of a character) in any text of a value.  UTF-8 cannot encode a surrogate."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError("text contains a lone surrogate (\\ud800 to \\udfff); send whole characters") from None
    elif isinstance(value, dict):
        for name, inner in value.items():
            # The keys of a logit_bias that is already parsed are token ids, not texts.
            if not (isinstance(name, int) or name.isascii()):
                _refuse_lone_surrogates(name)
            if type(inner) not in SCALAR_TYPES:
                _refuse_lone_surrogates(inner)
    elif isinstance(value, list) and not {*map(type, value)} <= NUMBER_TYPES:
        for inner in value:
            _refuse_lone_surrogates(inner)


class StrictModel(BaseModel):
    """A pydantic model with strict types ("1" is not a number), which refuses unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())


class RequestBody(StrictModel):
    """The base class of request bodies, and of objects inside them."""

    @model_validator(mode="before")
    @classmethod
    def _check_text(cls, value: Any) -> Any:
        """Refuse text with lone surrogates.  value: the parsed JSON.  Only one unknown field is kept."""
        try:
            _refuse_lone_surrogates(value)
        except RecursionError:
            raise ValueError("the body is nested too deeply; use fewer levels") from None
        if not isinstance(value, dict):
            return value
        known_fields = cls.model_fields
        unknown_names = [name for name in value if name not in known_fields]
        if not unknown_names:
            return value
        # Keep only one unknown field, because the error names only one.
        return {name: each for name, each in value.items() if name in known_fields or name == unknown_names[0]}

    def fields_without_effect(self) -> list[str]:
        """Returns the names of the sent fields that have no effect, in the order of the class's fields."""
        sent_fields = self.model_fields_set
        return [
            name
            for name, neutral in _neutral_values(type(self)).items()
            if name in sent_fields and (value := getattr(self, name)) is not None and value != neutral
        ]


def nested_fields_without_effect(name: str, bodies: Iterable[RequestBody]) -> list[str]:
    """Returns the names of the sent fields without effect in a list of objects, each name once, such as messages.name.

    name: the field of the outer body.  bodies: the objects in this field."""
    return [
        f"{name}.{each}" for each in dict.fromkeys(each for body in bodies for each in body.fields_without_effect())
    ]


@cache
def _neutral_values(model: type[BaseModel]) -> dict[str, Any]:
    """Returns NoEffect.neutral of each field without effect, by field name."""
    return {
        name: note.neutral
        for name, info in model.model_fields.items()
        for note in info.metadata
        if isinstance(note, NoEffect)
    }


class TextFormat(StrictModel):
    type: Literal["text"]

    def grammar(self) -> Grammar | None:
        return None


class JsonObjectFormat(StrictModel):
    type: Literal["json_object"]

    def grammar(self) -> Grammar:
        return Grammar("json_object")


class NamedSchema(StrictModel):
    # Not named "schema", which is a method of pydantic's models.
    schema_: dict[str, Any] | bool = Field(alias="schema")
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(StrictModel):
    type: Literal["json_schema"]
    json_schema: NamedSchema

    def grammar(self) -> Grammar:
        return Grammar.of_json_schema(json.dumps(self.json_schema.schema_), strict=bool(self.json_schema.strict))


class StructuralTagFormat(StrictModel):
    type: Literal["structural_tag"]
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None

    def grammar(self) -> Grammar:
        return Grammar("structural_tag", self.model_dump_json(exclude_none=True), strict=False)


Format = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat, Field(discriminator="type")]
Schema = dict[str, Any] | str


class StructuredOutputs(StrictModel):
    """vLLM's object for structured outputs.  Exactly one of its fields must be set."""

    # Not named "json", which is a method of pydantic's models.
    json_: Schema | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None

    def requested_grammar(self) -> Grammar:
        set_fields = [name for name in type(self).model_fields if getattr(self, name) not in (None, False)]
        if len(set_fields) != 1:
            raise EspalierError("structured_outputs needs exactly one form, such as json or regex; send one")
        return _grammar_of(set_fields[0], "" if set_fields[0] == "json_object" else getattr(self, set_fields[0]))


class GrammarFields(StrictModel):
    """The fields for structured outputs.  At most one may be sent."""

    response_format: Format | None = Field(
        None,
        description="text, json_object, json_schema or structural_tag; with a json_schema's strict true, a schema that "
        "allows further properties beside the named ones is refused",
    )
    structured_outputs: StructuredOutputs | None = Field(
        None, description="vLLM's form: one of json, regex, choice, grammar (EBNF), json_object, structural_tag"
    )
    guided_json: Schema | None = Field(None, description="vLLM's older form: a JSON schema")
    guided_regex: str | None = Field(None, description="vLLM's older form: a regular expression")
    guided_choice: list[str] | None = Field(None, description="vLLM's older form: the output is one of these texts")
    guided_grammar: str | None = Field(None, description="vLLM's older form: a grammar in EBNF")
    json_schema: str | None = Field(None, description="SGLang's form: a JSON schema, as text")
    regex: str | None = Field(None, description="SGLang's form: a regular expression")
    ebnf: str | None = Field(None, description="SGLang's form: a grammar in EBNF")
    structural_tag: str | None = Field(None, description="SGLang's form: a structural tag, as JSON text")

    def requested_grammar(self) -> Grammar | None:
        """Returns the grammar of the output, None for free text.  Raises EspalierError if two fields are sent."""
        grammars = list(self._requested_grammars())
        if len(grammars) > 1:
            names = " and ".join(name for name, _ in grammars)
            raise EspalierError(f"{names} both ask for a form of the output; send only one")
        return grammars[0][1] if grammars else None

    @property
    def grammar_field(self) -> str | None:
        """The name of the first field that asks for a form of the output; None for free text."""
        values = {name: getattr(self, name) for name in GrammarFields.model_fields}
        return next((name for name, value in values.items() if not isinstance(value, TextFormat | None)), None)

    def _requested_grammars(self) -> Iterator[tuple[str, Grammar]]:
        if self.response_format is not None and (grammar := self.response_format.grammar()) is not None:
            yield "response_format", grammar
        if (outputs := self.structured_outputs) is not None:
            yield "structured_outputs", outputs.requested_grammar()
        for name in GrammarFields.model_fields:
            value = getattr(self, name)
            if value is not None and name not in ("response_format", "structured_outputs"):
                yield name, _grammar_of(name, value)


# {field of vLLM: the Grammar.kind that it requests}, for the fields whose name is not the kind.
VLLM_GRAMMAR_KINDS: Mapping[str, GrammarKind] = {"json": "json_schema", "grammar": "ebnf"}


def _grammar_of(field: str, value: Any) -> Grammar:
    """Returns the grammar that a field of vLLM or SGLang requests.  They have no field `strict`, so strict is False."""
    name: Any = field.removeprefix("guided_").removesuffix("_")
    return Grammar(
        VLLM_GRAMMAR_KINDS.get(name, name), value if isinstance(value, str) else json.dumps(value), strict=False
    )
