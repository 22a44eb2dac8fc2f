"""Joins ranks on GPUs of one host, through NCCL.  A CUDA graph captures its operations.

NCCL sums each value once, in one order, and sends the sum to all ranks.  So every rank holds the same bits.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import FileStore, ProcessGroupNCCL

from espalier.shards.gloo import OPERATION_LIMIT


class NcclCollectives:
    """A Collectives (shards/base.py).  file: as GlooCollectives; device: of this rank, which no other rank uses."""

    def __init__(self, file: Path, rank: int, count: int, device: torch.device) -> None:
        nccl: Any = ProcessGroupNCCL  # whose stub lacks most of it
        options = nccl.Options()
        options._timeout = OPERATION_LIMIT
        store = FileStore(str(file), count)
        self.count = count
        self.group = nccl(store, rank, count, options)
        # The first operation joins the ranks, which a capture does not allow.
        self.all_reduce(torch.zeros(1, device=device))
        torch.cuda.synchronize(device)

    def all_gather(self, x: Tensor) -> Tensor:
        gathered = x.new_empty(self.count * x.numel())
        if x.numel():
            self.group._allgather_base(gathered, x.reshape(-1)).wait()
        return gathered.view(self.count, *x.shape)

    def all_reduce(self, x: Tensor) -> Tensor:
        total = x.contiguous()
        if x.numel():
            self.group.allreduce([total]).wait()
        return total

    def abort(self) -> None:
        self.group.abort()
