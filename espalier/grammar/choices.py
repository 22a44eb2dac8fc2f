"""Lists of texts, one of which is the output."""

from espalier.errors import EspalierError, shown
from espalier.grammar.json_text import read_json

MAX_CHOICES = 4096


def ebnf_of_choices(spec: str) -> str:
    """A grammar in xgrammar's EBNF that allows exactly the texts of a JSON array.  Raises EspalierError."""
    choices = read_json("list of choices", spec)
    if not isinstance(choices, list) or not choices or not all(isinstance(text, str) and text for text in choices):
        raise EspalierError(f"choices {shown(choices)} are not supported; use a list of non-empty strings")
    if len(choices) > MAX_CHOICES:
        raise EspalierError(f"{len(choices)} choices are not supported; use {MAX_CHOICES} at most")
    return "root ::= " + " | ".join(_quoted(text) for text in choices)


def _quoted(text: str) -> str:
    # xgrammar's \x takes all hex digits that follow, \u takes four.
    special = {'"': '\\"', "\\": "\\\\"}
    return '"' + "".join(special.get(c, c if c >= " " else f"\\u{ord(c):04x}") for c in text) + '"'
