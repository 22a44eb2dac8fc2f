"""How many threads PyTorch computes with on a CPU, by the model's size.

A pass reads every weight once, and threads share that.  They also wait for each other several times a layer, spinning.
On a machine that has other work, a thread that waits for its core holds up all: two threads are then 3 to 20 times
slower than one, whatever the model's size (docs/log.md).  A small model gains too little from a thread to risk that.
"""

import logging
import os
from dataclasses import dataclass

import torch

from espalier.config import is_open
from espalier.cores import physical_cores
from espalier.errors import EspalierError

# Weights that are worth a thread: one reads them in some 20 ms, beside which hundreds of waits on an idle machine, a
# few microseconds each, are little.
BYTES_PER_THREAD = 256 * 2**20
VARIABLE = "OMP_NUM_THREADS"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ThreadFacts:
    """num_cores: physical ones that this process may use; current: PyTorch's threads; from_environment: whether
    OMP_NUM_THREADS is set, which PyTorch follows."""

    num_cores: int
    current: int
    from_environment: bool


def thread_facts() -> ThreadFacts:
    return ThreadFacts(physical_cores(), torch.get_num_threads(), bool(os.environ.get(VARIABLE)))


def choose_threads(asked: int | str, device: str, weight_bytes: int, facts: ThreadFacts) -> int:
    """What is asked for, else what OMP_NUM_THREADS made of PyTorch, else a thread for each BYTES_PER_THREAD.

    On a GPU nothing changes.  Raises EspalierError where threads are asked for there.
    """
    if device != "cpu":
        if not is_open(asked):
            raise EspalierError(f"threads={asked} needs device=cpu; use 'auto' on {device}, or set {VARIABLE}")
        return facts.current
    if not is_open(asked):
        return int(asked)
    if facts.from_environment:
        return facts.current
    return max(1, min(weight_bytes // BYTES_PER_THREAD, facts.num_cores))


def use_threads(threads: int) -> None:
    """Have PyTorch compute with so many threads, in the whole process: PyTorch has one number for all models in it."""
    torch.set_num_threads(threads)
    log.info("CPU threads: %d; PyTorch has them for the whole process", threads)
