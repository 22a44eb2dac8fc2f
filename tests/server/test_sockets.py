"""The sockets of the server's connections."""

import asyncio
import socket

from espalier.server.run import _bound


def test_events_do_not_wait_for_acknowledgements():
    options = []

    async def run():
        def connected(reader, writer):
            accepted = writer.get_extra_info("socket")
            options.append(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listener = _bound("127.0.0.1", 0)
        server = await asyncio.start_server(connected, sock=listener)
        async with server:
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            assert await reader.read() == b""
            writer.close()

    asyncio.run(run())
    assert options == [1]
