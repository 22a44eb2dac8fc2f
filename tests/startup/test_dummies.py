"""After the start no kernel compiles, whatever prefill passes come: a simulation without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs Triton")

ROOT = Path(__file__).parents[2]
SHAPES = {
    "K and V heads, with a draft": ("llama-3.1-8b", "3"),
    "latent rows and experts": ("deepseek-v2-lite", "2", "--plain"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_passes_of_the_start_need_every_kernel_that_a_pass_needs(name):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.startup.launch_keys", *SHAPES[name]]
    ran = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["served"] == []
    # The simulation sees that the fullest passes and the rounds do not suffice.
    assert found["without_smaller"] and set(found["without_smaller"]) <= set(found["smaller"])
