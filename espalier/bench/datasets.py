"""Conversations from a file of prompts (espalier/prompt_files.py), read before any model is loaded.

Only the file's user messages are sent.  The model's own answers replace the answers of the file.
"""

import random
from argparse import Namespace
from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from espalier.bench.flags import DATASET_FLAGS, RANDOM_PROMPT_FLAGS
from espalier.bench.traffic import Conversation, Turn
from espalier.errors import EspalierError, require_number
from espalier.prompt_files import RECORD_FORMAT, messages_of, read_records, record_format, unexpected_record_error
from espalier.terminal.console import stdout
from espalier.terminal.flags import flag_of, require_at_least_one

# The default smallest and largest max_tokens of an answer.
DATASET_OUTPUT_BOUNDS = (256, 256)
MAX_TEMPERATURE = 2.0


def dataset_from_flags(args: Namespace) -> list[Conversation] | None:
    """Returns the conversations of --dataset, if given.  Sets its flags' defaults.  Raises EspalierError."""
    names = DATASET_FLAGS if getattr(args, "dataset", None) is None else RANDOM_PROMPT_FLAGS
    if given := [name for name in names if getattr(args, name, None) is not None]:
        remedy = (
            "is for --dataset; give a file too"
            if names is DATASET_FLAGS
            else "draws prompts, and --dataset has its own"
        )
        raise EspalierError(f"{flag_of(given[0])} {remedy}")
    if names is DATASET_FLAGS:
        args.temperature = [0.0]
        return None
    require_at_least_one(args, "limit")
    args.temperature = args.temperature or [0.0]
    for temperature in args.temperature:
        require_number("--temperature", temperature, lambda value: 0 <= value <= MAX_TEMPERATURE, "0 to 2")
    args.output, args.sample_seed = args.output or DATASET_OUTPUT_BOUNDS, args.sample_seed or 0
    conversations, num_silent = read_conversations(args.dataset, args.output, args.limit, args.sample_seed)
    if num_silent:
        stdout().print(f"{num_silent} records of {args.dataset} are left out: no user speaks in them")
    return conversations


def read_conversations(
    path: Path, output_bounds: tuple[int, int], limit: int | None, seed: int
) -> tuple[list[Conversation], int]:
    """Returns (conversations of a file, number of skipped records).  A record without a user message is skipped.

    limit: the number of conversations, taken equally from all categories, in the file's order; None for all.
    output_bounds: the smallest and largest max_tokens of an answer, drawn by the seed.  Raises EspalierError."""
    rng = random.Random(seed)
    records = [_messages_of_record(place, record) for place, record in read_records("--dataset", path)]
    with_user = [each for each in records if each[2]]
    if not with_user:
        raise EspalierError(f"--dataset {path} holds no prompt; each record is {RECORD_FORMAT}")
    sampled = with_user if limit is None else _sampled_records(path, with_user, limit, rng)
    conversations = [
        Conversation(i, system, tuple(Turn(text, rng.randint(*output_bounds)) for text in texts), category)
        for i, (category, system, texts) in enumerate(sampled)
    ]
    return conversations, len(records) - len(with_user)


def _sampled_records(path: Path, records: Sequence[Any], limit: int, rng: random.Random) -> list[Any]:
    if limit > len(records):
        raise EspalierError(f"--limit={limit} is above the {len(records)} conversations of {path}; lower it")
    by_category: dict[str, list[int]] = {}
    for i, (category, *_) in enumerate(records):
        by_category.setdefault(category, []).append(i)
    drawn = [rng.sample(places, len(places)) for places in by_category.values()]
    in_turns = [place for place in chain.from_iterable(zip_longest(*drawn)) if place is not None]
    return [records[place] for place in sorted(in_turns[:limit])]


def _messages_of_record(place: str, record: Mapping[str, Any]) -> tuple[str, str, list[str]]:
    """Returns (category, system message, messages of the user) of a record."""
    if record_format(place, record) == "token_ids":
        raise unexpected_record_error(place, "token ids, which are no text")
    messages = messages_of(place, record)
    system, texts = ([each["content"] for each in messages if each["role"] == who] for who in ("system", "user"))
    category = record.get("category") or ""
    if not isinstance(category, str):
        raise unexpected_record_error(place, '"category" that is no text')
    return category, "\n\n".join(system), [text for text in texts if text]
