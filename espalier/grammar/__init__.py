"""Grammars that restrict a request's output, as values: what may be asked for, and what xgrammar can enforce of it."""

from espalier.grammar.spec import KINDS, Grammar

__all__ = ["KINDS", "Grammar"]
