"""Shared parts of all commands: flags made from the config fields, tables and progress on the terminal, the machine."""
