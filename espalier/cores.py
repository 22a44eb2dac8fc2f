"""Cores of this machine that this process may use."""

import os
from pathlib import Path

CPUS = Path("/sys/devices/system/cpu")
QUOTA = Path("/sys/fs/cgroup/cpu.max")


def available_cores() -> int:
    """Logical cores within the process's affinity."""
    return len(_affinity())


def physical_cores() -> int:
    """Cores that share no arithmetic unit, within the affinity and the control group's quota; 1 or more."""
    return max(1, min(len({_siblings(core) for core in _affinity()}), _quota()))


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _siblings(core: int) -> str:
    """The logical cores of one physical core; alone where the system does not tell."""
    try:
        return (CPUS / f"cpu{core}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(core)


def _quota() -> int:
    """Whole cores' time that the control group may take; the machine's where nothing limits it."""
    try:
        allowed, period = map(int, QUOTA.read_text().split())
    except (OSError, ValueError):
        return os.cpu_count() or 1
    return allowed // period
