"""The CUDA streams of GPU executors.  New executors reuse the streams of closed executors.

PyTorch keeps a cuBLAS workspace for each stream (32 MiB on Hopper) until the process ends, so new streams for each
executor would leak memory.
"""

from collections import defaultdict
from typing import NamedTuple

import torch


class Streams(NamedTuple):
    compute: torch.cuda.Stream
    copies: torch.cuda.Stream


# The streams of closed executors.
# This is a module global because the workspaces belong to the process.  Two alternatives fail.  Clearing the workspaces
# (a private PyTorch call) would free memory that another engine's graphs use.  With one pair of streams for all
# engines, the capture of one engine would record launches of another.  No engine state is kept here.
IDLE_STREAMS: dict[torch.device, list[Streams]] = defaultdict(list)


def take_streams(device: torch.device) -> Streams:
    """Returns a pair of streams of the device that no executor uses, from IDLE_STREAMS or new."""
    idle = IDLE_STREAMS[device]
    return idle.pop() if idle else Streams(torch.cuda.Stream(device), torch.cuda.Stream(device))


def give_streams_back(device: torch.device, streams: Streams) -> None:
    IDLE_STREAMS[device].append(streams)
