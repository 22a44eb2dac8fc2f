"""What a start measures and compiles, on a CUDA of the CPU."""

from typing import Any

import pytest
import torch

from espalier.attention import GroupedBackend
from espalier.engine.cuda import CudaExecutor
from espalier.engine.launch_input import LaunchInput
from espalier.layout import TreeShape
from espalier.startup.measure_memory import measure_launch_memory
from tests.engine.fake_cuda import fake_cuda
from tests.harness import Setup

# Rounds of 1, 2 and 3 requests have the configured tree, those of 4 and more a smaller one.
SETUP = Setup(max_batch=6, trees=((4, TreeShape(1, 2, 3)),), attention="reference")
FREE, TOTAL = 3_000, 10_000


def dataset_of_flags(monkeypatch: pytest.MonkeyPatch, graph_batch: int) -> dict[str, set[Any]]:
    """(batch, whether it is staged) of the rounds that are compiled and that are run, and the widths of both; "ran
    forms": of passes that report nothing."""
    fake_cuda(monkeypatch)
    for name, value in {"memory_reserved": 100, "max_memory_reserved": 400}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (FREE, TOTAL))
    compiled: list[LaunchInput] = []
    ran: list[LaunchInput] = []
    run_dummy_launch = CudaExecutor.run_dummy_launch

    def running(executor: CudaExecutor, launch_input: LaunchInput) -> None:
        ran.append(launch_input)
        run_dummy_launch(executor, launch_input)

    monkeypatch.setattr(CudaExecutor, "compile_kernels", lambda executor, launches: compiled.extend(launches))
    monkeypatch.setattr(CudaExecutor, "run_dummy_launch", running)
    executor = CudaExecutor(SETUP.engine().executor.runner, graph_batch=0, capture_stages=True)
    needs = measure_launch_memory(executor, SETUP.layout, torch.device("cpu"), graph_batch)
    assert (needs.eager_bytes, needs.graph_bytes, needs.free_bytes, needs.total_bytes) == (300, 300, FREE, TOTAL)
    found = {}
    for name, launches in (("compiled", compiled), ("ran", ran)):
        found[name] = {(len(each.slots), each.is_staged) for each in launches if not each.is_prefill}
        found[f"{name} widths"] = {each.width for each in launches if each.is_prefill}
    found["ran forms"] = {each.form() for each in ran if each.is_prefill and each.prompt_rows is None}
    return found


def test_the_largest_rounds_of_each_tree_are_measured_with_grammars_and_without(monkeypatch):
    found = dataset_of_flags(monkeypatch, graph_batch=6)
    assert found["ran"] == found["compiled"] == {(3, False), (3, True), (6, False), (6, True)}
    assert found["ran widths"] == found["compiled widths"] == set(SETUP.layout.chunk_widths)


def test_rounds_that_will_run_eagerly_are_compiled_in_every_bucket(monkeypatch):
    found = dataset_of_flags(monkeypatch, graph_batch=2)
    assert found["compiled"] == {(batch, is_staged) for batch in (1, 2, 3, 4, 6) for is_staged in (False, True)}
    assert found["ran"] == {(3, False), (3, True), (6, False), (6, True)}


@pytest.mark.parametrize("captured", [False, True])
def test_the_largest_pass_that_is_captured_is_measured(captured, monkeypatch):
    monkeypatch.setattr(GroupedBackend, "captures_prefill", captured)
    found = dataset_of_flags(monkeypatch, graph_batch=6)
    assert found["ran forms"] == ({SETUP.layout.captured_passes[-1]} if captured else set())
