"""`espalier batch` against a server, and the server's own files and batches as OpenAI's client calls them."""

import asyncio
import json
import os
import random
import signal
import threading
import time
from contextlib import asynccontextmanager
from dataclasses import asdict
from types import SimpleNamespace

import openai
import pytest

from espalier import SpeculationConfig
from espalier.batch_jobs.files import DEFAULT_URLS, MAX_LINE_BYTES, Journal, scan_input
from espalier.cli.main import main
from espalier.errors import EspalierError
from espalier.server.batch_store import BatchRequest, BatchStore
from espalier.server.batches import BatchRunner
from espalier.server.routes import path_not_served_error
from espalier.server.run import _batch_concurrency
from tests import warm
from tests.batch_jobs.sample import line, outcomes, write
from tests.batch_jobs.valve import valve
from tests.server.serving import ENGINE, LONG, ROOT, TREE, Served, flags_of, serving

HI = [{"role": "user", "content": "hi"}]
TEXT = {"model": "bundled", "temperature": 0, "prompt": "x", "max_tokens": 2}
CHAT = {"model": "bundled", "temperature": 0, "messages": HI, "max_tokens": 2}
RESPONSE = {"model": "bundled", "temperature": 0, "input": "hi", "max_output_tokens": 2}
ENDED = ("completed", "failed", "cancelled", "expired")


def started(log, *arguments):
    """`espalier batch` in a process of its own.  Ctrl-C reaches it also where this process was started to ignore it."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with log.open("w") as lines:
        return warm.server().start("espalier", ["batch", *map(str, arguments)], environment, lines, lines)


def until(holds, seconds=100):
    """To look costs CPU time, so the pauses grow."""
    end, pause = time.monotonic() + seconds, 0.005
    while not holds():
        assert time.monotonic() < end
        time.sleep(pause)
        pause = min(pause * 1.5, 0.1)


def num_lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_a_killed_batch_goes_on_without_losing_or_repeating_a_line(served, tmp_path, capsys):
    lines = [line(i, body=TEXT | {"prompt": f"def f{i}("}) for i in range(1, 25)]
    lines[7], lines[8] = "{bad", line(9, url="/v1/embeddings")
    lines[9:12] = [
        line(10, url=DEFAULT_URLS[0], body=CHAT),
        line(11, url=DEFAULT_URLS[2], body=RESPONSE),
        line(32, body={"model": "x"}),
    ]
    given, out, log = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl", tmp_path / "log"
    with valve(served.base) as way:
        flags = ["--url", way.base, "--concurrency", "2"]
        for end, so_far in ((signal.SIGKILL, 2), (signal.SIGINT, 7)):
            way.let(so_far + 1)
            process = started(log, given, out, *flags)
            until(lambda: process.poll() is not None or num_lines(out) > so_far)  # noqa: B023
            process.send_signal(end)
            status, said = process.wait(100), log.read_text()
            assert status == (-9 if end == signal.SIGKILL else 130), said
            assert (end == signal.SIGKILL) is ("run the same command again to go on" not in said)
            assert so_far < num_lines(out) < 24
        way.let(24)
        assert main(["batch", str(given), str(out), *flags]) == 1
    said = capsys.readouterr().err
    assert "24 of 24 lines are answered, 3 with an error" in said
    assert said.endswith(f" s, in {out}; to ask all lines again, delete this file\n")
    errors = {8: "invalid_json_line", 9: "invalid_url", 12: 400}
    assert outcomes(out) == dict.fromkeys(range(1, 25), 200) | errors
    # The answers are the server's own.
    bodies = [json.loads(each)["response"] for each in out.read_text().splitlines()]
    texts = {answer["request_id"].rpartition("_")[2]: answer["body"] for answer in bodies if answer}
    _, _, direct = served.request(DEFAULT_URLS[1], lines[0]["body"])
    assert texts["1"]["choices"] == direct["choices"] and texts["1"]["usage"].keys() == direct["usage"].keys()
    assert texts["10"]["choices"][0]["message"] == served.request(DEFAULT_URLS[0], CHAT)[2]["choices"][0]["message"]
    assert texts["11"]["output"][0]["content"] == served.request(DEFAULT_URLS[2], RESPONSE)[2]["output"][0]["content"]
    # What is answered is not asked again.
    before = out.read_bytes()
    assert main(["batch", str(given), str(out), "--url", "http://127.0.0.1:1"]) == 1
    assert out.read_bytes() == before


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--url", "http://127.0.0.1:1"], "cannot be reached"),
        (["--url", "there"], "use an address such as"),
        (["--url", "http://x", "--max-batch", "2"], "--max-batch is not for --url"),
        (["--url", "http://x", "--tool-format", "none"], "--tool-format is not for --url"),
        (["--priority", "3"], "--priority is for a running server"),
        (["--concurrency", "0"], "--concurrency=0"),
        (["--tool-format", "x"], "x"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_written(tmp_path, capsys, flags, says):
    given, out = write(tmp_path / "in.jsonl", [line(1)]), tmp_path / "out.jsonl"
    assert main(["batch", str(given), str(out), *flags]) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1
    assert not out.exists() or not out.read_bytes()
    assert main(["batch", str(given), str(given)]) == 2 and given.read_bytes()


def test_an_engine_of_its_own_gets_the_flags(tmp_path, monkeypatch, capsys):
    engine, given, out = (
        Engine(100),
        write(tmp_path / "in.jsonl", [line(i) for i in range(1, 21)]),
        tmp_path / "out.jsonl",
    )
    started = []

    @asynccontextmanager
    async def in_process_app(*options):
        started.append(options)
        yield SimpleNamespace(engines=SimpleNamespace(num_slots=3)), engine

    monkeypatch.setattr("espalier.server.run.in_process_app", in_process_app)
    assert main(["batch", str(given), str(out), "--max-batch", "3", "--steps", "2", "--tool-format", "hermes"]) == 0
    [(settings, client, frontend, api)] = started
    assert settings == {"model": "bundled", "max_batch": 3, "speculation": asdict(SpeculationConfig(steps=2))}
    assert client.restart and (frontend.names, frontend.tool_format, frontend.request_timeout_s) == (
        ("bundled",),
        "hermes",
        None,
    )
    assert api.max_body_bytes == MAX_LINE_BYTES and engine.peak == 2 * 3
    assert outcomes(out) == dict.fromkeys(range(1, 21), 200)
    assert capsys.readouterr().err.endswith(f" s, in {out}\n")


def upload(client, lines):
    data = "".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in lines).encode()
    return client.files.create(file=("mine.jsonl", data), purpose="batch"), data


def ended(client, batch):
    until(lambda: client.batches.retrieve(batch.id).status in ENDED)
    return client.batches.retrieve(batch.id)


def results(client, file_id):
    return [json.loads(each) for each in client.files.content(file_id).text.splitlines()]


def test_openais_client_runs_batches(served, client):
    file, data = upload(
        client, [line(1), line(2), "{bad", line(4, url=DEFAULT_URLS[0], body=CHAT), line(5, body={"model": "x"})]
    )
    assert (file.bytes, file.filename, file.purpose) == (len(data), "mine.jsonl", "batch")
    assert client.files.content(file.id).content == data and client.files.retrieve(file.id) == file
    asked = {"endpoint": DEFAULT_URLS[1], "completion_window": "24h"}
    batch = client.batches.create(input_file_id=file.id, metadata={"a": "b"}, **asked)
    assert batch.metadata == {"a": "b"} and batch.status not in ENDED
    done = ended(client, batch)
    counts = done.request_counts
    assert (done.status, counts.total, counts.completed, counts.failed) == ("completed", 5, 2, 3)
    answers, errors = results(client, done.output_file_id), results(client, done.error_file_id)
    assert {each["custom_id"] for each in answers} == {"r1", "r2"}
    assert all(each["response"]["body"]["choices"][0]["text"] for each in answers)
    of_lines = [each["error"]["code"] if each["error"] else each["response"]["status_code"] for each in errors]
    assert sorted(map(str, of_lines)) == ["400", "invalid_json_line", "invalid_url"]
    # Lists, page by page, the newest first.
    other = client.batches.create(input_file_id=file.id, **asked)
    assert [each.id for each in client.batches.list(limit=1)][:2] == [other.id, batch.id]
    assert client.batches.list(limit=1).has_more
    assert {each.purpose for each in client.files.list(purpose="batch")} == {"batch"}
    assert ended(client, other).status == "completed"
    for id in (file.id, done.output_file_id):
        assert client.files.delete(id).deleted
        with pytest.raises(openai.NotFoundError, match="there is no file"):
            client.files.retrieve(id)


def test_a_line_may_wait_longer_than_another_request(tmp_path, client):
    body = LONG | {"max_tokens": 200}
    with serving(tmp_path, "--request-timeout", "0.05", "--batch-dir", str(tmp_path / "kept"), copied=True) as served:
        assert served.request(DEFAULT_URLS[1], body)[0] == 504
        client = client.with_options(base_url=f"{served.base}/v1")
        file, _ = upload(client, [line(1, body=body)])
        done = ended(
            client, client.batches.create(input_file_id=file.id, endpoint=DEFAULT_URLS[1], completion_window="24h")
        )
        assert (done.status, done.request_counts.completed) == ("completed", 1)


def test_a_cancelled_batch_answers_every_line(served, client):
    file, _ = upload(client, [line(i, body=TEXT | {"max_tokens": 200}) for i in range(200)])
    batch = client.batches.create(input_file_id=file.id, endpoint=DEFAULT_URLS[1], completion_window="24h")
    waiting = client.batches.create(input_file_id=file.id, endpoint=DEFAULT_URLS[1], completion_window="24h")
    with pytest.raises(openai.BadRequestError, match="cancel it first"):
        client.files.delete(file.id)
    for each in (waiting, batch):
        assert client.batches.cancel(each.id).status in ("cancelling", "cancelled")
    for each in (waiting, batch):
        done = ended(client, each)
        assert done.status == "cancelled" and done.cancelled_at
        answers = results(client, done.error_file_id)
        if done.output_file_id is not None:
            answers += results(client, done.output_file_id)
        assert sorted(each["custom_id"] for each in answers) == sorted(f"r{i}" for i in range(200))
        assert any(each["error"] and each["error"]["code"] == "batch_cancelled" for each in answers)
    # Nothing of it runs on.
    served.until(lambda: not served.metric("open_samples"))
    assert not served.metric("http_requests_total", path=DEFAULT_URLS[1], status="0")


def test_a_file_that_cannot_be_a_batch_fails_it_with_the_line(served, client):
    file, _ = upload(client, [line(1), line(2), line(3, custom_id="r1")])
    done = ended(
        client, client.batches.create(input_file_id=file.id, endpoint=DEFAULT_URLS[1], completion_window="24h")
    )
    [fault] = done.errors.data
    assert (done.status, fault.line) == ("failed", 3) and "custom_id 'r1' is on line 1 too" in fault.message
    assert str(ROOT) not in fault.message and "/files/" not in fault.message


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda client: client.files.create(file=b"x", purpose="fine-tune"), "use 'batch'"),
        (
            lambda client: client.files.create(
                file=b"x", purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
            ),
            "files stay until they are deleted",
        ),
        (lambda client: client.post("/files", body={"purpose": "batch"}, cast_to=object), "send multipart"),
        (lambda client: client.files.create(file=b"x" * 100_000, purpose="batch"), "raise --max-file-bytes"),
        (lambda client: client.files.content("../lock"), "not served|there is no file"),
        (lambda client: client.batches.list(limit=0), "use 1 to 100"),
        (lambda client: client.files.list(limit="٥"), "use 1 to 10000"),
        (lambda client: client.files.list(limit="9" * 5000), "use 1 to 10000"),
        (lambda client: client.batches.list(after="x"), "last_id of the page before"),
        (lambda client: client.get("/batches?limi=3", cast_to=object), "the query has no 'limi'"),
        (lambda client: client.get("/batches?limit=3&limit=5", cast_to=object), "the query has limit 2 times; send it"),
        (lambda client: client.batches.cancel("x"), "there is no batch 'x'"),
        (lambda client: client.batches.cancel("x", extra_body={"reason": "y"}), "/v1/batches/x/cancel takes no body"),
        (
            lambda client: client.files.delete("x", extra_body={"force": True}),
            "/v1/files/x takes no body; leave it out",
        ),
        (lambda client: client.batches.cancel("x", extra_query={"now": 1}), "the query has no 'now'; leave it out"),
        (lambda client: client.files.delete("x", extra_query={"now": 1}), "the query has no 'now'; leave it out"),
        (
            lambda client: client.files.create(file=b"x", purpose="batch", extra_query={"purpose": "x"}),
            "the query has no 'purpose'; leave it out",
        ),
        (
            lambda client: client.batches.create(input_file_id="x", endpoint=DEFAULT_URLS[1], completion_window="24h"),
            "is no file with purpose 'batch'",
        ),
        (
            lambda client: client.batches.create(input_file_id="x", endpoint="/v1/embeddings", completion_window="24h"),
            "endpoint",
        ),
        (
            lambda client: client.batches.create(input_file_id="x", endpoint=DEFAULT_URLS[1], completion_window="1h"),
            "completion_window",
        ),
        (
            lambda client: client.batches.create(
                input_file_id="x",
                endpoint=DEFAULT_URLS[1],
                completion_window="24h",
                output_expires_after={"anchor": "created_at", "seconds": 3600},
            ),
            "files stay until they are deleted",
        ),
    ],
)
def test_what_a_client_cannot_have_is_refused(served, client, call, says):
    with pytest.raises(openai.APIStatusError, match=says) as refused:
        call(client)
    assert refused.value.status_code in (400, 404, 413, 415) and refused.value.body["request_id"]


@pytest.mark.parametrize("body", [{}, None])
def test_a_body_that_asks_nothing_may_come_with_a_cancel(served, client, body):
    with pytest.raises(openai.NotFoundError, match="there is no batch 'x'"):
        client.batches.cancel("x", extra_body=body)
    data = json.dumps(body, indent=1).encode()
    assert served.request("/v1/batches/x/cancel", data)[0] == served.request("/v1/batches/x/cancel", b"")[0] == 404


class Engine:
    """An application that answers each request when it is let, and counts them."""

    def __init__(self, num_answers):
        self.num_answers = num_answers
        self.now = self.peak = 0
        self.bodies = []

    async def __call__(self, scope, receive, send):
        body = json.loads((await receive())["body"])
        self.bodies.append(body)
        self.now += 1
        self.peak = max(self.peak, self.now)
        await asyncio.sleep(0)
        while self.num_answers <= 0:
            await asyncio.sleep(0.001)
        self.num_answers -= 1
        self.now -= 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps({"echo": body["prompt"]}).encode()})


def test_a_journal_that_opens_while_the_server_ends_is_closed(tmp_path, monkeypatch):
    """Else its file would stay locked, and the batch could not go on."""
    opened, made = threading.Event(), []

    class SlowJournal(Journal):
        def __init__(self, *arguments):
            opened.set()
            time.sleep(0.1)
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr("espalier.server.batches.Journal", SlowJournal)
    given = write(tmp_path / "in.jsonl", [line(1)])

    async def end_while_it_opens():
        batches = BatchRunner(BatchStore(tmp_path / "kept"), 3)
        batches.start(Engine(1), None)
        with given.open("rb") as file:
            id = batches.store.add_file(file, "in.jsonl", "batch").id
        batch = batches.create(BatchRequest(input_file_id=id, endpoint=DEFAULT_URLS[1], completion_window="24h"))
        await asyncio.to_thread(opened.wait)
        await batches.close()
        while not made:
            await asyncio.sleep(0.001)
        Journal(batches.store.answers_path(batch.id), scan_input(given)).close()

    asyncio.run(asyncio.wait_for(end_while_it_opens(), 60))


def test_batches_outlive_the_server(tmp_path):
    """A server that ends amid two batches, and its next start: no line is lost or repeated, in their order."""
    given = write(tmp_path / "in.jsonl", [line(i) for i in range(1, 31)])

    async def first():
        batches, engine = BatchRunner(BatchStore(tmp_path / "kept"), 3), Engine(12)
        batches.start(engine, None)
        with given.open("rb") as file:
            id = batches.store.add_file(file, "in.jsonl", "batch").id
        body = BatchRequest(input_file_id=id, endpoint=DEFAULT_URLS[1], completion_window="24h")
        both = [batches.create(body).id for _ in range(2)]
        while engine.num_answers or len(engine.bodies) < 15:
            await asyncio.sleep(0.001)
        assert batches.update_counts(batches.store.batches[both[0]]).request_counts.completed == 12
        await batches.close()
        assert {body["priority"] for body in engine.bodies} == {2**20}
        return both

    async def second(both):
        batches, engine = BatchRunner(BatchStore(tmp_path / "kept"), 3), Engine(1000)
        assert [batches.store.batches[id].status for id in both] == ["in_progress", "validating"]
        batches.start(engine, None)
        while any(batches.store.batches[id].status != "completed" for id in both):
            await asyncio.sleep(0.001)
        assert len(engine.bodies) == 30 - 12 + 30
        for id in both:
            batch = batches.store.batches[id]
            assert outcomes(batches.store.content_path(batch.output_file_id)) == dict.fromkeys(range(1, 31), 200)
            assert batch.error_file_id is None and batch.request_counts.completed == 30
            assert not batches.store.answers_path(id).exists(), "its lines are in the output file"
        await batches.close()

    both = asyncio.run(asyncio.wait_for(first(), 60))
    asyncio.run(asyncio.wait_for(second(both), 60))


@pytest.mark.parametrize(("slots", "queue", "aborts_requests"), [(8, 256, 6), (8, 0, 4), (3, 9, 3), (1, 0, 1)])
def test_a_batch_leaves_slots_and_queue_to_others(slots, queue, aborts_requests):
    frontend = SimpleNamespace(engines=SimpleNamespace(num_slots=slots), options=SimpleNamespace(max_queue=queue))
    assert _batch_concurrency(frontend) == aborts_requests


@pytest.mark.parametrize("end", ["completed", "cancelled", "expired"])
def test_a_batch_goes_on_when_a_full_disk_has_room_again(tmp_path, monkeypatch, end):
    """A later batch need not wait for it."""
    given, is_full = write(tmp_path / "in.jsonl", [line(i) for i in range(1, 6)]), True
    monkeypatch.setattr("espalier.server.batches.FIRST_PAUSE_S", 0.001)

    async def run():
        nonlocal is_full
        batches = BatchRunner(BatchStore(tmp_path / "kept"), 3)
        batches.start(Engine(1000), None)
        with given.open("rb") as file:
            id = batches.store.add_file(file, "in.jsonl", "batch").id
        body = BatchRequest(input_file_id=id, endpoint=DEFAULT_URLS[1], completion_window="24h")
        batch, later = batches.create(body), batches.create(body)

        def journal(path, scan):
            if is_full and path == batches.store.answers_path(batch.id):
                raise EspalierError("No space left on device")
            return Journal(path, scan)

        monkeypatch.setattr("espalier.server.batches.Journal", journal)
        while later.status != "completed":
            await asyncio.sleep(0.001)
        assert batch.status == "validating"
        if end == "cancelled":
            batches.cancel(batch)
        elif end == "expired":
            batch.expires_at = int(time.time())
        is_full = False
        while batch.status != end:
            await asyncio.sleep(0.001)
        await batches.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_cancel_that_a_full_disk_refuses_can_be_sent_again(tmp_path, monkeypatch):
    monkeypatch.setattr("espalier.server.batches.FIRST_PAUSE_S", 0.001)
    given = write(tmp_path / "in.jsonl", [line(1)])

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    async def run():
        batches = BatchRunner(BatchStore(tmp_path / "kept"), 3)
        batches.start(Engine(0), None)
        with given.open("rb") as file:
            id = batches.store.add_file(file, "in.jsonl", "batch").id
        batch = batches.create(BatchRequest(input_file_id=id, endpoint=DEFAULT_URLS[1], completion_window="24h"))
        with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
            patch.setattr("espalier.server.batch_store._write_atomically", fail)
            batches.cancel(batch)
        batches.cancel(batch)
        while batch.status != "cancelled":
            await asyncio.sleep(0.001)
        await batches.close()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_batches_that_failed_run_one_after_another(tmp_path, monkeypatch):
    monkeypatch.setattr("espalier.server.batches.FIRST_PAUSE_S", 0.001)
    given, failed, running, most, answer = (
        write(tmp_path / "in.jsonl", [line(1)]),
        set(),
        0,
        0,
        BatchRunner._answer_lines,
    )

    def journal(path, scan):
        if len(failed) < 3:
            failed.add(path)
            raise EspalierError("No space left on device")
        return Journal(path, scan)

    async def counted(self, batch, journal):
        nonlocal running, most
        running, most = running + 1, max(most, running + 1)
        await asyncio.sleep(0.02)
        await answer(self, batch, journal)
        running -= 1

    async def run():
        batches = BatchRunner(BatchStore(tmp_path / "kept"), 3)
        batches.start(Engine(9), None)
        with given.open("rb") as file:
            id = batches.store.add_file(file, "in.jsonl", "batch").id
        body = BatchRequest(input_file_id=id, endpoint=DEFAULT_URLS[1], completion_window="24h")
        made = [batches.create(body) for _ in range(3)]
        while any(batch.status != "completed" for batch in made):
            await asyncio.sleep(0.001)
        await batches.close()

    monkeypatch.setattr("espalier.server.batches.Journal", journal)
    monkeypatch.setattr(BatchRunner, "_answer_lines", counted)
    asyncio.run(asyncio.wait_for(run(), 30))
    assert len(failed) == 3 and most == 1


def test_lines_left_at_the_windows_end_have_an_error(tmp_path):
    given = write(tmp_path / "in.jsonl", [line(i) for i in range(1, 6)])

    async def expire():
        batches = BatchRunner(BatchStore(tmp_path / "kept"), 3)
        batches.start(Engine(0), None)
        with given.open("rb") as file:
            id = batches.store.add_file(file, "in.jsonl", "batch").id
        batch = batches.create(BatchRequest(input_file_id=id, endpoint=DEFAULT_URLS[1], completion_window="24h"))
        batch.expires_at = int(time.time())
        while batch.status != "expired":
            await asyncio.sleep(0.001)
        assert outcomes(batches.store.content_path(batch.error_file_id)) == dict.fromkeys(range(1, 6), "batch_expired")
        await batches.close()

    asyncio.run(asyncio.wait_for(expire(), 60))


@pytest.mark.parametrize("path", ["/v1/files", "/v1/files/x", "/v1/batches"])
def test_a_server_without_a_place_for_batches_says_how_to_have_one(path):
    refused = path_not_served_error(path, [])
    assert refused.code == "unsupported" and "start it with --batch-dir DIR" in refused.detail
    assert "--batch-dir" not in path_not_served_error(path, ["/v1/files", "/v1/batches"]).detail


def test_a_wrong_path_is_told_the_paths_of_batches_where_they_are_served():
    assert "/v1/batches" not in path_not_served_error("/nowhere", []).detail
    served = path_not_served_error("/nowhere", ["/v1/files", "/v1/batches"])
    assert "/v1/responses, /v1/files, /v1/batches, /tokenize" in served.detail


@pytest.mark.full
def test_two_thousand_lines_killed_three_times(tmp_path, capsys):
    """One local engine each time, killed at random moments with everything that it started."""
    lines = [
        line(i, body={"model": "bundled", "prompt": f"def f{i}(", "max_tokens": 1 + i % 8}) for i in range(1, 2001)
    ]
    given, out = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    chance, seen, log = random.Random(), [], tmp_path / "log"
    arguments = [str(given), str(out), *flags_of(ENGINE | TREE | {"max_batch": 16, "num_pages": 800})]
    began = time.monotonic()
    for _ in range(3):
        process = started(log, *arguments)
        before = num_lines(out)
        until(lambda before=before: num_lines(out) > before, 600)
        time.sleep(chance.uniform(0.2, 6))
        process.kill()
        process.wait()
        seen.append(num_lines(out))
    last = started(log, *arguments)
    status, said = last.wait(), log.read_text()
    assert status == 0, said
    with capsys.disabled():
        print(f"\nlines answered at the kills: {seen}; {time.monotonic() - began:.1f} s; {said.strip()}")
    assert outcomes(out) == dict.fromkeys(range(1, 2001), 200)
    assert 0 < seen[0] < seen[1] < seen[2]


@pytest.mark.full
def test_a_killed_servers_batch_goes_on(tmp_path):
    flags = ("--batch-dir", str(tmp_path / "kept"), "--api-key", "none")
    with serving(tmp_path, *flags) as served:
        client = of(served)
        file, _ = upload(client, [line(i) for i in range(1, 101)])
        batch = client.batches.create(input_file_id=file.id, endpoint=DEFAULT_URLS[1], completion_window="24h")
        until(lambda: client.batches.retrieve(batch.id).request_counts.completed > 10)
        served.process.kill()
    with serving(tmp_path, *flags) as served:
        client = of(served)
        done = ended(client, batch)
        assert (done.status, done.request_counts.completed) == ("completed", 100)
        answers = results(client, done.output_file_id)
        assert sorted(each["custom_id"] for each in answers) == sorted(f"r{i}" for i in range(1, 101))


def of(served: Served):
    return openai.OpenAI(base_url=f"{served.base}/v1", api_key="none", max_retries=0)
