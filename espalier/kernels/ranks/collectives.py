"""Joins ranks on GPUs of one host.  Kernels join small tensors in memory that all GPUs reach, also inside of CUDA
graphs.  NCCL joins larger ones.
"""

import logging
from pathlib import Path

import torch
from torch import Tensor

from espalier.kernels.ranks.memory import PeerMemory, peer_memory
from espalier.shards import Collectives

# The most bytes of a rank's values that are summed in peer memory.  For more, NCCL is not slower.  On two H100s a sum
# of this size (2,048 rows of 4,096 values in bfloat16) takes 71 µs one-shot and 82 by NCCL (`python -m lab ranks`).
PEER_BYTES = 2**24
# In the time of one meeting of the ranks (3 µs on those H100s), a rank reads this many bytes over NVLink.
MEETING_BYTES = 2**20
log = logging.getLogger("espalier")


class PeerCollectives:
    """A Collectives (espalier/shards/base.py)."""

    def __init__(self, memory: PeerMemory, nccl: Collectives) -> None:
        from espalier.kernels.ranks import join

        self.join = join
        self.memory = memory
        self.nccl = nccl

    def all_gather(self, x: Tensor) -> Tensor:
        return self.nccl.all_gather(x)

    def all_reduce(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]) if x.ndim else x.reshape(1, 1)
        if not self.join.fits(self.memory, rows, x.dtype):
            return self.nccl.all_reduce(x)
        return self.join.sum_rows(self.memory, rows, x.dtype, two_shot(rows, x.dtype, self.memory.count)).view(x.shape)

    def all_reduce_add_norm(
        self, parts: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        if not self.join.fits(self.memory, parts, residual.dtype) or residual.stride(-1) != 1:
            return None
        way = two_shot(parts, residual.dtype, self.memory.count)
        return self.join.sum_add_norm(self.memory, parts, residual, weight, eps, way)

    def gather_columns(self, x: Tensor, each: int, size: int) -> Tensor:
        if not self.join.gathers(self.memory, x, each):
            return self.nccl.gather_columns(x, each, size)
        return self.join.gather_columns(self.memory, x, each, size)

    def abort(self) -> None:
        # First, because NCCL waits for its own kernels.  They may stand behind a kernel that waits for a rank.
        self.memory.wait_for_nobody()
        self.nccl.abort()


def two_shot(parts: Tensor, dtype: torch.dtype, count: int) -> bool:
    """Whether `count` ranks sum parts [rows, H] or [splits, rows, H] two-shot.

    One-shot, a rank reads all values of every other rank.  Two-shot, it reads its share of the values, and then the
    sums: fewer bytes, but the ranks meet once more.
    """
    rows, size = parts.shape[-2:]
    saved = (count - 1) * (1 - 2 / count)
    return rows * size * dtype.itemsize * saved > MEETING_BYTES


def join_gpus(file: Path, rank: int, count: int, device: torch.device, peer_bytes: int = PEER_BYTES) -> Collectives:
    """Meet the other ranks.  file, device: as for NcclCollectives; peer_bytes: of the largest sum in peer memory.

    If a rank cannot map the others' memory, NCCL joins everything, and the log says so.
    """
    from espalier.shards.nccl import NcclCollectives

    nccl = NcclCollectives(file, rank, count, device)
    memory, reason = None, ""
    try:
        memory = peer_memory(str(file), nccl.store, rank, count, device, peer_bytes)
    except Exception as error:
        reason = f"{error}".partition("\n")[0]
    # After this, the flags of all ranks are zero, so kernels may set them.
    joined = nccl.all_gather(torch.tensor(memory is not None, dtype=torch.int32, device=device))
    if memory is None or not bool(joined.all()):
        log.warning("ranks join by NCCL alone: no memory that all GPUs reach (%s)", reason or "another rank says why")
        return nccl
    log.info("ranks join in peer memory: sums to %d KiB; by NCCL above", peer_bytes >> 10)
    return PeerCollectives(memory, nccl)
