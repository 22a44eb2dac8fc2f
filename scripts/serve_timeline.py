"""Where the time of a request goes between its client and the engine's launches: `python -m scripts.serve_timeline`.

It gives the same prompts to LLM.generate and, all at once, to the server's real processes.  Each process notes when a
request passes.  A table has the ms after the start at which the first, the median and the last request passed, of the
repeat that took the least time.  By default the engine's device is a stand-in that sleeps (--paced).  With --shape or
--device it is a GPU, as for `python -m lab serve`.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from espalier.bench.clients import post_request_bytes
from espalier.bench.drive import BenchEngine
from espalier.cli.serve import plain_settings
from espalier.engine.engine import Engine
from espalier.engine.executor import LaunchHandle
from espalier.engine.launch_input import LaunchInput, RequestResult, TreeSize
from espalier.llm import LLM
from espalier.request import OutputChunk, Request, SamplingParams
from espalier.server import logs, worker
from espalier.server.api import ApiOptions
from espalier.server.bodies import BodyReader
from espalier.server.client import ClientOptions, EngineClient
from espalier.server.frontend import FrontendOptions
from espalier.server.protocol import Generation, SubmittedPrompt
from espalier.server.run import ServeOptions, serve
from espalier.speculate.round import ModelRunner
from espalier.terminal.console import print_table
from lab import shape_worker
from lab.bench.engines import ShapeEngines, engines_of_flags, load_sizes
from lab.bench.flags import engines as add_flags
from lab.bench.serve import with_full_batch_pages
from lab.bench.server import exchange_all, free_port, stop_process, wait_until_served
from lab.shape_flags import shape_settings

# Tokens that the stand-in's rounds accept, and the chunk sizes of a GPU.
ACCEPT_LENGTH = 4
GPU_SIZES = {"chunk_size": 2048, "busy_chunk_size": 640, "overlap": True}
# In the order in which a request passes.
EVENTS = {
    "sent": "sent by the client",
    "arrived": "read by the API server",
    "parsed": "body checked",
    "submitted": "given to the outbox",
    "received": "read by the engine process",
    "launched": "in a prefill pass",
    "result": "first token read",
    "back": "first token in the API server",
    "client": "first byte at the client",
    "last_result": "last token read",
    "last_back": "last token in the API server",
    "ended": "response complete",
}
Note = Callable[[str, object], None]
Times = dict[str, dict[str, float]]


@contextmanager
def noting(folder: str) -> Iterator[Note]:
    """A function that adds (event, name, time) to this process's file, which is complete at the end of the block."""
    with Path(folder, str(os.getpid())).open("w") as file:
        yield lambda event, name: print(event, name, time.perf_counter(), file=file)


def request_of_id(request_id: str) -> str:
    """The HTTP request's id in an engine request's id; an LLM's own id has none and stays."""
    return request_id.rpartition(".")[0].rpartition("-")[0] or request_id


@dataclass(frozen=True)
class PacedHandle:
    """A launch that ends at a given time."""

    ends_at: float
    rows: list[RequestResult]

    def wait(self) -> None:
        time.sleep(max(0.0, self.ends_at - time.perf_counter()))

    def result(self) -> list[RequestResult]:
        self.wait()
        return self.rows


class PacedExecutor:
    """A device whose launches take a given time and run in order.

    pace: ms of a round; ms in which the host launches a prefill pass; µs of a prefill pass for each of its rows.
    """

    captured_passes = ()
    runs_any_tree = False
    failure = None

    def __init__(self, runner: ModelRunner, pace: Sequence[float]):
        self.runner = runner
        self.round_s, self.pass_s, self.row_s = pace[0] / 1e3, pace[1] / 1e3, pace[2] / 1e6
        self.free_at = 0.0

    def launch(self, launch_input: LaunchInput) -> LaunchHandle:
        begun, num_rows = time.perf_counter(), len(launch_input.pieces or launch_input.slots) * launch_input.width
        if launch_input.is_prefill:
            time.sleep(self.pass_s)
        seconds = num_rows * self.row_s if launch_input.is_prefill else self.round_s
        self.free_at = max(time.perf_counter(), max(begun, self.free_at) + seconds)
        tokens = [300] * (1 if launch_input.is_prefill else ACCEPT_LENGTH)
        return PacedHandle(
            self.free_at, [RequestResult(tokens, True, TreeSize((2, 2, 2, 2))) for _ in launch_input.slots]
        )

    def close(self) -> None:
        pass


def paced_llm(llm: LLM, pace: Sequence[float]) -> LLM:
    engine = Engine(PacedExecutor(llm.engine.executor.runner, pace), overlap=True, prefix_cache=False)
    return LLM.from_engine(engine, llm.config, llm.inputs)


class Watch:
    """Notes an engine's launches and its requests' first launches; a LaunchObserver."""

    def __init__(self, engine: Engine, note: Note):
        self.engine, self.note = engine, note

    def on_launch(self, launch_input: LaunchInput) -> None:
        self.note("pass" if launch_input.is_prefill else "round", len(launch_input.slots))
        entered = {each.slot for each in launch_input.slot_inits}
        for request in self.engine.scheduler.running:
            if request.slot in entered:
                self.note("launched", request_of_id(request.id))

    def before_result(self, handle: LaunchHandle) -> None:
        pass


def note_chunk(note: Note, seen: set[str], piece: OutputChunk) -> None:
    name = request_of_id(piece.request_id)
    if name not in seen:
        seen.add(name)
        note("result", name)
    if piece.finish_reason is not None:
        note("last_result", name)


# The engine process


class NotedLLM:
    """The LLM of the engine process, whose requests and chunks are noted."""

    def __init__(self, llm: LLM, note: Note):
        self.llm, self.note = llm, note
        self.seen: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.llm, name)

    def group(self, prompt: list[int], params: Any, name: str, *rest: Any) -> list[Request]:
        self.note("received", name.rpartition("-")[0])
        return self.llm.new_requests(prompt, params, name, *rest)

    def step(self) -> list[OutputChunk]:
        pieces = self.llm.step()
        for piece in pieces:
            note_chunk(self.note, self.seen, piece)
        return pieces


@contextmanager
def load(sent: dict[str, Any]) -> Iterator[Any]:
    """sent: notes, the folder for files of notes; pace, None for a GPU; loaded, what `espalier serve` sends."""
    loaded = shape_worker.load(sent["loaded"]) if "recipe" in sent["loaded"] else worker.load_model(sent["loaded"])
    with noting(sent["notes"]) as note, loaded as llm:
        used = llm if sent["pace"] is None else paced_llm(llm, sent["pace"])
        used.engine.observer = Watch(used.engine, note)
        yield NotedLLM(used, note)


# The API server's process


def frontend(port: int, sent: Mapping[str, Any]) -> None:
    logs.set_up_logging("warning", False)
    client = ClientOptions(worker_module="scripts.serve_timeline", log_level="warning")
    options = ServeOptions("127.0.0.1", port, 5.0, None, client, FrontendOptions(("m",)), ApiOptions())
    with noting(sent["notes"]) as note:
        note_front(note)
        asyncio.run(serve(sent, options))


def note_front(note: Note) -> None:
    """From now on, this process notes its requests."""
    read, submit, add = BodyReader.read, EngineClient.submit, Generation.add

    async def noted_read(self: BodyReader, *args: Any) -> Any:
        note("arrived", logs.request_id.get())
        body = await read(self, *args)
        note("parsed", logs.request_id.get())
        return body

    def noted_submit(self: EngineClient, prompts: Any, asked: SubmittedPrompt) -> Generation:
        note("submitted", asked.name)
        return submit(self, prompts, asked)

    def noted_add(self: Generation, part: Any) -> None:
        name = part.name.rpartition("-")[0]
        note("back", name)
        if part.output.finish_reason is not None:
            note("last_back", name)
        add(self, part)

    for owner, name, noted in (
        (BodyReader, "read", noted_read),
        (EngineClient, "submit", noted_submit),
        (Generation, "add", noted_add),
    ):
        setattr(owner, name, noted)


# The measurement


@dataclass
class Side:
    """One batch of requests.  began and ended: perf_counter's times; known: of its client."""

    size: int
    began: float
    ended: float
    known: list[tuple[str, str, float]]

    @property
    def seconds(self) -> float:
        return self.ended - self.began


class Timeline:
    """Runs batches of requests, each through LLM.generate and through the server."""

    def __init__(self, opened: BenchEngine, llm: LLM, port: int, args: Namespace):
        self.opened, self.llm, self.port, self.args = opened, llm, port, args
        self.offline: list[Side] = []
        self.served: list[Side] = []

    def measure(self, size: int) -> None:
        """A warm-up and the repeats, LLM.generate and the server in turns."""
        prompts = self.opened.make_prompts([self.args.context] * size)
        for turn in range(self.args.repeats + 1):
            offline, served = self._generate(prompts), self._serve(prompts, f"b{size}t{turn}")
            if turn:
                self.offline.append(offline)
                self.served.append(served)

    def _generate(self, prompts: Sequence[list[int]]) -> Side:
        params = SamplingParams(temperature=0.0, max_tokens=self.args.tokens, ignore_eos=True)
        known: list[tuple[str, str, float]] = []
        seen: set[str] = set()

        def note(event: str, name: object) -> None:
            known.append((event, str(name), time.perf_counter()))

        self.llm.engine.observer = Watch(self.llm.engine, note)
        began = time.perf_counter()
        self.llm.generate(prompts, params, lambda piece: note_chunk(note, seen, piece))
        return Side(len(prompts), began, time.perf_counter(), known)

    def _serve(self, prompts: Sequence[list[int]], name: str) -> Side:
        same = {"model": "m", "max_tokens": self.args.tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        same["return_token_ids"] = self.llm.tokenizer is None
        names = [f"{name}r{i}" for i in range(len(prompts))]
        requests = [
            post_request_bytes("/v1/completions", {**same, "prompt": prompt}, {"x-request-id": each})
            for each, prompt in zip(names, prompts, strict=True)
        ]
        exchanges = exchange_all(self.port, requests)
        known = [("sent", each, done.sent_at) for each, done in zip(names, exchanges, strict=True)]
        known += [("client", each, done.first_at) for each, done in zip(names, exchanges, strict=True)]
        known += [("ended", each, done.ended_at) for each, done in zip(names, exchanges, strict=True)]
        return Side(len(prompts), exchanges[0].sent_at, max(done.ended_at for done in exchanges), known)

    def show(self, notes: Path) -> None:
        """Print the tables.  notes: the folder of the server's processes, which have ended."""
        lines = [line.split() for file in notes.iterdir() for line in file.read_text().splitlines()]
        noted = [(event, name, float(at)) for event, name, at in lines]
        for size in dict.fromkeys(side.size for side in self.served):
            offline = [side for side in self.offline if side.size == size]
            served = [side for side in self.served if side.size == size]
            show_size(size, offline, served, noted)


def show_size(size: int, offline: Sequence[Side], served: Sequence[Side], noted: list[tuple[str, str, float]]) -> None:
    middle = [1e3 * median(side.seconds for side in sides) for sides in (offline, served)]
    best = [min(sides, key=lambda side: side.seconds) for sides in (offline, served)]
    least = [1e3 * side.seconds for side in best]
    print(f"\n{size} requests        LLM.generate    server     ratio")
    for name, pair in (("median ms", middle), ("least ms", least)):
        print(f"{name:16s} {pair[0]:14.1f} {pair[1]:9.1f} {pair[0] / pair[1]:9.3f}")
    events = [each.known for each in best]
    events[1] = events[1] + [each for each in noted if best[1].began <= each[2] <= best[1].ended]
    times = [times_of(known, side.began) for known, side in zip(events, best, strict=True)]
    rows = [["ms after the start", *["LLM.generate: first", "median", "last"], *["server: first", "median", "last"]]]
    rows += [[text, *spread(times[0].get(event)), *spread(times[1].get(event))] for event, text in EVENTS.items()]
    print_table(rows)
    for name, known, side in zip(("LLM.generate", "server"), events, best, strict=True):
        print(f"{name}: {launches_of(known, side.began)}")


def times_of(known: Sequence[tuple[str, str, float]], began: float) -> Times:
    """The ms of each request's first event of a kind."""
    times: Times = {}
    for event, name, at in known:
        times.setdefault(event, {}).setdefault(name, 1e3 * (at - began))
    return times


def spread(times: Mapping[str, float] | None) -> list[str]:
    if not times:
        return [""] * 3
    each = sorted(times.values())
    return [f"{value:.2f}" for value in (each[0], median(each), each[-1])]


def launches_of(known: Sequence[tuple[str, str, float]], began: float) -> str:
    """The launches in words.  The host starts a launch after it has started the one before."""
    launches = sorted((at, event, name) for event, name, at in known if event in ("pass", "round"))
    passes = [
        f"{name} at {1e3 * (at - began):.1f} (next {1e3 * (after - at):.1f} later)"
        for (at, event, name), (after, _, _) in pairwise(launches)
        if event == "pass"
    ]
    rounds = [at for at, event, _ in launches if event == "round"]
    apart = median(b - a for a, b in pairwise(rounds)) if len(rounds) > 1 else 0.0
    return f"prefill passes (requests, ms): {', '.join(passes)}; {len(rounds)} rounds, {1e3 * apart:.2f} ms apart"


def run(args: Namespace) -> None:
    sizes = [int(size) for size in args.concurrency.split(",")]
    longest = args.context + args.tokens
    on_gpu = args.shape is not None or getattr(args, "device", None) is not None
    made = engines_of_flags(
        args, load_sizes(max(sizes), longest + 1) | ({} if on_gpu else GPU_SIZES), max_context=longest
    )
    loaded = plain_settings(dict(made.settings))
    if isinstance(made, ShapeEngines):
        made = with_full_batch_pages(made)
        recipe = shape_settings(args, made.settings.get("seed", 0))
        loaded = {"recipe": recipe, "settings": plain_settings(dict(made.settings))}
    pace = None if on_gpu else [float(part) for part in args.paced.split(",")]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        port = free_port()
        sent = json.dumps({"notes": folder, "pace": pace, "loaded": loaded})
        process = subprocess.Popen(
            [sys.executable, "-m", "scripts.serve_timeline", "--api-server", str(port), "--sent", sent]
        )
        try:
            # The server loads first, as in `python -m lab serve`: "auto" takes a share of the memory that is free.
            wait_until_served(process, port)
            opened = stack.enter_context(made.open())
            timeline = Timeline(opened, opened.llm if pace is None else paced_llm(opened.llm, pace), port, args)
            for size in sizes:
                timeline.measure(size)
        finally:
            stop_process(process)
        timeline.show(Path(folder))


def main() -> int:
    if len(sys.argv) == 3 and sys.argv[1].startswith("ipc://"):
        return worker.main(sys.argv[1], int(sys.argv[2]), load)
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--concurrency", default="1,8,16,64")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--paced",
        default="6,20,27",
        metavar="MS,MS,US",
        help="ms of a round, ms in which the host launches a prefill pass, µs of a pass for each row (6,20,27)",
    )
    parser.add_argument("--api-server", type=int)
    parser.add_argument("--sent")
    add_flags(parser)
    args = parser.parse_args()
    args.measured = "serve"
    if args.api_server is not None:
        frontend(args.api_server, json.loads(args.sent))
    else:
        run(args)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
