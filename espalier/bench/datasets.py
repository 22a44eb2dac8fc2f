"""Conversations from a file of prompts.  Its format is recognised by its content, and it is read before any model.

A record is SPEED-Bench's ({"category", "turns"}), ShareGPT's ({"conversations"}), a conversation ({"messages"}) or a
text ({"prompt"}), one a line, in a JSON list, or as SPEED-Bench's Parquet file has them.  What users say is sent.  The
model's own answers take the place of those in the file.
"""

import json
import random
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from espalier.bench.flags import OF_DATASET, OF_DRAWN
from espalier.bench.traffic import Conversation, Turn
from espalier.errors import EspalierError, one_line, require_number
from espalier.terminal.console import read_text, stdout
from espalier.terminal.flags import flag_of, require_at_least_one

# Fewest and most tokens of an answer, by default.
OUTPUTS = (256, 256)
MAX_TEMPERATURE = 2.0
PARQUET = b"PAR1"
# What SPEED-Bench's public file has in the place of a text that its owner gives out alone.
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
USERS, SYSTEMS = ("user", "human"), ("system", "developer")
ANSWERS = ("assistant", "gpt", "chatgpt", "bing", "bard", "tool", "function")
EXPECTED = (
    'an object with "turns" (texts, as SPEED-Bench has them), "conversations" (objects with "from" and "value", as '
    'ShareGPT has them), "messages" (objects with "role" and "content") or "prompt" (a text)'
)
Record = tuple[str, Any]


def asked_for(args: Namespace) -> list[Conversation] | None:
    """The conversations of --dataset; None: prompts are drawn.  Sets its flags' defaults.  Raises EspalierError."""
    names = OF_DATASET if getattr(args, "dataset", None) is None else OF_DRAWN
    if given := [name for name in names if getattr(args, name, None) is not None]:
        remedy = (
            "is for --dataset; give a file too" if names is OF_DATASET else "draws prompts, and --dataset has its own"
        )
        raise EspalierError(f"{flag_of(given[0])} {remedy}")
    if names is OF_DATASET:
        args.temperature = [0.0]
        return None
    require_at_least_one(args, "limit")
    args.temperature = args.temperature or [0.0]
    for temperature in args.temperature:
        require_number("--temperature", temperature, lambda value: 0 <= value <= MAX_TEMPERATURE, "0 to 2")
    args.output, args.sample_seed = args.output or OUTPUTS, args.sample_seed or 0
    talks, num_silent = conversations_of(args.dataset, args.output, args.limit, args.sample_seed)
    if num_silent:
        stdout().print(f"{num_silent} records of {args.dataset} are left out: no user speaks in them")
    return talks


def conversations_of(
    path: Path, outputs: tuple[int, int], limit: int | None, seed: int
) -> tuple[list[Conversation], int]:
    """(conversations of a file, number of its records in which no user speaks, as ShareGPT's file has some).

    limit: take so many, evenly from each category that has enough, in the file's order; None: all.
    outputs: fewest and most max_tokens of an answer, drawn by the seed.  Raises EspalierError.
    """
    chance = random.Random(seed)
    records = [_said(place, record) for place, record in _records(path)]
    spoken = [record for record in records if record[2]]
    if not spoken:
        raise EspalierError(f"--dataset {path} holds no prompt; each record is {EXPECTED}")
    chosen = spoken if limit is None else _sampled(path, spoken, limit, chance)
    talks = [
        Conversation(i, system, tuple(Turn(text, chance.randint(*outputs)) for text in texts), category)
        for i, (category, system, texts) in enumerate(chosen)
    ]
    return talks, len(records) - len(spoken)


def _sampled(path: Path, records: Sequence[Any], limit: int, chance: random.Random) -> list[Any]:
    if limit > len(records):
        raise EspalierError(f"--limit={limit} is above the {len(records)} conversations of {path}; lower it")
    by_category: dict[str, list[int]] = {}
    for i, (category, *_) in enumerate(records):
        by_category.setdefault(category, []).append(i)
    drawn = [chance.sample(places, len(places)) for places in by_category.values()]
    in_turns = [place for place in chain.from_iterable(zip_longest(*drawn)) if place is not None]
    return [records[place] for place in sorted(in_turns[:limit])]


def _records(path: Path) -> Iterator[Record]:
    """(place in the file, value) of each record.  Raises EspalierError."""
    try:
        with path.open("rb") as file:
            is_parquet = file.read(len(PARQUET)) == PARQUET
    except OSError as error:
        raise EspalierError(f"--dataset {path} cannot be read ({error.strerror}); use a file of prompts") from None
    if is_parquet:
        yield from _of_parquet(path)
        return
    text = read_text("--dataset", path)
    if text.lstrip().startswith("["):
        for i, value in enumerate(_parsed(path, 1, text), 1):
            yield f"{path}, record {i}", value
        return
    for i, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield f"{path}:{i}", _parsed(path, i, line)


def _of_parquet(path: Path) -> Iterator[Record]:
    try:
        parquet = import_module("pyarrow.parquet")
    except ImportError:
        raise EspalierError(f"--dataset {path} is a Parquet file; run `pip install pyarrow` to read it") from None
    try:
        rows = parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as error:
        raise EspalierError(f"--dataset {path} is no whole Parquet file ({one_line(error)}); fetch it again") from None
    yield from ((f"{path}, row {i}", row) for i, row in enumerate(rows, 1))


def _parsed(path: Path, line: int, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise _wrong(f"{path}:{line + error.lineno - 1}", f"not JSON ({error.msg})") from None
    except (ValueError, RecursionError):
        raise _wrong(f"{path}:{line}", "not JSON that can be read") from None


def _said(place: str, record: Any) -> tuple[str, str, list[str]]:
    """(category, system message, what the user says) of a record."""
    if not isinstance(record, dict):
        raise _wrong(place, "not an object")
    kind = next((name for name in ("turns", *FIELDS, "prompt") if name in record), None)
    if kind is None:
        raise _wrong(place, "an object without a prompt")
    said: Any = [record[kind]] if kind == "prompt" else record[kind]
    system: list[str] = []
    if not isinstance(said, list):
        raise _wrong(place, f'"{kind}" that is no list')
    texts = [*_of_messages(place, said, system, *FIELDS[kind])] if kind in FIELDS else said
    if kind == "conversations":
        texts = [text for text in texts if text != ""]
    for text in (*texts, *system):
        _require_text(place, text)
    category = record.get("category") or ""
    if not isinstance(category, str):
        raise _wrong(place, '"category" that is no text')
    return category, "\n\n".join(system), texts


# Of a message: the names of its speaker and of its text.
FIELDS: Mapping[str, tuple[str, str]] = {"conversations": ("from", "value"), "messages": ("role", "content")}


def _of_messages(place: str, messages: Sequence[Any], system: list[str], who: str, what: str) -> Iterator[str]:
    """What users say.  system: gets what the system says."""
    for message in messages:
        speaker = message.get(who) if isinstance(message, dict) else None
        if speaker in USERS:
            yield message.get(what)
        elif speaker in SYSTEMS:
            system.append(message.get(what))
        elif speaker not in ANSWERS:
            raise _wrong(place, f'a message whose "{who}" is none of {", ".join((*USERS, *SYSTEMS, *ANSWERS))}')


def _require_text(place: str, text: Any) -> None:
    if not isinstance(text, str) or not text.strip():
        raise _wrong(place, "a text that is empty or none")
    if PLACEHOLDER in text:
        raise EspalierError(
            f"--dataset {place} has no text but where to fetch it; prepare the file with SPEED-Bench's prepare_data.py"
        )
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise _wrong(place, "half of a UTF-16 pair, which is no text")


def _wrong(place: str, found: str) -> EspalierError:
    return EspalierError(f"--dataset {place}: expected {EXPECTED}, but found {found}")
