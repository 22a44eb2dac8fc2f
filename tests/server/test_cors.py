"""Pages of other origins: who may call, and that a refused preflight has the form of all other errors."""

import logging

import pytest
from starlette.testclient import TestClient

from espalier.server.api import ApiOptions, make_app
from tests.server.test_pages import fronted

PAGE = "https://page.example"
ASKED = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}


def calling(*origins):
    return TestClient(make_app(fronted("m"), ApiOptions("secret", origins))[0])


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        ({"origin": "https://other.example"}, "pages of the origin 'https://other.example' may not call this server;"),
        ({"origin": "null"}, "'null' may not call this server; allow it with --cors-origin"),
        ({"access-control-request-method": "BREW"}, "access-control-request-method='BREW' is not supported; use GET"),
        ({"access-control-request-private-network": "true"}, "a page of a public address may not call"),
    ],
)
def test_a_refused_preflight_is_an_error_like_all_others(caplog, sent, says):
    caplog.set_level(logging.INFO)
    answer = calling(PAGE).options("/v1/chat/completions", headers={"origin": PAGE, **ASKED, **sent})
    error = answer.json()["error"]
    assert answer.status_code == 400 and says in error["message"] and error["type"] == "invalid_request_error"
    assert error["request_id"] == answer.headers["x-request-id"] and error["request_id"].startswith("req-")
    # A page of an allowed origin may read the error.
    assert answer.headers.get("access-control-allow-origin") == (None if "origin" in sent else PAGE)
    assert f"OPTIONS /v1/chat/completions 400: {error['message']}" in caplog.messages


@pytest.mark.parametrize("origins", [(PAGE,), ("*",), ("https://a.example", PAGE)])
def test_an_allowed_page_may_call_and_reads_errors(origins):
    client = calling(*origins)
    answer = client.options("/v1/chat/completions", headers={"origin": PAGE, **ASKED})
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] in (PAGE, "*")
    answer = client.get("/v1/models", headers={"origin": PAGE})
    assert answer.status_code == 401 and answer.headers["access-control-allow-origin"] in (PAGE, "*")
