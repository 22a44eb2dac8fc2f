"""The CPU cores that this process may use, how its threads wait for each other, and a thread's priority and end."""

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

CPUS = Path("/sys/devices/system/cpu")
QUOTA = Path("/sys/fs/cgroup/cpu.max")
# A thread of this priority gets a tenth of another's share.  With the lowest priority, the thread could hold the GIL
# for long while it waits for a core.
LOW_PRIORITY = 10
# How long the process waits at exit for a daemon thread that is inside a library's call.
EXIT_S = 10.0

# A variable of GNU's OpenMP, which runs PyTorch's threads.  OpenMP reads the variable when it is loaded.
SPIN_COUNT = "GOMP_SPINCOUNT"
WAIT_POLICY = "OMP_WAIT_POLICY"
# This count takes some microseconds.  By default a waiting thread spins for milliseconds before it sleeps.  The core
# may be needed by the thread it waits for: on shared cores, two threads are then many times slower than one
# (docs/log.md).
SPINS = "1000"


def limit_spinning() -> None:
    """Make waiting threads of PyTorch sleep soon, unless the user chose how they wait or PyTorch is loaded already."""
    if "torch" not in sys.modules and not spins_briefly():
        os.environ[SPIN_COUNT] = SPINS


def spins_briefly() -> bool:
    """Whether the environment sets how threads wait.  The user or `limit_spinning` may have set it."""
    return SPIN_COUNT in os.environ or WAIT_POLICY in os.environ


def available_cores() -> int:
    """Returns the number of logical cores in the process's affinity mask."""
    return len(_affinity())


def physical_cores() -> int:
    """Returns the number of physical cores, limited by the affinity mask and the cgroup's quota; at least 1."""
    return max(1, min(len({_siblings(core) for core in _affinity()}), _quota()))


def lower_priority(native_id: int) -> None:
    """Give a thread a small share of a core that other threads want.  Does nothing except on Linux."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, native_id, LOW_PRIORITY)


def wait_at_exit(is_in_library: Callable[[threading.Thread], bool]) -> None:
    """At exit, wait up to EXIT_S for threads of which is_in_library(thread) is true.

    A thread whose call returns while the interpreter shuts down is ended within C++, which aborts the process.
    """
    atexit.register(_wait_for, is_in_library)


def _wait_for(is_in_library: Callable[[threading.Thread], bool]) -> None:
    end = time.monotonic() + EXIT_S
    while any(map(is_in_library, threading.enumerate())) and time.monotonic() < end:
        time.sleep(0.01)


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _siblings(core: int) -> str:
    """Returns the logical cores on the same physical core, as text; only `core` if the system does not report them."""
    try:
        return (CPUS / f"cpu{core}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(core)


def _quota() -> int:
    """Returns the cgroup's CPU quota in whole cores; the machine's cores if there is no quota."""
    try:
        allowed, period = map(int, QUOTA.read_text().split())
    except (OSError, ValueError):
        return os.cpu_count() or 1
    return allowed // period
