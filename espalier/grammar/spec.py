"""The output form that a user asks for, as plain values.  espalier/masking turns them into masks."""

import json
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from espalier.errors import EspalierError, refuse_unknown_fields, require_text, shown, without_duplicate_keys

Kind = Literal["json_object", "json_schema", "regex", "ebnf", "choice", "structural_tag"]
KINDS: tuple[str, ...] = get_args(Kind)
# The most characters of a spec.  A larger one is refused before it is parsed.
MAX_SPEC_CHARS = 64 * 1024


@refuse_unknown_fields
@dataclass(frozen=True)
class Grammar:
    """The form that an output must have.

    kind: which form.  spec: JSON text for json_schema and structural_tag, a JSON array of strings for choice, a regular
    expression, a grammar in xgrammar's EBNF, "" for json_object.
    strict: True refuses a JSON schema whose objects may have more properties than it names.  False accepts it, and the
    output has only the named ones.
    after: text that ends the model's reasoning, such as "</think>".  The form begins after this text; None: it begins
    with the first token.
    Raises EspalierError for a value that no model supports.
    """

    kind: Kind = ""  # type: ignore[assignment]  # refused below, with the kinds
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
        """Make the grammar of a JSON schema.  schema: a value (dict or bool) or JSON text."""
        text = schema if isinstance(schema, str) else json.dumps(schema)
        return cls("json_schema", text, strict, after)

    @classmethod
    def of_choices(cls, choices: list[str], *, after: str | None = None) -> "Grammar":
        """The grammar that allows exactly these texts."""
        return cls("choice", json.dumps(choices), after=after)


def require_grammar(name: str, value: Any) -> None:
    if not isinstance(value, Grammar):
        raise EspalierError(f"{name}={shown(value)} is not supported; use espalier.Grammar(...)")


# Integers that xgrammar reads exactly.
INTEGERS = range(-(2**63), 2**63)


def read_json(what: str, text: str) -> Any:
    """Parse JSON text.  xgrammar must read its numbers and texts exactly.

    what: the name of the text in errors.  Raises EspalierError for any other text.
    """
    try:
        value = json.loads(
            text,
            parse_int=_whole,
            parse_float=_finite,
            parse_constant=refuse_constant,
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
    raise EspalierError(f"the {what} cannot be read: {reason}; send other JSON")


def _whole(digits: str) -> int:
    # Python takes long to read very long numbers.
    if len(digits) > 20 or int(digits) not in INTEGERS:
        raise ValueError(f"{shown(digits)} has more than 64 bits")
    return int(digits)


def _finite(digits: str) -> float:
    if not math.isfinite(value := float(digits)):
        raise ValueError(f"{shown(digits)} is too large")
    return value


def refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
