"""A response of server-sent events."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from espalier.server.errors import FAILED, ApiError
from espalier.server.http1 import EXCHANGE, HttpExchange

if TYPE_CHECKING:
    from espalier.server.front import Run

log = logging.getLogger("espalier.server")
# A stream whose client does not read is ended this long after its deadline.
SEND_GRACE_S = 10.0


class EventStream(StreamingResponse):
    """A run's events; the first exists already.  A later error is sent as an event.

    To wake this task for each event costs as much as the event.  So after the first one, the run writes events as soon
    as they exist, where the HTTP server takes them (http1.EXCHANGE) and the client reads.
    """

    def __init__(self, run: "Run", first: bytes, rest: AsyncIterator[bytes]):
        super().__init__(rest, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self.run = run
        self.first = first
        self.rest = rest
        self.ended = False

    async def _send_all(self, send: Send, exchange: HttpExchange | None) -> None:
        """Send the response.  If the client leaves, its rest is dropped."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send(_body(self.first))
        if exchange is not None:
            self.run.write_to(exchange)
        is_last = False
        try:
            async for events in self.rest:
                # The last events and the end of the response are one message.
                is_last = self.run.has_ended
                await send(_body(events, not is_last))
        except ClientDisconnect:
            return
        except ApiError as error:
            log.warning("the stream ended early: %s", error.detail)
            await send(_body(self._failed(error)))
        except Exception:
            # Status 200 is already sent: without an error event the client would take this for the end of the text.
            log.exception("the stream failed")
            await send(_body(self._failed(ApiError(500, FAILED))))
        self.ended = True
        if not is_last:
            await send(_body(b"", False))
        # Streams that end together all end before the first of them is logged and counted.
        await asyncio.sleep(0)

    def _failed(self, error: ApiError) -> bytes:
        body = error.body()
        self.run.metrics.stream_errors.labels(body["error"]["type"]).inc()
        return self.run.answer.failure(body)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limit = None if self.run.deadline is None else self.run.deadline + SEND_GRACE_S
        try:
            async with asyncio.timeout_at(limit):
                await self._send_all(send, scope.get("extensions", {}).get(EXCHANGE))
        except TimeoutError:
            log.warning("the client did not read the stream before its deadline: the connection is closed")
        finally:
            if not self.ended:
                self.run.metrics.disconnects.inc()
            self.run.close()


def _body(events: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": events, "more_body": more}
