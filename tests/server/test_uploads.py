"""Files over HTTP: what names another charset is refused unread, what fails leaves nothing, and ranges are exact."""

import asyncio
import errno
import gzip
import json
from encodings.aliases import aliases
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from espalier.server.batch_api import TransferLimiter, batch_endpoints
from espalier.server.batch_store import BatchRequest, BatchStore
from espalier.server.batches import BatchRunner
from espalier.server.bodies import MAX_CONTENT_TYPE, BodyLimits, BodyReader, read_body, require_utf8
from espalier.server.errors import ApiError
from espalier.server.middleware import RequestMiddleware
from espalier.server.openai import TokenizeRequest
from espalier.server.responses import ResponsesRequest
from espalier.server.routes import make_router

LIMITS = BodyLimits(100, 100, 4, 100)
CODECS = sorted(
    {*aliases, *aliases.values(), "undefined", "idna", "unicode_escape", "raw_unicode_escape", "x", "utf-8\\"}
)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return BatchStore(tmp_path_factory.mktemp("kept"))


@pytest.fixture(scope="module")
def client(kept):
    async def batches():
        made = BatchRunner(kept, 1)
        made.start(None, None)
        return made

    async def made():
        server = SimpleNamespace(body_reader=BodyReader(LIMITS))
        return make_router(server, batch_endpoints(await batches()))

    app = asyncio.run(made())
    return TestClient(RequestMiddleware(app, None, 10**6, lambda *_: None, None, 10**6))


FORM = {"content-type": "multipart/form-data; boundary=B"}


def form_of(parts):
    """parts: (the end of the header, which begins in the quoted name; the content)"""
    texts = [f'--B\r\nContent-Disposition: form-data; name="{head}\r\n\r\n{content}\r\n' for head, content in parts]
    return "".join([*texts, "--B--\r\n"]).encode()


def upload(client, content_type=FORM["content-type"], name="a.jsonl", head=""):
    file = f'file"; filename="{name}"\r\n{head}'.removesuffix("\r\n"), "0123456789"
    form = form_of([('purpose"', "batch"), file])
    return client.post("/v1/files", content=form, headers={"content-type": content_type})


def left(kept):
    return sorted(path.name for path in kept.folder.rglob("*") if path.is_file() and path.name != "lock")


@pytest.mark.parametrize("form", ["charset={}", 'CHARSET="{}"', "charset=utf-8; charset={}"])
def test_every_charset_but_utf8_is_refused_by_name_before_it_is_decoded(form):
    """In a form and in JSON: for each codec that Python has."""
    for codec in CODECS:
        options = form.format(codec)
        if codec.lower() in ("utf-8", "utf8"):
            require_utf8(f"application/json; {options}")
            continue
        for refuse in (
            lambda: require_utf8(f"multipart/form-data; boundary=B; {options}"),  # noqa: B023
            lambda: read_body(TokenizeRequest, f"application/json;{options}", b"{", LIMITS),  # noqa: B023
        ):
            with pytest.raises(ApiError, match="send UTF-8") as refused:
                refuse()
            assert refused.value.status_code == 415 and codec.rstrip("\\") in refused.value.detail


@pytest.mark.parametrize(
    "content_type",
    ["multipart/form-data; boundary=B; charset=punycode", "application/x-www-form-urlencoded", "", "m;" + "a;" * 600],
)
def test_an_upload_in_another_form_is_refused_and_leaves_nothing(client, kept, content_type):
    before = left(kept)
    answer = upload(client, content_type)
    assert answer.status_code == 415 and answer.json()["error"]["message"]
    assert left(kept) == before
    assert len(content_type) > MAX_CONTENT_TYPE or "not supported" in answer.json()["error"]["message"]


PURPOSE, FILE = ('purpose"', "batch"), ('file"; filename="a.jsonl"', "0123456789")


@pytest.mark.parametrize(
    ("parts", "param", "says"),
    [
        ([('porpose"', "batch"), FILE], "porpose", "the form has no 'porpose'; did you mean 'purpose'?"),
        ([PURPOSE, FILE, ('color"', "x")], "color", "the form has no 'color'; use one of file, purpose"),
        ([('expires_after[anchor]"', "x")], "expires_after", "files stay until they are deleted; leave it out"),
        ([PURPOSE, FILE, FILE], "file", "more than one file; upload each file with a request of its own"),
        ([PURPOSE, PURPOSE, FILE], "purpose", "more than one purpose; send it once"),
        ([PURPOSE, ('file"', "{}")], "file", "file has no filename; send it as a file"),
        ([('purpose"; filename="p"', "batch"), FILE], "purpose", "send it as the text 'batch'"),
        ([('purpose"', "fine-tune"), FILE], "purpose", "purpose='fine-tune' is not supported; use 'batch'"),
        ([FILE], "purpose", "purpose is missing; send 'batch'"),
        ([PURPOSE], "file", "file is missing; send it as a part"),
        ([('"', "x")], "", "the form has no ''; use one of file, purpose"),
    ],
)
def test_a_form_that_is_no_upload_is_refused_by_name_and_leaves_nothing(client, kept, parts, param, says):
    before = left(kept)
    answer = client.post("/v1/files", content=form_of(parts), headers=FORM)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param) and says in error["message"]
    assert left(kept) == before


def test_a_form_that_is_cut_off_is_refused_and_leaves_nothing(client, kept):
    before, whole = left(kept), form_of([PURPOSE, FILE])
    for end in range(len(whole) - len("--\r\n") + 1):
        answer = client.post("/v1/files", content=whole[:end], headers=FORM)
        assert answer.status_code == 400
        assert "the form is cut off: its last boundary is missing; send the whole" in answer.json()["error"]["message"]
    assert left(kept) == before
    assert client.post("/v1/files", content=whole[:-2], headers=FORM).status_code == 200


def test_a_compressed_upload_is_refused_by_its_encoding(client, kept):
    before, form = left(kept), form_of([PURPOSE, FILE])
    answer = client.post("/v1/files", content=gzip.compress(form), headers=FORM | {"content-encoding": "gzip"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "content-encoding 'gzip' is not supported; send the body uncompressed"
    assert left(kept) == before
    assert client.post("/v1/files", content=form, headers=FORM | {"content-encoding": "identity"}).status_code == 200


def test_what_is_no_form_is_refused_with_advice(client):
    for content, content_type in ((b"purpose=batch", FORM["content-type"]), (b"", "multipart/form-data")):
        answer = client.post("/v1/files", content=content, headers={"content-type": content_type})
        assert answer.status_code == 400 and "; send the parts file and purpose" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("head", "status"),
    [
        *((f"Content-Type: text/plain; charset={codec}\r\n", 415) for codec in ("idna", "utf-16", "base64")),
        *((f"Content-Transfer-Encoding: {name}\r\n", 415) for name in ("base64", "Quoted-Printable")),
        ("Content-Type: application/jsonl; charset=UTF-8\r\nContent-Transfer-Encoding: Binary\r\n", 200),
    ],
)
def test_a_file_whose_own_header_names_other_bytes_is_refused_and_leaves_nothing(client, kept, head, status):
    before = left(kept)
    answer = upload(client, head=head)
    assert answer.status_code == status
    assert (left(kept) == before) == (status != 200)


@pytest.mark.parametrize(("number", "status"), [(errno.ENOSPC, 507), (errno.EDQUOT, 507), (errno.EIO, 500)])
def test_a_disk_that_fails_is_named_and_nothing_stays(client, kept, monkeypatch, number, status):
    before, copy = left(kept), "espalier.server.batch_store.shutil.copyfileobj"

    def fail(source, target):
        target.write(b"torn")
        raise OSError(number, "the reason")

    with monkeypatch.context() as patch:
        patch.setattr(copy, fail)
        answer = upload(client)
    assert answer.status_code == status and "the reason" in answer.json()["error"]["message"]
    assert left(kept) == before
    monkeypatch.setattr(kept, "save_batch", lambda batch: fail(None, open("/dev/null", "wb")))  # noqa: SIM115
    asked = {"input_file_id": upload(client).json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    answer = client.post("/v1/batches", json=asked)
    assert answer.status_code == status and "the reason" in answer.json()["error"]["message"]


@given(st.one_of(st.none(), st.integers(0, 12)), st.one_of(st.none(), st.integers(0, 12)), st.booleans())
def test_a_range_is_that_part_of_the_file_or_an_error_as_documented(client, kept, first, last, is_list):
    id = next(iter(kept.files), None) or upload(client).json()["id"]
    asked = f"bytes={'' if first is None else first}-{'' if last is None else last}" + ",," * is_list
    answer = client.get(f"/v1/files/{id}/content", headers={"range": asked})
    whole = b"0123456789"
    if first is None:
        part = b"" if last is None else whole[max(10 - last, 0) :] if last else b""
    else:
        part = whole[first:] if last is None else whole[first : last + 1]
    if answer.status_code == 206:
        assert answer.content == part
        return
    error = answer.json()["error"]
    assert part == b"" and (answer.status_code, error["param"]) in ((400, "range"), (416, "range"))
    if answer.status_code == 416:
        assert answer.headers["content-range"] == "bytes */10"


@pytest.mark.parametrize(
    "asked", ["bytes", "lines=1-2", "bytes=a-b", "bytes=" + "9" * 5000 + "-", "bytes=-", "bytes=9-1"]
)
def test_a_range_that_is_none_is_an_error_as_documented(client, kept, asked):
    id = next(iter(kept.files), None) or upload(client).json()["id"]
    answer = client.get(f"/v1/files/{id}/content", headers={"range": asked})
    assert answer.status_code in (400, 416) and answer.json()["error"]["param"] == "range"


def test_content_that_is_gone_is_said_to_be(client, kept):
    id = upload(client).json()["id"]
    kept.content_path(id).unlink()
    answer = client.get(f"/v1/files/{id}/content")
    assert answer.status_code == 404 and "gone" in answer.json()["error"]["message"]
    assert client.delete(f"/v1/files/{id}").json()["deleted"] and id not in kept.files


def test_a_file_that_the_disk_does_not_delete_stays(client, kept, monkeypatch):
    id, before = upload(client).json()["id"], left(kept)

    def fail(path, missing_ok=False):
        raise OSError(errno.EROFS, "the reason")

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.unlink", fail)
        answer = client.delete(f"/v1/files/{id}")
    assert answer.status_code == 500 and "cannot delete this (the reason)" in answer.json()["error"]["message"]
    assert left(kept) == before and client.get(f"/v1/files/{id}").status_code == 200


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({str(i): "" for i in range(17)}, "at most 16"),
        ({"k" * 65: ""}, "64"),
        ({"k": "v" * 513}, "512"),
        ({"k": 1}, "string"),
    ],
)
@pytest.mark.parametrize(
    ("model", "asked"),
    [
        (BatchRequest, {"input_file_id": "x", "endpoint": "/v1/completions", "completion_window": "24h"}),
        (ResponsesRequest, {"model": "m", "input": "hi"}),
    ],
)
def test_metadata_that_is_returned_has_openais_limits(metadata, says, model, asked):
    def read(metadata):
        return read_body(model, "application/json", json.dumps(asked | {"metadata": metadata}).encode(), LIMITS)

    with pytest.raises(ApiError, match=f"{says}.*at most 16 names of at most 64 characters") as refused:
        read(metadata)
    assert (refused.value.status_code, refused.value.param) == (400, "metadata")
    for fits in ({"k" * 64: "v" * 512} | {str(i): "" for i in range(15)}, {}, None):
        assert read(fits).metadata == fits


def test_one_transfer_too_many_is_refused():
    transfers = TransferLimiter(2)
    with transfers.reserve(), transfers.reserve(), pytest.raises(ApiError, match="2 files are being") as refused:
        transfers.reserve().__enter__()
    assert refused.value.status_code == 429
    with transfers.reserve():
        assert transfers.num_open == 1
