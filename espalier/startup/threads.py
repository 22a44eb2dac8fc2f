"""Chooses the number of CPU threads for PyTorch, by the model's size.

A forward pass reads every weight once, and threads share that work.  All threads synchronise several times in each
layer.  On a machine with other load, a thread that waits for a core delays all others, especially if waiting threads
spin (espalier/cores.py).  For a small model, more threads gain less time than such delays may cost.
"""

import logging
import os
from dataclasses import dataclass

import torch

from espalier.config import is_unresolved
from espalier.cores import SHORT_SPIN_COUNT, SPIN_COUNT_VARIABLE, is_wait_policy_set, physical_cores
from espalier.errors import EspalierError

# The bytes of weights per thread.  A thread reads this many bytes in about 20 ms.  In a pass, all waits of threads for
# each other take about 1 ms on an idle machine.
BYTES_PER_THREAD = 256 * 2**20
OMP_VARIABLE = "OMP_NUM_THREADS"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CpuThreadInfo:
    """The CPU's cores and PyTorch's threads.  num_cores: physical cores that this process may use.
    num_torch_threads: PyTorch's number of threads.  is_set_by_environment: whether OMP_NUM_THREADS is set."""

    num_cores: int
    num_torch_threads: int
    is_set_by_environment: bool


def cpu_thread_info() -> CpuThreadInfo:
    return CpuThreadInfo(physical_cores(), torch.get_num_threads(), bool(os.environ.get(OMP_VARIABLE)))


def choose_threads(requested: int | str, device: str, weight_bytes: int, info: CpuThreadInfo) -> int:
    """Returns the number of threads for a CPU: the user's number, else OMP_NUM_THREADS, else one thread for each
    BYTES_PER_THREAD of weights, up to the number of cores.  requested: the user's number, or "auto".

    On a GPU, PyTorch's number of threads is not changed.  Raises EspalierError if the user sets threads on a GPU.
    """
    if device != "cpu":
        if not is_unresolved(requested):
            raise EspalierError(f"threads={requested} needs device=cpu; use 'auto' on {device}, or set {OMP_VARIABLE}")
        return info.num_torch_threads
    if not is_unresolved(requested):
        return int(requested)
    if info.is_set_by_environment:
        return info.num_torch_threads
    return max(1, min(weight_bytes // BYTES_PER_THREAD, info.num_cores))


def set_num_threads(threads: int) -> None:
    """Sets PyTorch's number of threads, which all models in this process share."""
    torch.set_num_threads(threads)
    if threads > 1 and not is_wait_policy_set():
        log.warning(
            "CPU threads: %d, which are slow where other programs use the cores, as PyTorch was imported before "
            "espalier; import espalier first, set %s=%s, or use threads=1",
            threads,
            SPIN_COUNT_VARIABLE,
            SHORT_SPIN_COUNT,
        )
    log.info("CPU threads: %d; PyTorch's setting for the whole process", threads)
