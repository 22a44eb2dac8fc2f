"""Tool calls and reasoning: the formats in which models write them, and what a request's tools make of a prompt, of the
parameters and of the output."""
