"""Memory on each rank's GPU that the GPUs of all ranks read and write, through PyTorch's symmetric memory.

A rank's memory begins with flags, by which programs of the same number meet.  Each program has a slot in two areas: the
rank's own values, and what the ranks have summed.  Both are there twice, and used in turn.
"""

import os
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Store

# The most programs that meet, and the most ranks.
PROGRAMS, MAX_RANKS = 128, 16
FLAGS_BYTES = PROGRAMS * MAX_RANKS * torch.int32.itemsize
# NVLink's multicast is never used: a program that ends while it does may block the GPUs of its host.
NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


@dataclass(frozen=True)
class PeerMemory:
    """addresses: [ranks] int64, where each rank's memory begins; uses: [PROGRAMS] int32, how often each program of this
    rank has met its peers; stop: [1] int32 in host memory, not zero if nobody is to be waited for; held: what keeps the
    memory mapped.
    """

    rank: int
    count: int
    slot_bytes: int
    addresses: Tensor
    uses: Tensor
    stop: Tensor
    held: Any = None

    @property
    def area_bytes(self) -> int:
        return 2 * PROGRAMS * self.slot_bytes

    @property
    def most_bytes(self) -> int:
        """Bytes of a rank's values that fit in the slots of all programs."""
        return PROGRAMS * self.slot_bytes

    def wait_for_nobody(self) -> None:
        """End the waiting of kernels, with wrong results.  Without a call of CUDA, which might wait for them."""
        self.stop.numpy()[0] = 1


class CountedAnew(Store):
    """A store for one rendezvous.  PyTorch numbers the steps of all rendezvous of a process, so the numbers of a
    process that has joined ranks before differ from those of a new one.  Here they count from the first."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store = store
        self.first: int | None = None

    def _own(self, key: str) -> str:
        name, step, rank = key.rsplit("/", 2)
        self.first = int(step) if self.first is None else self.first
        return f"{name}/{int(step) - self.first}/{rank}"

    def set(self, key: str, value: Any) -> None:
        self.store.set(self._own(key), value)

    def get(self, key: str) -> bytes:
        return self.store.get(self._own(key))

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self.store.wait([self._own(key) for key in keys], *timeout)


def peer_memory(name: str, store: Store, rank: int, count: int, device: torch.device, most_bytes: int) -> PeerMemory:
    """Map the memory of all ranks.  Every rank calls it, with a store of all and a name that was not used before.

    The flags are zero, but not on every rank, when this returns: the ranks must meet before they use them.
    Raises RuntimeError, among others, where the GPUs do not reach one another.
    """
    from torch.distributed._symmetric_memory import _SymmetricMemory

    others = [each for each in range(count) if each != rank]
    if hidden := [each for each in others if not torch.cuda.can_device_access_peer(device, each)]:
        raise RuntimeError(f"GPU {rank} does not reach the memory of GPU {hidden[0]}")
    os.environ[NO_MULTICAST] = "1"
    slot_bytes = -(-most_bytes // PROGRAMS)
    size = FLAGS_BYTES + 4 * PROGRAMS * slot_bytes
    own_store = CountedAnew(store)
    group = register(name, own_store, rank, count)
    memory = _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, device)
    memory.zero_()
    handle = _SymmetricMemory.rendezvous(memory, name)
    ranks = [handle.get_buffer(each, (size,), torch.uint8) for each in range(count)]
    return PeerMemory(
        rank,
        count,
        slot_bytes,
        torch.tensor([each.data_ptr() for each in ranks], dtype=torch.int64, device=device),
        torch.zeros(PROGRAMS, dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.int32, pin_memory=True),
        (memory, handle, ranks, own_store, group),
    )


def register(name: str, store: Store, rank: int, count: int) -> ProcessGroup:
    """Tell PyTorch who meets under this name.  Later versions read it of the process group, which the caller keeps,
    earlier ones of a table."""
    from torch._C._distributed_c10d import _register_process_group
    from torch.distributed._symmetric_memory import _SymmetricMemory

    group = ProcessGroup(store, rank, count)
    _register_process_group(cast(Any, name), group)
    _SymmetricMemory.set_group_info(name, rank, count, store)
    return group
