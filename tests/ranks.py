"""Engines of several ranks in tests.

Their processes are forked, because to import PyTorch takes seconds, and serve many engines, one after another.
"""

import gc
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from signal import SIGKILL
from typing import Any

import torch
from torch import Tensor

from espalier.config import ResolvedConfig
from espalier.engine.engine import Engine
from espalier.engine.follow import FollowerRank
from espalier.engine.ranks import OtherRanks, Peer, UnloadModels
from espalier.models import load_target, read_config
from espalier.request import Request
from espalier.shards import Shards
from espalier.speculate.drafters.registry import load_draft, read_draft
from espalier.startup.build import LoadedModels
from espalier.startup.load import build_engine_of_ranks
from lab.faults.planted import plant
from tests.harness import DTYPE, Setup
from tests.pages import check_pages


@dataclass(frozen=True)
class Called:
    """Call a function of a rank's Follower there.  It is answered by Returned."""

    number: int
    function: Callable[..., Any]


@dataclass(frozen=True)
class Returned:
    number: int
    value: Any


class CalledFollower(FollowerRank):
    def handle_message(self, message: Any) -> None:
        if isinstance(message, Called):
            self.send(Returned(message.number, message.function(self)))
        else:
            super().handle_message(message)


@dataclass
class Forked:
    """A process as espalier/engine/ranks.py:Process."""

    pid: int
    code: int | None = None

    def poll(self) -> int | None:
        if self.code is None:
            with suppress(ChildProcessError):
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (timeout or 0)
        while self.poll() is None and time.monotonic() < end:
            time.sleep(0.005)
        if self.code is None:
            raise TimeoutError
        return self.code


def fork_ranks(count: int, follower: type[FollowerRank] = CalledFollower) -> list[Peer]:
    peers: list[Peer] = []
    for rank in range(1, count):
        own, others = socket.socketpair()
        pid = os.fork()
        if not pid:
            # No other process may hold an end of another rank's socket.
            gc.freeze()  # a collective of an earlier engine has no threads here
            fd = others.fileno()
            os.closerange(3, fd)
            os.closerange(fd + 1, 4096)
            os._exit(follower(Connection(others.detach()), rank).run())
        others.close()
        peers.append(Peer(rank, Connection(own.detach()), Forked(pid)))
    return peers


class KeptRanks(OtherRanks):
    """An engine's end frees only what the ranks have loaded; `finish` ends the processes."""

    num_called = 0

    def end(self) -> None:
        if self.failure is None:
            self.send(UnloadModels())

    def finish(self) -> None:
        super().end()

    def call(self, function: Callable[..., Any]) -> list[Any]:
        """What function(follower) returns on each of the other ranks."""
        self.num_called += 1
        self.send(Called(self.num_called, function))
        return [answer.value for answer in self.wait_for_messages(Returned, self.num_called)]


@dataclass
class Group:
    """Ranks 0, in this process, to count - 1."""

    count: int
    kept: KeptRanks | None = None

    @property
    def ranks(self) -> KeptRanks:
        """New ones, once a failure has ended the last."""
        if self.kept is None or self.kept.failure is not None:
            self.finish()
            self.kept = KeptRanks(fork_ranks(self.count))
        return self.kept

    def finish(self) -> None:
        if self.kept is not None:
            self.kept.finish()

    def engine(self, setup: Setup, files: tuple[Path, Path | None]) -> Engine:
        """The engine of a setup whose models are these (target, draft)."""
        config = setup.config(tensor_parallel=self.count)
        return build_engine_of_ranks(self.ranks, config, None, partial(models_of, *files))[0]

    def plant(self, name: str, ranks: Sequence[int] | None = None) -> ExitStack:
        """Plant a fault on every rank, or on some."""
        planted = ExitStack()
        if ranks is None or 0 in ranks:
            planted.enter_context(plant(name))
        self.ranks.call(partial(plant_there, name, ranks))
        planted.callback(lambda: self.ranks.failure or self.ranks.call(unplant_there))
        return planted


def plant_there(name: str, ranks: Sequence[int] | None, follower: Any) -> None:
    follower.planted = ExitStack()
    if ranks is None or follower.rank in ranks:
        follower.planted.enter_context(plant(name))


def unplant_there(follower: Any) -> None:
    follower.planted.close()


def models_of(target: Path, draft: Path | None, config: ResolvedConfig, shards: Shards) -> LoadedModels:
    """What a rank holds of the models in these directories."""
    how: dict[str, Any] = {"dtype": DTYPE, "device": "cpu", "position_rows": config.layout.position_rows}
    capture = () if draft is None else read_draft(draft, read_config(target)).spec.captured_layers
    loaded = load_target(target, captured_layers=capture, shards=shards, **how)
    return LoadedModels(
        config, loaded, None if draft is None else load_draft(draft, loaded, shards=shards, **how), shards
    )


def run_open(engine: Engine, requests: Sequence[Request]) -> list[Request]:
    """Run requests to their end.  The engine stays open."""
    for each in requests:
        engine.add(each)
    while engine.has_work:
        engine.step()
        check_pages(engine)
    return list(requests)


def planes_of(engine_or_follower: Any) -> list[Tensor]:
    """Every stack of the pages' planes, [layers, rows, heads, size]."""
    pages = engine_or_follower.executor.runner.pages
    return [plane.float() if plane.dtype.itemsize == 1 else plane for s in (*pages.target_stacks, *pages.draft_stacks)
            for plane in s.planes]  # fmt: skip


def whole(parts: Sequence[Tensor], heads: int) -> Tensor:
    """The plane of one process from those of the ranks, all of whose bits are used."""
    own, count = parts[0].shape[2], len(parts)
    if own * count == heads:
        return torch.cat(list(parts), 2)
    held: dict[int, Tensor] = {}
    for rank, part in enumerate(parts):
        first = 0 if own == heads else rank * heads // count
        assert own in (1, heads) and torch.equal(held.setdefault(first, part), part), "ranks hold the same bits"
    return torch.cat([held[head] for head in sorted(held)], 2)
