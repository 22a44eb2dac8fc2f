"""Where the time of requests goes between a client and the engine's launches: `python -m tools.serve_timeline`.

It sends requests at once to the server's real processes, and gives the same prompts to LLM.generate.  Each process
notes when a request passes.  The table has, for each event, the ms after the start at which the first, the median and
the last request had it; medians over the repeats.  The engine's device is a stand-in that sleeps: --paced ROUND,PASS
gives the ms of a round and of a prefill pass.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

from espalier.bench.clients import exchange_all, request_of
from espalier.engine.engine import Engine
from espalier.engine.launch_input import RequestResult, TreeSize
from espalier.llm import LLM
from espalier.request import SamplingParams
from espalier.server import logs, worker
from espalier.server.api import ApiOptions
from espalier.server.body_reader import BodyReader
from espalier.server.client import ClientOptions, EngineClient, Generation
from espalier.server.front import FrontOptions
from espalier.server.run import ServeOptions, serve
from espalier.stats import SpeculationStats

ACCEPT = 4
EVENTS = "sent arrived parsed submitted worker launched result back client last_result last_back ended".split()


class Notes:
    def __init__(self, path):
        self.file = open(path, "a", buffering=1)

    def __call__(self, event, name):
        self.file.write(f"{event} {name} {time.perf_counter()}\n")


class PacedHandle:
    def __init__(self, at, rows):
        self.at, self.rows = at, rows

    def wait(self):
        left = self.at - time.perf_counter()
        if left > 0:
            time.sleep(left)

    def result(self):
        self.wait()
        return self.rows


class Paced:
    """An executor whose launches take a given time."""

    def __init__(self, runner, round_s, pass_s, note):
        self.runner, self.round_s, self.pass_s, self.note = runner, round_s, pass_s, note
        self.free_at, self.row_s = 0.0, 27e-6 if pass_s > 0.01 else 1e-6

    def launch(self, li):
        self.note("pass" if li.is_prefill else "round", len(li.slots))
        now = time.perf_counter()
        if li.is_prefill:
            # The host starts a pass kernel by kernel.
            rows = len(li.pieces or li.slots) * li.width
            time.sleep(max(self.pass_s, rows * self.row_s))
            self.free_at = max(time.perf_counter(), self.free_at)
        else:
            self.free_at = max(now, self.free_at) + self.round_s
        count = 1 if li.is_prefill else ACCEPT
        rows = [RequestResult([300 + i for i in range(count)], True, TreeSize(8, 3)) for _ in li.slots]
        return PacedHandle(self.free_at, rows)

    def close(self):
        pass


class Noted:
    """An LLM whose requests and chunks are noted."""

    def __init__(self, llm, note):
        self.llm, self.note, self.seen, self.in_slot = llm, note, set(), set()

    def __getattr__(self, name):
        return getattr(self.llm, name)

    def group(self, prompt, params, name=None, *rest):
        self.note("worker", name.rpartition("-")[0])
        return self.llm.group(prompt, params, name, *rest)

    def step(self):
        pieces = self.llm.step()
        for piece in pieces:
            name = piece.request_id.rpartition(".")[0].rpartition("-")[0]
            if name not in self.seen:
                self.seen.add(name)
                self.note("result", name)
            if piece.finish_reason:
                self.note("last_result", name)
        return pieces


class Launches:
    def __init__(self, llm, note):
        self.llm, self.note = llm, note

    def on_launch(self, li):
        for init in li.slot_inits:
            for r in self.llm.engine.scheduler.running:
                if r.slot == init.slot:
                    self.note("launched", r.id.rpartition(".")[0].rpartition("-")[0])

    def before_result(self, handle):
        pass


@contextmanager
def load(sent):
    with paced_llm(sent["sizes"], sent["paced"], sent["notes"]) as llm:
        yield llm


@contextmanager
def paced_llm(sizes, paced, notes):
    note = Notes(notes)
    llm = LLM("bundled", device="cpu", **sizes)
    runner = llm.engine.executor.runner
    engine = Engine(Paced(runner, paced[0] / 1e3, paced[1] / 1e3, note), True, False)
    llm = LLM.from_engine(engine, llm.config, llm.inputs)
    engine.observer = Launches(llm, note)
    yield Noted(llm, note)


def front(port, sent):
    logs.set_up("info", False)
    note = Notes(sent["notes"])
    read, submit, take = BodyReader.read, EngineClient.submit, Generation.take

    async def noted_read(self, *args):
        note("arrived", logs.request_id.get())
        body = await read(self, *args)
        note("parsed", logs.request_id.get())
        return body

    def noted_submit(self, name, *args):
        result = submit(self, name, *args)
        note("submitted", name)
        return result

    def noted_take(self, part):
        name = part.name.rpartition("-")[0]
        if not getattr(self, "seen", False):
            self.seen = True
            note("back", name)
        if part.piece.finish_reason:
            note("last_back", name)
        take(self, part)

    BodyReader.read, EngineClient.submit, Generation.take = noted_read, noted_submit, noted_take
    client = ClientOptions(worker="tools.serve_timeline")
    options = ServeOptions("127.0.0.1", port, 5.0, None, client, FrontOptions(("m",)), ApiOptions())
    asyncio.run(serve(sent, options))


def old_clients(port, requests):
    from concurrent.futures import ThreadPoolExecutor
    from http.client import HTTPConnection
    from espalier.bench.clients import Exchange
    conns = [HTTPConnection("127.0.0.1", port) for _ in requests]
    for c in conns:
        c.connect()
    out = [Exchange(r) for r in requests]
    def send(c, e):
        head, body = e.request.split(b"\r\n\r\n", 1)
        rid = head.rpartition(b": ")[2].decode()
        e.sent_at = time.perf_counter()
        c.request("POST", "/v1/completions", body, {"content-type": "application/json", "x-request-id": rid})
        a = c.getresponse()
        e.arrivals.append(time.perf_counter())
        a.read()
        e.received += b"HTTP/1.1 %d" % a.status
        e.ended_at = time.perf_counter()
    with ThreadPoolExecutor(len(conns)) as pool:
        list(pool.map(send, conns, out))
    for c in conns:
        c.close()
    return out


def main():
    if len(sys.argv) == 2 and sys.argv[1].startswith("ipc:"):
        return worker.main(sys.argv[1], load)
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--front", type=int)
    parser.add_argument("--sent")
    parser.add_argument("--concurrency", default="1,8,16,64")
    parser.add_argument("--paced", default="6,15")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--old", action="store_true")
    parser.add_argument("--launches", action="store_true")
    args = parser.parse_args()
    if args.front:
        return front(args.front, json.loads(args.sent))
    sizes = [int(n) for n in args.concurrency.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        notes = f"{folder}/notes"
        open(notes, "w").close()
        settings = {"max_batch": max(sizes), "max_context": 256, "prefix_cache": False, "chunk_size": 2048, "busy_chunk_size": 640}
        sent = {"sizes": settings, "paced": [float(n) for n in args.paced.split(",")], "notes": notes}
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        process = subprocess.Popen([sys.executable, "-m", "tools.serve_timeline", "--front", str(port), "--sent", json.dumps(sent)], stderr=open(f"/tmp/front.log", "w"))
        try:
            with paced_llm(settings, sent["paced"], "/dev/null") as llm:
                while process.poll() is None:
                    try:
                        socket.create_connection(("127.0.0.1", port)).close()
                        break
                    except OSError:
                        time.sleep(0.05)
                for size in sizes:
                    measure(llm.llm, port, notes, size, args)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


def measure(llm, port, notes, size, args):
    prompts = [[300 + i] * 128 for i in range(size)]
    params = SamplingParams(temperature=0.0, max_tokens=args.tokens, ignore_eos=True)
    offline, runs, launches = [], [], []
    for turn in range(args.repeats + 1):
        t = time.perf_counter()
        llm.generate(prompts, params)
        offline.append(time.perf_counter() - t)
        open(notes, "w").close()
        names = [f"t{turn}s{size}r{i}" for i in range(size)]
        requests = [request_of("/v1/completions", {"model": "m", "prompt": p, "max_tokens": args.tokens, "temperature": 0, "ignore_eos": True, "stream": True}, {"x-request-id": n}) for p, n in zip(prompts, names)]
        with ExitStack() as stack:
            conns = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in prompts]
            time.sleep(0.05)
            began = time.perf_counter()
            if args.old:
                exchanges = old_clients(port, requests)
                began = min(e.sent_at for e in exchanges)
            else:
                exchanges = exchange_all(conns, requests)
        assert all(e.status == 200 for e in exchanges), exchanges[0].received
        time.sleep(0.1)
        times, log = defaultdict(dict), []
        for line in open(notes):
            event, name, at = line.split()
            (log.append((event, name, float(at) - began)) if event in ("pass", "round") else times[event].__setitem__(name, float(at) - began))
        times["sent"] = {n: e.sent_at - began for n, e in zip(names, exchanges)}
        times["client"] = {n: e.arrivals[0] - began for n, e in zip(names, exchanges)}
        times["ended"] = {n: e.ended_at - began for n, e in zip(names, exchanges)}
        if turn:
            runs.append(times); launches.append(log)
    off = offline[1:]
    ends = [max(r["ended"].values()) for r in runs]
    print(f"\n{size} requests: LLM.generate {1e3*median(off):.1f} ms (least {1e3*min(off):.1f}), server {1e3*median(ends):.1f} (least {1e3*min(ends):.1f}), ratio {median(off)/median(ends):.3f} (of the least {min(off)/min(ends):.3f})")
    best = runs[ends.index(min(ends))]
    print("   event          first  median    last   | first  median  last of the best")
    for event in EVENTS:
        v = [sorted(r[event].values()) for r in runs]
        b = sorted(best[event].values())
        print(f"   {event:12s} " + " ".join(f"{1e3*median(x):7.2f}" for x in ([y[0] for y in v], [median(y) for y in v], [y[-1] for y in v])) + "   | " + " ".join(f"{1e3*x:7.2f}" for x in (b[0], median(b), b[-1])))
    log = launches[ends.index(min(ends))]
    print("   passes", [(int(n), round(1e3 * t, 1)) for e, n, t in log if e == "pass"], "rounds", sum(e == "round" for e, n, t in log), "median passes", median(sum(e == "pass" for e, *_ in l) for l in launches), "rounds", median(sum(e == "round" for e, *_ in l) for l in launches))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
