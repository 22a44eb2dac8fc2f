"""Checks the head of a request before h11 reads it: h11 takes more than this server, and long for many lines."""

import re

from espalier.server.errors import ApiError

MAX_HEAD_BYTES = 65536
MAX_HEAD_LINES = 256
UNREADABLE = (
    "malformed HTTP: the request line, a header or the framing of the body is invalid; "
    "send plain HTTP/1.1 (http://, not https://)"
)
END = b"\r\n\r\n"
# What a request may begin with, as far as it has arrived.
START = re.compile(rb"[A-Z-]{0,24}(?:\Z| (?:\Z|[^ \r\n]+(?:\Z| (?:HTTP/1\.[01]\r\n|[HTP/1.0\r]{0,9}\Z))))")
# A line feed alone, or a line that continues the one before.
BAD_LINE = re.compile(rb"(?<!\r)\n|\r\n[ \t]")


def check_head(data: bytes) -> int | None:
    """The length of a head at the start of the data, None while it is not whole.  Raises ApiError."""
    end = data.find(END)
    head = data if end < 0 else data[: end + len(END)]
    if len(head) > MAX_HEAD_BYTES:
        raise ApiError(431, f"the request's head is larger than {MAX_HEAD_BYTES} bytes; send fewer headers")
    if head.count(b"\n") > MAX_HEAD_LINES:
        raise ApiError(431, f"the request's head has more than {MAX_HEAD_LINES} lines; send fewer headers")
    if not START.match(head) or (end >= 0 and BAD_LINE.search(head)):
        raise ApiError(400, UNREADABLE)
    if end < 0:
        return None
    if head.startswith(b"CONNECT "):
        raise ApiError(405, "CONNECT is not served: this server is no proxy")
    first, *lines = head.lower().split(b"\r\n")[:-2]
    fields = [line.partition(b":") for line in lines]
    if first.endswith(b"1.1") and [name for name, *_ in fields].count(b"host") != 1:
        raise ApiError(400, "an HTTP/1.1 request has one Host header; send it once")
    codings = [value.strip() for name, _, value in fields if name == b"transfer-encoding"]
    if codings and codings != [b"chunked"]:
        _refuse_codings(b",".join(codings))
    return len(head)


def _refuse_codings(codings: bytes) -> None:
    """Refuse all transfer codings but chunked (RFC 9112, section 6.1).  Raises ApiError."""
    names = [name.strip(b" \t") for name in codings.split(b",")]
    if names.count(b"chunked") == 1 and names[-1] == b"chunked":
        raise ApiError(501, f"transfer-encoding {codings.decode('latin-1')} is not supported; use chunked alone")
    raise ApiError(400, "transfer-encoding must be chunked alone, or left out: the body's end would not be known")
