"""A test that cannot fail is a defect: ways to break a launch that raise nothing are planted, and must be noticed."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
import torch

import espalier.engine.cuda as cuda
from espalier.cache.kv import PagedKV
from espalier.engine.cuda import CudaExecutor, CudaLaunchHandle, HostEntry
from espalier.engine.engine import Engine
from espalier.engine.launch_buffer import LaunchBuffer
from espalier.engine.results import ResultsRing, read_results
from espalier.layout import LaunchForm
from espalier.request import Request
from tests.gpu.delays import delay_segments, delay_streams
from tests.gpu.engines import DeviceSetup, loaded, make_executor
from tests.gpu.near_ties import furthest_logprob, oracle
from tests.gpu.test_no_sync import forbid_syncs
from tests.gpu.traffic import mixed, run_staggered
from tests.gpu.twin import twins
from tests.gpu.watching import DeviceWatch
from tests.harness import run
from tests.properties.summary import FAULT
from tests.properties.watch import run_watched

pytestmark = pytest.mark.gpu

SETUP = DeviceSetup(
    page_size=3, topk=3, steps=3, num_draft_tokens=12, max_batch=4, max_context=64, attention="reference"
)
Patch = pytest.MonkeyPatch


# Checks: what the tests of this directory do, in small.


def follow(engine: Engine, requests: list[Request], right: list[list[int]]) -> None:
    """Tokens as they come are the right ones; raises at the first that is not, before state goes further astray."""
    for r in requests:
        engine.add(r)
    for _ in range(400):
        if not engine.has_work:
            break
        engine.step()
        for r, tokens in zip(requests, right, strict=True):
            assert r.output == tokens[: len(r.output)], f"{r.id} says {r.output} and alone {tokens}"
    assert [r.output for r in requests] == right


def tokens_under_delays(patch: Patch, plant: "Plant") -> None:
    right = run(replace(SETUP, overlap=False).engine(), mixed(9)).tokens
    delay_segments(patch, Random(1))
    engine = SETUP.engine()
    delay_streams(engine, Random(2))
    plant(patch, make_executor(engine))
    follow(engine, mixed(9), right)


def bits_of_graph_and_eager(patch: Patch, plant: "Plant") -> None:
    one, other = SETUP.engine(), SETUP.engine()
    plant(patch, make_executor(one))
    twins(one, other)
    run_staggered(one, mixed(6, max_tokens=10), every=2)


def no_synchronisation(patch: Patch, plant: "Plant") -> None:
    engine = SETUP.engine()
    plant(patch, make_executor(engine))
    forbid_syncs(engine)
    run_staggered(engine, mixed(4, max_tokens=6), every=1)


def float32_against_the_oracle(patch: Patch, plant: "Plant") -> None:
    setup = replace(SETUP, dtype=torch.float32, attention="auto")
    engine = setup.engine()
    plant(patch, make_executor(engine))
    ran = run(engine, mixed(6, max_tokens=10, logprobs=0))
    assert max(furthest_logprob(r, oracle(setup), torch.float32) for r in ran.requests) < 1


def committed_rows_in_bf16(patch: Patch, plant: "Plant") -> None:
    """The fault is there before graphs are captured."""
    plant(patch, None)
    run_watched(DeviceWatch(replace(SETUP, dtype=torch.bfloat16, attention="auto")), mixed(4, max_tokens=10))


# Faults, each planted into an executor that has captured its graphs.

Plant = Callable[[Patch, Any], None]
Check = Callable[[Patch, Plant], None]


def stale_launch_input(patch: Patch, executor: CudaExecutor) -> None:
    """Every third replay reads the launch input of the replay before it."""
    right, replays = cuda._copy_to_pinned, []

    def pinned(buffer: Any, packed: Any) -> Any:
        replays.append(right(buffer, packed).clone())
        same = len(replays) > 1 and replays[-1].shape == replays[-2].shape
        return replays[-2] if len(replays) % 3 == 0 and same else replays[-1]

    patch.setattr(cuda, "_copy_to_pinned", pinned)


def copies_that_do_not_wait(patch: Patch, executor: CudaExecutor) -> None:
    patch.setattr(executor.copy_stream, "wait_event", lambda event: None)


def results_read_before_they_are_there(patch: Patch, executor: CudaExecutor) -> None:
    def result(self: CudaLaunchHandle) -> Any:
        entry = self.host_entry.results[: len(self.launch_input.slots)].numpy()
        return read_results(self.results.columns, entry, self.prompt_logprobs, self.launch_input)

    patch.setattr(CudaLaunchHandle, "result", result)


def a_ring_of_one(patch: Patch, executor: CudaExecutor) -> None:
    """Every launch is given the same buffers for its results, though those of the launch before are not read."""
    first = executor.host_ring[0]
    executor.host_ring = [HostEntry(first.entry_index, host.vector, first.results) for host in executor.host_ring]


def results_in_another_entry(patch: Patch, executor: CudaExecutor) -> None:
    """What runs eagerly writes to the first entry, whatever the launch input says."""
    right = ResultsRing.write
    patch.setattr(ResultsRing, "write", lambda self, entry, outcome: right(self, torch.zeros_like(entry), outcome))


def graphs_of_other_batches(patch: Patch, executor: CudaExecutor) -> None:
    """A batch of three is replayed by the graph of two, and its third request not at all."""
    two, three = LaunchForm(2), LaunchForm(3)
    executor.graphs[three] = replace(executor.graphs[two], vector=executor.graphs[three].vector)


def a_buffer_allocated_anew(patch: Patch, executor: CudaExecutor) -> None:
    """What graphs have captured is no longer what the table holds."""
    table = executor.runner.table
    executor.kept = table.page_table  # type: ignore[attr-defined]
    table.page_table = table.page_table.clone()


def a_stream_of_its_own(patch: Patch, executor: CudaExecutor) -> None:
    """Eager launches no longer run behind the graphs."""
    right, other = executor._run_eager_launch, torch.cuda.Stream()

    def eager(*args: Any) -> Any:
        with torch.cuda.stream(other):
            return right(*args)

    patch.setattr(executor, "_run_eager_launch", eager)


def a_length_read_on_the_host(patch: Patch, executor: CudaExecutor) -> None:
    right = LaunchBuffer.update_slot_table

    def apply(self: LaunchBuffer, table: Any) -> None:
        right(self, table)
        int(table.prefix_len.max())

    patch.setattr(LaunchBuffer, "update_slot_table", apply)


def a_sibling_committed(patch: Patch, executor: CudaExecutor | None) -> None:
    """What is committed is the staged row before the one that was accepted."""
    right = PagedKV.commit
    patch.setattr(
        PagedKV, "commit", lambda self, staging, source, rows: right(self, staging, (source - 1).clamp(0), rows)
    )


def products_in_tf32(patch: Patch, executor: CudaExecutor) -> None:
    torch.set_float32_matmul_precision("high")
    # A graph keeps the products that it has captured.
    executor.graphs.clear()


@dataclass(frozen=True)
class Fault:
    plant: Plant
    noticed_by: Check


FAULTS = [
    Fault(stale_launch_input, tokens_under_delays),
    Fault(stale_launch_input, bits_of_graph_and_eager),
    Fault(copies_that_do_not_wait, tokens_under_delays),
    Fault(results_read_before_they_are_there, tokens_under_delays),
    Fault(a_ring_of_one, tokens_under_delays),
    Fault(results_in_another_entry, tokens_under_delays),
    Fault(graphs_of_other_batches, bits_of_graph_and_eager),
    Fault(a_buffer_allocated_anew, bits_of_graph_and_eager),
    Fault(a_stream_of_its_own, tokens_under_delays),
    Fault(a_length_read_on_the_host, no_synchronisation),
    Fault(a_sibling_committed, committed_rows_in_bf16),
    Fault(products_in_tf32, float32_against_the_oracle),
]


@pytest.fixture(autouse=True)
def precision_as_before() -> Iterator[None]:
    """Not by monkeypatch: pytest 9 undoes by deleting what stands in no __dict__, as PyTorch's settings do not.  That
    fails, and TF32 stays on for all tests that follow in the process."""
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture(autouse=True)
def models_of_its_own() -> Iterator[None]:
    """A faulty launch may write anywhere, also to weights, which tests of a process share.  And what is left of a
    failed engine must be freed before the next one captures its graphs."""
    loaded.cache_clear()
    yield
    loaded.cache_clear()
    gc.collect()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.plant.__name__}-{fault.noticed_by.__name__}")
def test_a_planted_fault_is_noticed(fault, monkeypatch, put_on_record):
    with pytest.raises((AssertionError, RuntimeError)) as noticed:
        fault.noticed_by(monkeypatch, fault.plant)
    said = str(noticed.value).splitlines()[0][:60] if str(noticed.value) else "an assertion"
    put_on_record(FAULT, (fault.plant.__name__, fault.noticed_by.__name__, said))
    torch.cuda.synchronize()


@pytest.mark.parametrize("check", sorted({fault.noticed_by for fault in FAULTS}, key=lambda check: check.__name__))
def test_without_a_fault_nothing_is_noticed(check, monkeypatch):
    check(monkeypatch, lambda *_: None)
