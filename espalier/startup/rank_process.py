"""The process of one rank: `python -m espalier.startup.rank_process RANK FD`, which startup/ranks.py starts."""

import logging
import os
import sys
from multiprocessing.connection import Connection

from espalier.engine.follow import Follower


def main(rank: int, fd: int) -> int:
    """Runs a rank until it ends.  fd: file descriptor of the socket to rank 0.  Returns the exit code."""
    logging.basicConfig(level=logging.WARNING, format=f"rank {rank}: %(message)s")
    return Follower(Connection(fd), rank).run()


if __name__ == "__main__":
    # End at once, because threads may still wait for other ranks.
    os._exit(main(int(sys.argv[1]), int(sys.argv[2])))
