"""The body process: reads large bodies for a front, one after another, and leaves when the front does.

A frame is its length and a pickle, both ways.  Only the front's own process is on the other side of the pipes.
"""

import pickle
import signal
import struct
import sys
from typing import Any, BinaryIO

import msgspec

from espalier.server.bodies import BodyLimits, read_body
from espalier.server.errors import ApiError

LENGTH = struct.Struct("<I")


def framed(value: Any) -> bytes:
    data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(data)) + data


def answer(name: str, content_type: str, data: bytes, limits: BodyLimits) -> tuple[Any, tuple[Any, ...] | None]:
    """(the body, None), or (None, the arguments of its ApiError)."""
    try:
        return read_body(name, content_type, data, limits), None
    except ApiError as error:
        return None, (error.status_code, error.detail, error.param, error.code)


def serve(requests: BinaryIO, answers: BinaryIO, limits: BodyLimits) -> None:
    """Answer each (model's name, content type, bytes) until there are no more."""
    while head := requests.read(LENGTH.size):
        name, content_type, data = pickle.loads(requests.read(*LENGTH.unpack(head)))
        answers.write(framed(answer(name, content_type, data, limits)))
        answers.flush()


if __name__ == "__main__":
    # Ctrl-C reaches it as well: the front says when to leave.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(sys.stdin.buffer, sys.stdout.buffer, msgspec.json.decode(sys.argv[1], type=BodyLimits))
