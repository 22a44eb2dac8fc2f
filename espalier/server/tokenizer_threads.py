"""Tokenizes prompts in two threads: one for short and one for long prompts, so short prompts never wait for long ones.

Each thread has its own tokenizer.  In encode_batch, the tokenizers library releases the GIL, so the event loop goes on.
"""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from espalier.chat import Rendering, RenderLoop
from espalier.errors import EspalierError
from espalier.inputs import InputProcessor
from espalier.server.errors import bad_request_error, queue_full_error

T = TypeVar("T")
# Work with more characters or tokens goes to the thread for long texts.  Work of this size takes a few milliseconds.
MAX_SHORT_SIZE = 16384
MAX_WAITING_PROMPTS = 32
# Work of at most this size runs on the event loop, because a switch to a thread and back takes longer.
MAX_INLINE_SIZE = 2048


@dataclass
class TokenizerThread:
    """One thread with its tokenizer.  num_unfinished_calls: calls that wait or run, even if their request has ended."""

    inputs: InputProcessor
    executor: ThreadPoolExecutor
    num_unfinished_calls: int = 0

    async def run(self, work: Callable[..., T], *values: Any) -> T:
        """Run work(InputProcessor, *values) in the thread, and return the result."""
        running = asyncio.get_running_loop().run_in_executor(self.executor, work, self.inputs, *values)
        self.num_unfinished_calls += 1
        running.add_done_callback(self._count_finished_call)
        return await asyncio.shield(running)

    def _count_finished_call(self, call: asyncio.Future[Any]) -> None:
        self.num_unfinished_calls -= 1


class TokenizerThreads:
    """Runs tokenization in the thread for short texts or for long texts.

    inputs: used by the thread for short texts.  The thread for long texts uses a copy."""

    def __init__(self, inputs: InputProcessor):
        self._short_text_thread = TokenizerThread(inputs, ThreadPoolExecutor(1, "tokenizer-short"))
        self._long_text_thread = TokenizerThread(inputs.for_another_thread(), ThreadPoolExecutor(1, "tokenizer-long"))

    async def run(self, work: Callable[..., T], *values: Any, size: int, field: str | None = None) -> T:
        """Run work(InputProcessor, *values) in one of the threads, or on the event loop if `size` is very small.

        size: the number of characters or tokens.  field: the body's field, for error messages.  Raises ApiError if
        `work` raises EspalierError, or if too many long prompts wait.
        """
        try:
            if size <= MAX_INLINE_SIZE and not self._short_text_thread.num_unfinished_calls:
                # The thread has no work, so the event loop may use the thread's tokenizer.
                return work(self._short_text_thread.inputs, *values)
            if size <= MAX_SHORT_SIZE:
                return await self._short_text_thread.run(work, *values)
            if self._long_text_thread.num_unfinished_calls > MAX_WAITING_PROMPTS:
                raise queue_full_error(f"{MAX_WAITING_PROMPTS} long prompts are already waiting to be tokenized")
            return await self._long_text_thread.run(work, *values)
        except EspalierError as error:
            raise bad_request_error(error, field) from None

    async def run_steps(
        self,
        work: Callable[..., RenderLoop],
        *values: Any,
        render: Callable[[Rendering], Awaitable[str]],
        size: int,
        field: str | None = None,
    ) -> list[int]:
        """Returns the token ids of a conversation.

        work(InputProcessor, *values): returns the generator that makes the token ids (chat.RenderLoop).  The generator
        runs in the thread that `run` would choose.  It yields the arguments of a chat template, and is sent the text
        that `render` returns for them.  size, field: as in `run`, and the same errors are raised.
        """
        steps: RenderLoop | None = None

        def advance(inputs: InputProcessor, text: Any) -> tuple[Rendering | None, list[int]]:
            """Resumes the generator.  text: the last rendered text.  Returns (rendering, []), or (None, token ids)."""
            nonlocal steps
            steps = steps or work(inputs, *values)
            try:
                return steps.send(text), []
            except StopIteration as end:
                return None, list(end.value)

        text = None
        while True:
            rendering, tokens = await self.run(advance, text, size=size, field=field)
            if rendering is None:
                return tokens
            try:
                text = await render(rendering)
            except EspalierError as error:
                raise bad_request_error(error, field) from None

    def close(self) -> None:
        for thread in (self._short_text_thread, self._long_text_thread):
            thread.executor.shutdown(wait=False)
