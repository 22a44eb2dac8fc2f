"""Starts the processes of ranks 1 to N - 1, each with a socket to this process and no other way in."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from types import MappingProxyType

from espalier.engine.ranks import Peer, Ranks

MODULE = "espalier.startup.rank_process"
# Rank 0 shows the progress.
NO_TERMINAL = MappingProxyType({"TERM": "dumb", "TTY_COMPATIBLE": "0"})


@contextmanager
def starting_ranks(count: int) -> Iterator[Ranks]:
    """The other ranks of `count`.  An error ends them; else whoever closes the engine does."""
    peers: list[Peer] = []
    ranks = None
    try:
        for rank in range(1, count):
            peers.append(start_rank(rank))
        ranks = Ranks(peers)
        yield ranks
    except BaseException:
        for peer in peers if ranks is None else ():
            peer.kill()
        if ranks is not None:
            ranks.end()
        raise


def start_rank(rank: int) -> Peer:
    """Start a process.  Its end of the socket is the only one, so each side sees when the other ends."""
    own, others = socket.socketpair()
    # Blocked signals stay blocked in the new process: Ctrl-C reaches the whole process group, and this process acts.
    ignored = {signal.SIGINT, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ignored)
    try:
        process = subprocess.Popen(
            (sys.executable, "-m", MODULE, str(rank), str(others.fileno())),
            stdin=subprocess.DEVNULL,
            env=os.environ | NO_TERMINAL,
            pass_fds=(others.fileno(),),
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        others.close()
    return Peer(rank, Connection(own.detach()), process)
