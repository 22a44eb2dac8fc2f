"""`espalier bench serve`: a server beside LLM.generate in tokens a second; with --soak, what it leaves unanswered; with
--bad-host, what others wait for while one host sends large requests."""

from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.text import Text

from espalier.bench.bad_host import ATTACKS, STREAMS, Beside, bad_host
from espalier.bench.machine import header
from espalier.bench.serve import Cell, ServeBench, serving
from espalier.bench.soak import soak
from espalier.cli.console import QUIET, aligned, progress, require_writable, stdout, write_json
from espalier.cli.flags import add_engine_flags, engine_settings, flag_of, new_command, sized
from espalier.errors import EspalierError

# Of what is measured without --soak.
DEFAULTS = MappingProxyType({"concurrency": "1,16", "context": 128, "tokens": 96, "repeats": 5})


def add(commands: Any) -> None:
    parser = new_command(commands, "serve", run, "a server beside LLM.generate: tokens a second, or a soak")
    parser.add_argument("--soak", type=int, metavar="N", help="send N requests of all kinds, many of which leave")
    parser.add_argument("--bad-host", action="store_true", help="what others wait for beside large, hostile requests")
    parser.add_argument("--concurrency", metavar="N,N", help="requests at once (1,16)")
    parser.add_argument("--context", type=int, metavar="N", help="prompt length (128)")
    parser.add_argument("--tokens", type=int, metavar="N", help="tokens to generate for each prompt (96)")
    parser.add_argument("--repeats", type=int, metavar="N", help="turns of each way; medians are shown (5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    add_engine_flags(parser)


def run(asked: Namespace) -> int:
    for name, value in DEFAULTS.items():
        if getattr(asked, name) is None:
            setattr(asked, name, value)
        elif asked.soak is not None or asked.bad_host:
            other = "--bad-host" if asked.bad_host else "--soak"
            raise EspalierError(f"{flag_of(name)} is not for {other}; leave one out")
    if asked.bad_host and asked.soak is not None:
        raise EspalierError("--soak is not for --bad-host; leave one out")
    for name in ("soak", "context", "tokens", "repeats"):
        value = getattr(asked, name)
        if value is not None and value < 1:
            raise EspalierError(f"--{name}={value} is not supported; use 1 or more")
    require_writable("--json", asked.json)
    stdout().print(Text(header(), QUIET))
    settings = engine_settings(asked)
    if asked.bad_host:
        return _bad_host(asked, settings)
    if asked.soak is None:
        _measured(asked, settings)
        return 0
    figures = soak(settings, asked.soak, settings.get("seed", 0))
    write_json(asked.json, {"soak": asdict(figures)})
    for name, value in asdict(figures).items():
        stdout().print(Text(f"  {name.replace('_', ' '):<18} {value}"))
    return int(bool(figures.unanswered or figures.leaked_pages or figures.leaked_processes))


def _measured(asked: Namespace, settings: dict[str, Any]) -> None:
    sizes = [int(part) for part in asked.concurrency.split(",") if part.isdecimal()]
    if not sizes or min(sizes) < 1 or ",".join(map(str, sizes)) != asked.concurrency:
        raise EspalierError(f"--concurrency={asked.concurrency} is not supported; use whole numbers, such as 1,16")
    # Prompts come again at every turn, and both ways are to read them each time.
    longest = asked.context + asked.tokens
    both = {"max_batch": max(sizes), "max_context": longest + 1, "prefix_cache": False}
    settings = sized(settings, both, max_context=longest)
    cells: list[Cell] = []
    with serving(settings) as server:
        bench = ServeBench(settings, server)
        with progress("measuring", len(sizes)) as advance:
            for size in sizes:
                cells.append(bench.measure(size, asked.context, asked.tokens, asked.repeats))
                advance()
        bench.close()
    write_json(asked.json, {"cells": [cell.as_dict() for cell in cells]})
    rows = [
        ["requests at once", *(str(cell.concurrency) for cell in cells)],
        ["LLM.generate, tokens/s", *(f"{cell.offline:.0f}" for cell in cells)],
        ["server, streams, tokens/s", *(f"{cell.streamed:.0f}" for cell in cells)],
        ["server, whole answers, tokens/s", *(f"{cell.whole:.0f}" for cell in cells)],
        ["streams over LLM.generate", *(f"{cell.streamed / cell.offline:.2f}" for cell in cells)],
        ["whole answers over LLM.generate", *(f"{cell.whole / cell.offline:.2f}" for cell in cells)],
    ]
    stdout().print(Text(aligned(rows)))


def _bad_host(asked: Namespace, settings: dict[str, Any]) -> int:
    # A slot for each stream, one for the short request, and one for each that the bad host may start at once.
    most = max(attack.count for attack in ATTACKS)
    found = bad_host(sized(settings, {"max_batch": STREAMS + 1 + most}, max_batch=STREAMS + 1))
    write_json(asked.json, {"bad_host": [asdict(beside) for beside in found]})
    rows = [["longest wait, ms", f"beside {STREAMS} streams:", "", "", "idle:", "", ""]]
    rows.append(["", "stream gap", "one token", "/health", "one token", "/health", "answers"])
    stdout().print(Text(aligned([*rows, *(_row(beside) for beside in found)])))
    return int(any(0 in beside.answers for beside in found))


def _row(beside: Beside) -> list[str]:
    waits = (
        beside.busy.stream_gap,
        beside.busy.one_token,
        beside.busy.health,
        beside.idle.one_token,
        beside.idle.health,
    )
    answers = ", ".join(f"{count} of {status or 'none'}" for status, count in beside.answers.items())
    name = f"{beside.count} x {beside.name}" if beside.count else beside.name
    return [name, *(f"{wait:.0f}" for wait in waits), answers]
