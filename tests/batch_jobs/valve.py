"""A server that passes requests on to another one, as many as the test lets through; the others wait."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Condition, Thread
from urllib.parse import urlsplit

HOPS = ("host", "content-length", "connection", "transfer-encoding")


class Valve(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, behind: str):
        super().__init__(("127.0.0.1", 0), _Passing)
        self.behind = urlsplit(behind).netloc
        self.base = f"http://127.0.0.1:{self.server_port}"
        self.left = self.turn = 0
        self.changed = Condition()

    def let(self, count: int) -> None:
        """Let `count` requests through from now on.  Requests that wait since before are dropped."""
        with self.changed:
            self.left, self.turn = count, self.turn + 1
            self.changed.notify_all()

    def passes(self) -> bool:
        with self.changed:
            turn = self.turn
            self.changed.wait_for(lambda: self.turn != turn or self.left > 0)
            if self.turn == turn:
                self.left -= 1
            return self.turn == turn

    def handle_error(self, *_: object) -> None:
        """A client that was killed is no error."""


class _Passing(BaseHTTPRequestHandler):
    server: Valve

    def do_GET(self) -> None:
        self._pass(None)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.server.passes():
            self._pass(body)

    def _pass(self, body: bytes | None) -> None:
        connection = HTTPConnection(self.server.behind, timeout=60)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in HOPS}
        connection.request(self.command, self.path, body, headers)
        answer = connection.getresponse()
        read = answer.read()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in HOPS:
                self.send_header(name, value)
        self.send_header("content-length", str(len(read)))
        self.end_headers()
        self.wfile.write(read)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def valve(behind: str) -> Iterator[Valve]:
    with Valve(behind) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
