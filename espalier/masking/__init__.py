"""Grammars at work: xgrammar compiles them, and makes the masks of each output."""
