"""The command line.  Each command is a module with `add` (its parser) and `run`; flags come from the config fields."""

from espalier.cli.main import main

__all__ = ["main"]
