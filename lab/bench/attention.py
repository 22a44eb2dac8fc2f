"""`python -m lab attention`: attention over committed rows, backend by backend, in one process on one GPU.

Only attention over the prefix is timed: a library's backend supplies only this part.  Layers and pages are those of
`python -m lab kernels`.  A backend that plans on the host is timed twice: with a plan of exact lengths, as in
lock-step, and without, as in overlap.  The host time of the plan is printed too.
"""

import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from statistics import median

import torch
from rich.text import Text

from espalier.attention import BACKENDS, AttentionBackend, CommittedLengths, grouped_backend
from espalier.bench.timing import GraphTimer, run_in_order
from espalier.errors import EspalierError
from espalier.terminal.console import (
    DIM_STYLE,
    print_header,
    print_table,
    progress,
    require_gpu,
    require_writable,
    stdout,
    write_json,
)
from lab.bench.cases import KernelCase, TimedCase, time_cases, timing_table
from lab.bench.kernels import (
    DTYPE,
    GQA_SPEC,
    MLA_SPEC_16_HEADS,
    PassInputs,
    PassShape,
    layers_beyond_cache,
    make_pass_inputs,
    require_page_sizes,
)

PASS_SIZES = ((1, 64, 4096), (1, 64, 32768), (8, 32, 4096), (32, 16, 4096), (64, 8, 4096), (1, 8, 65536))
PASS_SHAPES = (
    *(PassShape(*sizes, spec=spec) for spec in (GQA_SPEC, MLA_SPEC_16_HEADS) for sizes in PASS_SIZES),
    *(PassShape(1, 2048, 8192, spec=spec, chain=True) for spec in (GQA_SPEC, MLA_SPEC_16_HEADS)),
)
TIMED_PLANS = 20


COLUMN_NAMES = ("requests x queries x committed", "heads", "page size", "backend")


@dataclass(frozen=True)
class RefusedCell:
    """A cell that a backend refuses, and the reason."""

    names: tuple[str, ...]
    why: str


def run(args: Namespace) -> int:
    require_page_sizes(args.page_size)
    backends = [name.strip() for name in args.backends.split(",") if name.strip()] or installed_gpu_backends()
    unknown = [name for name in backends if name not in BACKENDS]
    if unknown:
        raise EspalierError(f"--backends: {unknown[0]!r} is unknown; use some of {', '.join(BACKENDS)}")
    require_writable("--json", args.json)
    device = require_gpu("attention")
    print_header()
    timer = GraphTimer()
    memory_bandwidth = timer.memory_bandwidth(device)
    times: list[TimedCase] = []
    refused: list[RefusedCell] = []
    with progress("measuring", len(PASS_SHAPES) * len(args.page_size)) as advance:
        for shape, page_size in product(PASS_SHAPES, args.page_size):
            times += time_cases(backend_cases(shape, page_size, backends, device, refused), timer, memory_bandwidth)
            advance()
    cells = {"cells": [one.as_dict(COLUMN_NAMES) for one in times], "refused": [asdict(one) for one in refused]}
    write_json(args.json, cells)
    stdout().print(Text("bfloat16, pages in no order; attention over the prefix alone, one layer", DIM_STYLE))
    print_table(timing_table(COLUMN_NAMES, times))
    for one in refused:
        print(f"  refused: {', '.join(one.names)}: {one.why}")
    return 0


def installed_gpu_backends() -> list[str]:
    """The backends for a GPU that are installed, without the reference: it would need minutes."""
    return [
        name
        for name, made in BACKENDS.items()
        if made.support.is_installed and "cuda" in made.support.devices and name != "reference"
    ]


def backend_cases(
    shape: PassShape, page_size: int, backends: Sequence[str], device: torch.device, refused: list[RefusedCell]
) -> Iterator[KernelCase]:
    """Yields a case for each backend; two for a backend that plans on the host.  Refused cells are added to `refused`.

    A case's note has the host time of a plan, and the largest difference from our kernels' result.
    """
    inputs = make_pass_inputs(shape, page_size, layers_beyond_cache(shape, device), device)
    ours = BACKENDS["triton"]().plan(*inputs.plan_arguments).attend_prefix(inputs.q, 0)[0].float()
    for name in backends:
        for exact in (True, False) if BACKENDS[name].support.needs_exact_lengths else (True,):
            # A prompt's chunk is eager, and its lengths are always exact.
            if shape.chain and not exact:
                continue
            names = str(shape), shape.heads, str(page_size), name if exact else f"{name}, overlap"
            try:
                grouped_backend(name, device.type, DTYPE, page_size, [shape.spec], range(1), exact_lengths=exact)
            except EspalierError as refusal:
                refused.append(RefusedCell(names, str(refusal)))
                continue
            yield _backend_case(names, BACKENDS[name](), shape, inputs, ours, exact)
            torch.cuda.empty_cache()


def _backend_case(
    names: tuple[str, ...],
    backend: AttentionBackend,
    shape: PassShape,
    inputs: PassInputs,
    our_output: torch.Tensor,
    has_exact_lengths: bool,
) -> KernelCase:
    num_layers, lengths = len(inputs.plan_arguments[1]), (shape.context,) * shape.batch
    host_us = _host_planning_us(backend, lengths, has_exact_lengths)
    backend.prepare(CommittedLengths(lengths, has_exact_lengths, in_graph=True))
    inputs.plan_arguments[2].plan_cache.clear()
    attention = backend.plan(*inputs.plan_arguments)
    error = float((attention.attend_prefix(inputs.q, 0)[0].float() - our_output).abs().max())
    run_layers = run_in_order([partial(attention.attend_prefix, inputs.q, layer) for layer in range(num_layers)])
    flops = replace(shape, chain=False).flops  # without the chunk's own rows
    note = f"host {host_us:.0f} us, differs by {error:.1g}"
    return KernelCase(names, shape.kv_bytes, flops, run_layers, num_layers, note=note)


def _host_planning_us(backend: AttentionBackend, lengths: tuple[int, ...], has_exact_lengths: bool) -> float:
    """Returns the median microseconds of `prepare`, with lengths that change as from round to round."""
    times = []
    for more in range(TIMED_PLANS):
        announced = CommittedLengths(tuple(length - more for length in lengths), has_exact_lengths, in_graph=True)
        torch.cuda.synchronize()
        began = time.perf_counter()
        backend.prepare(announced)
        times.append(1e6 * (time.perf_counter() - began))
    return median(times)
