"""Conversations from a file of prompts (espalier/prompt_files.py), read before any model is loaded.

The file's system and user messages are sent.  The model's own answers replace the answers of the file.
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
from espalier.prompt_files import RECORD_FORMAT, messages_of, prompt_field, read_records, unexpected_record_error
from espalier.terminal.console import stdout
from espalier.terminal.flags import flag_of, require_at_least_one

# The default smallest and largest max_tokens of an answer.
DATASET_OUTPUT_BOUNDS = (256, 256)
MAX_TEMPERATURE = 2.0


def dataset_from_flags(args: Namespace) -> list[Conversation] | None:
    """Returns the conversations of --dataset; None without this flag.  Sets the flags that belong to --dataset to their
    defaults, if they were not given.  Raises EspalierError."""
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

    limit: how many conversations to draw, evenly from the categories; None for all.  output_bounds: the smallest
    and largest max_tokens of an answer.  seed: seeds the random choice of conversations and of max_tokens.
    Raises EspalierError."""
    rng = random.Random(seed)
    records = [_messages_of_record(location, record) for location, record in read_records("--dataset", path)]
    user_records = [(category, system, texts) for category, system, texts in records if texts]
    if not user_records:
        raise EspalierError(f"--dataset {path} holds no prompt; each record is {RECORD_FORMAT}")
    sampled = user_records if limit is None else _sampled_records(path, user_records, limit, rng)
    conversations = [
        Conversation(i, system, tuple(Turn(text, rng.randint(*output_bounds)) for text in texts), category)
        for i, (category, system, texts) in enumerate(sampled)
    ]
    return conversations, len(records) - len(user_records)


def _sampled_records(path: Path, records: Sequence[Any], limit: int, rng: random.Random) -> list[Any]:
    """Draws `limit` records, evenly from the categories.  records: (category, system message, user messages)."""
    if limit > len(records):
        raise EspalierError(f"--limit={limit} is above the {len(records)} conversations of {path}; lower it")
    by_category: dict[str, list[int]] = {}
    for i, (category, *_) in enumerate(records):
        by_category.setdefault(category, []).append(i)
    shuffled_groups = [rng.sample(indices, len(indices)) for indices in by_category.values()]
    drawn_in_turns = [index for index in chain.from_iterable(zip_longest(*shuffled_groups)) if index is not None]
    return [records[index] for index in sorted(drawn_in_turns[:limit])]


def _messages_of_record(location: str, record: Mapping[str, Any]) -> tuple[str, str, list[str]]:
    """Returns (category, system message, the user's messages) of a record.  location: of the record, for errors."""
    if prompt_field(location, record) == "token_ids":
        raise unexpected_record_error(location, "token ids, which are no text")
    messages = messages_of(location, record)
    system, texts = ([m["content"] for m in messages if m["role"] == role] for role in ("system", "user"))
    category = record.get("category") or ""
    if not isinstance(category, str):
        raise unexpected_record_error(location, '"category" that is no text')
    return category, "\n\n".join(system), [text for text in texts if text]
