"""Grammars that restrict a request's output: checks and rewrites them, so that xgrammar enforces them."""

from espalier.grammar.spec import KINDS, Grammar

__all__ = ["KINDS", "Grammar"]
