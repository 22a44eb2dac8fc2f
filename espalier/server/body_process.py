"""The body process: reads large bodies for a front, one at a time, and exits when the front does.

A frame in either direction is a length and a pickle.  Pickle is safe here: only the front has the pipes' other ends.
"""

import pickle
import signal
import sys
from typing import Any, BinaryIO

import msgspec

from espalier.server.aside import LENGTH, framed
from espalier.server.bodies import BodyLimits, read_body
from espalier.server.errors import ApiError


def answer(name: str, content_type: str, data: bytes, limits: BodyLimits) -> tuple[Any, tuple[Any, ...] | None]:
    """(body, None), or (None, arguments of the ApiError)."""
    try:
        return read_body(name, content_type, data, limits), None
    except ApiError as error:
        return None, (error.status_code, error.detail, error.param, error.code)


def serve(requests: BinaryIO, answers: BinaryIO, limits: BodyLimits) -> None:
    """Answer each frame, a (model name, content type, bytes), until `requests` ends."""
    while head := requests.read(LENGTH.size):
        name, content_type, data = pickle.loads(requests.read(*LENGTH.unpack(head)))
        found = answer(name, content_type, data, limits)
        answers.write(framed(pickle.dumps(found, protocol=pickle.HIGHEST_PROTOCOL)))
        answers.flush()


if __name__ == "__main__":
    # Ctrl-C reaches the whole process group, but the front decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(sys.stdin.buffer, sys.stdout.buffer, msgspec.json.decode(sys.argv[1], type=BodyLimits))
