"""The server's fixtures."""

from tests.server.conftest import llm  # noqa: F401
