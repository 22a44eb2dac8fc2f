"""What the compiler makes of the attention kernel, which no comparison of results shows."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs Triton")


ROOT = Path(__file__).parents[2]
# Bytes that the compiler may add to pass values between warps.
SCRATCH = 4096


@pytest.fixture(scope="module")
def compiled():
    without = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compiled"], cwd=ROOT, env=without, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_loops_are_pipelined_and_fit_the_chip(compiled):
    """A loop that carries more than a page's load compiles, is right, and waits for every copy at once."""
    for case in compiled["plain"]:
        assert case["shared"] * case["blocks"]["per_processor"] <= 227 * 1024, case
        assert len(case["in_flight"]) >= 2 and all(waits and min(waits) > 0 for waits in case["in_flight"]), case


def test_latent_rows_are_loaded_once_and_fit_the_chip(compiled):
    """Rows that were read anew as V would take nearly twice the memory of `held`."""
    for case in compiled["latent"]:
        assert case["shared"] <= case["held"] + SCRATCH, case
        assert case["shared"] * case["blocks"]["per_processor"] <= 227 * 1024, case
        assert len(case["in_flight"]) == 3 and all(waits and min(waits) > 0 for waits in case["in_flight"]), case


def test_weights_are_made_while_the_tensor_cores_work(compiled):
    """What is written in that order may be put into another by ptxas, and nothing but the time tells."""
    for case in compiled["hopper"]:
        assert case["shared"] <= case["held"] and case["held"] * case["blocks"]["per_processor"] <= 227 * 1024, case
        # Each group of warps has its own, with masks and, where there is no window, without.
        loops = (1 if case["window"] else 2) * case["blocks"]["groups"]
        assert len(case["overlapping"]) == loops, case
        assert min(case["overlapping"]) >= 32, case


def test_loading_warps_stay_together_where_one_thread_arrives_for_all(compiled):
    """A warp that the others lap would wait for ever, for a turn of its stage that is over.  The barriers that keep
    them together are the compiler's."""
    for case in compiled["hopper"]:
        assert len(case["in_one_go"]) == case["straight"] and all(case["in_one_go"]), case
    assert sum(case["straight"] for case in compiled["hopper"]) >= 3
