"""Times cases on a GPU and formats the table of the times."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from espalier.bench.timing import GraphTimer
from lab.bench.ceilings import GpuCeilings

TIMING_TURNS = 20


@dataclass(frozen=True)
class KernelCase:
    """A row of the table.

    names: the row's first cells.  num_bytes: the bytes that a call must read; flops: the FLOPs that it computes; 0 if
    the number says nothing about the case.  run: runs `calls` calls; it is captured as a CUDA graph and replayed for at
    least `seconds`.  note: the row's last cell.
    """

    names: tuple[str, ...]
    num_bytes: float
    flops: float
    run: Callable[[], object]
    calls: int = 1
    seconds: float = 0.0
    note: str = ""


@dataclass(frozen=True)
class TimedCase:
    """us: median microseconds of a call.  bandwidth: bytes/s that the device reads, measured in the same run."""

    case: KernelCase
    us: float
    bandwidth: float

    @property
    def terabytes_per_second(self) -> float:
        return self.case.num_bytes / self.us / 1e6

    @property
    def bandwidth_share(self) -> float:
        return self.case.num_bytes / self.us * 1e6 / self.bandwidth

    @property
    def tflops(self) -> float:
        return self.case.flops / self.us / 1e6

    def as_dict(self, column_names: Sequence[str]) -> dict[str, Any]:
        """Returns the row for --json.  column_names: the columns of case.names."""
        rates = {name: getattr(self, name) for name in ("us", "terabytes_per_second", "bandwidth_share", "tflops")}
        return {**dict(zip(column_names, self.case.names, strict=True)), **rates, "note": self.case.note}


def time_cases(cases: Iterable[KernelCase], timer: GraphTimer, bandwidth: float) -> Iterator[TimedCase]:
    """Time one case after another.  If `cases` is a generator, only one case is in memory at a time."""
    for case in cases:
        [median_ms] = timer.median_ms([case.run], TIMING_TURNS, case.seconds)
        yield TimedCase(case, 1e3 * median_ms / case.calls, bandwidth)


def timing_table(column_names: Sequence[str], rows: Sequence[TimedCase]) -> list[list[str]]:
    """Returns the table's lines.  column_names: the columns of case.names."""
    lines = [[*column_names, "us", "TB/s", "of memory's", "TFLOP/s", ""]]
    for row in rows:
        read = [f"{row.terabytes_per_second:.2f}", f"{row.bandwidth_share:.1%}"] if row.case.num_bytes else ["", ""]
        computed = f"{row.tflops:.0f}" if row.case.flops else ""
        lines.append([*row.case.names, f"{row.us:.1f}", *read, computed, row.case.note])
    return lines


def describe_ceilings(ceilings: GpuCeilings) -> str:
    return f"memory reads {ceilings.bandwidth / 1e12:.2f} TB/s, a product does {ceilings.peak / 1e12:.0f} TFLOP/s"
