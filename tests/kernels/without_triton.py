"""Imports all but what holds kernels, where Triton cannot be imported.  A program of its own."""

import sys
from importlib import import_module

for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
    del sys.modules[name]
sys.modules["triton"] = None  # type: ignore[assignment]

for module in ("espalier.llm", "espalier.cli.main", "espalier.bench.tune"):
    import_module(module)
