"""Joins ranks on GPUs of one host, through NCCL.  A CUDA graph captures its operations.

NCCL sums each value once, in one order, and sends the sum to all ranks.  So every rank holds the same bits.
"""

import os
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.distributed import FileStore, ProcessGroupNCCL
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions

from espalier.shards.base import joined_columns
from espalier.shards.gloo import JOIN_LIMIT, OPERATION_LIMIT

# PyTorch's threads that watch NCCL end the process on an error.  Here the ranks are watched (engine/ranks.py).
UNWATCHED = MappingProxyType(
    {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_PROPAGATE_ERROR": "0",
    }
)


class NcclCollectives:
    """A Collectives (shards/base.py).  file: as GlooCollectives; device: of this rank, which no other rank uses.

    store: of all ranks.
    """

    def __init__(self, file: Path, rank: int, count: int, device: torch.device) -> None:
        os.environ.update(UNWATCHED)
        nccl: Any = ProcessGroupNCCL  # whose stub lacks most of it
        options = nccl.Options()
        options._timeout = OPERATION_LIMIT
        self.store = FileStore(str(file), count)
        self.store.set_timeout(JOIN_LIMIT)
        self.count = count
        # NCCL waits for the others forever, so all must be there.
        self.store.set(f"rank {rank}", "is there")
        self.store.wait([f"rank {each}" for each in range(count)])
        self.group = nccl(self.store, rank, count, options)
        # On the caller's stream: another one would have to wait for it, and it for that one.
        self.of_sum, self.of_gather = AllreduceOptions(), AllgatherOptions()
        for each in (self.of_sum, self.of_gather):
            each.asyncOp = False
        # The first operation joins the ranks, which a capture does not allow.
        self.all_reduce(torch.zeros(1, device=device))
        torch.cuda.synchronize(device)

    def all_gather(self, x: Tensor) -> Tensor:
        gathered = x.new_empty(self.count * x.numel())
        if x.numel():
            finish(self.group._allgather_base(gathered, x.reshape(-1), self.of_gather))
        return gathered.view(self.count, *x.shape)

    def all_reduce(self, x: Tensor) -> Tensor:
        total = x.contiguous()
        if x.numel():
            finish(self.group.allreduce([total], self.of_sum))
        return total

    def all_reduce_add_norm(self, parts: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
        return None

    def gather_columns(self, x: Tensor, each: int, size: int) -> Tensor:
        return joined_columns(self, x, each, size)

    def abort(self) -> None:
        self.group.abort()


def finish(work: Any) -> None:
    """Let the current stream wait.  None: the operation is on that stream."""
    if work is not None:
        work.wait()
