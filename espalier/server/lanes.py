"""Tokenization outside the event loop, in two lanes, so that a short prompt never waits for a long one.

Each lane is a thread with its own tokenizer.  transformers calls encode_batch of the tokenizers library, which releases
the GIL, so a long prompt does not block the event loop.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from espalier.errors import EspalierError
from espalier.inputs import InputProcessor
from espalier.server.errors import full, refusal

T = TypeVar("T")
# Characters or tokens of the short lane: a few milliseconds of work.
MAX_SHORT = 16384
MAX_WAITING = 32
# Work below this size takes less time than the way to a thread and back.
MAX_INLINE = 2048


class Lanes:
    """inputs: used by the short lane; the long lane uses a copy."""

    def __init__(self, inputs: InputProcessor):
        self._short = inputs, ThreadPoolExecutor(1, "tokenizing-short")
        self._long = inputs.for_another_thread(), ThreadPoolExecutor(1, "tokenizing-long")
        self._num_short = 0
        self._num_long = 0

    async def run(self, work: Callable[..., T], *values: Any, size: int, field: str | None = None) -> T:
        """Run work(InputProcessor, *values) in a lane.

        size: characters or tokens to process; field: the body's field that errors name.  Raises ApiError if `work`
        raises EspalierError, or if too many long prompts wait.
        """
        try:
            if size <= MAX_INLINE and not self._num_short:
                # Nobody else uses this lane's tokenizer now.
                return work(self._short[0], *values)
            if size <= MAX_SHORT:
                self._num_short += 1
                try:
                    return await self._in(self._short, work, *values)
                finally:
                    self._num_short -= 1
            if self._num_long > MAX_WAITING:
                raise full(f"{MAX_WAITING} long prompts are already waiting to be tokenized")
            self._num_long += 1
            try:
                return await self._in(self._long, work, *values)
            finally:
                self._num_long -= 1
        except EspalierError as error:
            raise refusal(error, field) from None

    async def _in(self, lane: tuple[InputProcessor, ThreadPoolExecutor], work: Callable[..., T], *values: Any) -> T:
        inputs, thread = lane
        return await asyncio.get_running_loop().run_in_executor(thread, work, inputs, *values)

    def close(self) -> None:
        for _, thread in (self._short, self._long):
            thread.shutdown(wait=False)
