"""A server as users start it: a process of its own, on a port that is free."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests import warm
from tests.worded import worded

ROOT = Path(__file__).parents[2]
START_S = 120
# float64, so that tokens are the offline LLM's whatever runs beside them.
ENGINE = {"dtype": "float64", "max_batch": 4, "max_context": 512, "page_size": 16, "num_pages": 200}
# Smaller than the usual tree, so that a round takes less.
TREE = {"steps": 3, "topk": 2, "num_draft_tokens": 8}
LONG = {"model": "bundled", "prompt": "def f(x):\n", "max_tokens": 400, "ignore_eos": True, "temperature": 0}
# The bundled tokenizer's token of 29 spaces.
SPACES = 5386
HEAD = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


def flags_of(settings: Mapping[str, object]) -> list[str]:
    return [part for name, value in settings.items() for part in ("--" + name.replace("_", "-"), str(value))]


FLAGS = flags_of(ENGINE | TREE)


class Served:
    """A running server.  base: its address without /v1."""

    def __init__(self, process: subprocess.Popen[str] | warm.Copy, port: int, log: Path):
        self.process = process
        self.port = port
        self.base = f"http://127.0.0.1:{port}"
        self.log = log

    def request(self, path: str, body: Any = None, method: str | None = None, **headers: str) -> tuple[int, Any, Any]:
        """(status, headers, JSON or text)"""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        sent = {"content-type": "application/json", **{name.replace("_", "-"): v for name, v in headers.items()}}
        asked = urllib.request.Request(self.base + path, data, sent, method=method)
        try:
            answer = urllib.request.urlopen(asked, timeout=60)
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            text = answer.read().decode()
            is_json = answer.headers.get("content-type", "").startswith("application/json")
            return answer.status, answer.headers, json.loads(text) if is_json else text

    def metric(self, name: str, **labels: str) -> float:
        """One sample of /metrics; 0 where it is not there yet."""
        wanted = {f'{key}="{value}"' for key, value in labels.items()}
        for line in self.request("/metrics")[2].splitlines():
            sample, _, value = line.rpartition(" ")
            found, _, rest = sample.partition("{")
            if found == f"espalier_{name}" and wanted <= set(rest.rstrip("}").split(",")):
                return float(value)
        return 0.0

    def engine_pid(self) -> int:
        """The API server's child that is not one of its readers and renderers."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        aside = (b"espalier.server.bodies", b"espalier.server.template_process")
        lines = {int(child): Path(f"/proc/{child}/cmdline").read_bytes() for child in children}
        [engine] = [child for child, line in lines.items() if not any(name in line for name in aside)]
        return engine

    def until(self, holds: Any, seconds: float = 60.0) -> None:
        """Wait for what takes a moment.  To look costs the server CPU time, so the pauses grow."""
        end, pause = time.monotonic() + seconds, 0.01
        while not holds():
            assert time.monotonic() < end, self.log.read_text()[-3000:]
            time.sleep(pause)
            pause = min(pause * 1.5, 0.1)


def connected(served: Served) -> socket.socket:
    """A connection that takes in as little as it can."""
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    slow.connect(("127.0.0.1", served.port))
    return slow


def answer(connection: socket.socket) -> tuple[int, str, Any]:
    """(status, headers in lower case, the error), read to the end of the connection."""
    connection.settimeout(20)
    read = b""
    while part := connection.recv(65536):
        read += part
    head, _, body = read.decode().partition("\r\n\r\n")
    return int(head.split()[1]), head.lower(), json.loads(body)["error"]


def ask_large(connection: socket.socket, headers: str = "") -> None:
    """A POST to /detokenize whose response, of 5 MB, is larger than the buffers of a socket."""
    data = json.dumps({"tokens": [SPACES] * 180_000}).encode()
    head = HEAD.replace("/v1/completions", "/detokenize") + headers
    connection.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)


def opened(
    served: Served, headers: Mapping[str, str] | None = None, **fields: Any
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """A stream whose first event has come: (connection, answer)."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    body = json.dumps({**LONG, "stream": True, **fields})
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json", **(headers or {})})
    answer = connection.getresponse()
    assert answer.status == 200
    assert answer.readline().startswith(b"data: ")
    return connection, answer


def events(answer: http.client.HTTPResponse) -> list[bytes]:
    return [line[6:].strip() for line in answer.read().splitlines() if line.startswith(b"data: ")]


def announce_body(connection: socket.socket, headers: str = "") -> None:
    """Send the headers of a request whose body never comes; returns once the server waits for the body."""
    connection.sendall(f"{HEAD}{headers}expect: 100-continue\r\ncontent-length: 1000\r\n\r\n".encode())
    assert connection.recv(1000).startswith(b"HTTP/1.1 100 ")


def is_told_of_the_end(connection: socket.socket) -> bool:
    """Whether a request whose body is not there is refused because the server ends."""
    status, head, error = answer(connection)
    is_refused = (status, error["type"]) == (503, "overloaded_error") and "the body had not arrived" in error["message"]
    return is_refused and "connection: close" in head and "retry-after: 1" in head


def exists(pid: int) -> bool:
    """Whether a process runs; one that has ended and is not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextmanager
def serving(folder: Path, *flags: str, copied: bool = False, **constants: float) -> Iterator[Served]:
    """A server with these flags, ended by SIGTERM; nothing of it is left.

    A first flag without a dash is its model.  Else it has a tiny one, called "bundled".  copied: it finds its imports
    done (tests/warm.py).  constants: of espalier/server/run.py, of a copied one.
    """
    if not flags or flags[0].startswith("-"):
        target, draft = map(str, worded())
        flags = (target, "--draft", draft, "--served-model-name", "bundled", *flags)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = folder / f"server-{port}.log"
    arguments = ["serve", *flags[:1], "--port", str(port), *FLAGS, *flags[1:]]
    temporary = folder / f"tmp-{port}"
    temporary.mkdir()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}
    with log.open("w") as lines:
        if copied:
            # Most servers render no template, and its process would take a second of CPU time.
            constants = {"PRESTARTS_TEMPLATE_PROCESS": 0, **constants}
            values = {f"espalier.server.run.{name}": value for name, value in constants.items()}
            process = warm.server().start("espalier", arguments, environment, lines, lines, values)
        else:
            command = [sys.executable, "-m", "espalier", *arguments]
            process = subprocess.Popen(command, stderr=lines, stdout=lines, text=True, env=environment, cwd=ROOT)
    served = Served(process, port, log)
    try:
        served.until(lambda: answers(served), START_S)
        yield served
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    # Its engine ends a little later than a server that was killed.
    served.until(lambda: not list(temporary.iterdir()))


def until(holds: Callable[[], Any], seconds: float = 60.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return found


def answers(served: Served) -> bool:
    assert served.process.poll() is None, served.log.read_text()[-3000:]
    try:
        return served.request("/health")[0] == 200
    except OSError:
        return False
