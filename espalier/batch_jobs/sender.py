"""Runs a batch: sends every unanswered line over HTTP, or to an ASGI application in this process.

A line is sent again after a failure that the line did not cause: a full queue, a restarting server or a lost
connection.  Only the lines in flight are in memory, so a file may have any number of lines.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from itertools import cycle
from typing import Any
from urllib.parse import SplitResult, urlsplit

import httpx
import msgspec

from espalier.batch_jobs.files import DEFAULT_URLS, BatchLine, Journal, LineError, Response, id_prefix, parse_line
from espalier.errors import EspalierError, one_line, shown

# The longest wait for the next bytes of an answer.  The wait is long, because some answers take many minutes.
ANSWER_TIMEOUT_S = 3600.0
CONNECT_TIMEOUT_S = 10.0
FIRST_RETRY_PAUSE_S, MAX_RETRY_PAUSE_S = 0.25, 10.0
# A line is not sent again after it was lost this many times (NotAnswered.was_lost), because it may crash the server.
MAX_TIMES_LOST = 5
RETRIED_STATUSES = (429, 502, 503)
STATUS_NOT_FOUND = 404
AsgiApp = Callable[..., Awaitable[None]]
SYNC_INTERVAL_S = 1.0


class NotAnswered(Exception):
    """A line got no answer.  retry_after_s: the shortest wait before a retry.  is_final: whether a retry would fail
    too.  was_lost: whether the line may have reached a server and crashed the server."""

    def __init__(self, reason: str, retry_after_s: float = 0.0, is_final: bool = False, was_lost: bool = False):
        super().__init__(reason)
        self.retry_after_s = retry_after_s
        self.is_final = is_final
        self.was_lost = was_lost


class Sender:
    """Sends lines to servers.  clients: one client for each server, used in turn.  All servers have the same models.

    give_up_s: after this time without an answer to any line, `answer` raises EspalierError; None for no limit.
    priority: the field priority for bodies without this field; None to leave it out."""

    def __init__(
        self, clients: Sequence[httpx.AsyncClient], give_up_s: float | None = None, priority: int | None = None
    ):
        self.give_up_s = give_up_s
        self.priority = priority
        self._next_clients = cycle(clients)
        self._answered_at = asyncio.get_running_loop().time()

    async def answer(self, request_id: str, line: BatchLine) -> Response:
        """Returns the response to a line, after retries if necessary.

        Raises LineError if only this line gets no answer, and EspalierError if other lines would get no answer either.
        """
        body = line.body
        if self.priority is not None and "priority" not in body:
            body = {**body, "priority": self.priority}
        body_json, pause, num_times_lost = msgspec.json.encode(body), FIRST_RETRY_PAUSE_S, 0
        while True:
            try:
                response = await self._send_once(next(self._next_clients), request_id, line, body_json)
            except NotAnswered as why:
                self._require_retry_useful(why)
                num_times_lost += why.was_lost
                if num_times_lost == MAX_TIMES_LOST:
                    message = f"the line was lost {num_times_lost} times ({why}); send it alone to see why"
                    raise LineError("no_answer", message, line.custom_id) from None
                await asyncio.sleep(max(why.retry_after_s, pause * (0.5 + random.random())))
                pause = min(2 * pause, MAX_RETRY_PAUSE_S)
            else:
                self._answered_at = asyncio.get_running_loop().time()
                return response

    def _require_retry_useful(self, failure: NotAnswered) -> None:
        """Raises EspalierError if a retry would fail too, or if no line was answered for give_up_s."""
        silent_s = asyncio.get_running_loop().time() - self._answered_at
        if failure.is_final:
            raise EspalierError(str(failure))
        if self.give_up_s is not None and silent_s > self.give_up_s:
            raise EspalierError(f"no line was answered for {silent_s:.0f} s ({failure}); see the server's log")

    async def _send_once(
        self, client: httpx.AsyncClient, request_id: str, line: BatchLine, body_json: bytes
    ) -> Response:
        """Send a line without retries.  Returns the response.  Raises NotAnswered or LineError."""
        headers = {"content-type": "application/json", "x-request-id": request_id}
        try:
            http_response = await client.post(line.url, content=body_json, headers=headers)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            raise NotAnswered(f"{client.base_url} cannot be reached: {one_line(error)}") from None
        except httpx.TransportError as error:
            raise NotAnswered(
                f"the connection to {client.base_url} was lost: {one_line(error)}", was_lost=True
            ) from None
        try:
            body = msgspec.json.decode(http_response.content)
        except msgspec.DecodeError:
            body = None
        _raise_if_not_answered(http_response, body)
        if not isinstance(body, dict):
            answered = f"the server answered {http_response.status_code}"
            message = f"{answered} without a JSON object; is it an OpenAI-compatible server?"
            raise LineError("invalid_response", message, line.custom_id)
        return Response(http_response.status_code, http_response.headers.get("x-request-id", request_id), body)


def _raise_if_not_answered(response: httpx.Response, body: Any) -> None:
    """Raises NotAnswered for an error that the line did not cause.  body: the decoded JSON of the response, or None."""
    body = body if isinstance(body, dict) else {}
    error = body.get("error") or {}
    error = error if isinstance(error, dict) else {"message": str(error)}
    why = f"status {response.status_code}: {error.get('message') or 'no message'}"
    if response.status_code in (401, 403):
        raise NotAnswered(f"the server refuses the API key ({why}); give the right one with --api-key", is_final=True)
    # Some servers send the fields of an error without the object "error" around them.
    if response.status_code == STATUS_NOT_FOUND and not error and "message" not in body:
        url, text = response.request.url, shown(response.text)
        here = f"{url} answers {STATUS_NOT_FOUND} without an error of OpenAI's form, {text}"
        raise NotAnswered(f"{here}: nothing is served there; correct --url, or url in the lines", is_final=True)
    if response.status_code in RETRIED_STATUSES:
        retry_after = response.headers.get("retry-after", "")
        raise NotAnswered(
            why,
            min(float(retry_after), MAX_RETRY_PAUSE_S) if retry_after.isdecimal() else 0.0,
            is_final=response.headers.get("x-should-retry") == "false",
            was_lost=error.get("code") == "engine_gone" and not retry_after,
        )


def split_url(url: str) -> SplitResult:
    """Splits a server's URL.  Raises EspalierError if the URL is not supported."""
    try:
        url_parts = urlsplit(url)
        # Some hosts that urlsplit accepts are refused by httpx.
        is_supported = url_parts.scheme in ("http", "https") and httpx.URL(url).host and url_parts.port != 0
    except (ValueError, httpx.InvalidURL):
        is_supported = False
    if not is_supported or url_parts.query or url_parts.fragment:
        raise EspalierError(f"--url={url} is not supported; use an address such as http://127.0.0.1:8000")
    return url_parts


def http_client(url: str, api_key: str | None, concurrency: int) -> httpx.AsyncClient:
    """Returns an HTTP client for a server.  url: with or without /v1 at the end.  Raises EspalierError.
    concurrency: how many requests may run at once."""
    split_url(url)
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    base = url.rstrip("/").removesuffix("/v1")
    timeout = httpx.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    return httpx.AsyncClient(base_url=base, headers=_key_headers(api_key), timeout=timeout, limits=limits)


def app_client(app: AsgiApp, api_key: str | None = None) -> httpx.AsyncClient:
    """Returns an HTTP client that calls an ASGI application in this process."""
    transport = httpx.ASGITransport(app)
    return httpx.AsyncClient(transport=transport, base_url="http://batch", headers=_key_headers(api_key), timeout=None)


def _key_headers(api_key: str | None) -> dict[bytes, bytes]:
    # The key is sent as UTF-8 bytes, because httpx refuses text that is not ASCII.
    return {} if api_key is None else {b"authorization": f"Bearer {api_key}".encode()}


async def require_reachable(clients: Sequence[httpx.AsyncClient]) -> None:
    """Raises EspalierError if a server cannot be reached, or does not serve /v1/models."""
    for client in clients:
        try:
            response = await client.get("/v1/models")
        except httpx.TransportError as error:
            raise EspalierError(
                f"--url {client.base_url} cannot be reached ({one_line(error)}); start a server there, or correct it"
            ) from None
        if response.status_code == STATUS_NOT_FOUND:
            raise EspalierError(
                f"--url {client.base_url} has no /v1/models: no OpenAI server is there; correct the path"
            )


async def run_batch(
    journal: Journal,
    sender: Sender,
    concurrency: int,
    on_answer: Callable[[], object] = lambda: None,
    urls: Collection[str] = DEFAULT_URLS,
) -> None:
    """Send all unanswered lines of the journal's input file, and write the answers to the journal.

    concurrency: how many lines are sent at once.  on_answer: called after each written answer.  urls: allowed values of
    the field url.  Raises EspalierError if the server does not answer any more, or the output cannot be written.
    Answers that are written stay in the journal, so a later run sends only the other lines."""
    lines = journal.unanswered_lines()
    try:
        async with asyncio.TaskGroup() as group:
            sync_task = group.create_task(_sync_journal_periodically(journal))
            async with asyncio.TaskGroup() as workers:
                for _ in range(min(concurrency, journal.num_unanswered)):
                    workers.create_task(_answer_lines(lines, journal, sender, on_answer, urls))
            sync_task.cancel()
    except BaseExceptionGroup as errors:
        raise _first_error(errors) from None
    finally:
        lines.close()


async def _answer_lines(
    lines: Iterator[tuple[int, bytes]],
    journal: Journal,
    sender: Sender,
    on_answer: Callable[[], object],
    urls: Collection[str],
) -> None:
    """Send one line after another, and write the answers.  Several tasks run this function with the same `lines`."""
    for number, data in lines:
        custom_id: str | None = None
        answer: Response | LineError
        try:
            line = parse_line(number, data, urls)
            custom_id = line.custom_id
            answer = await sender.answer(f"{id_prefix(journal.scan.digest)}{number}", line)
        except LineError as error:
            custom_id, answer = error.custom_id, error
        journal.append(number, custom_id, answer)
        on_answer()


async def _sync_journal_periodically(journal: Journal) -> None:
    while True:
        await asyncio.sleep(SYNC_INTERVAL_S)
        # The sync runs in a thread, because a slow disk must not block the event loop.
        await asyncio.to_thread(journal.sync)


def _first_error(errors: BaseExceptionGroup) -> BaseException:
    inner = errors.exceptions[0]
    return _first_error(inner) if isinstance(inner, BaseExceptionGroup) else inner
