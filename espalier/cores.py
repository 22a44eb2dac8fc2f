"""The CPU cores that this process may use, how its threads wait for each other, and the share and end of a thread."""

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
# A tenth of the share of others.  With the lowest, a thread could hold the GIL for long while it waits for a core.
LOW_PRIORITY = 10
# How long the process waits at its end for a daemon thread that is in a library.
EXIT_S = 10.0

# What GNU's OpenMP, which PyTorch's threads come from, reads when it is loaded.
SPIN_COUNT = "GOMP_SPINCOUNT"
WAIT_POLICY = "OMP_WAIT_POLICY"
# Some microseconds.  By default a thread spins for milliseconds before it sleeps, on a core that the thread which it
# waits for may need: on shared cores, two threads are then many times slower than one (docs/log.md).
SPINS = "1000"


def bound_spinning() -> None:
    """Let PyTorch's threads sleep soon where they wait, unless the user says how they wait, or PyTorch is loaded."""
    if "torch" not in sys.modules and not waits_shortly():
        os.environ[SPIN_COUNT] = SPINS


def waits_shortly() -> bool:
    """Whether it was said how threads wait, by the user or by `bound_spinning`."""
    return SPIN_COUNT in os.environ or WAIT_POLICY in os.environ


def available_cores() -> int:
    """Number of logical cores in the process's affinity mask."""
    return len(_affinity())


def physical_cores() -> int:
    """Number of physical cores, limited by the affinity mask and the cgroup's quota; at least 1."""
    return max(1, min(len({_siblings(core) for core in _affinity()}), _quota()))


def lower_priority(native_id: int) -> None:
    """Give a thread a small share where others want the core.  Only Linux has priorities of threads."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, native_id, LOW_PRIORITY)


def wait_at_exit(is_in_library: Callable[[threading.Thread], bool]) -> None:
    """At the process's end, wait EXIT_S at most for such threads.

    A thread whose call returns while the interpreter ends is ended within C++, which aborts the process.
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
    """The logical cores of a core's physical core, as text; only itself if the system does not report them."""
    try:
        return (CPUS / f"cpu{core}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(core)


def _quota() -> int:
    """The cgroup's CPU quota in whole cores; the machine's cores if there is no quota."""
    try:
        allowed, period = map(int, QUOTA.read_text().split())
    except (OSError, ValueError):
        return os.cpu_count() or 1
    return allowed // period
