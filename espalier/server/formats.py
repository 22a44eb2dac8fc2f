"""The body fields that ask for a form of the output: OpenAI's, vLLM's and SGLang's, all as one Grammar."""

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from espalier.errors import EspalierError
from espalier.grammar.spec import Grammar, Kind


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())


class TextFormat(_Strict):
    type: Literal["text"]

    def grammar(self) -> Grammar | None:
        return None


class JsonObjectFormat(_Strict):
    type: Literal["json_object"]

    def grammar(self) -> Grammar:
        return Grammar("json_object")


class NamedSchema(_Strict):
    # The name "schema" is a method of pydantic's models.
    schema_: dict[str, Any] | bool = Field(alias="schema")
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(_Strict):
    type: Literal["json_schema"]
    json_schema: NamedSchema

    def grammar(self) -> Grammar:
        return Grammar.of_json_schema(json.dumps(self.json_schema.schema_), strict=bool(self.json_schema.strict))


class StructuralTagFormat(_Strict):
    type: Literal["structural_tag"]
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None

    def grammar(self) -> Grammar:
        return Grammar("structural_tag", self.model_dump_json(exclude_none=True), strict=False)


Format = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat, Field(discriminator="type")]
Schema = dict[str, Any] | str


class StructuredOutputs(_Strict):
    """vLLM's.  Exactly one field."""

    # The name "json" is a method of pydantic's models.
    json_: Schema | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None

    def asked_grammar(self) -> Grammar:
        values: dict[Kind, Any] = {
            "json_schema": self.json_,
            "regex": self.regex,
            "choice": self.choice,
            "ebnf": self.grammar,
            "json_object": "" if self.json_object else None,
            "structural_tag": self.structural_tag,
        }
        found = [_grammar_of(kind, value) for kind, value in values.items() if value is not None]
        if len(found) != 1:
            raise EspalierError("structured_outputs needs exactly one form, such as json or regex; send one")
        return found[0]


class Constrained(_Strict):
    """The fields that ask for a form.  At most one may be sent."""

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

    def asked_grammar(self) -> Grammar | None:
        """The form that is asked for.  Raises EspalierError if there are two."""
        found = list(self._asked())
        if len(found) > 1:
            names = " and ".join(name for name, _ in found)
            raise EspalierError(f"{names} both ask for a form of the output; send only one")
        return found[0][1] if found else None

    def _asked(self) -> Iterator[tuple[str, Grammar]]:
        if self.response_format is not None and (grammar := self.response_format.grammar()) is not None:
            yield "response_format", grammar
        if (outputs := self.structured_outputs) is not None:
            yield "structured_outputs", outputs.asked_grammar()
        for name, kind in KIND_OF_FIELD.items():
            if (value := getattr(self, name)) is not None:
                yield name, _grammar_of(kind, value)


# For the fields that hold one value.  Their JSON schemas are not strict: they have no field `strict`.
KIND_OF_FIELD: Mapping[str, Kind] = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "ebnf",
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf": "ebnf",
    "structural_tag": "structural_tag",
}


def _grammar_of(kind: Kind, value: Any) -> Grammar:
    return Grammar(kind, value if isinstance(value, str) else json.dumps(value), strict=False)
