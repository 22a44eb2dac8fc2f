"""Chooses the number of CPU threads for PyTorch, by the model's size.

A forward pass reads every weight once, and threads share that work.  The threads also wait for one another, several
times in each layer.  On a machine with other load, one thread that waits for a core delays all others.  The delay is
longer if the waiting threads spin (espalier/cores.py).  A small model gains too little from more threads to risk that.
"""

import logging
import os
from dataclasses import dataclass

import torch

from espalier.config import is_unresolved
from espalier.cores import SHORT_SPIN_COUNT, SPIN_COUNT_VARIABLE, is_wait_policy_set, physical_cores
from espalier.errors import EspalierError

# There is one thread for each of these.  A thread reads them in about 20 ms.  The barriers of a pass take much less:
# there are hundreds, of a few microseconds each on an idle machine.
BYTES_PER_THREAD = 256 * 2**20
VARIABLE = "OMP_NUM_THREADS"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ThreadFacts:
    """Facts about the CPU's threads.

    num_cores: physical cores that this process may use; current: PyTorch's number of threads now; from_environment:
    whether OMP_NUM_THREADS is set, from which PyTorch takes its number of threads.
    """

    num_cores: int
    current: int
    from_environment: bool


def thread_facts() -> ThreadFacts:
    return ThreadFacts(physical_cores(), torch.get_num_threads(), bool(os.environ.get(VARIABLE)))


def choose_threads(requested: int | str, device: str, weight_bytes: int, facts: ThreadFacts) -> int:
    """Returns the number of threads for a CPU: the user's number, else that of OMP_NUM_THREADS, else one thread for
    each BYTES_PER_THREAD of weights, up to num_cores.

    On a GPU PyTorch's number stays.  Raises EspalierError if the user sets threads on a GPU.
    """
    if device != "cpu":
        if not is_unresolved(requested):
            raise EspalierError(f"threads={requested} needs device=cpu; use 'auto' on {device}, or set {VARIABLE}")
        return facts.current
    if not is_unresolved(requested):
        return int(requested)
    if facts.from_environment:
        return facts.current
    return max(1, min(weight_bytes // BYTES_PER_THREAD, facts.num_cores))


def use_threads(threads: int) -> None:
    """Sets PyTorch's number of threads for the whole process, so for all models in it."""
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
