"""Joins ranks on a CPU, through PyTorch's gloo over the loopback interface.

Sums are gathered and added in the order of the ranks, so every rank holds the same bits.
"""

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import FileStore, ProcessGroupGloo

from espalier.shards.base import Collectives

# The most time for ranks to join, once all ranks are known to run.
CONNECT_TIMEOUT = timedelta(seconds=60)
# The most time of one operation.  The thread that watches the ranks ends it long before (engine/ranks.py).
OPERATION_TIMEOUT = timedelta(days=1)


class GlooCollectives(Collectives):
    """Joins ranks through gloo.  file: the same for all ranks, on a disk that they all see."""

    def __init__(self, file: Path, rank: int, num_ranks: int) -> None:
        gloo: Any = ProcessGroupGloo  # whose stub lacks most of it
        options = gloo._Options()
        options._timeout = CONNECT_TIMEOUT
        # Only the loopback interface is used, with a free port.  The file tells the port to the other ranks.
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        store = FileStore(str(file), num_ranks)
        self.num_ranks = num_ranks
        self.group = gloo(store, rank, num_ranks, options)
        self.group._set_default_timeout(OPERATION_TIMEOUT)

    def all_gather(self, x: Tensor) -> Tensor:
        gathered = x.new_empty(self.num_ranks, *x.shape)
        if x.numel():
            # Gathered as bytes, because gloo supports few dtypes.
            own, all_ranks = (each.reshape(-1).view(torch.uint8) for each in (x.contiguous(), gathered))
            self.group._allgather_base(all_ranks, own).wait()
        return gathered

    def all_reduce(self, x: Tensor) -> Tensor:
        parts = self.all_gather(x).to(torch.promote_types(x.dtype, torch.float32))
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total.to(x.dtype)

    def abort(self) -> None:
        """Does nothing, because an operation ends with an error when another rank's process has ended."""
