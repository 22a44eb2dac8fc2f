"""The pages for people: their commands can be pasted, they fetch nothing, and they need no key and give none away."""

import json
import re
import shlex
from html import unescape
from types import SimpleNamespace

import pytest
from starlette.testclient import TestClient

from espalier.server.api import ApiOptions, make_app
from espalier.server.routes import example_requests

FETCHES = re.compile(r"<(?:link|img|iframe|object)\b|\ssrc=|@import|url\(|fetch\(|href=\"(?!#|docs\")")
NAMES = ("m", "org/name", 'it\'s <b>&amp; "x" $HOME')


def fronted(*names, template="{{ messages }}"):
    """As much of an API server as the pages ask for."""
    tokenizer = None if template is None else SimpleNamespace(template=SimpleNamespace(source=template))
    inputs = SimpleNamespace(tokenizer=tokenizer, model_info=SimpleNamespace(max_context=4096))
    frontend = SimpleNamespace(
        names=names, inputs=inputs, metrics=SimpleNamespace(started_at=0, responses=Answers()), body_reader=None
    )
    frontend.frontend_for = lambda model: frontend
    return frontend


class Answers:
    def labels(self, *_):
        return SimpleNamespace(inc=lambda: None)


def pages(*names, key=None):
    """(the start page, the page of fields) of a server."""
    app, _ = make_app(fronted(*names), ApiOptions(api_key=key))
    asking = TestClient(app)
    assert asking.get("/v1/models").status_code == (401 if key else 200)
    answers = [asking.get(path) for path in ("/", "/docs")]
    assert [answer.status_code for answer in answers] == [200, 200]
    if key:
        [command] = commands(answers[0].text)
        name, _, value = shlex.split(command)[-1].replace("$ESPALIER_API_KEY", key).partition(": ")
        assert asking.get("/v1/models", headers={name: value}).status_code == 200
    assert all("default-src 'none'" in answer.headers["content-security-policy"] for answer in answers)
    return [answer.text for answer in answers]


def commands(page):
    """The commands of the page, as a browser shows them."""
    found = [unescape(re.sub(r"<[^>]*>", "", each)) for each in re.findall(r"<pre>(.*?)</pre>", page, re.S)]
    assert found and all(line.startswith("curl ") for line in found)
    return found


def run_curl(served, command):
    """What curl would send: (status, answer).  Of its flags the pages use -H and -d."""
    _, url, *rest = shlex.split(command)
    given = list(zip(rest[::2], rest[1::2], strict=True))
    headers = {
        name.strip(): value.strip() for flag, line in given if flag == "-H" for name, value in [line.split(":", 1)]
    }
    bodies = [value.encode() for flag, value in given if flag == "-d"]
    assert url.startswith(served.base) and {flag for flag, _ in given} <= {"-H", "-d"}
    status, _, answer = served.request(url.removeprefix(served.base), *bodies, **headers)
    return status, answer


def test_the_start_page_has_the_model_the_endpoints_and_commands_that_work(served):
    page = served.request("/")[2]
    described = served.request("/openapi.json")[2]
    assert "bundled" in page and "512 tokens" in page
    assert all(f"<code>{path}</code>" in page for path in described["paths"])
    answers = [run_curl(served, command) for command in commands(page)]
    assert [status for status, _ in answers] == [200, 200]
    assert answers[0][1]["data"][0]["id"] == "bundled" and answers[1][1]["usage"]["completion_tokens"]


def test_the_page_of_fields_has_every_path_field_and_description(served):
    page = unescape(served.request("/docs")[2])
    described = served.request("/openapi.json")[2]
    assert all(path in page for path in described["paths"])
    for name, schema in described["components"]["schemas"].items():
        for field, given in schema.get("properties", {}).items():
            assert f"<code>{field}</code>" in page and given.get("description", "") in page, (name, field)
    assert all(f'id="{name}"' in page for name in re.findall(r'href="#([^"]+)"', page))


@pytest.mark.parametrize("key", [None, "secret"])
def test_pages_fetch_nothing_and_name_models_only_where_no_key_is_needed(key):
    start, fields = pages("unheard-of", key=key)
    assert not FETCHES.search(start) and not FETCHES.search(fields)
    assert ("unheard-of" in start, "Authorization: Bearer" in start) == (key is None, key is not None)
    assert "unheard-of" not in fields and "secret" not in start + fields


@pytest.mark.parametrize("template", ["{{ messages }}", "", None], ids=["chat", "text", "ids"])
@pytest.mark.parametrize("name", NAMES)
def test_a_shell_reads_a_command_as_it_is_meant(name, template):
    [*_, (path, rest)] = example_requests(fronted(name, template=template), needs_key=False)
    *_, body = shlex.split(rest)
    assert json.loads(body)["model"] == name
    assert ("chat" in path, "prompt" in body) == (bool(template), not template)


@pytest.mark.parametrize("name", NAMES)
def test_a_browser_shows_a_command_as_it_is_meant(name):
    start, _ = pages(name)
    assert json.loads(shlex.split(commands(start)[1])[-1])["model"] == name


def test_a_host_cannot_write_into_the_page():
    app, _ = make_app(fronted("m"), ApiOptions())
    page = TestClient(app).get("/", headers={"host": "x'; rm -rf ~ <script>"}).text
    assert page.count("<script>") == 1
    assert shlex.split(commands(page)[0]) == ["curl", "http://x%27%3B%20rm%20-rf%20~%20%3Cscript%3E/v1/models"]
