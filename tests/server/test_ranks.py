"""The server's supervision of an engine that is several ranks."""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from espalier.server.client import ClientOptions, EngineClient
from tests.startup.test_ranks import is_gone

SETTINGS = {"model": "bundled", "tensor_parallel": 2, "device": "cpu", "max_batch": 2, "max_context": 128}


def ranks_of(pid: int) -> list[int]:
    """The processes that an engine process has started."""
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        await asyncio.sleep(0.05)


@pytest.mark.full
def test_an_engine_whose_rank_dies_is_replaced_and_nothing_is_left():
    async def scenario() -> None:
        client = EngineClient(SETTINGS, ClientOptions(restart=True, heartbeat_s=0.2))
        await client.start()
        try:
            assert client.process is not None
            first = client.process.pid
            [rank] = ranks_of(first)
            os.kill(rank, signal.SIGKILL)
            await until(lambda: client.state != "ready")
            assert (
                "RankFailed: rank 1" in client.unavailable_reason
                and "has ended by SIGKILL" in client.unavailable_reason
            )
            await until(lambda: client.state == "ready")
            assert client.num_restarts == 1 and client.config["tensor_parallel"] == 2
            second = client.process.pid
            [other] = ranks_of(second)
        finally:
            await client.close()
        await until(lambda: all(map(is_gone, (first, rank, second, other))))

    asyncio.run(scenario())
