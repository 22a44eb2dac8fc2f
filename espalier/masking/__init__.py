"""Grammars in use: xgrammar compiles them, and makes the masks of each output."""
