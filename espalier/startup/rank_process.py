"""The process of one rank: `python -m espalier.startup.rank_process RANK FD`, which startup/ranks.py starts."""

import logging
import os
import sys
from multiprocessing.connection import Connection

from espalier.engine.follow import FollowerRank


def main(rank: int, fd: int) -> int:
    """Runs this rank until rank 0 ends it.  Returns the exit code.  fd: the file descriptor of the socket to rank 0."""
    logging.basicConfig(level=logging.WARNING, format=f"rank {rank}: %(message)s")
    return FollowerRank(Connection(fd), rank).run()


if __name__ == "__main__":
    # os._exit does not wait for threads, which may still wait for other ranks.
    os._exit(main(int(sys.argv[1]), int(sys.argv[2])))
