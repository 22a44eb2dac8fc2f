"""The machine and the versions that a measurement was made on.  Figures are not comparable without them."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import espalier
from espalier.cores import available_cores
from espalier.errors import EspalierError

if TYPE_CHECKING:
    import torch


def describe() -> dict[str, str]:
    """Name -> text: the machine, the interpreter and the versions that figures depend on."""
    import torch  # here, so that `--help` does not wait for it

    machine = {
        "machine": f"{_processor()}, {available_cores()} cores, {_memory_gib():.0f} GiB",
        "system": platform.platform(),
        "python": platform.python_version(),
        "espalier": espalier.__version__,
        "torch": str(torch.__version__),
        "transformers": installed("transformers"),
    }
    if torch.cuda.is_available():
        machine["cuda"] = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return machine


def header() -> str:
    """One line for the top of a table."""
    about = describe()
    gpu = f"{about['cuda']}; " if "cuda" in about else ""
    return f"{gpu}{about['machine']}; torch {about['torch']}; python {about['python']}"


def require_gpu(what: str) -> "torch.device":
    """The GPU that the command `what` measures.  Raises EspalierError if there is none."""
    import torch

    if not torch.cuda.is_available():
        raise EspalierError(f"{what} measures on a GPU, and there is none here; run it on a machine with one")
    return torch.device("cuda")


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _memory_gib() -> float:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
