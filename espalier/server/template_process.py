"""Renders chat templates in a helper process, one at a time, within limits of time and memory.

A chat template is a program by the checkpoint's author, with input from the client.  It may run forever or exhaust the
memory, so it never runs on the event loop.  This module is also the program of the helper process.  The messages are
JSON, not pickles, because a malicious template could send a pickle that runs code in the API server.
"""

import json
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from espalier.chat import LIMIT_ERROR, ChatTemplate, Rendering
from espalier.errors import EspalierError
from espalier.server.helper_process import HelperProcess, HelperProcessFailed, run_helper_loop

MAX_CPU_S = 1.0
MAX_MEMORY_BYTES = 2**30
# The wall-time limit of one rendering, for work that the limit of CPU time (MAX_CPU_S) cannot interrupt.
MAX_WALL_S = 30.0
MAX_WAITING_RENDERINGS = 64


class TemplateProcess:
    """Renders chat templates in a helper process.  hf: a Hugging Face tokenizer with a chat template."""

    def __init__(self, hf: Any):
        self.source = hf.chat_template, dict(hf.special_tokens_map)
        waiting = "conversations are already waiting for the chat template"
        self.helper = HelperProcess("template", MAX_WAITING_RENDERINGS, waiting, "espalier.server.template_process")

    async def render(self, rendering: Rendering) -> str:
        """Returns the text.  Raises EspalierError if the template fails or reaches a limit; ApiError if many wait."""
        data = json.dumps({"source": self.source, "rendering": rendering}).encode()
        try:
            answer = json.loads(await self.helper.call(data, MAX_WALL_S))
        except HelperProcessFailed:
            raise EspalierError(LIMIT_ERROR.format(f"{MAX_WALL_S:g} s and the memory that it may take")) from None
        if "error" in answer:
            raise EspalierError(answer["error"])
        return str(answer["text"])


class CpuTimeExceeded(BaseException):
    """The CPU time limit was reached.  A BaseException, so that no `except Exception` in libraries catches it."""


class TemplateOnlyTokenizer(PreTrainedTokenizerBase):
    """A Hugging Face tokenizer that has only a chat template.  special_tokens: {name: text or texts}."""

    def __init__(self, chat_template: Any, special_tokens: dict[str, Any]):
        self.chat_template = chat_template
        self._special_tokens = special_tokens

    @property
    def special_tokens_map(self) -> dict[str, Any]:
        return self._special_tokens


def render_within_limits(template: ChatTemplate, rendering: Rendering) -> str:
    """Returns the rendered text.  Raises EspalierError if the template fails or reaches a limit."""
    try:
        with _cpu_time_limit():
            return template.render(rendering)
    except CpuTimeExceeded:
        raise EspalierError(LIMIT_ERROR.format(f"{MAX_CPU_S:g} s of CPU time")) from None
    except MemoryError:
        raise EspalierError(LIMIT_ERROR.format(f"{MAX_MEMORY_BYTES >> 20} MB of memory")) from None


@contextmanager
def _cpu_time_limit() -> Iterator[None]:
    signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _raise_cpu_time_exceeded(signal_number: int, frame: FrameType | None) -> None:
    raise CpuTimeExceeded


class TemplateWorker:
    """Renders templates in the helper process.  Keeps the compiled template until a request has another template."""

    def __init__(self) -> None:
        self._source: Any = None
        self._template: ChatTemplate | None = None

    def render_frame(self, frame: bytes) -> bytes:
        """Returns the answer to a frame from TemplateProcess.render.  The frame and the answer are JSON."""
        request = json.loads(frame)
        if self._template is None or request["source"] != self._source:
            self._source = request["source"]
            self._template = ChatTemplate(TemplateOnlyTokenizer(*request["source"]))
        try:
            answer = {"text": render_within_limits(self._template, Rendering(*request["rendering"]))}
        except EspalierError as error:
            answer = {"error": str(error)}
        return json.dumps(answer).encode()


if __name__ == "__main__":
    signal.signal(signal.SIGPROF, _raise_cpu_time_exceeded)
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    run_helper_loop(TemplateWorker().render_frame)
