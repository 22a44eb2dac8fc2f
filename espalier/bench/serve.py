"""`espalier bench serve`: a server compared with LLM.generate, on the same prompts and settings.

--soak counts the requests that a server leaves unanswered.  --bad-host measures how long other requests wait while one
host sends large requests.
"""

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from statistics import median
from types import MappingProxyType
from typing import Any

from espalier.bench import bad_host, soak
from espalier.bench.drive import contexts
from espalier.bench.server import NAME, Server, serving
from espalier.errors import EspalierError
from espalier.llm import LLM
from espalier.request import SamplingParams
from espalier.terminal.console import print_header, print_table, progress, require_writable, write_json
from espalier.terminal.flags import (
    add_engine_flags,
    add_json_flag,
    engine_settings,
    flag_of,
    positive_numbers,
    require_at_least_one,
    with_minimum,
)

# For the default mode.
DEFAULTS = MappingProxyType({"concurrency": "1,16", "context": 128, "tokens": 96, "repeats": 5})


def add_flags(parser: ArgumentParser) -> None:
    parser.add_argument("--soak", type=int, metavar="N", help="send N requests of all kinds, many of which disconnect")
    parser.add_argument("--bad-host", action="store_true", help="how long others wait during large, hostile requests")
    parser.add_argument("--concurrency", metavar="N,N", help="requests at once (1,16)")
    parser.add_argument("--context", type=int, metavar="N", help="prompt length (128)")
    parser.add_argument("--tokens", type=int, metavar="N", help="tokens to generate for each prompt (96)")
    parser.add_argument("--repeats", type=int, metavar="N", help="repetitions; medians are shown (5)")
    add_json_flag(parser)
    add_engine_flags(parser)


def run(args: Namespace) -> int:
    for name, value in DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
        elif args.soak is not None or args.bad_host:
            other = "--bad-host" if args.bad_host else "--soak"
            raise EspalierError(f"{flag_of(name)} is not for {other}; leave one out")
    if args.bad_host and args.soak is not None:
        raise EspalierError("--soak is not for --bad-host; leave one out")
    require_at_least_one(args, "soak", "context", "tokens", "repeats")
    require_writable("--json", args.json)
    print_header()
    settings = engine_settings(args)
    if args.bad_host:
        return bad_host.run(args, settings)
    return _run(args, settings) if args.soak is None else soak.run(args, settings)


def _run(args: Namespace, settings: dict[str, Any]) -> int:
    sizes = positive_numbers("--concurrency", args.concurrency, "1,16")
    # The same prompts come at every turn, so the prefix cache is off for LLM and server.
    longest = args.context + args.tokens
    usual = {"max_batch": max(sizes), "max_context": longest + 1, "prefix_cache": False}
    settings = with_minimum(settings, usual, max_context=longest)
    cells: list[Cell] = []
    with serving(settings) as server:
        bench = ServeBench(settings, server)
        with progress("measuring", len(sizes)) as advance:
            for size in sizes:
                cells.append(bench.measure(size, args.context, args.tokens, args.repeats))
                advance()
        bench.close()
    write_json(args.json, {"cells": [cell.as_dict() for cell in cells]})
    print_table(_table(cells))
    return 0


def _table(cells: Sequence["Cell"]) -> list[list[str]]:
    return [
        ["requests at once", *(str(cell.concurrency) for cell in cells)],
        ["LLM.generate, tokens/s", *(f"{cell.offline:.0f}" for cell in cells)],
        ["server, streams, tokens/s", *(f"{cell.streamed:.0f}" for cell in cells)],
        ["server, whole answers, tokens/s", *(f"{cell.whole:.0f}" for cell in cells)],
        ["streams over LLM.generate", *(f"{cell.streamed / cell.offline:.2f}" for cell in cells)],
        ["whole answers over LLM.generate", *(f"{cell.whole / cell.offline:.2f}" for cell in cells)],
    ]


@dataclass(frozen=True)
class Cell:
    """Median tokens/s at one concurrency: LLM.generate, and the server with streams and with whole responses."""

    concurrency: int
    offline: float
    streamed: float
    whole: float

    def as_dict(self) -> dict[str, float]:
        return asdict(self) | {"streamed_ratio": self.streamed / self.offline, "whole_ratio": self.whole / self.offline}


class ServeBench:
    """LLM and the server, both loaded.  The caller closes it."""

    def __init__(self, settings: Mapping[str, Any], server: Server):
        self.llm = LLM(**settings)
        self.server = server

    def measure(self, concurrency: int, context: int, num_tokens: int, repeats: int) -> Cell:
        """Medians over repeats, after one warm-up.  LLM.generate, streams and whole responses take turns."""
        prompts = [list(prompt) for prompt in contexts(self.llm, concurrency, context)]
        seconds: dict[str, list[float]] = {"offline": [], "streamed": [], "whole": []}
        for turn in range(repeats + 1):
            taken = {
                "offline": self._offline(prompts, num_tokens),
                "streamed": self._served(prompts, num_tokens, stream=True),
                "whole": self._served(prompts, num_tokens, stream=False),
            }
            if turn:
                for name, each in taken.items():
                    seconds[name].append(each)
        rates = {name: concurrency * num_tokens / median(each) for name, each in seconds.items()}
        return Cell(concurrency, **rates)

    def _offline(self, prompts: Sequence[list[int]], num_tokens: int) -> float:
        began = time.perf_counter()
        self.llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True))
        return time.perf_counter() - began

    def _served(self, prompts: Sequence[list[int]], num_tokens: int, stream: bool) -> float:
        """Send all prompts at once, one connection each."""

        def send(prompt: list[int]) -> None:
            body = {"model": NAME, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0}
            status, answer = self.server.post("/v1/completions", {**body, "ignore_eos": True, "stream": stream})
            if status != 200 or b'"error"' in answer:
                raise EspalierError(f"the server answered {status}: {answer[-300:].decode()}")

        with ThreadPoolExecutor(len(prompts)) as clients:
            began = time.perf_counter()
            list(clients.map(send, prompts))
            return time.perf_counter() - began

    def close(self) -> None:
        self.llm.close()
