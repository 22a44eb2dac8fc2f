"""Reads the frames of HTTP/1 in what a client sends, ahead of the parser: heads are checked and bodies pass through.

It refuses heads that the parser would accept and must not, and leaves out `Upgrade`: this server speaks no other
protocol, and the parser would take the body for that protocol (RFC 9110, section 7.8: a server may ignore the header).
"""

import re
from collections.abc import Callable, Iterator

from espalier.server.errors import ApiError

# Of a head, and of the trailers.
MAX_HEAD_BYTES = 65536
MAX_HEAD_LINES = 256
# More chunks than this must have this many bytes on average.
FEW_CHUNKS = 16384
MIN_CHUNK_BYTES = 32
# 2**63 has as many digits.
MAX_LENGTH_DIGITS = 19
UNREADABLE = (
    "malformed HTTP: the request line, a header or the framing of the body is invalid; "
    "send plain HTTP/1.1 (http://, not https://)"
)
END = b"\r\n\r\n"
# What a request may begin with, as far as it has arrived.
START = re.compile(rb"[A-Z-]{0,24}(?:\Z| (?:\Z|[^ \r\n]+(?:\Z| (?:HTTP/1\.[01]\r\n|[HTP/1.0\r]{0,9}\Z))))")
BARE_LF = re.compile(rb"(?<!\r)\n")
FIELDS = re.compile(rb"\r\n(?:(host|upgrade|content-length|transfer-encoding):([^\r\n]*)|[ \t])", re.I)
SIZE = re.compile(rb"[0-9A-Fa-f]{1,15}")


class Frames:
    """The frames of one connection: head, body, head, and so on."""

    def __init__(self) -> None:
        # The part of a head, a chunk's size or a trailer that has arrived.
        self._held = b""
        # What comes next but for heads; None for a head.
        self._rest: Callable[[bytes, int], int] | None = None
        self._left = 0
        self._num_trailer_bytes = self._num_chunks = self._chunk_bytes = 0
        self._is_chunked = False

    def take(self, data: bytes) -> Iterator[bytes]:
        """Yield what the parser may read.  Raises ApiError for a head that is refused; nothing may follow then."""
        passed: list[bytes] = []
        at = start = 0
        try:
            while at < len(data):
                if self._rest is not None:
                    at = self._rest(data, at)
                    continue
                passed.append(data[start:at])
                head, at = self._head(data, at)
                passed.append(head)
                start = at
        finally:
            if whole := b"".join([*passed, data[start:at]]):
                yield whole

    def _head(self, data: bytes, at: int) -> tuple[bytes, int]:
        """What passes, and the place in the data that follows it."""
        num_held = len(self._held)
        data = self._held + data[at:]
        searched = max(0, num_held - len(END) + 1)
        begin = 0 if num_held else len(data) - len(data.lstrip(b"\r\n"))
        end = data.find(END, max(begin, searched))
        head = data[begin:] if end < 0 else data[begin : end + len(END)]
        if len(head) > MAX_HEAD_BYTES:
            raise ApiError(431, f"the request's head is larger than {MAX_HEAD_BYTES} bytes; send fewer headers")
        if not START.match(head) or BARE_LF.search(head, max(0, searched - 1)):
            raise ApiError(400, UNREADABLE)
        if end < 0:
            self._held = head
            return b"", at + len(data) - num_held
        self._held = b""
        return self._checked(head), at + end + len(END) - num_held

    def _checked(self, head: bytes) -> bytes:
        """The head as the parser reads it; sets the state for what follows it."""
        if head.count(b"\n") > MAX_HEAD_LINES:
            raise ApiError(431, f"the request's head has more than {MAX_HEAD_LINES} lines; send fewer headers")
        if head.startswith(b"CONNECT "):
            raise ApiError(405, "CONNECT is not served: this server is no proxy")
        fields: dict[bytes, list[bytes]] = {}
        for match in FIELDS.finditer(head):
            if match[1] is None:  # a line that continues the one before
                raise ApiError(400, UNREADABLE)
            fields.setdefault(match[1].lower(), []).append(match[2].strip(b" \t"))
        version = head[: head.index(b"\r\n")].rpartition(b" ")[2]
        if version == b"HTTP/1.1" and len(fields.get(b"host", ())) != 1:
            raise ApiError(400, "an HTTP/1.1 request has one Host header; send it once")
        codings = b",".join(fields.get(b"transfer-encoding", ())).lower()
        if b"transfer-encoding" in fields and codings != b"chunked":
            _refuse_codings(codings)
        self._is_chunked = bool(codings)
        length = fields.get(b"content-length", [b"0"])[0]
        if len(length) > MAX_LENGTH_DIGITS:
            raise ApiError(400, f"a content-length of {len(length)} characters is not supported; send a plain number")
        # The parser refuses what is no number, and a length beside chunks.
        self._left = int(length) if length.isdigit() else 0
        self._num_trailer_bytes = self._num_chunks = self._chunk_bytes = 0
        self._rest = self._size if self._is_chunked else self._body if self._left else None
        if b"upgrade" in fields:
            head = FIELDS.sub(_without_upgrade, head)
        return head

    # Each of these passes what it reads, and gives the place in the data that follows.

    def _body(self, data: bytes, at: int) -> int:
        size = min(self._left, len(data) - at)
        self._left -= size
        if not self._left:
            self._rest = self._size if self._is_chunked else None
        return at + size

    def _line(self, data: bytes, at: int) -> tuple[bytes | None, int]:
        """A line, None while its end has not arrived."""
        end = data.find(b"\n", at) + 1 or len(data)
        line = self._held + data[at:end]
        self._num_trailer_bytes += end - at
        if self._num_trailer_bytes > MAX_HEAD_BYTES:
            raise ApiError(431, f"a chunk's line or the trailers are larger than {MAX_HEAD_BYTES} bytes; send less")
        is_whole = line.endswith(b"\n")
        self._held = b"" if is_whole else line
        return line if is_whole else None, end

    def _size(self, data: bytes, at: int) -> int:
        line, at = self._line(data, at)
        if line is not None:
            size = SIZE.match(line)
            if size is None:
                raise ApiError(400, UNREADABLE)
            self._num_trailer_bytes = 0
            self._num_chunks += 1
            self._chunk_bytes += int(size[0], 16)
            if self._num_chunks > FEW_CHUNKS and self._chunk_bytes < MIN_CHUNK_BYTES * self._num_chunks:
                # Each costs the event loop as much as a small request's header.
                raise ApiError(400, f"{FEW_CHUNKS} chunks of less than {MIN_CHUNK_BYTES} bytes; send larger ones")
            # A chunk ends with CR LF.
            self._left = int(size[0], 16) and int(size[0], 16) + 2
            self._rest = self._body if self._left else self._trailer
        return at

    def _trailer(self, data: bytes, at: int) -> int:
        line, at = self._line(data, at)
        if line == b"\r\n":
            self._rest = None
        return at


def _refuse_codings(codings: bytes) -> None:
    """Refuse all transfer codings but chunked (RFC 9112, section 6.1).  Raises ApiError."""
    names = [name.strip(b" \t") for name in codings.split(b",")]
    if names.count(b"chunked") == 1 and names[-1] == b"chunked":
        raise ApiError(501, f"transfer-encoding {codings.decode('latin-1')} is not supported; use chunked alone")
    raise ApiError(400, "transfer-encoding must be chunked alone, or left out: the body's end would not be known")


def _without_upgrade(match: re.Match[bytes]) -> bytes:
    return b"" if match[1].lower() == b"upgrade" else match[0]
