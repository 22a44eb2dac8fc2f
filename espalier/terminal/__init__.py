"""Shared parts of all commands: flags made from config fields, tables, progress bars, a description of the machine."""
