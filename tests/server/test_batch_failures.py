"""Batches of a server whose disk or engine fails: what clients see, what is logged, and when the next try comes."""

import asyncio
import json
import os
import time

import msgspec
import pytest

from espalier.batch_jobs.files import DEFAULT_URLS, Journal
from espalier.errors import EspalierError
from espalier.server import batch_store
from espalier.server.batch_store import BatchRequest, BatchStore
from espalier.server.batches import BatchRunner
from tests.batch_jobs.sample import line, outcomes, write
from tests.server.test_batches import ENDED, Engine

FULL = "No space left on device"


def run_batch(tmp_path, lines, num_answers, follow):
    """Runs follow(BatchRunner, Batch) while a batch of these lines runs.  num_answers: how many the engine gives."""
    given = write(tmp_path / "in.jsonl", lines)

    async def run():
        batches = BatchRunner(BatchStore(tmp_path / "kept"), 3)
        batches.start(Engine(num_answers), None)
        with given.open("rb") as file:
            id = batches.store.add_file(file, "in.jsonl", "batch").id
        asked = BatchRequest(input_file_id=id, endpoint=DEFAULT_URLS[1], completion_window="24h")
        await follow(batches, batches.create(asked))
        await batches.close()

    asyncio.run(asyncio.wait_for(run(), 30))


def fail_to_open(monkeypatch, failures, pause_s):
    """The journal of answers cannot be opened while `failures` yields an error.  Returns the times of the tries."""
    tries = []

    def journal(path, scan):
        tries.append(time.monotonic())
        if (error := next(failures, None)) is not None:
            raise error
        return Journal(path, scan)

    monkeypatch.setattr("espalier.server.batches.Journal", journal)
    monkeypatch.setattr("espalier.server.batches.FIRST_PAUSE_S", pause_s)
    return tries


@pytest.mark.parametrize("end", ["cancelled", "expired"])
def test_the_end_of_a_batch_ends_its_pause(tmp_path, monkeypatch, end):
    tries = fail_to_open(monkeypatch, iter([EspalierError(FULL)]), 100)

    async def follow(batches, batch):
        batch.expires_at = time.time() + (0.1 if end == "expired" else 100)
        while not tries:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        if end == "cancelled":
            batches.cancel(batch)
        while batch.status != end:
            await asyncio.sleep(0.001)

    run_batch(tmp_path, [line(1)], 0, follow)
    assert len(tries) == 2


@pytest.mark.parametrize("end", ["cancelled", "expired"])
def test_a_batch_that_fails_after_its_end_has_pauses_too(tmp_path, monkeypatch, end):
    tries = fail_to_open(monkeypatch, iter([EspalierError(FULL)] * 999), 100)

    async def follow(batches, batch):
        if end == "cancelled":
            batches.cancel(batch)
        else:
            batch.expires_at = int(time.time())
        while not tries:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.1)

    run_batch(tmp_path, [line(1)], 0, follow)
    assert len(tries) == 1


@pytest.mark.parametrize("end", ENDED)
def test_a_client_sees_what_is_on_the_disk_and_the_end_is_right(tmp_path, monkeypatch, end):
    """The first write of each status and of each file fails."""
    monkeypatch.setattr("espalier.server.batches.FIRST_PAUSE_S", 0.001)
    refused, write_atomically = set(), batch_store._write_atomically

    def refuse_first(path, data):
        if (kind := (path, json.loads(data)["status"])) not in refused:
            refused.add(kind)
            raise OSError(28, FULL)
        write_atomically(path, data)

    async def follow(batches, batch):
        monkeypatch.setattr("espalier.server.batch_store._write_atomically", refuse_first)
        if end == "cancelled":
            with pytest.raises(OSError, match=FULL):
                batches.cancel(batch)
            batches.cancel(batch)
        elif end == "expired":
            batch.expires_at = int(time.time())
        path = batches.store.folder / "batches" / f"{batch.id}.json"
        while batch.status != end:
            await asyncio.sleep(0.001)
            stored, shown = json.loads(path.read_bytes()), msgspec.to_builtins(batch)
            assert all(stored[name] == shown[name] for name in stored if name not in ("request_counts", "expires_at"))
        if end in ("cancelled", "expired"):
            answers = batches.store.content_path(batch.error_file_id)
            assert outcomes(answers) == dict.fromkeys((1, 2), f"batch_{end}")

    run_batch(tmp_path, [] if end == "failed" else [line(1), line(2)], 9 if end == "completed" else 0, follow)
    assert end in {status for _, status in refused}


def test_a_batch_that_has_ended_is_not_run_again(tmp_path, monkeypatch):
    """The disk does not remove its answers, whose lines are in the output file."""

    def fail(path, missing_ok=False):
        if path.name.startswith("batch_") and path.suffix == ".jsonl":
            raise OSError(30, "Read-only file system")
        os.unlink(path)

    async def follow(batches, batch):
        monkeypatch.setattr("pathlib.Path.unlink", fail)
        while batch.status != "completed":
            await asyncio.sleep(0.001)
        batches.store.remove_file(batch.input_file_id)
        await asyncio.sleep(0.05)
        assert batch.status == "completed" and not batches.unfinished_batch_of(batch.input_file_id)

    tries = fail_to_open(monkeypatch, iter([]), 0.001)
    run_batch(tmp_path, [line(1)], 9, follow)
    assert len(tries) == 1


def test_the_traceback_of_a_failure_is_logged_once(tmp_path, monkeypatch, caplog):
    failures = [OSError(28, FULL), OSError(28, FULL), EspalierError("used"), KeyError(), OSError(28, FULL)]
    fail_to_open(monkeypatch, iter(failures), 0.001)

    async def follow(batches, batch):
        while batch.status != "completed":
            await asyncio.sleep(0.001)

    run_batch(tmp_path, [line(1)], 9, follow)
    errors = [each for each in caplog.records if each.levelname == "ERROR"]
    assert [each.getMessage().partition(" s: ")[2] for each in errors] == [str(each) or repr(each) for each in failures]
    assert [bool(each.exc_info) for each in errors] == [True, False, False, True, False]
