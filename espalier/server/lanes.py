"""Tokenizing beside the loop, in two lanes: a short prompt never waits behind a long one.

Each lane is one thread with a tokenizer of its own.  The library's encode_batch, which transformers calls, holds no
lock of the interpreter, so that a long prompt stops nothing else either.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from espalier.errors import EspalierError
from espalier.inputs import InputProcessor
from espalier.server.errors import full, refusal

T = TypeVar("T")
# Characters or tokens that take a few milliseconds.
LONGEST_SHORT = 16384
MOST_WAITING = 32


class Lanes:
    """inputs: used by the short lane; the long one has a copy."""

    def __init__(self, inputs: InputProcessor):
        self._short = inputs, ThreadPoolExecutor(1, "tokenizing-short")
        self._long = inputs.for_another_thread(), ThreadPoolExecutor(1, "tokenizing-long")
        self._num_long = 0

    async def run(self, work: Callable[..., T], *values: Any, size: int, field: str | None = None) -> T:
        """`work` of an InputProcessor and values.  size: of its text, in characters, or its tokens; field: of the body,
        which holds it.

        Raises ApiError for what it refuses, and where too many long ones wait.
        """
        try:
            if size <= LONGEST_SHORT:
                return await self._in(self._short, work, *values)
            if self._num_long > MOST_WAITING:
                raise full(f"{MOST_WAITING} long prompts wait to be tokenized")
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
