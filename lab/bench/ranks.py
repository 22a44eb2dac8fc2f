"""`python -m lab ranks`: the time of collectives of ranks on GPUs, and whether all ranks get the same bits.

Each rank captures the same calls and replays them as often, so none waits for a call that another leaves out.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from espalier.engine.lead import replace_by_rank_failure
from espalier.errors import EspalierError
from espalier.kernels.ops.norm import add_rms_norm
from espalier.startup.ranks import ConnectWrapper, starting_ranks
from espalier.terminal.console import print_header, print_table, require_gpu, require_writable, stdout, write_json
from lab.bench.cases import KernelCase, TimedCase, timing_table
from lab.bench.checks import positive_numbers

DTYPE = torch.bfloat16
EPS = 1e-5
# Peer memory for the largest measured sum.
MAX_PEER_BYTES = 2**25
CALLS_PER_GRAPH, TIMED_REPLAYS, WARM_UP_REPLAYS = 20, 20, 5
# Sums of random rows that the check compares.
CHECKED_SUMS = 2000
COLUMN_NAMES = ("what", "rows x columns", "way")


@dataclass(frozen=True)
class CollectiveWork:
    """The work of each rank (espalier/engine/ranks.py:LoadModels)."""

    num_ranks: int
    rendezvous_file: str
    rows: tuple[int, ...]
    hidden_size: int
    vocab_size: int

    def load(self, rank: int) -> Any:
        self.run(rank)

    def run(self, rank: int, wrap_connect: ConnectWrapper = lambda connect: connect()) -> list[TimedCase]:
        from espalier.kernels.ranks.collectives import PeerCollectives, connect_gpus

        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        ranks = wrap_connect(
            lambda: connect_gpus(Path(self.rendezvous_file), rank, self.num_ranks, device, MAX_PEER_BYTES)
        )
        if not isinstance(ranks, PeerCollectives):
            raise EspalierError("the GPUs reach no memory in common, so there is nothing to compare with NCCL")
        with torch.inference_mode():
            check_sums(ranks, rank, self.hidden_size)
            return [TimedCase(case, graph_call_us(case.run), 1.0) for case in self.cases(ranks, device)]

    def cases(self, ranks: Any, device: torch.device) -> Iterator[KernelCase]:
        kernels, memory = ranks.kernels, ranks.memory
        for rows in self.rows:
            x, residual = (torch.randn(rows, self.hidden_size, dtype=DTYPE, device=device) for _ in range(2))
            weight, size = torch.ones(self.hidden_size, dtype=DTYPE, device=device), f"{rows} x {self.hidden_size}"
            sums: dict[str, Callable[[], Any]] = {"NCCL": partial(ranks.nccl.all_reduce, x.clone())}
            norms: dict[str, Callable[[], Any]] = {"NCCL": partial(nccl_add_norm, ranks, x.clone(), residual, weight)}
            if kernels.supports_all_reduce(memory, x, DTYPE):
                for way, two_shot in (("one-shot", False), ("two-shot", True)):
                    sums[way] = partial(kernels.all_reduce_rows, memory, x, DTYPE, two_shot)
                    norms[way] = partial(kernels.all_reduce_add_norm, memory, x, residual, weight, EPS, two_shot)
            for what, ways in (("sum", sums), ("sum, add, norm", norms)):
                for way, run in ways.items():
                    yield KernelCase((what, size, way), x.nbytes, 0, run)
        each = -(-self.vocab_size // self.num_ranks)
        for rows in (1, 16, 64, 256):
            x = torch.randn(rows, each, dtype=DTYPE, device=device)
            names = "logits", f"{rows} x {each * self.num_ranks}"
            yield KernelCase(
                (*names, "NCCL"), x.nbytes, 0, partial(ranks.nccl.gather_columns, x, each, each * self.num_ranks)
            )
            if kernels.supports_gather(memory, x, each):
                gather = partial(kernels.gather_columns, memory, x, each, each * self.num_ranks)
                yield KernelCase((*names, "peer memory"), x.nbytes, 0, gather)


def nccl_add_norm(ranks: Any, x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    return add_rms_norm(ranks.nccl.all_reduce(x), residual, weight, EPS)


def graph_call_us(call: Callable[[], Any]) -> float:
    """The median microseconds of a call, over replays of a CUDA graph with CALLS_PER_GRAPH calls."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(CALLS_PER_GRAPH):
            call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(TIMED_REPLAYS + 1)]
    for _ in range(WARM_UP_REPLAYS):
        graph.replay()
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return 1e3 * median(a.elapsed_time(b) for a, b in pairwise(events)) / CALLS_PER_GRAPH


def check_sums(ranks: Any, rank: int, hidden: int) -> None:
    """Check that sums of random rows have the same bits as sums of gathered rows, on every rank.

    Both one-shot and two-shot sums are checked, alone and with the norm.  Raises EspalierError if a value differs."""
    kernels, memory = ranks.kernels, ranks.memory
    generator = torch.Generator(device=memory.addresses.device).manual_seed(rank)
    make = partial(torch.randn, dtype=DTYPE, device=memory.addresses.device)
    weight = torch.ones(hidden, dtype=DTYPE, device=memory.addresses.device)
    wrong = torch.zeros(1, dtype=torch.int64, device=memory.addresses.device)
    for i in range(CHECKED_SUMS):
        rows, two_shot = (1, 3, 64, 129, 300, 4096)[i % 6], i // 6 % 2 == 1
        x = make(rows, hidden, generator=generator)
        wanted = sum_in_rank_order(ranks.nccl.all_gather(x))
        wrong += (kernels.all_reduce_rows(memory, x, DTYPE, two_shot) != wanted).sum()
        total, norm = kernels.all_reduce_add_norm(memory, x, wanted, weight, EPS, two_shot)
        added, normed = add_rms_norm(wanted, wanted, weight, EPS)
        wrong += (total != added).sum() + (norm.float() - normed.float()).abs().gt(0.05).sum()
        if i % 50 == 0:
            columns = make(1 + i // 50, 1000 - rank, generator=generator)
            gathered = kernels.gather_columns(memory, columns, 1000, 1000 * memory.num_ranks - memory.num_ranks + 1)
            wrong += (gathered[:, rank * 1000 :][:, : 1000 - rank] != columns).sum() if rank < 2 else 0
    if failed := int(ranks.nccl.all_reduce(wrong)):
        raise EspalierError(f"{failed} values of {CHECKED_SUMS} sums differ from those of gathered rows")


def sum_in_rank_order(gathered: Tensor) -> Tensor:
    total = gathered[0].float()
    for each in gathered[1:]:
        total = total + each.float()
    return total.to(gathered.dtype)


def run(args: Namespace) -> int:
    rows = positive_numbers("--rows", args.rows, "1,16,64,512,2048,4096")
    require_writable("--json", args.json)
    require_gpu("ranks")
    if not 2 <= args.ranks <= torch.cuda.device_count():
        raise EspalierError(
            f"--ranks={args.ranks} needs as many GPUs, and 2 at least; there are {torch.cuda.device_count()}"
        )
    print_header()
    with starting_ranks(args.ranks) as ranks:
        ranks.wait_until_loaded()
        joined = str(Path(ranks.rendezvous_folder.name) / "joined")
        work = CollectiveWork(args.ranks, joined, tuple(rows), args.hidden, args.vocab)
        ranks.load(work)
        with replace_by_rank_failure(ranks):
            times = work.run(0, ranks.join)
        ranks.wait_until_loaded()
        ranks.end()
    stdout().print(f"{CHECKED_SUMS} sums on {args.ranks} ranks: 0 values differ")
    write_json(args.json, {"ranks": args.ranks, "joins": [time.as_dict(COLUMN_NAMES) for time in times]})
    print_table([line[:4] for line in timing_table(COLUMN_NAMES, times)])
    return 0
