"""`espalier bench serve`: a server compared with LLM.generate, on the same prompts and settings.

Both get token ids, all prompts at once, without a prefix cache, after one warm-up.  The server's time is from the first
byte that a client sends to the last one received; the clients share a thread (clients.py).
With --shape both run a synthetic model on the same GPU, each its own copy.  It has no tokenizer: prompts are token ids,
and answers have token ids (return_token_ids) instead of text.
--url measures running servers instead (open_loop.py).
--soak counts the requests that a server leaves unanswered.  --bad-host measures how long other requests wait while one
host sends large requests.
"""

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from types import MappingProxyType

from espalier.bench import bad_host, engines, open_loop, soak
from espalier.bench.clients import exchange_all, request_of
from espalier.bench.engines import BenchEngine, OfShape, engines_of, load_sizes, requested_pages
from espalier.bench.server import NAME, Server, serving
from espalier.errors import EspalierError
from espalier.request import SamplingParams
from espalier.startup.resolve import layout_of
from espalier.terminal.console import print_header, print_table, progress, require_writable, write_json
from espalier.terminal.flags import SHAPE_FLAGS, engine_settings, flag_of, positive_numbers, require_at_least_one

# For the default mode.
DEFAULTS = MappingProxyType({"concurrency": "1,16", "context": 128, "tokens": 96, "repeats": 5})


def add_flags(parser: ArgumentParser) -> None:
    open_loop.add_flags(parser)
    parser.add_argument("--soak", type=int, metavar="N", help="send N requests of all kinds, many of which disconnect")
    parser.add_argument("--bad-host", action="store_true", help="how long others wait during large, hostile requests")
    parser.add_argument("--concurrency", metavar="N,N", help="requests at once (1,16)")
    parser.add_argument("--context", type=int, metavar="N", help="prompt length (128)")
    parser.add_argument("--tokens", type=int, metavar="N", help="tokens to generate for each prompt (96)")
    parser.add_argument("--repeats", type=int, metavar="N", help="repetitions; medians are shown (5)")
    engines.add_flags(parser)


def run(args: Namespace) -> int:
    modes = {"--url": args.url, "--bad-host": args.bad_host or None, "--soak": args.soak}
    chosen = [flag for flag, value in modes.items() if value is not None]
    if len(chosen) > 1:
        raise EspalierError(f"{chosen[1]} is not for {chosen[0]}; leave one out")
    for name, value in DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
        elif chosen:
            raise EspalierError(f"{flag_of(name)} is not for {chosen[0]}; leave one out")
    if args.url is not None:
        refuse_shape(args, "--url")
        return open_loop.run(args)
    open_loop.refuse_flags(args)
    require_at_least_one(args, "soak", "context", "tokens", "repeats")
    if args.soak is None and not args.bad_host:
        return _run(args)
    refuse_shape(args, "--bad-host" if args.bad_host else "--soak")
    require_writable("--json", args.json)
    print_header()
    settings = engine_settings(args)
    return bad_host.run(args, settings) if args.bad_host else soak.run(args, settings)


def refuse_shape(args: Namespace, mode: str) -> None:
    """Raises EspalierError for a flag of synthetic models."""
    for name in ("shape", *SHAPE_FLAGS):
        if getattr(args, name) is not None:
            raise EspalierError(f"{flag_of(name)} is not for {mode}; leave one out")


def _run(args: Namespace) -> int:
    sizes = positive_numbers("--concurrency", args.concurrency, "1,16")
    # The same prompts come at every turn, so the prefix cache is off for LLM and server.
    longest = args.context + args.tokens
    made = engines_of(args, load_sizes(max(sizes), longest + 1), max_context=longest)
    flags: list[str] = []
    if isinstance(made, OfShape):
        made, flags = sharing_the_gpu(made), _shape_flags(args)
    cells: list[Cell] = []
    with serving(made.settings, *flags) as server, made.open(tree=True) as opened:
        bench = ServeBench(opened, server)
        with progress("measuring", len(sizes)) as advance:
            for size in sizes:
                cells.append(bench.measure(size, args.context, args.tokens, args.repeats))
                advance()
    write_json(args.json, {**engines.about(args, made.config(True)), "cells": [cell.as_dict() for cell in cells]})
    print_table(_table(cells))
    return 0


def sharing_the_gpu(made: OfShape) -> OfShape:
    """With as many pages as a full batch needs: the server and the LLM must both fit."""
    if requested_pages(made.settings) is not None:
        return made
    num_pages = layout_of(made.config(tree=True)).most_pages
    return OfShape(made.recipe, {**made.settings, "num_pages": num_pages}, made.device)


def _shape_flags(args: Namespace) -> list[str]:
    """Flags of the server's models."""
    given = [name for name in ("shape", *SHAPE_FLAGS) if getattr(args, name) is not None]
    return [part for name in given for part in (flag_of(name), str(getattr(args, name)))]


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
    """An LLM and a server of the same model, both loaded."""

    def __init__(self, opened: BenchEngine, server: Server):
        self.opened = opened
        self.llm = opened.llm
        self.server = server

    def measure(self, concurrency: int, context: int, num_tokens: int, repeats: int) -> Cell:
        """Medians over repeats, after one warm-up.  LLM.generate, streams and whole responses take turns."""
        prompts = self.opened.prompts([context] * concurrency)
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
        """Seconds from the first byte sent to the last one received.  All prompts are sent at once."""
        same = {"model": NAME, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": stream}
        # Without text, a stream's events would be empty.
        same["return_token_ids"] = self.llm.tokenizer is None
        requests = [request_of("/v1/completions", {**same, "prompt": prompt}) for prompt in prompts]
        exchanges = exchange_all(self.server.port, requests)
        for exchange in exchanges:
            if exchange.status != 200 or b'"error"' in exchange.received:
                raise EspalierError(
                    f"the server answered {exchange.status}: {bytes(exchange.received[-300:]).decode()}"
                )
        return max(exchange.ended_at for exchange in exchanges) - exchanges[0].sent_at
