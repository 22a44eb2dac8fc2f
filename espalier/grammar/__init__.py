"""Grammars that restrict a request's output: their spec, their compilation with xgrammar, and masks on trees."""

from espalier.grammar.spec import KINDS, Grammar

__all__ = ["KINDS", "Grammar"]
