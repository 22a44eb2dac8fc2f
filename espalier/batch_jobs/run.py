"""Runs a batch: sends every line that has no answer in the journal, and writes the answer.

At most `concurrency` lines are in memory, so a file may have any number of lines.
"""

import asyncio
from collections.abc import Callable, Collection, Iterator

from espalier.batch_jobs.journal import Journal
from espalier.batch_jobs.lines import URLS, LineError, Response, id_prefix, parse
from espalier.batch_jobs.sender import Sender

SYNC_S = 1.0


async def run(
    journal: Journal,
    sender: Sender,
    concurrency: int,
    answered: Callable[[], object] = lambda: None,
    urls: Collection[str] = URLS,
) -> None:
    """answered: called after each line that is written.  urls: the endpoints that a line may name.

    Raises EspalierError if the server does not answer any more or the output cannot be written.  The journal always has
    the answers so far, and a later run continues from there.
    """
    lines = journal.unanswered()
    try:
        async with asyncio.TaskGroup() as group:
            syncing = group.create_task(_sync(journal))
            async with asyncio.TaskGroup() as workers:
                for _ in range(min(concurrency, journal.num_left)):
                    workers.create_task(_work(lines, journal, sender, answered, urls))
            syncing.cancel()
    except BaseExceptionGroup as errors:
        raise _first_error(errors) from None
    finally:
        lines.close()


async def _work(
    lines: Iterator[tuple[int, bytes]],
    journal: Journal,
    sender: Sender,
    answered: Callable[[], object],
    urls: Collection[str],
) -> None:
    """Answer one line after another.  Several workers share the iterator `lines`."""
    for number, data in lines:
        custom_id: str | None = None
        answer: Response | LineError
        try:
            line = parse(number, data, urls)
            custom_id = line.custom_id
            answer = await sender.answer(f"{id_prefix(journal.input.digest)}{number}", line)
        except LineError as error:
            custom_id, answer = error.custom_id, error
        journal.append(number, custom_id, answer)
        answered()


async def _sync(journal: Journal) -> None:
    while True:
        await asyncio.sleep(SYNC_S)
        # A slow disk must not hold up what else runs on this event loop.
        await asyncio.to_thread(journal.sync)


def _first_error(errors: BaseExceptionGroup) -> BaseException:
    inner = errors.exceptions[0]
    return _first_error(inner) if isinstance(inner, BaseExceptionGroup) else inner
