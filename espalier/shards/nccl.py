"""Joins ranks on GPUs of one host, through NCCL.  A CUDA graph can capture these operations.

NCCL computes each sum once, and sends it to all ranks.  So all ranks get the same bits.
"""

import os
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.distributed import FileStore, ProcessGroupNCCL
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions

from espalier.shards.base import Collectives
from espalier.shards.gloo import CONNECT_TIMEOUT, OPERATION_TIMEOUT

# PyTorch's threads that watch NCCL would end the process on an error.  They are off, because engine/ranks.py watches.
NCCL_ENVIRONMENT = MappingProxyType(
    {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_PROPAGATE_ERROR": "0",
    }
)


class NcclCollectives(Collectives):
    """Joins ranks through NCCL.  file: the path of a file that all ranks share, for `store`.  device: the rank's GPU.

    store: a key-value store that all ranks share."""

    def __init__(self, file: Path, rank: int, num_ranks: int, device: torch.device) -> None:
        os.environ.update(NCCL_ENVIRONMENT)
        nccl: Any = ProcessGroupNCCL  # its type stub lacks most attributes
        options = nccl.Options()
        options._timeout = OPERATION_TIMEOUT
        self.store = FileStore(str(file), num_ranks)
        self.store.set_timeout(CONNECT_TIMEOUT)
        self.num_ranks = num_ranks
        # NCCL would wait forever for a missing rank, so this rank first waits until all ranks have started.
        self.store.set(f"rank {rank}", "is there")
        self.store.wait([f"rank {index}" for index in range(num_ranks)])
        self.group = nccl(self.store, rank, num_ranks, options)
        # Operations run on the caller's stream.  On another stream, the two streams would have to wait for each other.
        self.sum_options, self.gather_options = AllreduceOptions(), AllgatherOptions()
        for operation_options in (self.sum_options, self.gather_options):
            operation_options.asyncOp = False
        # NCCL joins the ranks in the first operation.  This is not allowed in a CUDA graph capture, so it is done here.
        self.all_reduce(torch.zeros(1, device=device))
        torch.cuda.synchronize(device)

    def all_gather(self, x: Tensor) -> Tensor:
        """Gathers each rank's x [...] into [ranks, ...]."""
        gathered = x.new_empty(self.num_ranks * x.numel())
        if x.numel():
            wait_on_stream(self.group._allgather_base(gathered, x.reshape(-1), self.gather_options))
        return gathered.view(self.num_ranks, *x.shape)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sums x over the ranks.  The sum overwrites a contiguous x."""
        total = x.contiguous()
        if x.numel():
            wait_on_stream(self.group.allreduce([total], self.sum_options))
        return total

    def abort(self) -> None:
        self.group.abort()


def wait_on_stream(work: Any) -> None:
    """Make the current stream wait for an operation.  work: None if the operation runs on the current stream."""
    if work is not None:
        work.wait()
