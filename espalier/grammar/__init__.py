"""Grammars that restrict a request's output, as plain values: what a user may ask for, and what xgrammar enforces."""

from espalier.grammar.spec import KINDS, Grammar

__all__ = ["KINDS", "Grammar"]
