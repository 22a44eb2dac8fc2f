"""Gathers the prompts that arrive at the front together, so that one prefill pass of the engine can enter them."""

import asyncio
from collections.abc import Callable

from espalier.server.protocol import Submit

# Turns of the event loop without a new prompt after which the prompts leave.  A request that waits in a socket needs
# two turns: one to be read, one to be handled.
QUIET_TURNS = 3
MAX_WAIT_S = 0.01


class Outbox:
    """send: sends prompts in one message; full_rows: tokens that fill a prefill pass.

    A prompt leaves as soon as no other request waits to be read, the prompts fill a pass, or MAX_WAIT_S are over.
    """

    def __init__(self, send: Callable[[list[Submit]], None], full_rows: int):
        self.send = send
        self.full_rows = full_rows
        self._waiting: list[Submit] = []
        self._num_rows = 0
        self._turn: asyncio.Handle | None = None

    def add(self, submit: Submit) -> None:
        loop = asyncio.get_running_loop()
        if not self._waiting:
            self._send_at = loop.time() + MAX_WAIT_S
        self._waiting.append(submit)
        self._num_rows += len(submit.prompt)
        if self._num_rows >= self.full_rows or loop.time() >= self._send_at:
            self.flush()
        else:
            self._look_again(QUIET_TURNS)

    def flush(self) -> None:
        """Send what waits now."""
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        if self._waiting:
            waiting, self._waiting, self._num_rows = self._waiting, [], 0
            self.send(waiting)

    def _look_again(self, turns: int) -> None:
        if self._turn is not None:
            self._turn.cancel()
        self._turn = asyncio.get_running_loop().call_soon(self._look, turns - 1)

    def _look(self, turns: int) -> None:
        if turns:
            self._look_again(turns)
        else:
            self.flush()
