"""Columns of the slot table follow from one declaration, and kernels find them by name."""

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import warm

pytest.importorskip("triton", reason="needs Triton")

ROOT = Path(__file__).parents[2]
TOP_A = """
    top_a: float | None = _param(
        "made up", limits.range_check(0, 1, "0.5 changes nothing"), generation_config="top_a"
    )
"""
RESOLVED_TOP_A = """
    top_a: float = _slot_column(0.5, "filters")
"""


def test_a_sampling_parameter_is_declared_in_one_place(tmp_path):
    """Declared before all others, it also moves every column of its type."""
    for folder in ("espalier", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("bundled"))
    declared = tmp_path / "espalier" / "request.py"
    text = declared.read_text(encoding="utf-8")
    for line, before in ((TOP_A, "    temperature: float | None = "), (RESOLVED_TOP_A, "    temperature: float = ")):
        assert text.count(before) == 1
        text = text.replace(before, line + before)
    declared.write_text(text, encoding="utf-8")
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "tests.kernels.one_more_param"]
    ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == {
        "column": 0.75,
        "kernel": 0.75,
        "neutral": 0.5,
        "has_filters": True,
        "refusal": "top_a=2.0 is not supported; use 0 to 1 (0.5 changes nothing)",
        "agrees": True,
        "flag": True,
        "api": "made up",
        "resolved": 0.25,
    }


def test_kernels_that_read_columns_compile():
    """The interpreter, which runs the other tests, accepts code that the compiler refuses."""
    loaded = json.loads(warm.compiler().run("tests.kernels.compiled_sampling"))
    readers = {"_gather_kernel", "_gather_slots_kernel", "_advance_kernel", "_block_topk_kernel", "_edge_topk_kernel"}
    assert {*readers, "_best_of_split_kernel", "_draw_filtered_kernel"} <= set(loaded)


def bare_columns(source: str) -> Iterator[str]:
    """Offsets and fields in kernels that are numbers and not names."""
    for function in ast.walk(ast.parse(source)):
        if not (
            isinstance(function, ast.FunctionDef) and any("kernel" in ast.dump(d) for d in function.decorator_list)
        ):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and isinstance(node.right, ast.Constant):
                pointers = {name.id for name in ast.walk(node.left) if isinstance(name, ast.Name)}
                if any("ints" in name or "floats" in name for name in pointers):
                    yield ast.unparse(node)
            if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
                yield ast.unparse(node)


def test_no_kernel_has_a_bare_number_for_a_column():
    for folder in ("sampling", "state", "tree"):
        for path in (ROOT / "espalier" / "kernels" / folder).glob("*.py"):
            assert not list(bare_columns(path.read_text(encoding="utf-8"))), path
    planted = "@kernel\ndef f(ints_ptr, row):\n    return tl.load(ints_ptr + 8 * b + 7) + row[11]"
    assert set(bare_columns(planted)) == {"ints_ptr + 8 * b + 7", "row[11]"}
