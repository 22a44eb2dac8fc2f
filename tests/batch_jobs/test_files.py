"""The input and the output of a batch: what is refused before anything is sent, and what a killed run leaves behind."""

import json
import os
import threading
import time
from codecs import BOM_UTF8
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from espalier.batch_jobs import files
from espalier.batch_jobs.files import Journal, LineError, Response, parse_line, scan_input
from espalier.errors import EspalierError
from tests.batch_jobs.sample import line, outcomes, write

ANSWER = Response(200, "id", {"text": "é"})


def test_a_survey_counts_lines_and_changes_with_every_byte(tmp_path):
    path = write(tmp_path / "in.jsonl", [line(1), "", "{bad", "  ", line(5)])
    found = scan_input(path)
    assert (found.num_lines, found.last_line_number) == (3, 5)
    marked = tmp_path / "marked.jsonl"
    marked.write_bytes(BOM_UTF8 + path.read_bytes())
    assert replace(scan_input(marked), path=path) == found, "some editors begin a file with a byte order mark"
    path.write_bytes(path.read_bytes().replace(b"f5", b"f6"))
    assert scan_input(path).digest != found.digest


@pytest.mark.parametrize("colliding", [False, True], ids=["", "every hash is equal"])
def test_a_custom_id_that_comes_twice_is_refused_by_line(tmp_path, monkeypatch, colliding):
    if colliding:
        monkeypatch.setattr(files, "_hash_of_id", lambda custom_id: 7)
    path = write(tmp_path / "in.jsonl", [line(i) for i in range(1, 9)])
    assert scan_input(path).num_lines == 8
    write(path, [line(1), line(2), "", line(3, custom_id="r2"), line(4)])
    with pytest.raises(EspalierError, match=r"line 4: custom_id 'r2' is on line 2 too; give each line its own"):
        scan_input(path)


def test_an_input_without_lines_is_refused(tmp_path):
    for path in (write(tmp_path / "in.jsonl", ["", " "]), tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(EspalierError, match=r"has no line|is not a file"):
            scan_input(path)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        ("{bad", "invalid_json_line"),
        ("[1]", "invalid_json_line"),
        ('{"custom_id": "\\ud800"}', "invalid_json_line"),
        (line(1, custom_id=None), "missing_required_parameter"),
        (line(1, body=None), "missing_required_parameter"),
        (line(1, custom_id=""), "invalid_custom_id"),
        (line(1, custom_id=5), "invalid_custom_id"),
        (line(1, method="GET"), "invalid_method"),
        (line(1, url="/v1/embeddings"), "invalid_url"),
        (line(1, url=["/v1/completions"]), "invalid_url"),
        (line(1, body=[1]), "invalid_body"),
        (line(1, body={"stream": True}), "invalid_body"),
        (line(1, model="x"), "unknown_parameter"),
    ],
    ids=str,
)
def test_a_line_that_asks_nothing_has_an_error_of_its_own(data, code):
    text = data if isinstance(data, str) else json.dumps(data)
    with pytest.raises(LineError) as refused:
        parse_line(1, text.encode())
    assert refused.value.code == code
    custom_id = data.get("custom_id") if isinstance(data, dict) else None
    assert refused.value.custom_id == (custom_id if isinstance(custom_id, str) else None)


@pytest.mark.parametrize("name", ["method", "prompt"])
def test_a_name_that_comes_twice_in_a_line_is_an_error_and_not_dropped(name):
    text = json.dumps(line(1, body={"prompt": "x"})).replace(f'"{name}"', f'"{name}": 1, "{name}"')
    with pytest.raises(LineError, match=f"'{name}' comes twice in one object; leave one out") as refused:
        parse_line(1, text.encode())
    assert (refused.value.code, refused.value.custom_id) == ("invalid_json_line", "r1")


@pytest.mark.parametrize("inner", ["", '"prompt": 1, '], ids=["", "a name of the body too"])
def test_a_line_with_two_custom_ids_is_filed_under_neither(inner):
    text = json.dumps(line(1, body={"prompt": "x"})).replace('"custom_id"', '"custom_id": "r9", "custom_id"')
    with pytest.raises(LineError, match="the line has 'r9' and 'r1' as custom_id; leave one out") as refused:
        parse_line(1, text.replace('"prompt"', f'{inner}"prompt"').encode())
    assert (refused.value.code, refused.value.custom_id) == ("invalid_json_line", None)


@pytest.mark.parametrize(
    "value",
    ["[" * 100_000 + "]" * 100_000, '"\\ud800"', b'"\xff"', "1e999", "1" * 5000, "NaN", '"\0"', '"'],
    ids=["deep", "surrogate", "no UTF-8", "large", "long", "NaN", "control character", "torn"],
)
def test_what_msgspec_does_not_read_is_an_error_of_the_line(value):
    data = value if isinstance(value, bytes) else value.encode()
    with pytest.raises(LineError, match=r"^the line is not JSON \(.*\); write a JSON object$") as refused:
        parse_line(1, b'{"custom_id": "r1", "body": ' + data + b"}")
    assert (refused.value.code, refused.value.custom_id) == ("invalid_json_line", None)


def test_a_line_that_one_parser_reads_and_the_other_does_not_is_an_error_of_the_line():
    """Two parsers read a line, and the depth at which each gives up depends on Python."""
    codes = []
    for depth in (*range(2, 3000), 100_000):
        text = json.dumps(line(1)).replace('"def f1("', "[" * depth + "]" * depth)
        try:
            parse_line(1, text.encode())
        except LineError as refused:
            codes.append((refused.code, refused.custom_id))
    assert codes and set(codes) <= {("invalid_json_line", None), ("invalid_json_line", "r1")}


def test_wherever_an_output_is_cut_off_its_whole_lines_stay(tmp_path):
    """A kill at every byte of the last line, and a loss of power that leaves zeros there."""
    found = scan_input(write(tmp_path / "in.jsonl", [line(1), line(2), "{bad", line(4)]))
    path = tmp_path / "out.jsonl"
    journal = Journal(path, found)
    for number, answer in ((4, ANSWER), (1, LineError("x", "y")), (3, ANSWER)):
        journal.append(number, f"r{number}", answer)
    journal.close()
    whole = path.read_bytes()
    ends = [0, *(i + 1 for i, byte in enumerate(whole) if byte == 10)]
    for cut in range(ends[-2], len(whole) + 1):
        for rest in (b"",) if cut % 5 else (b"", b"\0" * 5):
            path.write_bytes(whole[:cut] + rest)
            journal = Journal(path, found)
            num_whole = sum(end <= cut for end in ends[1:])
            assert path.read_bytes() == whole[: ends[num_whole]]
            answered = [4, 1, 3][:num_whole]
            assert [journal.is_answered(number) for number in (1, 2, 3, 4)] == [n in answered for n in (1, 2, 3, 4)]
            assert (journal.num_answered, journal.num_failed) == (num_whole, 1 in answered)
            assert [number for number, _ in journal.unanswered_lines()] == [
                n for n in (1, 2, 3, 4) if n not in answered
            ]
            for number, _ in journal.unanswered_lines():
                journal.append(number, f"r{number}", ANSWER)
            journal.close()
            assert sorted(outcomes(path)) == [1, 2, 3, 4]


def test_a_line_that_is_answered_twice_counts_once(tmp_path):
    """Two outputs of one input may have been joined.  The first answer is the one that counts."""
    found = scan_input(write(tmp_path / "in.jsonl", [line(1), line(2), line(3)]))
    path = tmp_path / "out.jsonl"
    journal = Journal(path, found)
    for number, answer in ((2, LineError("x", "y")), (1, ANSWER)):
        journal.append(number, f"r{number}", answer)
    journal.close()
    path.write_bytes(path.read_bytes() * 3)
    journal = Journal(path, found)
    assert (journal.num_answered, journal.num_failed, journal.num_unanswered) == (2, 1, 1)
    assert [number for number, _ in journal.unanswered_lines()] == [3]
    journal.close()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"notes", "line 1: this is not a batch's output"),
        (b'{"id":"batch_req_', None),
        (b'{"a": 1}\n', "line 1: this is not a batch's output"),
        (b"changed input", "answers to another input"),
    ],
)
def test_another_file_is_not_written_over(tmp_path, content, why):
    given = write(tmp_path / "in.jsonl", [line(1)])
    path = tmp_path / "out.jsonl"
    path.write_bytes(content)
    if content == b"changed input":
        path.unlink()
        journal = Journal(path, scan_input(given))
        journal.append(1, "r1", ANSWER)
        journal.close()
        write(given, [line(1, custom_id="r9")])
        content = path.read_bytes()
    if why is None:
        Journal(path, scan_input(given)).close()
        assert path.read_bytes() == b""
        return
    with pytest.raises(EspalierError, match=why):
        Journal(path, scan_input(given))
    assert path.read_bytes() == content


def test_two_batches_do_not_write_one_output(tmp_path):
    found = scan_input(write(tmp_path / "in.jsonl", [line(1)]))
    journal = Journal(tmp_path / "out.jsonl", found)
    with pytest.raises(EspalierError, match="is being written by another batch"):
        Journal(tmp_path / "out.jsonl", found)
    journal.close()
    Journal(tmp_path / "out.jsonl", found).close()


def test_the_name_of_an_output_is_on_the_disk_before_its_first_line(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (fsync(file), synced.append(os.readlink(f"/proc/self/fd/{file}"))))
    journal = Journal(tmp_path / "out.jsonl", scan_input(write(tmp_path / "in.jsonl", [line(1)])))
    assert synced == [str(tmp_path)]
    journal.close()


def test_a_line_that_does_not_fit_on_the_disk_leaves_no_part_of_itself(tmp_path, monkeypatch):
    """Other lines, which wait for their answers at that moment, may still be appended."""
    journal = Journal(tmp_path / "out.jsonl", scan_input(write(tmp_path / "in.jsonl", [line(1), line(2)])))
    whole = os.write

    def torn(file, data):
        if len(data) < 10:
            raise OSError(28, "No space left on device")
        return whole(file, data[: len(data) - 9])

    with monkeypatch.context() as patch, pytest.raises(EspalierError, match="No space left"):
        patch.setattr(os, "write", torn)
        journal.append(1, "r1", ANSWER)
    journal.append(2, "r2", ANSWER)
    journal.close()
    assert outcomes(tmp_path / "out.jsonl") == {2: 200}


def test_a_sync_in_a_thread_ends_before_the_output_is_closed(tmp_path, monkeypatch):
    """Else lines would be lost that the caller believes are on the disk."""
    journal = Journal(tmp_path / "out.jsonl", scan_input(write(tmp_path / "in.jsonl", [line(1)])))
    journal.append(1, "r1", ANSWER)
    begun, go_on, fsync = threading.Event(), threading.Event(), os.fsync

    def slow(file):
        begun.set()
        go_on.wait(60)
        fsync(file)

    monkeypatch.setattr(os, "fsync", slow)
    with ThreadPoolExecutor(2) as threads:
        syncing = threads.submit(journal.sync)
        begun.wait(60)
        closing = threads.submit(journal.close)
        time.sleep(0.05)
        too_early = closing.done()
        go_on.set()
        closing.result(60)
        syncing.result(60)
    assert not too_early
