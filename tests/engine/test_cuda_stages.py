"""The GPU executor's rounds in stages, on a CUDA of the CPU: what is copied, captured and repeated is what the CPU
executor computes."""

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

from espalier.engine import cuda_stages
from espalier.engine.cuda_stages import (
    StageMemory,
    no_garbage_collection,
    pack_side_by_side,
    runs_of_rows,
    unpack_side_by_side,
)
from espalier.engine.launch_input import dummy_launch
from espalier.kernels.ops import drafts
from espalier.request import Request
from tests.engine.fake_cuda import FakeGraph, engine_on_fake_cuda, fake_cuda
from tests.grammar.test_lossless import asked, setup_of
from tests.harness import run

GRAPHS, EAGER = 3, 0


@pytest.mark.parametrize(
    ("algorithm", "temperature", "graph_batch", "overlap", "who"),
    [
        pytest.param("eagle3", 0.0, GRAPHS, True, "most", marks=pytest.mark.full),
        pytest.param("eagle3", 1.2, GRAPHS, True, "all", marks=pytest.mark.full),
        pytest.param("eagle3", 1.2, GRAPHS, False, "most", marks=pytest.mark.full),
        ("eagle3", 1.2, EAGER, True, "all"),
        # The draft does not ask: most requests of a batch have no grammar.
        ("eagle3", 1.2, GRAPHS, True, "one"),
        ("ngram", 1.2, GRAPHS, True, "all"),
        # On a CPU the trees of block drafts are selected on the host, which no graph repeats.
        ("dflash", 1.2, EAGER, True, "all"),
        ("dspark", 0.0, EAGER, True, "most"),
        ("peagle", 1.2, EAGER, True, "all"),
    ],
)
def test_the_gpu_executor_says_what_the_cpu_executor_says(
    algorithm, temperature, graph_batch, overlap, who, monkeypatch
):
    """Under grammars of all it also drafts the same trees: the guide and the answers arrive."""
    setup = setup_of(algorithm, 4, 16, overlap=overlap, attention="reference", max_batch=3)
    # What only a CPU's path reads: a GPU's kernels end where the text does.
    monkeypatch.setattr(drafts, "max_history_length", lambda root: setup.layout.history_width)

    def requests() -> list[Request]:
        made = asked(2, temperature, count=5, max_tokens=9)
        if who == "one":
            for each in made[1:]:
                each.masker = None
        return [each for each in made if each.masker is not None] if who == "all" else made

    expected = run(setup.engine(), requests())
    fake_cuda(monkeypatch)
    engine = engine_on_fake_cuda(setup, graph_batch)
    assert gc.isenabled()
    num_captured = FakeGraph.captured
    ran = run(engine, requests())
    assert ran.tokens == expected.tokens
    if who == "all":
        assert vars(ran.stats) == vars(expected.stats)
    assert bool(FakeGraph.captured) == bool(FakeGraph.replayed) == bool(graph_batch)
    assert FakeGraph.captured == num_captured, "no request waits for a capture"


def test_a_staged_round_is_freed_without_a_garbage_collection(monkeypatch):
    """A round holds logits of gigabytes, and none is collected while graphs are captured."""
    setup = setup_of("eagle3", 4, 16, overlap=True, attention="reference", max_batch=3)
    alive = []

    class Noted(cuda_stages.StagedRound):
        def __init__(self, *args):
            super().__init__(*args)
            alive.append(weakref.ref(self))

    monkeypatch.setattr(cuda_stages, "StagedRound", Noted)
    fake_cuda(monkeypatch)
    engine = engine_on_fake_cuda(setup, EAGER)
    gc.collect()
    with no_garbage_collection():
        engine.executor.run_dummy_launch(replace(dummy_launch(2), is_staged=True))
        assert [each() for each in alive] == [None]
        run(engine, [each for each in asked(2, 0.0, count=5, max_tokens=9) if each.masker is not None])
        assert len(alive) > 5
        assert {each() for each in alive} == {None}


def test_adjacent_rows():
    assert runs_of_rows(()) == []
    assert runs_of_rows((3,)) == [(0, 1)]
    assert runs_of_rows((0, 1, 2)) == [(0, 3)]
    assert runs_of_rows((0, 2, 3, 7)) == [(0, 1), (1, 3), (3, 4)]


@pytest.mark.parametrize("words", [1, 2, 3])
def test_values_and_words_of_a_row_are_one_copy(words):
    values = np.array([[3, -1], [-1, 7]])
    masks = np.arange(2 * words, dtype=np.int32).reshape(2, words) - 3
    found = unpack_side_by_side(torch.from_numpy(pack_side_by_side(values, masks)), 2, words)
    assert found[0].tolist() == values.tolist() and found[1].tolist() == masks.tolist()


@pytest.mark.parametrize("free", [-1, torch.tensor([5, 6])])
def test_rows_that_are_not_named_are_free(free, monkeypatch):
    memory = StageMemory(torch.device("cpu"))
    rows = memory.make_rows("guide", (4, 2), torch.int64, free)
    nothing = [-1, -1] if isinstance(free, int) else free.tolist()
    assert rows.values.tolist() == [nothing] * 4
    rows.set_rows((0, 2, 3), np.array([[1, 2], [3, 4], [5, 6]]))
    assert rows.values.tolist() == [[1, 2], nothing, [3, 4], [5, 6]]
    rows.set_rows((0, 2, 3), np.array([[7, 7], [8, 8], [9, 9]]))
    assert rows.values.tolist() == [[7, 7], nothing, [8, 8], [9, 9]]
    rows.set_rows((1,), np.array([[4, 4]]))
    assert rows.values.tolist() == [nothing, [4, 4], nothing, nothing]
    rows.set_rows((), None)
    assert rows.values.tolist() == [nothing] * 4


def test_batch_sizes_that_share_memory_leave_nothing_behind():
    memory = StageMemory(torch.device("cpu"))
    large, small = (memory.make_rows("masks", (batch, 2), torch.int64, -1) for batch in (3, 2))
    large.set_rows((1,), np.array([[5, 6]]))
    small.set_rows((0,), np.array([[7, 8]]))
    assert small.values.tolist() == [[7, 8], [-1, -1]]
    large.set_rows((1,), np.array([[5, 6]]))
    assert large.values.tolist() == [[-1, -1], [5, 6], [-1, -1]]
    small.set_rows((0,), None)
    assert small.values.tolist() == [[-1, -1]] * 2
    assert small.values.data_ptr() == large.values.data_ptr()


def test_a_larger_batch_that_asks_later_gets_memory_of_its_own():
    memory = StageMemory(torch.device("cpu"))
    small, large = (memory.make_rows("masks", (batch, 2), torch.int64, -1) for batch in (2, 3))
    large.set_rows((1,), np.array([[5, 6]]))
    small.set_rows((0,), np.array([[7, 8]]))
    assert large.values.tolist() == [[-1, -1], [5, 6], [-1, -1]]
    assert small.values.tolist() == [[7, 8], [-1, -1]]
