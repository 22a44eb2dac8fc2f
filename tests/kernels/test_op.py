"""Every op: its launcher has its name and signature, a call chooses by the device, and a CPU never imports Triton."""

import inspect
import sys
from importlib import import_module
from pkgutil import iter_modules

import pytest
import torch

import espalier.kernels.ops
from espalier.errors import EspalierError
from espalier.kernels.runtime import op as declaring
from espalier.kernels.runtime.op import op
from tests import warm

MODULES = [
    import_module(f"espalier.kernels.ops.{module.name}") for module in iter_modules(espalier.kernels.ops.__path__)
]
OPS = [each for module in MODULES for each in vars(module).values() if hasattr(each, "triton")]
OPS = [each for each in dict.fromkeys(OPS) if each.__module__.startswith("espalier.kernels.ops")]


def parameters(function):
    return [(each.name, each.kind, each.default) for each in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("declared", OPS, ids=lambda declared: declared.__name__)
def test_launcher_and_call_have_the_signature_of_the_op(declared):
    launcher = declaring.launcher_of(declared)
    assert launcher.__name__ == declared.__name__
    assert parameters(launcher) == parameters(declared.reference) == parameters(declared)
    assert declared.__doc__, "the contract is the docstring"


class OnGpu:
    is_cuda = True


def made_of(launched):
    @op("launchers", tensor="b[0]")
    def add(a, b, *rest, c=3):
        return "reference", a, b, rest, c

    @op("launchers", condition=lambda c: c > 5)
    def by_size(a, c=3):
        return "reference", a, c

    module = type(sys)("launchers")
    module.add = lambda *args, **kwargs: launched.append((args, kwargs)) or "launched"
    module.by_size = lambda a, c: ("launched", a, c)
    return module, add, by_size


def test_a_call_chooses_by_the_device(monkeypatch):
    pytest.importorskip("triton", reason="needs Triton")
    launched = []
    module, add, by_size = made_of(launched)
    monkeypatch.setitem(sys.modules, "launchers", module)
    cpu, gpu = [torch.zeros(1)], [OnGpu()]
    assert add(1, cpu, 4, 5, c=7) == ("reference", 1, cpu, (4, 5), 7) and add(1, cpu)[4] == 3
    assert launched == []
    assert add(1, gpu, 4, c=7) == add(1, b=gpu) == add.triton(1, cpu) == "launched"
    assert launched == [((1, gpu, 4), {"c": 7}), ((1, gpu), {"c": 3}), ((1, cpu), {})]
    assert add.reference(1, gpu)[0] == "reference"
    assert by_size(1) == ("reference", 1, 3) and by_size(1, 6) == ("launched", 1, 6)


def test_without_triton_only_a_launch_is_refused(monkeypatch):
    _, add, _ = made_of([])
    monkeypatch.setitem(sys.modules, "triton", None)
    assert add(1, [torch.zeros(1)])[0] == "reference"
    with pytest.raises(EspalierError, match="pip install triton"):
        add(1, [OnGpu()])


def test_the_engine_imports_without_triton():
    """A process of its own: this one has imported Triton.  Everything but what holds kernels, and its own tools."""
    warm.compiler().run("tests.kernels.without_triton")
