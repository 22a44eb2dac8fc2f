"""The OpenAI-compatible server: an HTTP front, and the engine in a process of its own."""
