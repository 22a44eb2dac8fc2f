"""Collectives of ranks on GPUs of one host.  Kernels sum and gather small tensors in peer memory, which all
ranks can read and write, also in CUDA graphs.  Larger tensors go through NCCL.

A rank's peer memory begins with flags.  By these flags, the programs with the same index on all ranks wait for each
other.  After the flags come four slots (buffers) per program: two for the rank's values and two for sums.  From launch
to launch, a program alternates between the two slots of a pair.
"""

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Store

from espalier.shards import Collectives

# The most programs of a collective kernel, and the most ranks.
MAX_PROGRAMS, MAX_RANKS = 128, 16
FLAGS_BYTES = MAX_PROGRAMS * MAX_RANKS * torch.int32.itemsize
# This variable turns NVLink's multicast off, because a process that ends during a multicast may block the host's GPUs.
NO_MULTICAST_ENV = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


@dataclass(frozen=True)
class PeerMemory:
    """Memory of each rank that all ranks can read and write.

    slot_bytes: the bytes of one slot.  addresses: [ranks] int64, the address of each rank's memory.  num_launches:
    [MAX_PROGRAMS] int32, the number of launches that each program of this rank has completed.  stop_flag: [1] int32 in
    host memory; if it is not zero, kernels stop waiting.  keep_alive: objects that must live as long as the memory is
    used.
    """

    rank: int
    num_ranks: int
    slot_bytes: int
    addresses: Tensor
    num_launches: Tensor
    stop_flag: Tensor
    keep_alive: Any = None

    def release_waiters(self) -> None:
        """End the waits of running kernels; their results are then wrong.  Calls no CUDA function, because it might
        wait too."""
        self.stop_flag.numpy()[0] = 1


class RestartedStepStore(Store):
    """A key-value store of PyTorch for one rendezvous.  Its keys number the steps of the rendezvous from 0.

    PyTorch counts steps over all rendezvous of a process.  Without this class, a process that had a rendezvous before
    and a new process would use different keys."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store = store
        self.first_step: int | None = None

    def _restarted_key(self, key: str) -> str:
        """Returns the key with its step counted from 0.  key: "name/step/rank"."""
        name, step, rank = key.rsplit("/", 2)
        self.first_step = int(step) if self.first_step is None else self.first_step
        return f"{name}/{int(step) - self.first_step}/{rank}"

    def set(self, key: str, value: Any) -> None:
        self.store.set(self._restarted_key(key), value)

    def get(self, key: str) -> bytes:
        return self.store.get(self._restarted_key(key))

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self.store.wait([self._restarted_key(key) for key in keys], *timeout)


def map_peer_memory(
    name: str, store: Store, rank: int, num_ranks: int, device: torch.device, max_bytes: int
) -> PeerMemory:
    """Map the peer memory of all ranks.  Every rank calls this function, with one shared store and one unused name.

    After the call, this rank's flags are zero.  Flags of other ranks may not be zero yet, so ranks must synchronise
    before kernels use flags.  max_bytes: the most bytes of a sum.  Raises RuntimeError if the GPUs cannot reach one
    another, and PyTorch's own errors.
    """
    from torch.distributed._symmetric_memory import _SymmetricMemory

    others = [other for other in range(num_ranks) if other != rank]
    if unreachable := [other for other in others if not torch.cuda.can_device_access_peer(device, other)]:
        raise RuntimeError(f"GPU {rank} does not reach the memory of GPU {unreachable[0]}")
    os.environ[NO_MULTICAST_ENV] = "1"
    slot_bytes = -(-max_bytes // MAX_PROGRAMS)
    num_bytes = FLAGS_BYTES + 4 * MAX_PROGRAMS * slot_bytes
    own_store = RestartedStepStore(store)
    group = register_process_group(name, own_store, rank, num_ranks)
    memory = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
    memory.zero_()
    handle = _SymmetricMemory.rendezvous(memory, name)
    buffers = [handle.get_buffer(peer, (num_bytes,), torch.uint8) for peer in range(num_ranks)]
    return PeerMemory(
        rank,
        num_ranks,
        slot_bytes,
        torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.int64, device=device),
        torch.zeros(MAX_PROGRAMS, dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.int32, pin_memory=True),
        (memory, handle, buffers, own_store, group),
    )


def register_process_group(name: str, store: Store, rank: int, num_ranks: int) -> ProcessGroup:
    """Register the ranks of a rendezvous with PyTorch, under this name.  Returns the process group.

    Newer versions of PyTorch read the ranks from the process group, which the caller must keep alive.  Older versions
    read the ranks from a table."""
    from torch._C._distributed_c10d import _register_process_group
    from torch.distributed._symmetric_memory import _SymmetricMemory

    group = ProcessGroup(store, rank, num_ranks)
    _register_process_group(cast(Any, name), group)
    _SymmetricMemory.set_group_info(name, rank, num_ranks, store)
    return group


# The most bytes of a rank's values that are summed in peer memory.  On two H100s a sum of this size with residual and
# norm (2,048 rows of 4,096 values in bfloat16) takes 70 µs one-shot and 100 µs by NCCL (`python -m lab ranks`).
MAX_PEER_BYTES = 2**24
# MAX_PEER_BYTES for two ranks: enough for the largest prefill pass of an 8B model.  A sum of 4,096 rows takes 133 µs,
# and 182 µs by NCCL.
MAX_PEER_BYTES_OF_TWO_RANKS = 2**25
# The bytes that a rank reads over NVLink in the time of one barrier (3 µs on two H100s).
BARRIER_COST_BYTES = 2**20
log = logging.getLogger("espalier")


class PeerCollectives:
    """Collectives (espalier/shards/base.py) in peer memory for small tensors, and by NCCL for larger ones."""

    def __init__(self, memory: PeerMemory, nccl: Collectives) -> None:
        from espalier.kernels.ranks import collective_kernels

        self.kernels = collective_kernels
        self.memory = memory
        self.nccl = nccl

    def all_gather(self, x: Tensor) -> Tensor:
        return self.nccl.all_gather(x)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Returns the sum of x [...] over the ranks."""
        rows = x.reshape(-1, x.shape[-1]) if x.ndim else x.reshape(1, 1)
        if not self.kernels.supports_all_reduce(self.memory, rows, x.dtype):
            return self.nccl.all_reduce(x)
        two_shot = uses_two_shot(rows, x.dtype, self.memory.num_ranks)
        return self.kernels.all_reduce_rows(self.memory, rows, x.dtype, two_shot).view(x.shape)

    def all_reduce_add_norm(
        self, parts: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        """Returns (residual + the sum of `parts` over the ranks, its RMS norm); None if no kernel can."""
        if not self.kernels.supports_all_reduce(self.memory, parts, residual.dtype) or residual.stride(-1) != 1:
            return None
        two_shot = uses_two_shot(parts, residual.dtype, self.memory.num_ranks)
        return self.kernels.all_reduce_add_norm(self.memory, parts, residual, weight, eps, two_shot)

    def gather_columns(self, x: Tensor, columns_per_rank: int, size: int) -> Tensor:
        """Joins the ranks' x [N, columns] side by side: [N, size].  columns_per_rank: of all but the last ranks."""
        if not self.kernels.supports_gather(self.memory, x, columns_per_rank):
            return self.nccl.gather_columns(x, columns_per_rank, size)
        return self.kernels.gather_columns(self.memory, x, columns_per_rank, size)

    def abort(self) -> None:
        # The waiting kernels end first: NCCL waits for its own kernels, which may be queued after a waiting kernel.
        self.memory.release_waiters()
        self.nccl.abort()


def uses_two_shot(parts: Tensor, dtype: torch.dtype, num_ranks: int) -> bool:
    """Returns whether `num_ranks` ranks sum parts [rows, H] or [splits, rows, H] two-shot.  dtype: of the sum.

    One-shot, a rank reads all values of every other rank.  Two-shot, a rank reads a share of these values, and then the
    sums.  Two-shot reads fewer bytes, but needs one more barrier."""
    rows, size = parts.shape[-2:]
    saved_share = (num_ranks - 1) * (1 - 2 / num_ranks)
    return rows * size * dtype.itemsize * saved_share > BARRIER_COST_BYTES


def connect_gpus(
    rendezvous_file: Path, rank: int, num_ranks: int, device: torch.device, peer_bytes: int = 0
) -> Collectives:
    """Connect to the other ranks.  rendezvous_file, device: see NcclCollectives.
    peer_bytes: the most bytes of a sum in peer memory; 0: MAX_PEER_BYTES, or MAX_PEER_BYTES_OF_TWO_RANKS.

    If a rank cannot map the memory of the others, NCCL does all collectives, and the log says so."""
    from espalier.shards.nccl import NcclCollectives

    nccl = NcclCollectives(rendezvous_file, rank, num_ranks, device)
    peer_bytes = peer_bytes or (MAX_PEER_BYTES_OF_TWO_RANKS if num_ranks == 2 else MAX_PEER_BYTES)
    memory, reason = None, ""
    try:
        memory = map_peer_memory(str(rendezvous_file), nccl.store, rank, num_ranks, device, peer_bytes)
    except Exception as error:
        reason = f"{error}".partition("\n")[0]
    # After this gather the flags of all ranks are zero, so kernels may set them.
    has_memory = nccl.all_gather(torch.tensor(memory is not None, dtype=torch.int32, device=device))
    if memory is None or not bool(has_memory.all()):
        log.warning("ranks join by NCCL alone: no memory that all GPUs reach (%s)", reason or "another rank says why")
        return nccl
    log.info("ranks join in peer memory: sums to %d KiB; by NCCL above", peer_bytes >> 10)
    return PeerCollectives(memory, nccl)
