"""Tool calls and reasoning: the formats in which models write them, and how a request's tools change its prompt, its
parameters and its output."""
