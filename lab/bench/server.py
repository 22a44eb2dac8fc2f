"""Starts the server for measurements: the command that users type, in its own process."""

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from espalier.bench.clients import Address, HttpResponse, connect
from espalier.config import SpeculationConfig
from espalier.errors import EspalierError

# Long enough for a server to load its model.
START_SECONDS = 600.0
# A server drains for at most a minute, and then closes in less than another.
STOP_SECONDS = 120.0
SERVED_NAME = "measured"
HEALTH_REQUEST = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
JSON_HEADERS = {"content-type": "application/json"}


@dataclass(frozen=True)
class Server:
    """A running server.  pid: the API server's process; engine_pid: the engine's process."""

    port: int
    pid: int
    engine_pid: int

    def connect(self) -> http.client.HTTPConnection:
        """Returns an open connection, which the caller closes."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=START_SECONDS)
        connection.connect()
        return connection

    def post(self, path: str, body: Mapping[str, Any]) -> tuple[int, bytes]:
        """(status, body) of the response."""
        with closing(self.connect()) as connection:
            return post_body(connection, path, json.dumps(body).encode())

    def metrics(self) -> dict[str, float]:
        """The samples of /metrics, by name with labels."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=START_SECONDS)
        try:
            connection.request("GET", "/metrics")
            lines = connection.getresponse().read().decode().splitlines()
        finally:
            connection.close()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def post_body(connection: http.client.HTTPConnection, path: str, body: bytes) -> tuple[int, bytes]:
    """Post a body.  (status, body) of the response."""
    connection.request("POST", path, body, JSON_HEADERS)
    answer = connection.getresponse()
    return answer.status, answer.read()


def flags_of(settings: Mapping[str, Any]) -> list[str]:
    """Command-line flags for these engine settings."""
    flags = []
    for name, value in settings.items():
        if isinstance(value, SpeculationConfig):
            flags += flags_of({key: each for key, each in asdict(value).items() if each != "auto"})
        elif name != "model":
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                flags.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                flags += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return flags


@contextmanager
def running_server(
    settings: Mapping[str, Any], *flags: str, start: Sequence[str] = ("espalier", "serve")
) -> Iterator[Server]:
    """Start a server by `python -m *start`, wait until it has loaded its model, and stop it at the end of the block.

    Raises EspalierError with the end of its log if it does not start.
    """
    port = free_port()
    model = [str(settings["model"])] if "model" in settings else []
    address = ["--port", str(port), "--served-model-name", SERVED_NAME]
    command = [sys.executable, "-m", *start, *model, *address, *flags_of(settings), *flags]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            try:
                wait_until_served(process, port)
            except EspalierError as error:
                log.seek(0)
                raise EspalierError(f"{error}: {' '.join(log.read()[-500:].split())}") from None
            yield Server(port, process.pid, children_of(process.pid)[0])
        finally:
            stop_process(process)


def stop_process(process: subprocess.Popen[bytes], seconds: float = STOP_SECONDS) -> None:
    """Send SIGTERM and wait.  A server that still runs after `seconds` is killed, its engine with it; that raises
    EspalierError."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise EspalierError(f"the server (pid {process.pid}) did not leave within {seconds:g} s of SIGTERM") from None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_served(process: subprocess.Popen[bytes], port: int) -> None:
    """Wait until the server accepts connections.  Raises EspalierError if it ends or takes START_SECONDS."""
    end = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < end:
        try:
            with socket.create_connection(("127.0.0.1", port)):
                return
        except OSError:
            time.sleep(0.05)
    raise EspalierError("the server did not start")


def children_of(pid: int) -> list[int]:
    """The processes that a process's main thread has started."""
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def is_running(pid: int) -> bool:
    """Whether a process runs.  A zombie does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def exchange_all(port: int, requests: Sequence[bytes]) -> list[HttpResponse]:
    """Send the requests, each on an open connection of its own, and read the responses.  Raises EspalierError."""
    return asyncio.run(_exchange_all(Address("127.0.0.1", port), requests))


async def _exchange_all(address: Address, requests: Sequence[bytes]) -> list[HttpResponse]:
    connections = [await connect(address) for _ in requests]
    try:
        # The server has accepted a connection once it has answered on it.
        await _gather_responses([connection.send(HEALTH_REQUEST) for connection in connections])
        pairs = zip(connections, requests, strict=True)
        return await _gather_responses([connection.send(request) for connection, request in pairs])
    finally:
        for connection in connections:
            connection.transport.abort()


async def _gather_responses(ended: Sequence[asyncio.Future[HttpResponse]]) -> list[HttpResponse]:
    try:
        async with asyncio.timeout(START_SECONDS):
            return await asyncio.gather(*ended)
    except TimeoutError:
        raise EspalierError(f"the server did not answer within {START_SECONDS:g} s; see its log") from None
