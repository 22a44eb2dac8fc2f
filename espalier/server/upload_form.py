"""Reads the form of an upload to /v1/files: one file and its purpose."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from espalier.errors import shown, unknown_name_error
from espalier.server.batch_store import INPUT_PURPOSE
from espalier.server.bodies import require_utf8
from espalier.server.errors import ApiError

PART_NAMES = ("file", "purpose")


class _UploadParser(MultiPartParser):
    """Refuses a wrong part before its content is stored.  has_ended: whether the last boundary has been read."""

    has_ended = False

    def __init__(self, http: Request):
        super().__init__(http.headers, self._parts_of(http))

    async def _parts_of(self, http: Request) -> AsyncGenerator[bytes, None]:
        """Yields the body's bytes.  Raises ApiError at the end of a body without its last boundary."""
        async with aclosing(http.stream()) as stream:
            async for part in stream:
                yield part
        if not self.has_ended:
            raise ApiError(400, "the form is cut off: its last boundary is missing; send the whole form")

    def on_headers_finished(self) -> None:
        super().on_headers_finished()
        part = self._current_part
        name = part.field_name
        if name.partition("[")[0] == "expires_after":
            why = "expires_after is not supported: files stay until they are deleted; leave it out"
            raise ApiError(400, why, "expires_after", "unsupported")
        if name not in PART_NAMES:
            raise ApiError(400, str(unknown_name_error("the form", name, PART_NAMES, python=False)), name)
        if any(name == earlier for earlier, _ in self.items):
            advice = "upload each file with a request of its own" if name == "file" else "send it once"
            raise ApiError(400, f"the form has more than one {name}; {advice}", name)
        if name == "file" and part.file is None:
            raise ApiError(400, "file has no filename; send it as a file, with a filename", name)
        if name == "purpose" and part.file is not None:
            raise ApiError(400, f"purpose has a filename; send it as the text {INPUT_PURPOSE!r}", name)

    def on_end(self) -> None:
        self.has_ended = True


@asynccontextmanager
async def uploaded_file(http: Request) -> AsyncIterator[UploadFile]:
    """Reads the form and yields its file, which is closed after the block.  Raises ApiError."""
    try:
        form = await _UploadParser(http).parse()
    except MultiPartException as error:
        why = error.message.rstrip(".")
        raise ApiError(400, f"the form cannot be read ({why}); send the parts file and purpose") from None
    try:
        file, purpose = form.get("file"), form.get("purpose")
        if purpose is None:
            raise ApiError(400, f"purpose is missing; send {INPUT_PURPOSE!r}", "purpose")
        if purpose != INPUT_PURPOSE:
            raise ApiError(400, f"purpose={shown(purpose)} is not supported; use {INPUT_PURPOSE!r}", "purpose")
        if not isinstance(file, UploadFile):
            raise ApiError(400, "file is missing; send it as a part of multipart/form-data", "file")
        _require_no_transfer_encoding(file)
        yield file
    finally:
        await form.close()


def _require_no_transfer_encoding(file: UploadFile) -> None:
    """Raises ApiError for an encoded file, such as base64, because the server stores the bytes unchanged."""
    require_utf8(file.headers.get("content-type", ""))
    encoding = file.headers.get("content-transfer-encoding", "binary")
    if encoding.lower() not in ("7bit", "8bit", "binary"):
        raise ApiError(415, f"content-transfer-encoding={shown(encoding)} is not supported; send binary", "file")
