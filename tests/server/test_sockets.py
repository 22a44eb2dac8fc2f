"""The sockets of the server's connections."""

import asyncio
import socket

import pytest

from espalier.errors import EspalierError
from espalier.server.run import bind_listener, url_of


def test_events_do_not_wait_for_acknowledgements():
    options = []

    async def run():
        def connected(reader, writer):
            accepted = writer.get_extra_info("socket")
            options.append(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listener = bind_listener("127.0.0.1", 0)
        server = await asyncio.start_server(connected, sock=listener)
        async with server:
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            assert await reader.read() == b""
            writer.close()

    asyncio.run(run())
    assert options == [1]


def test_of_two_servers_that_load_at_the_same_time_the_second_is_refused_at_once():
    with bind_listener("127.0.0.1", 0) as first:  # bound, and not listening until its model is loaded
        port = first.getsockname()[1]
        with pytest.raises(EspalierError, match=f"--port {port} cannot be used .*in use"):
            bind_listener("127.0.0.1", port)


def test_the_port_of_a_server_that_has_ended_can_be_used_again_at_once():
    with bind_listener("127.0.0.1", 0) as first:
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        first.listen()
        address = first.getsockname()
        with socket.create_connection(address):
            # The side that closes first keeps the port.
            first.accept()[0].close()
    bind_listener(*address).close()


@pytest.mark.parametrize(
    ("host", "url"), [("127.0.0.1", "http://127.0.0.1:8000"), ("::1", "http://[::1]:8000"), ("::", "http://[::]:8000")]
)
def test_an_ipv6_address_is_in_brackets(host, url):
    assert url_of(host, 8000) == url
