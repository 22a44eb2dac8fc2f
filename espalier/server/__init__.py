"""The OpenAI-compatible server: an HTTP front process and an engine process."""
