"""The endpoints /v1/files and /v1/batches, as OpenAI's client calls them."""

import asyncio
import errno
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.types import Message, Receive, Scope, Send

from espalier.errors import require_int, shown, whole_number
from espalier.server.batch_store import INPUT_PURPOSE, Batch, BatchRequest, StoredFile
from espalier.server.batches import BatchRunner
from espalier.server.bodies import require_uncompressed, require_utf8
from espalier.server.connections import MAX_TRANSFERS
from espalier.server.errors import ApiError, json_response, queue_full_error
from espalier.server.middleware import FILES_PATH
from espalier.server.routes import Endpoint, query_parameters
from espalier.server.upload_form import uploaded_file

T = TypeVar("T", StoredFile, Batch)
BATCHES_PATH = "/v1/batches"
MAX_LIST_ITEMS = {FILES_PATH: 10_000, BATCHES_PATH: 100}
DEFAULT_LIST_ITEMS = {FILES_PATH: 10_000, BATCHES_PATH: 20}
JSONL_CONTENT_TYPE = "application/jsonl"
RANGE_ERRORS = {
    400: "the range is not supported; use bytes=FIRST-LAST, bytes=FIRST- or bytes=-COUNT",
    416: "the range begins after the file's end",
}
log = logging.getLogger("espalier.server")


class TransferLimiter:
    """Limits the uploads and downloads in progress, because each transfer has files open.  max_open: the
    most transfers at once."""

    def __init__(self, max_open: int = MAX_TRANSFERS):
        self.max_open = max_open
        self.num_open = 0

    @contextmanager
    def reserve(self) -> Iterator[None]:
        """Counts a transfer as in progress during the block.  Raises ApiError if too many transfers are in progress."""
        if self.num_open >= self.max_open:
            raise queue_full_error(f"{self.max_open} files are being sent or received already")
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1


class Download(FileResponse):
    """The response with a stored file.  If the request has a Range header, only the requested range is sent."""

    def __init__(self, path: Path, transfers: TransferLimiter):
        super().__init__(path, media_type=JSONL_CONTENT_TYPE)
        self.transfers = transfers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the file.  Raises ApiError for a bad range, and if too many transfers are in progress."""

        async def raise_range_errors(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] in RANGE_ERRORS:
                size = Headers(raw=message["headers"]).get("content-range")
                headers = {} if size is None else {"content-range": size}
                raise ApiError(message["status"], RANGE_ERRORS[message["status"]], "range", headers=headers)
            await send(message)

        with self.transfers.reserve():
            await super().__call__(scope, receive, raise_range_errors)


@contextmanager
def _disk_errors_as_api_errors(action: str = "store") -> Iterator[None]:
    """Turns an OSError that leaves the block into an ApiError about the disk.  action: a verb for the error's text."""
    try:
        yield
    except OSError as error:
        why = f"the server cannot {action} this ({error.strerror or error})"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ApiError(507, f"{why}; delete files, or make room on its disks", retry=False) from None
        log.error("cannot %s a file or batch: %s", action, error)
        raise ApiError(500, f"{why}; its log has the details", retry=False) from None


def batch_endpoints(batches: BatchRunner) -> list[Endpoint]:
    return [*_file_endpoints(batches), *_batch_endpoints(batches)]


def _file_endpoints(batches: BatchRunner) -> list[Endpoint]:
    store, transfers = batches.store, TransferLimiter()

    def requested_file(http: Request) -> StoredFile:
        """Returns the stored file whose id is in the request's path.  Raises ApiError."""
        if (id := http.path_params["id"]) not in store.files:
            raise ApiError(404, f"there is no file {shown(id)}; GET {FILES_PATH} lists them", "file_id")
        return store.files[id]

    async def upload_file(http: Request) -> Response:
        try:
            content_type = http.headers.get("content-type", "")
            require_utf8(content_type)
            require_uncompressed(http.headers)
            if not content_type.lower().startswith("multipart/form-data"):
                raise ApiError(415, f"content-type {shown(content_type)} is not supported; send multipart/form-data")
            with transfers.reserve(), _disk_errors_as_api_errors():
                async with uploaded_file(http) as file:
                    name = file.filename or "batch.jsonl"
                    return json_response(await asyncio.to_thread(store.add_file, file.file, name, INPUT_PURPOSE))
        except ApiError:
            # A client may send the whole body before it reads the error, so the rest of the body is read.
            await http.scope["state"]["upload"].finish()
            raise

    async def list_files(http: Request) -> Response:
        query = _list_parameters(http, "purpose", "order")
        chosen = [each for each in store.list_files() if query.get("purpose", each.purpose) == each.purpose]
        return _list_page(FILES_PATH, chosen, query)

    async def get_file(http: Request) -> Response:
        return json_response(requested_file(http))

    async def get_content(http: Request) -> Response:
        path = store.content_path(requested_file(http).id)
        if not path.is_file():
            raise ApiError(404, f"the content of {http.path_params['id']} is gone from the server's disk", "file_id")
        return Download(path, transfers)

    async def delete_file(http: Request) -> Response:
        await _require_no_body(http)
        if (reader := batches.unfinished_batch_of(id := requested_file(http).id)) is not None:
            raise ApiError(400, f"the file is the input of {reader}, which has not ended; cancel it first", "file_id")
        with _disk_errors_as_api_errors("delete"):
            store.remove_file(id)
        return json_response({"id": id, "object": "file", "deleted": True})

    return [
        Endpoint("POST", FILES_PATH, upload_file),
        Endpoint("GET", FILES_PATH, list_files),
        Endpoint("GET", FILES_PATH + "/{id}", get_file),
        Endpoint("DELETE", FILES_PATH + "/{id}", delete_file),
        Endpoint("GET", FILES_PATH + "/{id}/content", get_content),
    ]


def _batch_endpoints(batches: BatchRunner) -> list[Endpoint]:
    store = batches.store

    def requested_batch(http: Request) -> Batch:
        """Returns the batch whose id is in the request's path.  Raises ApiError."""
        if (id := http.path_params["id"]) not in store.batches:
            raise ApiError(404, f"there is no batch {shown(id)}; GET {BATCHES_PATH} lists them", "batch_id")
        return batches.update_counts(store.batches[id])

    async def create_batch(http: Request, body: BatchRequest) -> Response:
        file = store.files.get(body.input_file_id)
        if file is None or file.purpose != INPUT_PURPOSE:
            message = (
                f"input_file_id={shown(body.input_file_id)} is no file with purpose {INPUT_PURPOSE!r}; upload one first"
            )
            raise ApiError(400, message, "input_file_id")
        with _disk_errors_as_api_errors():
            return json_response(batches.create(body))

    async def list_batches(http: Request) -> Response:
        counted = [batches.update_counts(each) for each in store.batches.values()]
        return _list_page(BATCHES_PATH, counted, _list_parameters(http))

    async def get_batch(http: Request) -> Response:
        return json_response(requested_batch(http))

    async def cancel_batch(http: Request) -> Response:
        await _require_no_body(http)
        with _disk_errors_as_api_errors():
            batches.cancel(requested_batch(http))
        return json_response(requested_batch(http))

    return [
        Endpoint("POST", BATCHES_PATH, create_batch, body=BatchRequest),
        Endpoint("GET", BATCHES_PATH, list_batches),
        Endpoint("GET", BATCHES_PATH + "/{id}", get_batch),
        Endpoint("POST", BATCHES_PATH + "/{id}/cancel", cancel_batch),
    ]


async def _require_no_body(http: Request) -> None:
    """Raises ApiError unless the body is empty, {} or null.  Some clients always send a body, such as {}."""
    if b"".join((await http.body()).split()) not in (b"", b"{}", b"null"):
        raise ApiError(400, f"{http.method} {http.url.path} takes no body; leave it out")


def _list_parameters(http: Request, *names: str) -> Mapping[str, str]:
    """Returns the query parameters of a list: limit, after and those in `names`.  Raises ApiError for others."""
    known = ("limit", "after", *names)
    return query_parameters(http, known, f"use {', '.join(known)}")


def _list_page(path: str, items: Sequence[T], query: Mapping[str, str]) -> Response:
    """Returns one page of a list, newest items first unless `order` is asc.  items: oldest first.  Raises ApiError.
    path: the path of the list's endpoint.  query: the request's query parameters."""
    max_count = MAX_LIST_ITEMS[path]
    limit = query.get("limit", str(DEFAULT_LIST_ITEMS[path]))
    try:
        require_int("limit", num_items := whole_number(limit), 1, max_count)
    except ValueError:
        raise ApiError(400, f"limit={shown(limit)} is not supported; use 1 to {max_count}", "limit") from None
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise ApiError(400, f"order={shown(order)} is not supported; use asc or desc", "order")
    ordered = list(items) if order == "asc" else list(reversed(items))
    after = query.get("after")
    if after is not None:
        places = [i for i, each in enumerate(ordered) if each.id == after]
        if not places:
            raise ApiError(400, f"after={shown(after)} is not in the list; use the last_id of the page before", "after")
        ordered = ordered[places[0] + 1 :]
    page = ordered[:num_items]
    ends = {"first_id": page[0].id if page else None, "last_id": page[-1].id if page else None}
    return json_response({"object": "list", "data": page, **ends, "has_more": len(ordered) > len(page)})
