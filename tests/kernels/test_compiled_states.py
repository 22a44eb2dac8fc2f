"""The kernels of layers that keep a state are code that Triton's compiler takes."""

import json

import pytest

from tests import warm

pytest.importorskip("triton", reason="needs Triton")


def test_kernels_of_states_compile():
    said = json.loads(warm.compiler().run("tests.kernels.compiled_states"))
    assert said["refused"] == {}
    of_chains = {"_solve_chunks_kernel", "_scan_chunks_kernel"}
    of_commits = {"_commit_states_kernel", "_commit_tails_kernel"}
    assert set(said["names"]) == {*of_chains, *of_commits, "_tree_kernel", "_prepare_rows_kernel", "_gated_norm_kernel"}


def test_no_register_of_tiny_heads_is_lost():
    """Engines of tiny heads read shared memory that was not theirs: ptxas had lost where an operand begins."""
    lost = json.loads(warm.compiler().run("tests.kernels.compiled_states", "machine"))
    assert len(lost) == 1 and set(map(tuple, lost.values())) == {()}


@pytest.mark.full
def test_no_register_of_any_head_is_lost():
    lost = json.loads(warm.compiler().run("tests.kernels.compiled_states", "all"))
    assert len(lost) > 200 and set(map(tuple, lost.values())) == {()}
