"""Tool calls and reasoning: parsers of the formats in which models write them, and the changes of a request's prompt,
parameters and output by its tools."""
