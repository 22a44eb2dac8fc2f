"""Runs one request: turns the engine's output into a whole response, or into a stream of server-sent events.

When the response ends, for any reason, the samples that still run are aborted.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from espalier.errors import EspalierError
from espalier.grammar.spec import GRAMMAR_ERRORS
from espalier.server.errors import INTERNAL_ERROR, RETRY_AFTER_S, ApiError, bad_request_error, json_response
from espalier.server.http1 import EXCHANGE_EXTENSION, HttpExchange
from espalier.server.logs import client_name
from espalier.server.protocol import EngineBusy, EngineGone, Generation, OutputPart
from espalier.server.response_builders import ResponseBuilder

if TYPE_CHECKING:
    from espalier.server.frontend import ModelFrontend

log = logging.getLogger("espalier.server")
# A stream whose client does not read is ended this long after the request's deadline.
SEND_GRACE_S = 10.0


class ActiveRequest:
    """One request in progress.

    generation: receives the engine's output.  deadline: when the request's time limit ends, on the event loop's clock;
    None for no limit.  grammar_field: the body field that asks for a grammar, for the error if it is refused."""

    def __init__(
        self,
        frontend: "ModelFrontend",
        make_builder: Callable[[], ResponseBuilder],
        generation: Generation,
        deadline: float | None,
        grammar_field: str | None,
    ):
        self.grammar_field = grammar_field
        self.metrics = frontend.metrics
        self.timeout_s = frontend.options.request_timeout_s
        self.make_builder = make_builder
        self.generation = generation
        self.client_shares, self.client = frontend.client_shares, client_name.get()
        self.client_shares.add_generation(self.client, generation)
        self.deadline = deadline
        self.prompt_index = {name: i for i, name in enumerate(generation.num_running)}
        self.started_at = asyncio.get_running_loop().time()
        # By (prompt name, output index): when the last tokens arrived, on the event loop's clock.
        self.last_token_at: dict[tuple[str, int], float] = {}
        self.disconnect_task: asyncio.Task[None] | None = None
        self._unsent_first_events = b""

    @cached_property
    def response_builder(self) -> ResponseBuilder:
        return self.make_builder()

    def watch_for_disconnect(self, http: Request) -> None:
        """From now on, the request ends with ClientDisconnect if the client disconnects."""
        self.disconnect_task = asyncio.create_task(_wait_for_disconnect(http))
        self.disconnect_task.add_done_callback(self._fail_on_disconnect)

    def _fail_on_disconnect(self, disconnect_task: asyncio.Task[None]) -> None:
        if not disconnect_task.cancelled():
            self.generation.fail(ClientDisconnect())

    async def full_response(self) -> Response:
        """Returns the whole response.  Raises ApiError or ClientDisconnect."""
        with self._as_api_errors():
            async for parts in self.generation.iter_parts(self.deadline):
                self._record_metrics(parts)
                for part in parts:
                    self.response_builder.add_output(self.prompt_index[part.name], part)
        self.close()
        return json_response(self.response_builder.full_response())

    async def events(self) -> AsyncIterator[bytes]:
        """Yields the response as server-sent events.  Raises ApiError or ClientDisconnect."""
        self._unsent_first_events = b"".join(
            map(self.response_builder.encode_event, self.response_builder.first_chunks())
        )
        with self._as_api_errors():
            async for parts in self.generation.iter_parts(self.deadline):
                if events := self._events_of(parts):
                    yield events

    @property
    def has_ended(self) -> bool:
        """Whether the output is complete, and no error occurred."""
        return self.generation.has_ended and self.generation.error is None

    def _events_of(self, parts: list[OutputPart]) -> bytes:
        """Returns the encoded stream events for new parts of the output.  Raises ApiError."""
        self._record_metrics(parts)
        events = self._unsent_first_events + b"".join(
            [self.response_builder.add_output_as_event(self.prompt_index[part.name], part) for part in parts]
        )
        self._unsent_first_events = b""
        if self.has_ended:
            # The last tokens and the closing events are sent in one write, because each write is expensive.
            events += b"".join(
                [
                    *map(self.response_builder.encode_event, self.response_builder.last_chunks()),
                    self.response_builder.end_event,
                ]
            )
        return events

    def write_events_to(self, exchange: HttpExchange) -> None:
        """From now on, write events directly to the connection of `exchange`, as long as the client reads."""

        def write(parts: list[OutputPart]) -> bool:
            """Write the events of `parts`.  Returns False, without writing, if the client does not read."""
            if not exchange.is_client_reading:
                return False
            if events := self._events_of(parts):
                exchange.write(events)
            return True

        self.generation.listener = write

    @contextmanager
    def _as_api_errors(self) -> Iterator[None]:
        """Turns an exception that leaves the block into an ApiError."""
        try:
            yield
        except TimeoutError:
            self.metrics.timeouts.inc()
            message = f"the request took longer than {self.timeout_s:g} s; lower max_tokens, or raise --request-timeout"
            raise ApiError(504, message, retry=False) from None
        except EngineGone as error:
            raise ApiError(503, f"{error}; retry the request", code="engine_gone") from None
        except EngineBusy as error:
            code = "rate_limit_exceeded"
            raise ApiError(429, str(error), code=code, retry_after_s=RETRY_AFTER_S) from None
        except EspalierError as error:
            raise bad_request_error(error, self.grammar_field) from None

    def _record_metrics(self, parts: list[OutputPart]) -> None:
        """Count the parts in the metrics.  Raises ApiError if a part has an error."""
        metrics, now = self.metrics, asyncio.get_running_loop().time()
        for part in parts:
            output = part.output
            if count := len(output.token_ids):
                metrics.generated_tokens.count += count
                key = part.name, output.index
                last_at = self.last_token_at.get(key)
                if last_at is None:
                    metrics.time_to_first_token.observe(now - self.started_at)
                else:
                    metrics.inter_token_time.observe((now - last_at) / count, count)
                self.last_token_at[key] = now
            if part.usage is not None:
                metrics.finished_samples.labels(output.finish_reason).inc()
                metrics.prompt_tokens.inc(part.usage.prompt_tokens)
                metrics.cached_tokens.inc(part.usage.cached_tokens)
            if output.error is not None:
                is_grammar = output.error in GRAMMAR_ERRORS
                param = self.grammar_field if is_grammar else None
                raise ApiError(400 if is_grammar else 500, output.error, param, retry=False)

    def close(self) -> None:
        """End the request: abort the samples that still run."""
        if self.disconnect_task is not None:
            self.disconnect_task.cancel()
        self.generation.close()
        self.client_shares.remove_generation(self.client, self.generation)
        self.metrics.duration.observe(asyncio.get_running_loop().time() - self.started_at)


async def _wait_for_disconnect(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """The streaming response of an ActiveRequest.  first_event: made before the status is sent.  later_events:
    made while the response is sent.

    An error after the first event is sent as an event.  Waking the task of this response costs as much as sending an
    event.  So ActiveRequest writes later events directly to the connection, without this task, if the HTTP server
    supports direct writes (http1.EXCHANGE_EXTENSION) and the client reads.
    """

    def __init__(self, active_request: ActiveRequest, first_event: bytes, later_events: AsyncIterator[bytes]):
        super().__init__(later_events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self.active_request = active_request
        self.first_event = first_event
        self.later_events = later_events
        self.has_ended = False

    async def _send_all(self, send: Send, exchange: HttpExchange | None) -> None:
        """Send the response.  If the client disconnects, the rest is dropped.  exchange: None without direct writes."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send(_body_message(self.first_event))
        if exchange is not None:
            self.active_request.write_events_to(exchange)
        is_last = False
        try:
            async for events in self.later_events:
                # The last events and the end of the response are sent as one message.
                is_last = self.active_request.has_ended
                await send(_body_message(events, not is_last))
        except ClientDisconnect:
            return
        except ApiError as error:
            log.warning("the stream ended early: %s", error.detail)
            await send(_body_message(self._failure_event(error)))
        except Exception:
            # Status 200 is already sent, so only an error event tells the client that the text is incomplete.
            log.exception("the stream failed")
            await send(_body_message(self._failure_event(ApiError(500, INTERNAL_ERROR))))
        self.has_ended = True
        if not is_last:
            await send(_body_message(b"", False))
        # Let other streams that end now send their last bytes before this stream is logged and counted.
        await asyncio.sleep(0)

    def _failure_event(self, error: ApiError) -> bytes:
        """Returns the event that tells the client about an error, and counts the error in the metrics."""
        body = error.body()
        self.active_request.metrics.stream_errors.labels(body["error"]["type"]).inc()
        return self.active_request.response_builder.error_event(body)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        send_deadline = None if self.active_request.deadline is None else self.active_request.deadline + SEND_GRACE_S
        try:
            async with asyncio.timeout_at(send_deadline):
                await self._send_all(send, scope.get("extensions", {}).get(EXCHANGE_EXTENSION))
        except TimeoutError:
            log.warning("the client did not read the stream before its deadline: the connection is closed")
        finally:
            if not self.has_ended:
                self.active_request.metrics.disconnects.inc()
            self.active_request.close()


def _body_message(events: bytes, more_body: bool = True) -> Message:
    return {"type": "http.response.body", "body": events, "more_body": more_body}
