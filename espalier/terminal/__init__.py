"""Shared parts of all commands: flags generated from config fields, tables, progress bars, the machine."""
