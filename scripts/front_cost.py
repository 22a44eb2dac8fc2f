"""CPU time of the API server, per request and per token: `python -m scripts.front_cost`.

The engine is a stand-in that emits TOKENS tokens of each running request in each step of STEP_S, so only the API server
is measured.  The difference between long and short streams is the cost of their tokens.  Of the repeats, the least
counts: on a shared machine the others include what other programs cost the caches.  With --profile the API server
writes its profile to a file for pstats.
"""

import asyncio
import cProfile
import os
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from json import dumps
from pathlib import Path
from typing import Any

import zmq

from espalier.config import EngineConfig
from espalier.errors import EspalierError
from espalier.llm import prepare_engine
from espalier.request import OutputChunk, Usage
from espalier.server import logs, protocol
from espalier.server.api import ApiOptions
from espalier.server.client import ClientOptions
from espalier.server.frontend import FrontendOptions
from espalier.server.protocol import EngineReady, OutputPart, Shutdown, StepOutput, SubmitPrompts, SubmittedPrompt
from espalier.server.run import ServeOptions, serve
from espalier.server.worker import EXIT_FAILED, EXIT_OK, wait_for_start
from espalier.stats import SpeculationStats
from lab.bench.server import free_port, wait_until_served

STEP_S = 0.003
TOKENS = 4
MAX_STREAMS = 64
LENGTHS = (8, 264)
CHUNK_SIZE = 2048
PROMPT = list(range(300, 428))
CHAT = [{"role": "user", "content": "Tell a long story about a tree that was trained to grow flat against a wall."}]


def stand_in(address: str, api_server_pid: int) -> int:
    """The engine process.  It ends when the API server does, like a real one."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as pair:
        pair.linger = 0
        pair.connect(address)
        if wait_for_start(pair, api_server_pid) is None:
            return EXIT_FAILED
        model_info = prepare_engine(EngineConfig(model="bundled")).inputs.model_info
        pair.send(
            protocol.encode(
                EngineReady(model_info, {"max_batch": MAX_STREAMS, "chunk_size": CHUNK_SIZE, "page_size": 16})
            )
        )
        left: dict[str, SubmittedPrompt] = {}
        sent: dict[str, int] = {}
        while os.getppid() == api_server_pid:
            while pair.poll(0 if left else 1000):
                message = protocol.decode_to_engine(pair.recv())
                if isinstance(message, Shutdown):
                    return EXIT_OK
                for submit in message.prompts if isinstance(message, SubmitPrompts) else ():
                    left[submit.name], sent[submit.name] = submit, 0
            parts = [step_of(submit, sent) for submit in left.values()]
            left = {name: submit for name, submit in left.items() if sent[name] < (submit.params.max_tokens or 0)}
            pair.send(protocol.encode(StepOutput(parts)))
            time.sleep(STEP_S)
    return EXIT_OK


def step_of(submit: SubmittedPrompt, sent: dict[str, int]) -> OutputPart:
    limit = submit.params.max_tokens or 0
    tokens = [300 + (sent[submit.name] + i) % 500 for i in range(min(TOKENS, limit - sent[submit.name]))]
    sent[submit.name] += len(tokens)
    piece = OutputChunk(f"{submit.name}.0", 0, tokens, from_draft=[True] * len(tokens))
    if sent[submit.name] < limit:
        return OutputPart(submit.name, piece)
    ended = OutputChunk(f"{submit.name}.0", 0, tokens, from_draft=[True] * len(tokens), finish_reason="length")
    return OutputPart(submit.name, ended, Usage(len(submit.prompt), limit), SpeculationStats())


def front(port: int, profile: str | None) -> None:
    """The API server's process."""
    logs.set_up_logging("info", False)
    client = ClientOptions(worker_module="scripts.front_cost")
    options = ServeOptions("127.0.0.1", port, 5.0, None, client, FrontendOptions(("fake",)), ApiOptions())
    if profile is None:
        asyncio.run(serve({}, options))
        return
    profiler = cProfile.Profile()
    profiler.runcall(asyncio.run, serve({}, options))
    profiler.dump_stats(profile)


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process so far."""
    return sum(int(file.read_text().split()[0]) for file in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def post(connection: HTTPConnection, path: str, body: dict[str, Any]) -> None:
    connection.request("POST", path, dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    if b"[DONE]" not in answer.read():
        raise EspalierError(f"the API server answered {answer.status}")


def measure(port: int, pid: int, path: str, prompt: dict[str, Any], streams: int, repeats: int) -> tuple[float, float]:
    """(µs a request without its tokens, µs a token) of the API server, on connections that stay open."""
    costs, connections = [], [HTTPConnection("127.0.0.1", port, timeout=60) for _ in range(streams)]
    for length in LENGTHS:
        body = {"model": "fake", "max_tokens": length, "stream": True, "ignore_eos": True, **prompt}
        each = []
        with ThreadPoolExecutor(streams) as clients:
            for _ in range(repeats + 1):
                began = cpu_seconds(pid)
                list(clients.map(lambda connection: post(connection, path, body), connections))  # noqa: B023
                each.append((cpu_seconds(pid) - began) / streams)
        costs.append(min(each))
    per_token = (costs[1] - costs[0]) / (LENGTHS[1] - LENGTHS[0])
    return 1e6 * (costs[0] - LENGTHS[0] * per_token), 1e6 * per_token


def run(args: Namespace) -> None:
    port = free_port()
    command = [sys.executable, "-m", "scripts.front_cost", "--front", str(port)]
    command += [] if args.profile is None else ["--profile", args.profile]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        wait_until_served(process, port)
        for name, path, prompt in (
            ("completions, token ids", "/v1/completions", {"prompt": PROMPT}),
            ("completions, token ids back", "/v1/completions", {"prompt": PROMPT, "return_token_ids": True}),
            ("chat", "/v1/chat/completions", {"messages": CHAT}),
        ):
            for streams in map(int, args.streams.split(",")):
                request, token = measure(port, process.pid, path, prompt, streams, args.repeats)
                print(f"{name:28s} {streams:3d} streams {request:8.0f} µs a request {token:8.2f} µs a token")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def main() -> int:
    # The API server starts it as its engine.
    if len(sys.argv) == 3 and sys.argv[1].startswith("ipc://"):
        return stand_in(sys.argv[1], int(sys.argv[2]))
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--streams", default="1,8,16,64")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--profile")
    parser.add_argument("--front", type=int)
    args = parser.parse_args()
    if args.front is not None:
        front(args.front, args.profile)
    else:
        run(args)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
