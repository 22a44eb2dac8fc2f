"""Refuses unsupported grammars, as far as that is possible without compiling them."""

from collections.abc import Callable, Mapping
from functools import lru_cache

from espalier.errors import EspalierError
from espalier.grammar.finite import check_escapes
from espalier.grammar.regex import ebnf_of_regex
from espalier.grammar.schema import enforceable
from espalier.grammar.spec import Grammar
from espalier.grammar.tag import ebnf_of_choices, enforceable_tag

_CHECKS: Mapping[str, Callable[[Grammar], object]] = {
    "json_schema": lambda grammar: enforceable(grammar.spec, grammar.strict),
    "structural_tag": lambda grammar: enforceable_tag(grammar.spec, grammar.strict),
    "regex": lambda grammar: ebnf_of_regex(grammar.spec),
    "ebnf": lambda grammar: check_escapes(grammar.spec),
    "choice": lambda grammar: ebnf_of_choices(grammar.spec),
}


# A server gets the same grammars again and again, and to check a large one takes many milliseconds.
@lru_cache(256)
def check_grammar(grammar: Grammar) -> None:
    """Raises EspalierError with the reason."""
    if not grammar.spec and grammar.kind != "json_object":
        raise EspalierError(f"a grammar of kind {grammar.kind!r} is empty; give its text")
    if grammar.kind in _CHECKS:
        _CHECKS[grammar.kind](grammar)
