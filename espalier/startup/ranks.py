"""The startup work of a rank: connect to the other ranks, load a part of the models, measure how many pages fit, and
create the executor.

Rank 0 sends a RankStartup to the other ranks and does the same work itself.
"""

import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType

import torch

from espalier.child_process import environment, signals_blocked
from espalier.config import ResolvedConfig
from espalier.engine.executor import Executor
from espalier.engine.ranks import OtherRanks, Peer
from espalier.shards import Collectives, Shards
from espalier.shards.gloo import GlooCollectives
from espalier.startup.build import LoadedModels, make_executor, make_runner
from espalier.startup.measure_memory import measure_pages

# Loads one rank's part of the models.  It is pickled, so it must be a module-level function or a partial of one.
LoadRankModels = Callable[[ResolvedConfig, Shards], LoadedModels]
# Calls a function that connects to the other ranks, and returns the result of that function.
ConnectWrapper = Callable[[Callable[[], Collectives]], Collectives]


@dataclass(frozen=True)
class RankStartup:
    """The startup work of one rank.  load_models: loads the rank's models.  requested_pages: the user's num_pages.
    rendezvous_file: the path of a file through which ranks connect; it must not exist yet."""

    load_models: LoadRankModels
    config: ResolvedConfig
    requested_pages: int | None
    rendezvous_file: str

    def load(self, rank: int) -> Executor:
        """Loads the models and returns the rank's executor (engine/ranks.py:LoadModels)."""
        return self.make_executor(self.load_rank_models(rank))[0]

    def load_rank_models(self, rank: int, wrap_connect: ConnectWrapper = lambda connect: connect()) -> LoadedModels:
        """Connects to the other ranks, and loads this rank's part of the models.
        wrap_connect(connect): calls connect(), which waits for the other ranks, and returns its result."""
        config, num_ranks = self.config, self.config.tensor_parallel
        if torch.device(config.device).type == "cuda":
            config = replace(config, device=f"cuda:{rank}")
            torch.cuda.set_device(rank)
        collectives = wrap_connect(
            lambda: connect_ranks(torch.device(config.device), Path(self.rendezvous_file), rank, num_ranks)
        )
        return self.load_models(config, Shards(rank, num_ranks, collectives))

    def make_executor(self, loaded: LoadedModels) -> tuple[Executor, LoadedModels]:
        """Returns the executor, and the models with a number of pages that fits on every rank."""
        if loaded.device.type == "cuda":
            pages = torch.tensor(measure_pages(loaded, self.requested_pages), device=loaded.device)
            loaded = loaded.with_num_pages(int(loaded.shards.all_gather(pages).min()))
        config = loaded.config
        return make_executor(make_runner(loaded), config.overlap, config.graph_batch, capture_stages=True), loaded


def connect_ranks(device: torch.device, rendezvous_file: Path, rank: int, num_ranks: int) -> Collectives:
    """Connects to the other ranks.  Returns the collective operations.  rendezvous_file: see RankStartup."""
    if device.type == "cpu":
        return GlooCollectives(rendezvous_file, rank, num_ranks)
    from espalier.kernels.ranks.collectives import connect_gpus

    return connect_gpus(rendezvous_file, rank, num_ranks, device)


RANK_MODULE = "espalier.startup.rank_process"
# Environment variables for the processes of ranks 1 and above, so that only rank 0 shows progress bars.
NO_TERMINAL_VARIABLES = MappingProxyType({"TERM": "dumb", "TTY_COMPATIBLE": "0"})


@contextmanager
def starting_ranks(num_ranks: int) -> Iterator[OtherRanks]:
    """Starts the processes of ranks 1 to num_ranks - 1.  An error inside the `with` block ends them; otherwise they run
    until the engine is closed."""
    peers: list[Peer] = []
    ranks = None
    try:
        for rank in range(1, num_ranks):
            peers.append(start_rank(rank))
        ranks = OtherRanks(peers)
        yield ranks
    except BaseException:
        for peer in peers if ranks is None else ():
            peer.kill()
        if ranks is not None:
            ranks.end()
        raise


def start_rank(rank: int) -> Peer:
    """Starts the process of a rank.  Only the two processes have the socket, so each notices when the other ends."""
    own, others = socket.socketpair()
    # Only rank 0 reacts to signals.
    with others, signals_blocked(signal.SIGINT, signal.SIGTERM):
        process = subprocess.Popen(
            (sys.executable, "-m", RANK_MODULE, str(rank), str(others.fileno())),
            stdin=subprocess.DEVNULL,
            env=environment(**NO_TERMINAL_VARIABLES),
            pass_fds=(others.fileno(),),
        )
    return Peer(rank, Connection(own.detach()), process)
