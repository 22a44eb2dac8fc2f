"""The OpenAI-compatible server: an API server process and an engine process."""
