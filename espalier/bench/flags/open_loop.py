"""The flags of `python -m lab serve`."""

import json
from argparse import ArgumentParser, ArgumentTypeError
from pathlib import Path
from typing import Any

from espalier.bench.flags.load import bounds
from espalier.terminal.flags import add_json_flag, add_key_flag

POISSON, FIXED, BURSTS = "poisson", "fixed", "bursts"
CHAT, COMPLETIONS = "chat", "completions"


def add_flags(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--url", action="append", metavar="X", help="a running server, any with OpenAI's API; may be repeated")
    add("--model", metavar="X", help="the model's name there (the server's first)")
    add("--rate", type=_rates, metavar="X,X", help="arrivals a second; several are measured one after another (2)")
    add("--arrivals", choices=(POISSON, FIXED, BURSTS), help="random, evenly spaced, or many at once (poisson)")
    add("--burst", type=int, metavar="N", help="arrivals at once, with --arrivals bursts (8)")
    add("--requests", type=int, metavar="N", help="arrivals at each rate: requests, or conversations (64)")
    add("--endpoint", choices=(CHAT, COMPLETIONS), help="endpoint that is called (chat)")
    add("--input", type=bounds, metavar="N,N", help="fewest and most words of a prompt (16,64)")
    add("--output", type=bounds, metavar="N,N", help="least and largest max_tokens (16,64)")
    add("--prefixes", type=int, metavar="N", help="prompts begin with one of N shared texts (0)")
    add("--prefix-words", type=int, metavar="N", help="length of a shared text (64)")
    add("--turns", type=int, metavar="N", help="turns of a conversation; each sends all that was said before (1)")
    add("--think", type=float, metavar="S", help="seconds from an answer to the next turn (1)")
    add("--ttft-limit", type=float, metavar="MS", help="for goodput: the first token comes within MS")
    add(
        "--itl-limit",
        type=float,
        metavar="MS",
        help="for goodput: each later token takes at most MS, on a request's average",
    )
    add(
        "--timeout",
        type=float,
        metavar="S",
        help="seconds after which a request without a whole answer has failed (600)",
    )
    add(
        "--extra-body",
        type=_object,
        metavar="JSON",
        help='further fields of every request, such as {"ignore_eos": true}',
    )
    add_key_flag(parser, "bearer token")
    add("--plot", type=Path, metavar="FILE", help="draw the times and the goodput by rate: .png, .svg or .pdf")
    add_json_flag(parser)


def _rates(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


_rates.__name__ = "list of numbers, such as 1,2,4"


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ArgumentTypeError(f"{text!r} is not a JSON object, such as '{{\"ignore_eos\": true}}'")
    return value
