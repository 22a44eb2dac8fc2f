"""`op` declares an operation: its contract and its plain-torch reference are one function.

A call runs the operation's launcher for tensors on a GPU and the reference otherwise.  The launcher's module, and
Triton with it, is imported at the first launch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from importlib import import_module
from inspect import Parameter, signature
from typing import Any, ParamSpec, Protocol, TypeVar, cast

from espalier.kernels.runtime.launch import require_triton

P = ParamSpec("P")
R = TypeVar("R")


class Op(Protocol[P, R]):
    """An operation.  Calling it chooses between `triton` and `reference`.  reference: runs the operation in plain
    torch.  triton: runs the launcher, on any device.  launcher_module: the module of the launcher."""

    reference: Callable[P, R]
    triton: Callable[P, R]
    launcher_module: str
    __name__: str

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...


def op(
    module: str, tensor: str | None = None, condition: Callable[..., bool] | None = None
) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Decorate a reference.  The launcher is the function in `module` with the reference's name and signature.

    tensor: a Python expression of the parameters, which gives a tensor; None: the first parameter.  The launcher runs
    if this tensor is on a GPU.  condition: given instead of `tensor`, a function of some of the parameters.  The
    launcher runs if it returns True.
    """

    def declare(reference: Callable[P, R]) -> Op[P, R]:
        """Returns the operation with this reference."""

        def first_launch(*args: P.args, **kwargs: P.kwargs) -> R:
            require_triton()
            namespace["launch"] = dispatcher.triton = launcher_of(dispatcher)
            return cast(R, dispatcher.triton(*args, **kwargs))

        if condition is None:
            on_gpu = f"{tensor or next(iter(signature(reference).parameters))}.is_cuda"
        else:
            on_gpu = f"when({', '.join(signature(condition).parameters)})"
        namespace: dict[str, Any] = {"launch": first_launch, "reference": reference, "when": condition}
        dispatcher = _make_dispatcher(reference, on_gpu, namespace)
        dispatcher.reference, dispatcher.triton, dispatcher.launcher_module = reference, first_launch, module
        return cast(Op[P, R], dispatcher)

    return declare


def launcher_of(op: Op[P, R]) -> Callable[P, R]:
    """Returns the launcher.  The first call for a module imports the module, which imports Triton."""
    return cast(Callable[P, R], getattr(import_module(op.launcher_module), op.__name__))


def _make_dispatcher(reference: Callable[..., Any], gpu_condition: str, namespace: dict[str, Any]) -> Any:
    """Make a function with the reference's parameters.  The function is compiled from source, because a
    wrapper with *args would take twice as long, and a prefill pass calls the function for each layer."""
    parameters, arguments = [], []
    for name, parameter in signature(reference).parameters.items():
        stars = "*" if parameter.kind is Parameter.VAR_POSITIONAL else ""
        argument = f"{name}={name}" if parameter.kind is Parameter.KEYWORD_ONLY else stars + name
        parameters.append(stars + name)
        arguments.append(argument)
    call = f"(launch if {gpu_condition} else reference)({', '.join(arguments)})"
    source = f"def dispatcher({', '.join(parameters)}): return {call}"
    exec(source, namespace)
    dispatcher: Any = namespace["dispatcher"]
    dispatcher.__defaults__, dispatcher.__kwdefaults__ = reference.__defaults__, reference.__kwdefaults__
    return update_wrapper(dispatcher, reference)
