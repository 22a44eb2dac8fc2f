"""`python -m lab loading`: how fast a target comes from disk onto its device, and how much memory that takes.

The files are first only read, and then loaded.  Before each, they are dropped from the system's file cache.
The memory of the process is sampled, without the pages of files, which the system may take back at any time.
"""

import os
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event, Thread
from time import perf_counter

import torch

from espalier.config import EngineConfig
from espalier.errors import EspalierError
from espalier.models import load_target, read_config
from espalier.models.weight_files import count_weights_in, safetensors_files
from espalier.startup.checkpoints import find_target
from espalier.startup.resolve import choose_device
from espalier.terminal.console import print_header, print_table, require_writable, write_json

# Bytes per read: enough for a disk's full rate.
READ_BYTES = 16 * 2**20
SAMPLE_SECONDS = 0.01
# Rows of the rotary tables that loading makes.
POSITION_ROWS = 4096


@dataclass(frozen=True)
class LoadingFigures:
    """file_bytes: size of the target's files.  read_seconds, load_seconds: time to only read them, and to load them.

    host_bytes: the largest growth of the process's memory while loading.  weights_bytes: size of the loaded weights.
    gpu_bytes: the most memory allocated on the GPU; None without a GPU.
    """

    file_bytes: int
    read_seconds: float
    load_seconds: float
    host_bytes: int
    weights_bytes: int
    gpu_bytes: int | None


def run(args: Namespace) -> int:
    require_writable("--json", args.json)
    device = choose_device(EngineConfig(device=args.device))
    path = find_target(args.model)
    print_header()
    found = measure_loading(path, getattr(torch, args.dtype), device)
    write_json(args.json, asdict(found))
    print_table(_table(found))
    return 0


def measure_loading(path: Path, dtype: torch.dtype, device: torch.device) -> LoadingFigures:
    """Raises EspalierError where the system does not show a process's memory."""
    files = safetensors_files(path)
    drop_from_file_cache(files)
    begun = perf_counter()
    _read_files(files)
    read_seconds = perf_counter() - begun
    drop_from_file_cache(files)
    if device.type == "cuda":
        torch.empty(1, device=device)  # the GPU's context is no part of loading
        torch.cuda.reset_peak_memory_stats(device)
    before = process_bytes()
    with _sample_until_end(process_bytes) as samples:
        begun = perf_counter()
        load_target(path, dtype=dtype, device=device, position_rows=POSITION_ROWS)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        load_seconds = perf_counter() - begun
    return LoadingFigures(
        file_bytes=sum(file.stat().st_size for file in files),
        read_seconds=read_seconds,
        load_seconds=load_seconds,
        host_bytes=max(samples) - before,
        weights_bytes=count_weights_in(path, read_config(path).formats).nbytes(dtype),
        gpu_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
    )


def drop_from_file_cache(files: list[Path]) -> None:
    """Drop files from the system's file cache.  Pages that are not on disk yet are written first."""
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read_files(files: list[Path]) -> None:
    buffer = bytearray(READ_BYTES)
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass


def process_bytes() -> int:
    """Bytes of this process's memory that is no file's.  Raises EspalierError on systems other than Linux."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        raise EspalierError("loading reads memory from /proc, which this system does not have; use Linux") from None
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon")))


@contextmanager
def _sample_until_end(read_value: Callable[[], int]) -> Iterator[list[int]]:
    """Sample a value in a thread until the block ends.  Yields the list of samples."""
    samples, ended = [read_value()], Event()

    def sample() -> None:
        while not ended.wait(SAMPLE_SECONDS):
            samples.append(read_value())

    thread = Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()
        samples.append(read_value())


def _table(figures: LoadingFigures) -> list[list[str]]:
    size = figures.file_bytes / 1e9
    rows = [
        ["files", f"{size:.2f} GB"],
        ["read alone", f"{figures.read_seconds:.2f} s, {size / figures.read_seconds:.2f} GB/s"],
        ["loaded", f"{figures.load_seconds:.2f} s, {size / figures.load_seconds:.2f} GB/s"],
        ["weights in memory", f"{figures.weights_bytes / 1e9:.2f} GB"],
        ["most memory of the process", f"+{figures.host_bytes / 1e9:.2f} GB"],
    ]
    if figures.gpu_bytes is not None:
        rows.append(["most memory of the GPU", f"{figures.gpu_bytes / 1e9:.2f} GB"])
    return rows
