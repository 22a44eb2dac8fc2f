"""A first start, with nothing in Triton's cache, compiles kernels only where they are asked for together.  No request
waits for one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.conftest import FIGURES

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("algorithm", "dtype"), [("eagle3", "bf16"), ("eagle3", "float32"), ("eagle3", "float64"), ("ngram", "bf16")]
)
def test_real_launches_find_every_kernel_compiled(algorithm, dtype, tmp_path, put_on_record):
    """What the dry pass asks for has the signature that is launched: alignment, ones and multiples of 16 included."""
    command = [sys.executable, "-m", "tests.gpu.first_start", algorithm, dtype]
    for kind in ("first", "second"):
        own = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
        ran = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        found = json.loads(ran.stdout.splitlines()[-1])
        started = found["measured"] + found["captured"]
        assert found["measured"] and [name for name, is_ahead in started if not is_ahead] == []
        assert found["served"] == [] and found["captured_late"] == 0
        # In bf16 another token may be as good.
        assert dtype == "bf16" or found["tokens"] == found["right"]
        said = [line for line in ran.stderr.splitlines() if " kernels compiled" in line or "captured CUDA" in line]
        assert said
        put_on_record(FIGURES, f"{kind} start, {algorithm}, {dtype}: {'; '.join(said)}")
