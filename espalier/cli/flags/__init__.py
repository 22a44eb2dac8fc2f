"""Flags of the commands whose modules import PyTorch, apart from those modules: see espalier/cli/parser.py."""
