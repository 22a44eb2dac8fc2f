"""`espalier batch IN OUT`: answers a file of requests in OpenAI's batch format.  The answers come from an engine that
the command starts, or from running servers.

The output is written line by line.  After an interruption, the same command continues where it stopped.
"""

import asyncio
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from time import perf_counter
from types import MappingProxyType
from typing import TYPE_CHECKING

from espalier.cli import INTERRUPTED_STATUS
from espalier.cli.serve import add_chat_flags, frontend_options_from_flags, plain_settings
from espalier.errors import EspalierError, require_int, require_number
from espalier.terminal.console import progress, waiting
from espalier.terminal.flags import (
    add_engine_flags,
    add_key_flag,
    add_plain_flag,
    api_key,
    engine_settings,
    flag_of,
    given_flags,
)

if TYPE_CHECKING:
    from espalier.batch_jobs.files import Journal
    from espalier.batch_jobs.sender import Sender

# Flags that need --url.
URL_FLAGS = ("api_key", "priority")
# Flags that are only for the engine that the command starts, with the defaults of the flags.
ENGINE_FLAG_DEFAULTS = MappingProxyType(
    {
        "no_speculation": False,
        "served_model_name": None,
        "chat_template": None,
        "allow_special_tokens_in_messages": False,
        "tool_format": "auto",
        "reasoning_format": "auto",
    }
)
BUNDLED = "bundled"
URL_CONCURRENCY = 64
# How many lines are sent at once for each slot of the engine.  With 2, the next line already waits when a line ends.
LINES_PER_SLOT = 2
# The queue limit of the engine that the command starts.  No file has so many lines, so no line is refused.
UNREACHED_QUEUE_LENGTH = 2**30


def add_flags(parser: ArgumentParser) -> None:
    parser.add_argument("input", type=Path, metavar="IN", help="requests, one JSON object on each line")
    parser.add_argument("output", type=Path, metavar="OUT", help="answers, one on each line; appended to if it exists")
    parser.add_argument(
        "--url",
        action="append",
        metavar="X",
        help="send to this running server; may be repeated (by default an engine is started)",
    )
    add_key_flag(parser, "bearer token for --url")
    parser.add_argument(
        "--concurrency", type=int, metavar="N", help=f"requests at once (--url: {URL_CONCURRENCY}; else by max_batch)"
    )
    parser.add_argument(
        "--priority",
        type=int,
        metavar="N",
        help="with --url: priority of lines that have none; not every server knows this field",
    )
    parser.add_argument(
        "--give-up-after",
        type=float,
        default=300.0,
        metavar="S",
        help="seconds without any answer after which the run ends (300)",
    )
    parser.add_argument(
        "--served-model-name",
        action="append",
        metavar="X",
        help="the model's name in the lines; may be repeated (MODEL)",
    )
    add_chat_flags(parser.add_argument_group("chat"))
    add_engine_flags(parser)
    add_plain_flag(parser)


def run(args: Namespace) -> int:
    """Runs the batch.  Returns 0 if every line has an answer with status 200, and 1 if some lines have an error."""
    _check_flags(args)
    # These imports are slow, and other commands do not need them.
    from espalier.batch_jobs.files import Journal, scan_input

    started_at = perf_counter()
    journal = Journal(args.output, scan_input(args.input))
    try:
        if journal.num_unanswered:
            _print_line(
                f"{journal.num_answered} of {journal.scan.num_lines} lines are already answered", journal.num_answered
            )
            asyncio.run(_answer_lines(args, journal))
    except KeyboardInterrupt:
        _print_line(f"interrupted: {_progress_text(journal)}; run the same command again to go on")
        return INTERRUPTED_STATUS
    except EspalierError as error:
        if not journal.num_answered:  # a flag may be wrong, so the same command may fail again
            raise
        raise EspalierError(f"{error}; {_progress_text(journal)}; run the same command again to go on") from None
    finally:
        journal.close()
    advice = "; to ask all lines again, delete this file" if journal.num_failed else ""
    seconds = f"{perf_counter() - started_at:.1f} s"
    _print_line(
        f"{_progress_text(journal)}, {journal.num_failed} with an error, after {seconds}, in {args.output}{advice}"
    )
    return int(journal.num_failed > 0)


def _check_flags(args: Namespace) -> None:
    """Refuse flags that cannot be combined.  Raises EspalierError."""
    if args.url is None:
        for name in URL_FLAGS:
            if getattr(args, name) is not None:
                raise EspalierError(f"{flag_of(name)} is for a running server; give --url, or leave it out")
    elif given := given_flags(args) + [
        name for name, unset in ENGINE_FLAG_DEFAULTS.items() if getattr(args, name) != unset
    ]:
        raise EspalierError(f"{flag_of(given[0])} is not for --url, where the server has its engine; leave one out")
    if args.url is not None:
        from espalier.batch_jobs.sender import split_url

        for url in args.url:
            split_url(url)
        api_key(args)
    require_int("--concurrency", args.concurrency, 1, optional=True)
    require_number("--give-up-after", args.give_up_after, lambda s: s >= 0, "seconds, 0 or more")
    # The output must be a regular file, because a batch reads it before it continues.
    if str(args.output) == "-" or (args.output.exists() and not args.output.is_file()):
        raise EspalierError(f"{args.output} is not a regular file; name another file for the output")
    if args.output.exists() and args.input.exists() and args.output.samefile(args.input):
        raise EspalierError(f"{args.output} is the input; name another file for the output")


async def _answer_lines(args: Namespace, journal: "Journal") -> None:
    """Answers the lines that have no answer yet.  journal: the input and output files."""
    from espalier.batch_jobs.sender import run_batch

    # concurrency: the number of lines to send at once.
    async with _sender_to_engine(args) if args.url is None else _sender_to_servers(args) as (sender, concurrency):
        with progress("answering", journal.scan.num_lines) as advance:
            advance(journal.num_answered)
            await run_batch(journal, sender, concurrency, advance)


@asynccontextmanager
async def _sender_to_servers(args: Namespace) -> AsyncIterator[tuple["Sender", int]]:
    """Yields (sender, number of lines to send at once), for the servers of --url."""
    from espalier.batch_jobs.sender import Sender, http_client, require_reachable

    concurrency = args.concurrency or URL_CONCURRENCY
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(http_client(url, api_key(args), concurrency)) for url in args.url]
        await require_reachable(clients)
        yield Sender(clients, args.give_up_after, args.priority), concurrency


@asynccontextmanager
async def _sender_to_engine(args: Namespace) -> AsyncIterator[tuple["Sender", int]]:
    """Yields (sender, number of lines to send at once), for an engine in this process."""
    from espalier.batch_jobs.files import MAX_LINE_BYTES
    from espalier.batch_jobs.sender import Sender, app_client
    from espalier.server.api import ApiOptions
    from espalier.server.client import ClientOptions
    from espalier.server.run import in_process_app

    settings = engine_settings(args)
    if "draft" not in settings:
        settings = {"model": BUNDLED, **settings}
    names = args.served_model_name or [name for name in [settings.get("model", "auto")] if name != "auto"]
    app_context = in_process_app(
        plain_settings(settings),
        # If the engine process crashes, it is replaced, and its lines are sent again.
        ClientOptions(restart=True, log_level="info" if args.verbose else "warning"),
        frontend_options_from_flags(args, names, max_queue=UNREACHED_QUEUE_LENGTH, request_timeout_s=None),
        ApiOptions(max_body_bytes=MAX_LINE_BYTES, body_timeout_s=None),
    )
    async with AsyncExitStack() as stack:
        with waiting("loading the model"):
            frontend, app = await stack.enter_async_context(app_context)
        client = await stack.enter_async_context(app_client(app))
        num_slots = frontend.engines.num_slots
        yield Sender([client], args.give_up_after), args.concurrency or LINES_PER_SLOT * num_slots


def _progress_text(journal: "Journal") -> str:
    return f"{journal.num_answered} of {journal.scan.num_lines} lines are answered"


def _print_line(text: str, is_shown: object = True) -> None:
    if is_shown:
        print(f"espalier: {text}", file=sys.stderr)
