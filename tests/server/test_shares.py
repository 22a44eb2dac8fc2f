"""Admission by clients: one that fills the queue leaves a share of it, and alone it has all of it."""

import asyncio
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.server.frontend import BATCH_CLIENT, SHARE_DIVISOR, ClientShares, without_timeout
from espalier.server.logs import client_name
from espalier.server.middleware import RequestMiddleware

NAMES = ("a", "b", "c", BATCH_CLIENT)


def generation(num_samples):
    return type("Generation", (SimpleNamespace,), {"__hash__": object.__hash__})(num_running={"x": num_samples})


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.integers(-2, 4)), max_size=80), st.integers(0, 9))
def test_what_all_have_is_bounded_and_a_small_client_enters(calls, max_queue):
    """num_samples below 1: an open request of the client ends."""
    shares, num_slots, share = ClientShares(), 2, -(-max_queue // SHARE_DIVISOR)
    capacity, open_, held = num_slots + max_queue, [], 0
    for name, num_samples in calls:
        client_name.set(name)
        if num_samples < 1:
            if mine := [each for each in open_ if each[0] == name]:
                open_.remove(mine[0])
                shares.remove_generation(*mine[0])
                held -= mine[0][1].num_running["x"]
            continue
        own = sum(each.num_running["x"] for owner, each in open_ if owner == name)
        admitted = shares.may_submit(num_samples, held, capacity, max_queue)
        shares.add_reserved(num_samples)
        assert (shares.num_reserved, shares.num_samples_of(name)) == (num_samples, own + num_samples)
        shares.remove_reserved(num_samples)
        assert shares.num_samples_of(name) == own
        if held + num_samples <= capacity:
            assert admitted
        elif own == held:
            assert not admitted, "alone it has the whole queue, and no more"
        elif name != BATCH_CLIENT and own + num_samples <= share and held + num_samples <= capacity + share:
            assert admitted
        else:
            assert not admitted
        if admitted:
            open_.append((name, generation(num_samples)))
            shares.add_generation(*open_[-1])
            held += num_samples
        assert held <= capacity + share
    client_name.set("")


@pytest.mark.parametrize(
    ("keys", "sent", "address", "name"),
    [
        ((), "whatever", "10.0.0.1", "10.0.0.1"),
        (("a",), "a", "10.0.0.1", "10.0.0.1"),
        (("a", "b"), "b", "10.0.0.1", "key 1"),
        (("a", "b"), "a", None, "key 0"),
        (("a", "b"), "c", "10.0.0.1", None),
        ((), "", None, ""),
    ],
)
def test_a_client_is_its_key_where_there_are_several_and_else_its_address(keys, sent, address, name):
    names, statuses = [], []

    async def app(scope, receive, send):
        names.append(client_name.get())

    async def send(message):
        statuses.append(message.get("status"))

    async def ask():
        middleware = RequestMiddleware(app, keys[0] if keys else None, 100, lambda *_: None, additional_keys=keys[1:])
        headers = [(b"authorization", b"Bearer " + sent.encode())]
        scope = {"type": "http", "method": "GET", "path": "/v1/models", "headers": headers}
        scope["client"] = None if address is None else (address, 1)
        for each in (middleware, without_timeout(middleware)):
            await each({**scope, "state": {}}, None, send)

    asyncio.run(ask())
    assert names == ([] if name is None else [name, BATCH_CLIENT])
    assert (401 in statuses) == (name is None)
