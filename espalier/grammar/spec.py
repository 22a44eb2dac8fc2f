"""The grammar of a request as plain values.  espalier/masking makes the token masks of a grammar."""

import json
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from espalier.errors import EspalierError, refuse_unknown_fields, require_text, shown, without_duplicate_keys

GrammarKind = Literal["json_object", "json_schema", "regex", "ebnf", "choice", "structural_tag"]
KINDS: tuple[str, ...] = get_args(GrammarKind)
# The processor time that all grammars of a decoding step (round) may take together.  Half of what they took in the
# previous round counts too.  After this time the engine ends the requests whose grammars took more than their share.
# Ordinary grammars take less than a fiftieth of this time.  A new request may have to wait for this time twice: in the
# round that runs when the request arrives, and in the request's own first round.
GRAMMAR_LIMIT_S = 0.125
# The errors by which the engine ends a request because of its grammar.
NO_TOKEN_LEFT_ERROR = (
    "the grammar leaves no token that may follow the output so far: this model's tokens cannot spell what it asks for; "
    "change the grammar, or lower its counts"
)
TOOK_TOO_LONG_ERROR = (
    f"the grammar took more than its share of {GRAMMAR_LIMIT_S:g} s to find the tokens that may follow the output so "
    "far; write it so that each text can be read in one way only, lower its counts, or make it smaller"
)
GRAMMAR_ERRORS = (NO_TOKEN_LEFT_ERROR, TOOK_TOO_LONG_ERROR)
# The most characters of a spec.  Longer specs are refused before they are parsed.
MAX_SPEC_CHARS = 64 * 1024


@refuse_unknown_fields
@dataclass(frozen=True)
class Grammar:
    """The form that an output must have.

    kind: one of KINDS.
    spec: JSON text for json_schema and structural_tag, a JSON array of strings for choice, a regular expression for
    regex, a grammar in xgrammar's EBNF for ebnf, "" for json_object.
    strict: True refuses a JSON schema whose objects may have unnamed properties.  False accepts the schema, and the
    output has only named properties.
    after: text that ends the model's reasoning, such as "</think>".  The grammar applies only after this text; None:
    from the first token.  A wrong field raises EspalierError."""

    kind: GrammarKind = ""  # type: ignore[assignment]  # "" is refused with a list of the kinds
    spec: str = ""
    strict: bool = True
    after: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise EspalierError(f"grammar kind {shown(self.kind)} is not supported; use one of {', '.join(KINDS)}")
        if not isinstance(self.spec, str):
            text = " (JSON text: json.dumps)" if isinstance(self.spec, dict) else ""
            raise EspalierError(f"grammar spec {shown(self.spec)} is not supported; use a string{text}")
        if len(self.spec) > MAX_SPEC_CHARS:
            raise EspalierError(
                f"a grammar of {len(self.spec)} characters is not supported; use {MAX_SPEC_CHARS} at most"
            )
        if not isinstance(self.strict, bool):
            raise EspalierError(f"grammar strict={shown(self.strict)} is not supported; use True or False")
        if self.after is not None and not (isinstance(self.after, str) and self.after):
            raise EspalierError(f"grammar after={shown(self.after)} is not supported; use a text or None")
        require_text("grammar spec", self.spec)
        require_text("grammar after", self.after or "")

    @classmethod
    def of_json_schema(cls, schema: Any, *, strict: bool = True, after: str | None = None) -> "Grammar":
        """Returns the grammar of a JSON schema: a dict, a bool or JSON text.  strict, after: as in Grammar."""
        text = schema if isinstance(schema, str) else json.dumps(schema)
        return cls("json_schema", text, strict, after)

    @classmethod
    def of_choices(cls, choices: list[str], *, after: str | None = None) -> "Grammar":
        """Returns the grammar that allows exactly the texts `choices`.  after: as in Grammar."""
        return cls("choice", json.dumps(choices), after=after)


def require_grammar(name: str, value: Any) -> None:
    if not isinstance(value, Grammar):
        raise EspalierError(f"{name}={shown(value)} is not supported; use espalier.Grammar(...)")


# The integers that xgrammar can represent.
EXACT_INTEGERS = range(-(2**63), 2**63)


def read_json(description: str, text: str) -> Any:
    """Parses JSON text whose numbers and strings xgrammar can represent.  Raises EspalierError for other text.
    description: the word for the text in errors."""
    try:
        value = json.loads(
            text,
            parse_int=_parse_integer,
            parse_float=_parse_float,
            parse_constant=refuse_json_constant,
            object_pairs_hook=without_duplicate_keys,
        )
        json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeEncodeError:
        reason = "a text in it has half of a surrogate pair"
    except RecursionError:
        reason = "it is nested too deeply"
    except ValueError as error:
        reason = str(error)
    raise EspalierError(f"the {description} cannot be read: {reason}; send other JSON")


def _parse_integer(digits: str) -> int:
    # int() is slow for very long numbers.
    if len(digits) > 20 or int(digits) not in EXACT_INTEGERS:
        raise ValueError(f"{shown(digits)} has more than 64 bits")
    return int(digits)


def _parse_float(digits: str) -> float:
    if not math.isfinite(value := float(digits)):
        raise ValueError(f"{shown(digits)} is too large")
    return value


def refuse_json_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
