"""Parses tool calls and reasoning, and adapts a request's prompt, parameters and output to the request's tools."""
