"""Compiles grammars with xgrammar, and makes the token masks of each output."""
