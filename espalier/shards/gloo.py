"""Joins ranks on a CPU, through PyTorch's gloo over the loopback interface.

For a sum, each rank gathers all tensors and adds them in the order of the ranks, so all ranks get the same bits.
"""

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import FileStore, ProcessGroupGloo

from espalier.shards.base import Collectives

# The longest time that a rank waits for the other ranks to join.
CONNECT_TIMEOUT = timedelta(seconds=60)
# The longest time of one operation.  engine/ranks.py watches the ranks, and ends a waiting operation much earlier.
OPERATION_TIMEOUT = timedelta(days=1)


class GlooCollectives(Collectives):
    """Joins ranks through gloo.  file: the path of a file through which the ranks find one another, equal for all
    ranks."""

    def __init__(self, file: Path, rank: int, num_ranks: int) -> None:
        gloo: Any = ProcessGroupGloo  # its type stub lacks most attributes
        options = gloo._Options()
        options._timeout = CONNECT_TIMEOUT
        # Only the loopback interface is used, with a free port.  The other ranks read the port from the file.
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        store = FileStore(str(file), num_ranks)
        self.num_ranks = num_ranks
        self.group = gloo(store, rank, num_ranks, options)
        self.group._set_default_timeout(OPERATION_TIMEOUT)

    def all_gather(self, x: Tensor) -> Tensor:
        """Gathers each rank's x [...] into [ranks, ...]."""
        gathered = x.new_empty(self.num_ranks, *x.shape)
        if x.numel():
            # Gathered as bytes, because gloo supports few dtypes.
            x_bytes, gathered_bytes = (t.reshape(-1).view(torch.uint8) for t in (x.contiguous(), gathered))
            self.group._allgather_base(gathered_bytes, x_bytes).wait()
        return gathered

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sums x over the ranks, in float32 or x's own dtype if that is wider."""
        parts = self.all_gather(x).to(torch.promote_types(x.dtype, torch.float32))
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total.to(x.dtype)

    def abort(self) -> None:
        """Does nothing: when another rank's process has ended, gloo's operations end with an error."""
