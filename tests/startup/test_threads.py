"""How many threads PyTorch computes with: by the model's size, unless OMP_NUM_THREADS or the user says otherwise."""

import os
import re
import subprocess
import sys

import pytest
import torch

from espalier import LLM, EspalierError, cores
from espalier.startup.threads import BYTES_PER_THREAD, OMP_VARIABLE, CpuThreadInfo, choose_threads, set_num_threads
from tests.harness import directories

SIZE = {"device": "cpu", "max_batch": 1, "max_context": 64}


@pytest.fixture(autouse=True)
def threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("asked", "device", "weight_bytes", "from_environment", "threads"),
    [
        ("auto", "cpu", 0, False, 1),
        ("auto", "cpu", 2 * BYTES_PER_THREAD - 1, False, 1),
        ("auto", "cpu", 2 * BYTES_PER_THREAD, False, 2),
        ("auto", "cpu", 5 * BYTES_PER_THREAD, False, 5),
        ("auto", "cpu", 100 * BYTES_PER_THREAD, False, 8),
        ("auto", "cpu", 0, True, 3),
        ("auto", "cpu", 100 * BYTES_PER_THREAD, True, 3),
        (6, "cpu", 0, False, 6),
        (6, "cpu", 100 * BYTES_PER_THREAD, True, 6),
        (40, "cpu", 0, False, 40),
        ("auto", "cuda", 0, False, 3),
        ("auto", "cuda:1", 100 * BYTES_PER_THREAD, True, 3),
    ],
)
def test_who_chooses(asked, device, weight_bytes, from_environment, threads):
    facts = CpuThreadInfo(num_cores=8, num_torch_threads=3, is_set_by_environment=from_environment)
    assert choose_threads(asked, device, weight_bytes, facts) == threads


def test_threads_are_refused_on_a_gpu():
    with pytest.raises(EspalierError, match=r"threads=2 needs device=cpu"):
        choose_threads(2, "cuda", 0, CpuThreadInfo(num_cores=8, num_torch_threads=3, is_set_by_environment=False))


@pytest.mark.parametrize(("variable", "settings", "threads"), [("", {}, 1), ("5", {}, 3), ("5", {"threads": 2}, 2)])
def test_an_engine_takes_what_was_chosen_and_says_so(monkeypatch, variable, settings, threads):
    """A tiny model's own choice is 1.  What PyTorch has is what OMP_NUM_THREADS made of it, or the process since."""
    monkeypatch.setenv(OMP_VARIABLE, variable)
    torch.set_num_threads(3)
    target, draft = directories()
    with LLM(model=target, draft=draft, **SIZE, **settings) as llm:
        assert (llm.config.threads, torch.get_num_threads()) == (threads, threads)
        assert re.search(rf"threads +{threads}\n", llm.config.as_text())


@pytest.mark.parametrize(
    ("first", "given", "spins"),
    [
        ("", {}, cores.SHORT_SPIN_COUNT),
        ("", {cores.SPIN_COUNT_VARIABLE: "7"}, "7"),
        ("", {cores.WAIT_POLICY_VARIABLE: "active"}, None),
        ("import sys, types; sys.modules['torch'] = types.ModuleType('torch')", {}, None),
    ],
    ids=["default", "own count", "own policy", "PyTorch before"],
)
def test_threads_wait_shortly_unless_the_user_says_how(first, given, spins):
    """The library reads the variable when PyTorch is imported."""
    code = f"import os; {first or 'pass'}; import espalier; print(os.environ.get({cores.SPIN_COUNT_VARIABLE!r}))"
    environment = {
        k: v for k, v in os.environ.items() if k not in (cores.SPIN_COUNT_VARIABLE, cores.WAIT_POLICY_VARIABLE)
    }
    ran = subprocess.run([sys.executable, "-c", code], env=environment | given, capture_output=True, text=True)
    assert ran.stdout.strip() == str(spins)


@pytest.mark.parametrize("is_set", [False, True])
def test_where_it_is_too_late_several_threads_are_warned_of(monkeypatch, caplog, is_set):
    monkeypatch.delenv(cores.WAIT_POLICY_VARIABLE, raising=False)
    monkeypatch.delenv(cores.SPIN_COUNT_VARIABLE, raising=False)
    if is_set:
        monkeypatch.setenv(cores.SPIN_COUNT_VARIABLE, "1")
    for threads, warned in ((1, 0), (2, 1 - is_set)):
        caplog.clear()
        set_num_threads(threads)
        assert len([each for each in caplog.records if "import espalier first" in each.getMessage()]) == warned


@pytest.mark.parametrize("threads", [0, -1, "2", True, 1.5])
def test_threads_that_are_no_count_are_refused(threads):
    with pytest.raises(EspalierError, match="threads="):
        LLM("bundled", threads=threads)


@pytest.mark.parametrize(
    ("siblings", "quota", "num"),
    [
        (["0,2", "1,3", "0,2", "1,3"], "max 100000", 2),
        (["0", "1", "2", "3"], "max 100000", 4),
        (["0", "1", "2", "3"], "250000 100000", 2),
        (["0", "1", "2", "3"], "50000 100000", 1),
        ([], None, 4),
    ],
)
def test_physical_cores(tmp_path, monkeypatch, siblings, quota, num):
    """Hyper-threads count once, and what the control group may not take does not; what nobody tells is no limit."""
    for core, line in enumerate(siblings):
        topology = tmp_path / f"cpu{core}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(line + "\n")
    if quota is not None:
        (tmp_path / "cpu.max").write_text(quota + "\n")
    monkeypatch.setattr(cores, "CPU_DIRECTORY", tmp_path)
    monkeypatch.setattr(cores, "CPU_QUOTA_FILE", tmp_path / "cpu.max")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert cores.physical_cores() == num
    assert cores.available_cores() == 4
