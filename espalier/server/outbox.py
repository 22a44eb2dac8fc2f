"""Gathers the prompts that arrive at the front together, so that one prefill pass of the engine can enter them."""

import asyncio
from collections.abc import Callable

from espalier.server.protocol import Submit

# Turns of the event loop in which no prompt comes, after which the prompts leave.  A request on a new connection needs
# five: accept, make its transport, watch it, read, handle.
QUIET_TURNS = 6
MAX_WAIT_S = 0.01


class Outbox:
    """Prompts on their way to the engine.

    They leave when no other request waits to be read, when they fill a prefill pass, or after MAX_WAIT_S.

    send: sends prompts in one message; full_rows: tokens that fill a prefill pass.
    """

    def __init__(self, send: Callable[[list[Submit]], None]):
        self.send = send
        self.full_rows = 0
        self._waiting: list[Submit] = []
        self._num_rows = 0
        self._send_at = 0.0
        self._num_quiet = 0
        self._turn: asyncio.Handle | None = None
        # Set once what waits has left.  None until the first prompt comes.
        self._left: asyncio.Event | None = None

    def add(self, submit: Submit) -> None:
        loop = asyncio.get_running_loop()
        if not self._waiting:
            self._send_at, self._left = loop.time() + MAX_WAIT_S, asyncio.Event()
        self._waiting.append(submit)
        self._num_rows += len(submit.prompt)
        self._num_quiet = 0
        if self._num_rows >= self.full_rows or loop.time() >= self._send_at:
            self.flush()
        elif self._turn is None:
            self._turn = loop.call_soon(self._look_in)

    async def sent(self) -> None:
        """Return when what waits has left, after at least one turn of the event loop."""
        if self._waiting and self._left is not None:
            await self._left.wait()
        else:
            await asyncio.sleep(0)

    def flush(self) -> None:
        """Send what waits now."""
        if waiting := self.clear():
            self.send(waiting)

    def clear(self) -> list[Submit]:
        """Remove and return what waits."""
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        if self._left is not None:
            self._left.set()
        waiting, self._waiting, self._num_rows = self._waiting, [], 0
        return waiting

    def _look_in(self) -> None:
        """Send, or look again in the next turn."""
        loop = asyncio.get_running_loop()
        if self._num_quiet == QUIET_TURNS or loop.time() >= self._send_at:
            self.flush()
            return
        self._num_quiet += 1
        self._turn = loop.call_soon(self._look_in)
