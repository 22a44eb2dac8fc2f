"""One server for the tests that only ask, and the offline LLM that they compare it with."""

from contextlib import ExitStack

import pytest
from openai import OpenAI

from espalier import LLM, SpeculationConfig
from tests.server.serving import ENGINE, TREE, Served, serving
from tests.worded import worded


@pytest.fixture(scope="session")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    batches = ("--batch-dir", str(folder / "batches"), "--max-file-bytes", "65536")
    with serving(folder, "--max-queue", "12", *batches, copied=True) as served:
        yield served


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """A function from flags to a server that runs with them: an earlier test's, or a new one where a test ended it.

    It takes constants too, for a new one (serving.py).
    """
    started = {}

    def running(*flags, **constants):
        if flags not in started or started[flags].process.poll() is not None:
            folder = tmp_path_factory.mktemp("server")
            started[flags] = stack.enter_context(serving(folder, *flags, copied=True, **constants))
        return started[flags]

    with ExitStack() as stack:
        yield running


@pytest.fixture
def langchain():
    """A package that takes a second to import: the worker that needs it does."""
    import langchain_openai

    return langchain_openai


@pytest.fixture(scope="session")
def llm():
    target, draft = worded()
    with LLM(model=target, draft=draft, speculation=SpeculationConfig(**TREE), **ENGINE) as llm:
        yield llm


@pytest.fixture(scope="session")
def client(served: Served):
    """One for all tests: to make a client reads all of the machine's certificates."""
    with OpenAI(base_url=f"{served.base}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client
