"""A server beside LLM.generate: the same prompts, the same engine settings, taking turns; and who asks a server.

The server is the command that users type, in a process of its own.
"""

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
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from espalier.bench.drive import contexts
from espalier.config import SpeculationConfig
from espalier.errors import EspalierError
from espalier.llm import LLM
from espalier.request import SamplingParams

START_S = 600.0
# A server drains for a minute at most, and closes what it holds in less than another.
LEAVE_S = 120.0
NAME = "measured"
JSON = {"content-type": "application/json"}


@dataclass(frozen=True)
class Server:
    """A running server: its port, the front's process and the engine's."""

    port: int
    pid: int
    engine_pid: int

    def post(self, path: str, body: Mapping[str, Any]) -> tuple[int, bytes]:
        """(status, the whole answer)"""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=START_S)
        try:
            connection.request("POST", path, json.dumps(body), JSON)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def metrics(self) -> dict[str, float]:
        """/metrics, by sample as it is written there."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=START_S)
        try:
            connection.request("GET", "/metrics")
            lines = connection.getresponse().read().decode().splitlines()
        finally:
            connection.close()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def flags_of(settings: Mapping[str, Any]) -> list[str]:
    """Engine settings as the command line takes them."""
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
def serving(settings: Mapping[str, Any], *flags: str) -> Iterator[Server]:
    """A server that has loaded its model.  Raises EspalierError with its log's end where it does not start."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    model = [str(settings["model"])] if "model" in settings else []
    own = ["--port", str(port), "--served-model-name", NAME]
    command = [sys.executable, "-m", "espalier", "serve", *model, *own, *flags_of(settings), *flags]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            _wait(process, port, log)
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            yield Server(port, process.pid, int(children[0]))
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes], seconds: float = LEAVE_S) -> None:
    """Raises EspalierError for a server that does not leave, once it is ended by force; its engine leaves with it."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise EspalierError(f"the server (pid {process.pid}) did not leave within {seconds:g} s of SIGTERM") from None


def _wait(process: subprocess.Popen[bytes], port: int, log: Any) -> None:
    end = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < end:
        try:
            with socket.create_connection(("127.0.0.1", port)):
                return
        except OSError:
            time.sleep(0.05)
    log.seek(0)
    raise EspalierError(f"the server did not start: {' '.join(log.read()[-500:].split())}")


@dataclass(frozen=True)
class Cell:
    """Medians at one concurrency, tokens a second."""

    concurrency: int
    offline: float
    streamed: float
    whole: float

    def as_dict(self) -> dict[str, float]:
        return asdict(self) | {"streamed_ratio": self.streamed / self.offline, "whole_ratio": self.whole / self.offline}


class ServeBench:
    """Both arms, loaded.  Whoever measures closes it."""

    def __init__(self, settings: Mapping[str, Any], server: Server):
        self.llm = LLM(**settings)
        self.server = server

    def measure(self, concurrency: int, context: int, num_tokens: int, repeats: int) -> Cell:
        """One warm-up each, then turns of offline, streamed and whole answers."""
        prompts = [list(prompt) for prompt in contexts(self.llm, concurrency, context)]
        seconds: dict[str, list[float]] = {"offline": [], "streamed": [], "whole": []}
        for turn in range(repeats + 1):
            taken = {
                "offline": self._offline(prompts, num_tokens),
                "streamed": self._served(prompts, num_tokens, stream=True),
                "whole": self._served(prompts, num_tokens, stream=False),
            }
            if turn:
                for arm, each in taken.items():
                    seconds[arm].append(each)
        rates = {arm: concurrency * num_tokens / median(each) for arm, each in seconds.items()}
        return Cell(concurrency, **rates)

    def _offline(self, prompts: Sequence[list[int]], num_tokens: int) -> float:
        began = time.perf_counter()
        self.llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True))
        return time.perf_counter() - began

    def _served(self, prompts: Sequence[list[int]], num_tokens: int, stream: bool) -> float:
        """One connection a prompt, all at once."""

        def ask(prompt: list[int]) -> None:
            body = {"model": NAME, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0}
            status, answer = self.server.post("/v1/completions", {**body, "ignore_eos": True, "stream": stream})
            if status != 200 or b'"error"' in answer:
                raise EspalierError(f"the server answered {status}: {answer[-300:].decode()}")

        with ThreadPoolExecutor(len(prompts)) as clients:
            began = time.perf_counter()
            list(clients.map(ask, prompts))
            return time.perf_counter() - began

    def close(self) -> None:
        self.llm.close()


def exists(pid: int) -> bool:
    """Whether a process runs; what has ended and was not waited for does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
