"""CPU cores and threads of this process: how many cores it may use, and how its threads wait, yield and end."""

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

CPU_DIRECTORY = Path("/sys/devices/system/cpu")
CPU_QUOTA_FILE = Path("/sys/fs/cgroup/cpu.max")
# A thread of this niceness gets a tenth of the time of an ordinary thread on the same core.  With even less time, a
# thread that holds the GIL could stop all other threads for long.
LOW_PRIORITY = 10
# How long the process waits at exit for a daemon thread that is inside a library's call.
MAX_EXIT_WAIT_S = 10.0

# A variable of GNU's OpenMP, which runs PyTorch's threads.  OpenMP reads the variable when it is loaded.
SPIN_COUNT_VARIABLE = "GOMP_SPINCOUNT"
WAIT_POLICY_VARIABLE = "OMP_WAIT_POLICY"
# This many spins take some microseconds.  By default a waiting thread spins for milliseconds before it sleeps.  If a
# spinning thread occupies the core that the other thread needs, both become many times slower (docs/log.md).
SHORT_SPIN_COUNT = "1000"


def limit_spinning() -> None:
    """Make waiting threads of PyTorch sleep soon.  No effect if the user chose how they wait, or PyTorch is loaded."""
    if "torch" not in sys.modules and not is_wait_policy_set():
        os.environ[SPIN_COUNT_VARIABLE] = SHORT_SPIN_COUNT


def is_wait_policy_set() -> bool:
    """Whether an environment variable, of the user or of `limit_spinning`, sets how threads wait."""
    return SPIN_COUNT_VARIABLE in os.environ or WAIT_POLICY_VARIABLE in os.environ


def available_cores() -> int:
    """Returns the number of logical cores in the process's affinity mask."""
    return len(_allowed_cores())


def physical_cores() -> int:
    """Returns the number of physical cores, limited by the affinity mask and the cgroup's quota; at least 1."""
    return max(1, min(len({_sibling_cores(core) for core in _allowed_cores()}), _quota_cores()))


def lower_priority(native_id: int) -> None:
    """Give a thread a small share of a core that others want, on Linux only.  native_id: threading.Thread.native_id."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, native_id, LOW_PRIORITY)


def wait_at_exit(is_in_library: Callable[[threading.Thread], bool]) -> None:
    """At exit, wait up to MAX_EXIT_WAIT_S for threads that are inside a call of a C++ library.

    If such a call returns while the interpreter shuts down, C++ ends the thread and aborts the process.
    is_in_library(thread): whether the thread is inside such a call."""
    atexit.register(_wait_for_threads, is_in_library)


def _wait_for_threads(is_in_library: Callable[[threading.Thread], bool]) -> None:
    """Waits, up to MAX_EXIT_WAIT_S, until no thread is inside a call of the library."""
    end = time.monotonic() + MAX_EXIT_WAIT_S
    while any(map(is_in_library, threading.enumerate())) and time.monotonic() < end:
        time.sleep(0.01)


def _allowed_cores() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _sibling_cores(core: int) -> str:
    """Returns the logical cores on the same physical core, as text; only `core` if the system does not report them."""
    try:
        return (CPU_DIRECTORY / f"cpu{core}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(core)


def _quota_cores() -> int:
    """Returns the cgroup's CPU quota in whole cores; the machine's cores if there is no quota."""
    try:
        quota, period = map(int, CPU_QUOTA_FILE.read_text().split())
    except (OSError, ValueError):
        return os.cpu_count() or 1
    return quota // period
