"""Runs a server's batches, one after another: checks the input file, answers its lines, and makes output files.

A batch's requests go through the server's own endpoints, at a lower priority than other requests.  Each answer is
written to a file at once, so a server that starts again continues where it stopped.
"""

import asyncio
import logging
import re
import time
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from espalier.batch_jobs.files import InputScan, Journal, LineError, custom_id_of, scan_input
from espalier.batch_jobs.sender import AsgiApp, Sender, app_client, run_batch
from espalier.errors import EspalierError
from espalier.server.batch_store import (
    COMPLETION_WINDOW_S,
    ENDED_STATUSES,
    OUTPUT_PURPOSE,
    Batch,
    BatchError,
    BatchErrors,
    BatchRequest,
    BatchStore,
    LineCounts,
    new_id,
    split_by_status,
)
from espalier.server.frontend import without_timeout

log = logging.getLogger("espalier.server")
# The default priority of batch requests.  Requests with lower values start first, and other requests have 0 by default.
BATCH_PRIORITY = 2**20
# The input files of at most this number of batches are read at the same time.
MAX_INPUT_SCANS = 2
# The pause after a failure of the disk or the engine, in seconds.  The pause doubles up to LONGEST_PAUSE_S.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
LINE_NUMBER_PATTERN = re.compile(r", line (\d+): ")
UNANSWERED_ERRORS = {
    "cancelled": ("batch_cancelled", "the batch was cancelled before this line was answered"),
    "expired": ("batch_expired", "the batch's completion_window ended before this line was answered"),
}


class UnfinishedBatch:
    """The state of a batch that has not ended.  earlier_batches_ended: set when all earlier batches have ended."""

    def __init__(self) -> None:
        self.earlier_batches_ended = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.task: asyncio.Task[None]


class BatchRunner:
    """Runs batches.  concurrency: how many requests of a batch run at once.  Call start() before other methods.

    Thousands of batches may wait, so a batch keeps no file open while it waits.
    """

    def __init__(self, store: BatchStore, concurrency: int):
        self.store = store
        self.concurrency = concurrency
        # By batch id.  Batches run in this order.
        self._unfinished_batches: dict[str, UnfinishedBatch] = {}
        self._journals: dict[str, Journal] = {}
        self._scan_limit = asyncio.Semaphore(MAX_INPUT_SCANS)
        self._cancelled_batch_lock = asyncio.Lock()

    def start(self, app: AsgiApp, api_key: str | None) -> None:
        """Continue the batches that have not ended.  app: the server's own application, which answers their requests.

        The limit --request-timeout does not apply to a batch's requests, because all other requests run first.  A batch
        has 24 hours for all its requests.
        """
        self._client = app_client(without_timeout(app), api_key)
        for batch in self.store.batches.values():
            if batch.status not in ENDED_STATUSES:
                self._start_batch(batch)

    def create(self, body: BatchRequest) -> Batch:
        """Store a new batch and start it.  body: the fields that the client sent."""
        now = int(time.time())
        id = new_id("batch_")
        batch = Batch(id, body.endpoint, body.input_file_id, now, now + COMPLETION_WINDOW_S, body.metadata)
        self.store.save_batch(batch)
        self._start_batch(batch)
        return batch

    def cancel(self, batch: Batch) -> None:
        """Cancel a batch.  The answers so far become its output."""
        if batch.status not in (*ENDED_STATUSES, "cancelling"):
            self.store.save_batch(batch, status="cancelling", cancelling_at=int(time.time()))
            self._unfinished_batches[batch.id].cancelled.set()

    def update_counts(self, batch: Batch) -> Batch:
        """Update the batch's request_counts if the batch runs, and return the batch."""
        journal = self._journals.get(batch.id)
        if journal is not None:
            _set_counts(batch, journal)
        return batch

    def unfinished_batch_of(self, file_id: str) -> str | None:
        """Returns the id of an unfinished batch whose input is this file; None if no batch reads the file."""
        batches = self.store.batches.values()
        return next(
            (each.id for each in batches if each.input_file_id == file_id and each.status not in ENDED_STATUSES), None
        )

    def stop(self) -> None:
        """Stop all work.  The unfinished batches continue when the server starts again."""
        for unfinished in self._unfinished_batches.values():
            unfinished.task.cancel()

    async def close(self) -> None:
        self.stop()
        await asyncio.gather(
            *(unfinished.task for unfinished in self._unfinished_batches.values()), return_exceptions=True
        )
        await self._client.aclose()
        self.store.close()

    def _start_batch(self, batch: Batch) -> None:
        unfinished = self._unfinished_batches[batch.id] = UnfinishedBatch()
        if batch.status == "cancelling":
            unfinished.cancelled.set()
        self._admit_oldest_batch()
        unfinished.task = asyncio.create_task(self._run_and_log(batch, unfinished))
        unfinished.task.add_done_callback(lambda _: self._remove_ended_batch(batch.id))

    def _remove_ended_batch(self, batch_id: str) -> None:
        del self._unfinished_batches[batch_id]
        self._admit_oldest_batch()

    def _admit_oldest_batch(self) -> None:
        if (oldest := next(iter(self._unfinished_batches.values()), None)) is not None:
            oldest.earlier_batches_ended.set()

    async def _run_and_log(self, batch: Batch, unfinished: UnfinishedBatch) -> None:
        """Run a batch to its end.  If the disk or the engine fails, run other batches, and try again after a pause."""
        pause_s, traced_errors = FIRST_PAUSE_S, set[str]()
        while True:
            was_ended = unfinished.cancelled.is_set() or batch.expires_at <= time.time()
            try:
                return await self._run_to_end(batch, unfinished)
            except Exception as error:
                # An EspalierError needs no traceback, because it says what to do.  Other tracebacks are logged once.
                is_new = not isinstance(error, EspalierError) and repr(error) not in traced_errors
                traced_errors.add(repr(error))
                why = str(error) or repr(error)
                log.error("%s is tried again in %g s: %s", batch.id, pause_s, why, exc_info=is_new)
            # Only one batch runs at a time, so this batch now waits behind all others.
            unfinished.earlier_batches_ended.clear()
            self._unfinished_batches[batch.id] = self._unfinished_batches.pop(batch.id)
            self._admit_oldest_batch()
            # If the batch is cancelled or expires during the pause, the pause ends at once, because the next try sends
            # no requests.  If that happened before this try, the pause has its full length.
            pause = asyncio.sleep(pause_s)
            await (pause if was_ended else self._await_unless_ended(batch, unfinished, pause))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _run_to_end(self, batch: Batch, unfinished: UnfinishedBatch) -> None:
        """Run a batch until it has ended.  Raises EspalierError or OSError if the engine or the disk fails."""
        try:
            async with self._scan_limit:
                scan = await asyncio.to_thread(scan_input, self.store.content_path(batch.input_file_id))
        except EspalierError as error:
            self._mark_failed(batch, error)
            return
        batch.request_counts.total = scan.num_lines
        end_status = (
            "cancelled"
            if unfinished.cancelled.is_set()
            else await self._await_unless_ended(batch, unfinished, unfinished.earlier_batches_ended.wait())
        )
        if end_status is None:
            await self._answer_and_make_files(batch, unfinished, scan)
        else:
            async with self._cancelled_batch_lock:
                await self._answer_and_make_files(batch, unfinished, scan, end_status)

    async def _await_unless_ended(
        self, batch: Batch, unfinished: UnfinishedBatch, work: Coroutine[Any, Any, Any]
    ) -> str | None:
        """Await `work`, then return None.  If the batch ends first, return "cancelled" or "expired"."""
        work_task = asyncio.create_task(work)
        cancel_task = asyncio.create_task(unfinished.cancelled.wait())
        try:
            left_s = batch.expires_at - time.time()
            await asyncio.wait({work_task, cancel_task}, timeout=max(left_s, 0), return_when=asyncio.FIRST_COMPLETED)
            if work_task.done():
                work_task.result()
                return None
            return "cancelled" if cancel_task.done() else "expired"
        finally:
            for task in (work_task, cancel_task):
                task.cancel()
            with suppress(asyncio.CancelledError):
                await work_task

    @staticmethod
    async def _open_journal(path: Path, scan: InputScan) -> Journal:
        """Open a batch's journal in a thread.  path: the file of its answers.  scan: the checked input file."""
        opening = asyncio.create_task(asyncio.to_thread(Journal, path, scan))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            # The thread goes on and opens the journal.  If nobody closed the journal, its file would stay locked.
            with suppress(EspalierError):
                (await opening).close()
            raise

    async def _answer_and_make_files(
        self, batch: Batch, unfinished: UnfinishedBatch, scan: InputScan, end_status: str | None = None
    ) -> None:
        """Answer a batch's lines and make its output files.  Raises EspalierError if the engine is gone.
        end_status: "cancelled" or "expired" if the batch ended while it waited; None to run its requests."""
        journal = self._journals[batch.id] = await self._open_journal(self.store.answers_path(batch.id), scan)
        try:
            if journal.num_unanswered and end_status is None:
                end_status = await self._await_unless_ended(batch, unfinished, self._answer_lines(batch, journal))
            if batch.expired_at is not None:
                end_status = "expired"  # An earlier try has already answered the other lines with errors.
            # A batch with all answers is completed, even if its time is over.
            elif end_status is None or (end_status == "expired" and not journal.num_unanswered):
                end_status = "completed"
            now = int(time.time())
            if end_status != "cancelled":
                expired_at = now if end_status == "expired" else None
                self.store.save_batch(batch, status="finalizing", finalizing_at=now, expired_at=expired_at)
            await asyncio.to_thread(_answer_rest_with_errors, journal, end_status)
        finally:
            _set_counts(batch, journal)
            del self._journals[batch.id]
            journal.close()
        file_ids = await asyncio.to_thread(self._make_output_files, batch)
        end_time = {f"{end_status}_at": int(time.time())}
        self.store.save_batch(batch, status=end_status, **file_ids, **end_time)
        # The output files have all answers now.  If this deletion fails, the server deletes the file at its next start.
        with suppress(OSError):
            self.store.answers_path(batch.id).unlink()
        log.info(
            "%s: %s, %d of %d lines answered", batch.id, end_status, batch.request_counts.completed, scan.num_lines
        )

    async def _answer_lines(self, batch: Batch, journal: Journal) -> None:
        """Run the requests of all lines that have no answer yet."""
        if batch.status == "validating":
            self.store.save_batch(batch, status="in_progress", in_progress_at=int(time.time()))
        sender = Sender([self._client], priority=BATCH_PRIORITY)
        await run_batch(journal, sender, self.concurrency, urls=(batch.endpoint,))

    def _make_output_files(self, batch: Batch) -> dict[str, str | None]:
        """Store the answers as the batch's output file and error file.  A file without lines is not made.

        Returns the batch's fields output_file_id and error_file_id."""
        file_ids: dict[str, str | None] = {"output": None, "error": None}
        answer_files = split_by_status(self.store.answers_path(batch.id), self.store.folder / "batches")
        try:
            for (path, num_lines), kind in zip(answer_files, file_ids, strict=True):
                if num_lines:
                    # Each try uses the same id.  So if the server crashes here, the next try replaces this file.
                    id = f"file-{batch.id.removeprefix('batch_')}-{kind}"
                    with path.open("rb") as lines:
                        file_ids[kind] = self.store.add_file(lines, f"{batch.id}_{kind}.jsonl", OUTPUT_PURPOSE, id).id
        finally:
            for path, _ in answer_files:
                path.unlink(missing_ok=True)
        return {f"{kind}_file_id": id for kind, id in file_ids.items()}

    def _mark_failed(self, batch: Batch, error: EspalierError) -> None:
        message = str(error).replace(str(self.store.content_path(batch.input_file_id)), "the file")
        line = LINE_NUMBER_PATTERN.search(message)
        batch_error = BatchError("invalid_input_file", message, None if line is None else int(line[1]))
        self.store.save_batch(batch, status="failed", failed_at=int(time.time()), errors=BatchErrors([batch_error]))


def _set_counts(batch: Batch, journal: Journal) -> None:
    num_ok = journal.num_answered - journal.num_failed
    batch.request_counts = LineCounts(journal.scan.num_lines, num_ok, journal.num_failed)


def _answer_rest_with_errors(journal: Journal, end_status: str) -> None:
    """Write an error as the answer of each unanswered line of a cancelled or expired batch."""
    for number, data in journal.unanswered_lines():
        code, message = UNANSWERED_ERRORS[end_status]
        journal.append(number, custom_id_of(data), LineError(code, message))
    journal.sync()
